"""Tool: `archive demo`: the library at work, step by step, with what each step cost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from archive.base import IntegrityError
from archive.cli import output
from archive.cli.demo_ranks import RESUMED_BY, SAVED_BY, Ranks, account, resume, save
from archive.cli.options import Target, on_archive

if TYPE_CHECKING:
    from archive import Archive, Episodes

Steps = dict[str, Any]
WEIGHTS, EPISODES_EACH, UPDATES_BETWEEN = 3, 8, 100


@dataclass
class Demo:
    """What the steps share: the archives they opened, and what must be found again."""

    target: Target
    archives: list[Archive] = field(default_factory=list)
    written: dict[str, Steps] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)  # uuid -> update count
    found: Episodes | None = None
    ranks: Ranks | None = None
    saved: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)

    def open(self, **how: Any) -> Archive:
        """The archive, as a process that has just started opens it; what it costs is counted."""
        arc = self.target.open(**how)
        self.archives.append(arc)
        return arc

    def cost(self) -> tuple[int, int, int]:
        """Requests, bytes sent and bytes received so far."""
        stats = [arc.io_stats().as_dict() for arc in self.archives] + (self.ranks.cost if self.ranks else [])
        verbs = ("get", "put", "create", "list", "delete", "head")
        sent, received = (sum(s[name] for s in stats) for name in ("bytes_out", "bytes_in"))
        return sum(s[verb] for s in stats for verb in verbs), sent, received


Step = Callable[[Demo], str]


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
    return f"{len(demo.written)} episodes by {WEIGHTS} weights, {_count_steps(demo)} steps, visible at once"


def find_by_weights(demo: Demo) -> str:
    """open elsewhere, filter by weights"""
    name = list(demo.weights)[1]
    found = demo.open().episodes.filter(model_weights_uuid=name)
    _demand(len(found) == EPISODES_EACH, f"{len(found)} episodes by weights {name}, {EPISODES_EACH} were written")
    return f"{len(found)} episodes by {name[:8]}; no data read"


def find_by_updates(demo: Demo) -> str:
    """filter by update count and return"""
    arc, counts = demo.archives[-1], list(demo.weights.values())
    demo.found = arc.episodes.filter(update_count=(counts[0], counts[-1] + 1), where="return > 10")
    sums = {name: float(steps["reward"].sum()) for name, steps in demo.written.items()}
    wanted = {name for name, total in sums.items() if total > 10}
    _demand({episode.id for episode in demo.found} == wanted, "the filter and the written rewards disagree")
    return f'{len(demo.found)} of {len(sums)} with "return > 10"; no data read'


def read_some(demo: Demo) -> str:
    """read one field of those"""
    assert demo.found is not None
    rewards = demo.found.read("reward")
    for episode, steps in zip(demo.found, rewards, strict=True):
        _demand_equal(steps, {"reward": demo.written[episode.id]["reward"]}, episode.id)
    return f"reward of {len(rewards)} episodes, equal to what was written"


def read_all(demo: Demo) -> str:
    """read all and compare"""
    found = demo.open().episodes.filter(episode_id=list(demo.written))
    _demand(len(found) == len(demo.written), f"{len(found)} of {len(demo.written)} episodes are there")
    for episode, steps in zip(found, found.read(), strict=True):
        _demand_equal(steps, demo.written[episode.id], episode.id)
    return f"{len(found)} episodes, every bit as it was written"


def save_ranks(demo: Demo) -> str:
    """four ranks save"""
    demo.ranks = Ranks(demo.target.url, demo.target.storage_options, demo.target.single_writer)
    demo.saved = demo.ranks.all(SAVED_BY, save)
    return f"{sum(len(r['numbers']) for r in demo.saved)} steps in the rings of {SAVED_BY} processes, one checkpoint"


def resume_ranks(demo: Demo) -> str:
    """three ranks resume"""
    assert demo.ranks is not None
    demo.resumed = demo.ranks.all(RESUMED_BY, resume)
    shares = ", ".join(str(len(r["numbers"])) for r in demo.resumed)
    sent = output.size(sum(r["sent"] for r in demo.resumed))
    return f"shares of {shares} steps; their next checkpoint sent {sent}"


def account_for_all(demo: Demo) -> str:
    """account for everything"""
    assert demo.ranks is not None
    checkpoint = demo.open().checkpoints.of(demo.ranks.run).latest
    assert checkpoint is not None
    return account(demo.saved, demo.resumed, checkpoint)


STEPS: tuple[Step, ...] = (
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


def _count_steps(demo: Demo) -> int:
    return sum(len(steps["reward"]) for steps in demo.written.values())


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
        did = step(demo)
        requests, sent, received = (now - then for now, then in zip(demo.cost(), before, strict=True))
        spent = {
            "seconds": round(time.perf_counter() - began, 3),
            "requests": requests,
            "sent": sent,
            "received": received,
        }
        rows.append({"step": step.__doc__, "did": did} | spent)
    return rows


@click.command()
@on_archive(default="demo-archive", time_travel=False, writes=True)
def demo(target: Target) -> None:
    """Write episodes, find them, read them back and compare. Run again, it adds to the same archive."""
    state = Demo(target)
    rows = run(state)
    if target.as_json:
        output.as_json({"url": state.archives[0].url, "steps": rows})
        return
    columns = ("step", "what happened", "seconds", "requests", "sent", "received")
    shown = [
        [r["step"], r["did"], r["seconds"], r["requests"], output.size(r["sent"]), output.size(r["received"])]
        for r in rows
    ]
    requests, sent, received = state.cost()
    total = ["all", "", round(sum(r["seconds"] for r in rows), 3), requests, output.size(sent), output.size(received)]
    output.table([*shown, total], columns)
    output.say(f"Look around with: archive info {target.url}; archive episodes {target.url} --where 'return > 10'")
    picture = f"archive export {target.url} --html best --where 'update_count > 0' -o episode.html"
    output.say(f"Watch one: {picture}")
