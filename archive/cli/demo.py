"""Tool: `archive demo`: the library at work, step by step, with what each step cost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from archive.base import IntegrityError, size
from archive.cli import output
from archive.cli.demo_ranks import Ranks, account, resume, save
from archive.cli.options import Target, on_archive

if TYPE_CHECKING:
    from archive import Archive, Episodes

Steps = dict[str, Any]
WEIGHTS, EPISODES_EACH, UPDATES_BETWEEN = 3, 8, 100
SAVED_BY, RESUMED_BY = 4, 3
COSTS = ("requests", "sent", "received")


@dataclass
class Demo:
    """What the steps share: the archives they opened, and what must be found again."""

    target: Target
    archives: list[Archive] = field(default_factory=list)
    written: dict[str, Steps] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)  # uuid -> update count
    chosen: list[Episodes] = field(default_factory=list)
    ranks: Ranks = field(init=False)
    saved: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = Ranks(self.target.url, self.target.storage_options, self.target.single_writer)

    def open(self, **how: Any) -> Archive:
        """The archive, as a process that has just started opens it; what it costs is counted."""
        self.archives.append(self.target.open(**how))
        return self.archives[-1]

    def cost(self) -> dict[str, int]:
        """Requests, bytes sent and bytes received so far."""
        stats = [*(arc.io_stats() for arc in self.archives), *self.ranks.cost]
        sums = (sum(s.requests for s in stats), sum(s.bytes_out for s in stats), sum(s.bytes_in for s in stats))
        return dict(zip(COSTS, sums, strict=True))


def start(demo: Demo) -> str:
    """open or create it"""
    arc = demo.open(create=True)
    return f"{len(arc.episodes)} episodes are there already" if arc.commits else "made a new archive"


def write(demo: Demo) -> str:
    """write and commit"""
    import numpy as np

    arc = demo.archives[0]
    counts = arc.episodes.table["update_count_max"].drop_null().to_pylist()
    first = max(counts, default=0) + UPDATES_BETWEEN
    rng = np.random.default_rng(first)
    with arc.writer() as writer:
        for update_count in range(first, first + WEIGHTS * UPDATES_BETWEEN, UPDATES_BETWEEN):
            name = str(uuid.uuid4())
            demo.weights[name] = update_count
            writer.weights(name, update_count)
            for _ in range(EPISODES_EACH):
                steps = made_up_episode(rng, skill=update_count / first)
                demo.written[writer.add_episode(steps, terminated=True)] = steps
    total = sum(len(steps["reward"]) for steps in demo.written.values())
    return f"{len(demo.written)} episodes by {WEIGHTS} weights, {total} steps, visible at once"


def find_by_weights(demo: Demo) -> str:
    """open elsewhere, filter by weights"""
    name = list(demo.weights)[1]
    found = demo.open().episodes.filter(model_weights_uuid=name)
    _demand(len(found) == EPISODES_EACH, f"{len(found)} episodes by weights {name}, {EPISODES_EACH} were written")
    return f"{len(found)} episodes by {name[:8]}; no data read"


def find_by_updates(demo: Demo) -> str:
    """filter by update count and return"""
    counts = list(demo.weights.values())
    found = demo.archives[-1].episodes.filter(update_count=(counts[0], counts[-1] + 1), where="return > 10")
    wanted = {name for name, steps in demo.written.items() if float(steps["reward"].sum()) > 10}
    _demand({episode.id for episode in found} == wanted, "the filter and the written rewards disagree")
    demo.chosen.append(found)
    return f'{len(found)} of {len(demo.written)} with "return > 10"; no data read'


def read_some(demo: Demo) -> str:
    """read one field of those"""
    (found,) = demo.chosen
    for episode, steps in zip(found, found.read("reward"), strict=True):
        _demand_equal(steps, {"reward": demo.written[episode.id]["reward"]}, episode.id)
    return f"reward of {len(found)} episodes, equal to what was written"


def read_all(demo: Demo) -> str:
    """read all and compare"""
    found = demo.open().episodes.filter(episode_id=list(demo.written))
    _demand(len(found) == len(demo.written), f"{len(found)} of {len(demo.written)} episodes are there")
    for episode, steps in zip(found, found.read(), strict=True):
        _demand_equal(steps, demo.written[episode.id], episode.id)
    return f"{len(found)} episodes, every bit as it was written"


def save_ranks(demo: Demo) -> str:
    """four ranks save"""
    demo.saved = demo.ranks.all(SAVED_BY, save)
    return f"{sum(len(r['numbers']) for r in demo.saved)} steps in the rings of {SAVED_BY} processes, one checkpoint"


def resume_ranks(demo: Demo) -> str:
    """three ranks resume"""
    demo.resumed = demo.ranks.all(RESUMED_BY, resume)
    shares = ", ".join(str(len(r["numbers"])) for r in demo.resumed)
    return f"shares of {shares} steps; their next checkpoint sent {size(sum(r['sent'] for r in demo.resumed))}"


def account_for_all(demo: Demo) -> str:
    """account for everything"""
    checkpoint = demo.open().checkpoints.of(demo.ranks.run).latest
    assert checkpoint is not None
    resumed, live, sound = account(demo.saved, demo.resumed, checkpoint)
    _demand(sound, "steps were lost, doubled or changed")
    return f"{resumed} steps and priorities, each once and on its step; with the new ones {live} are live"


STEPS: tuple[Callable[[Demo], str], ...] = (
    *(start, write, find_by_weights, find_by_updates, read_some, read_all),
    *(save_ranks, resume_ranks, account_for_all),
)


def made_up_episode(rng: Any, *, skill: float) -> Steps:
    """A few steps of an agent that gets better with `skill`: images, a state, actions, rewards."""
    import numpy as np

    length = int(rng.integers(20, 60))
    state = np.cumsum(rng.normal(size=(length, 4)), axis=0).astype(np.float32)
    pixels = np.arange(32, dtype=np.float32)
    waves = np.sin(pixels[None, :] / 5 + state[:, :1])[:, :, None] * np.cos(pixels / 7)[None, None, :]
    image = np.repeat(((waves + 1) * 127).astype(np.uint8)[..., None], 3, axis=-1)
    reward = rng.normal(0.15 * skill, 0.3, length).astype(np.float32)
    return {"obs": {"image": image, "state": state}, "action": rng.integers(0, 4, length), "reward": reward}


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(f"the demonstration failed: {what}; please report it")


def _demand_equal(found: Steps, wanted: Steps, where: str) -> None:
    _demand(found.keys() == wanted.keys(), f"{where} has fields {sorted(found)}, not {sorted(wanted)}")
    for name, value in wanted.items():
        if isinstance(value, dict):
            _demand_equal(found[name], value, f"{where}/{name}")
        else:
            same = found[name].dtype == value.dtype and found[name].tobytes() == value.tobytes()
            _demand(same, f"{where}/{name} differs from what was written")


def run(demo: Demo) -> list[dict[str, Any]]:
    """All steps: what each did, how long it took, what it cost."""
    rows = []
    for step in STEPS:
        before, began = demo.cost(), time.perf_counter()
        did = {"step": step.__doc__, "did": step(demo), "seconds": round(time.perf_counter() - began, 3)}
        rows.append(did | {name: now - before[name] for name, now in demo.cost().items()})
    return rows


@click.command()
@on_archive(default="demo-archive", time_travel=False, writes=True)
def demo(target: Target) -> None:
    """Write episodes, find them, read them back and compare. Run again, it adds to the same archive."""
    state = Demo(target)
    rows = run(state)
    target.answer({"url": state.archives[0].url, "steps": rows}, lambda: _show(target, rows))


def _show(target: Target, rows: Sequence[Mapping[str, Any]]) -> None:
    total = {name: sum(row[name] for row in rows) for name in ("seconds", *COSTS)}
    shown = [
        {**row, "what happened": row["did"], "sent": size(row["sent"]), "received": size(row["received"])}
        for row in (*rows, {"step": "all", "did": "", **total, "seconds": round(total["seconds"], 3)})
    ]
    output.table(shown, ("step", "what happened", "seconds", *COSTS))
    output.say(f"Look around with: archive info {target.url}; archive episodes {target.url} --where 'return > 10'")
    picture = f"archive export {target.url} --html best --where 'update_count > 0' -o episode.html"
    output.say(f"Watch one: {picture}")
