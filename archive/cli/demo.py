"""`archive demo`: the library at work, step by step, with what each step cost; ranks are processes."""

from __future__ import annotations

import itertools
import secrets
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archive.base import IntegrityError, size
from archive.cli.commands import LOOK, command
from archive.cli.options import Target, argument
from archive.cli.output import Output

if TYPE_CHECKING:
    from archive import Archive
    from archive.checkpoint import Checkpoint
    from archive.store import IOStats

Steps = dict[str, Any]
ENVS, LENGTH, KEPT, NEW = 4, 120, 100, 6  # env rows a rank, steps each has made and still holds, steps after the resume


class Ranks:
    """A run of its own in the archive: its name, and what its ranks have written."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.run = f"demo-{secrets.token_hex(3)}"
        self.cost: list[IOStats] = []

    def all(self, world_size: int, work: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of `work` on every rank; the ranks run at the same time.

        Ranks are processes; they are threads if the store is in this process, or no other may write there.
        """
        url, alone = self._target.url, self._target.single_writer
        how = {"storage_options": self._target.storage_options, "single_writer": alone}
        if alone or url.startswith("memory:"):
            executor: Executor = ThreadPoolExecutor(world_size)
        else:
            executor = ProcessPoolExecutor(world_size, mp_context=get_context("spawn"))
        with executor as pool:
            jobs = [pool.submit(work, url, how, self.run, r, world_size) for r in range(world_size)]
            results = [job.result() for job in jobs]
        self.cost += [result["cost"] for result in results]
        return results


def steps_of(rank: int, first: int, stop: int) -> dict[str, Any]:
    """Made-up steps [first, stop) of all env rows of a rank; each carries a checksum of what it is."""
    import numpy as np

    times, envs = np.repeat(np.arange(first, stop), ENVS), np.tile(np.arange(ENVS), stop - first)
    number = rank * 1_000_000 + times * 1000 + envs
    return {"number": number, "check": checksum(number), "env": envs, "reward": np.ones(len(number), np.float32)}


def checksum(number: Any) -> Any:
    return number * 2_654_435_761 % 4_294_967_291


def save(url: str, how: dict[str, Any], run: str, rank: int, world_size: int) -> dict[str, Any]:
    """One of the ranks that save: a ring of env rows, a priority for each step, one checkpoint."""
    import numpy as np

    import archive

    arc = archive.open(url, **how)
    writer = arc.writer(rank, world_size, run, f"{run}-first", archive.Schema(env_id=["env"]))
    steps = steps_of(rank, 0, LENGTH)
    last = np.repeat((np.arange(LENGTH) + rank) % 25 == 24, ENVS)
    writer.append(steps, env_ids=steps["env"], last=last)
    for env in range(ENVS):
        writer.evict(env, before=LENGTH - KEPT)
    numbers = steps["number"].reshape(LENGTH, ENVS)[-KEPT:].T.ravel()  # as they are live: one env row after the other
    writer.checkpoint(1, columns={"priority": numbers / 7}, progress={"steps": LENGTH}).result()
    writer.close()
    return {"numbers": numbers, "cost": arc.io_stats()}


def resume(url: str, how: dict[str, Any], run: str, rank: int, world_size: int) -> dict[str, Any]:
    """One of the ranks that resume: takes its share, checks every step, goes on and checkpoints what is new."""
    import numpy as np

    import archive
    import resharding

    arc = archive.open(url, **how)
    checkpoint = arc.checkpoints.of(run).latest
    assert checkpoint is not None
    share = resharding.plan(checkpoint, world_size).share(rank)
    steps = share.read(["number", "check"])
    numbers, checks = (np.concatenate([s[name] for s in steps]) for name in ("number", "check"))
    sound = bool((checks == checksum(numbers)).all() and (share.columns["priority"] == numbers / 7).all())
    writer = arc.writer(resume=share, session=f"{run}-second", schema=archive.Schema(env_id=["env"]))
    before = arc.io_stats()
    new = steps_of(10 + rank, 0, NEW)
    writer.append(new, env_ids=new["env"])
    writer.checkpoint(2).result()
    sent = (arc.io_stats() - before).bytes_out
    writer.close()
    return {"numbers": numbers, "sound": sound, "sent": sent, "cost": arc.io_stats()}


def account(
    saved: Sequence[Mapping[str, Any]], resumed: Sequence[Mapping[str, Any]], checkpoint: Checkpoint
) -> tuple[int, int, bool]:
    """The number of steps that were resumed, the number that are live now, and True if all is well.

    It is, if every step that was saved was resumed once, whole, with its priority, and nothing is there twice.
    """
    import numpy as np

    before, after = (np.sort(np.concatenate([r["numbers"] for r in results])) for results in (saved, resumed))
    now = np.concatenate([d["number"] for d in checkpoint.episodes.read(["number"])])
    wanted = len(before) + len(resumed) * ENVS * NEW
    sound = np.array_equal(before, after) and all(r["sound"] for r in resumed)
    return len(after), wanted, bool(sound and len(now) == len(np.unique(now)) == wanted)


WEIGHTS, EPISODES_EACH, UPDATES_BETWEEN = 3, 8, 100
SIDE, MOVES = 64, ((-0.04, 0), (0.04, 0), (0, -0.04), (0, 0.04))  # pixels of an image; what each action does
SAVED_BY, RESUMED_BY = 4, 3
STEPS = (
    "open or create it",
    "write and commit",
    "open elsewhere, filter by weights",
    "filter by update count and return",
    "read one field of those",
    "read all and compare",
    "four ranks save",
    "three ranks resume",
    "account for everything",
)
COSTS = ("requests", "sent", "received")


def in_one_process(opened: Callable[..., Archive]) -> Iterator[str]:
    """Episodes are written, found and read back; what came of each step. `opened` opens as a new process would."""
    arc = opened(create=True)
    yield f"{len(arc.episodes)} episodes are there already" if arc.commits else "made a new archive"
    written, weights = _write(arc)
    total = sum(len(steps["reward"]) for steps in written.values())
    yield f"{len(written)} episodes by {WEIGHTS} weights, {total} steps, visible at once"
    episodes, name = opened().episodes, list(weights)[1]
    found = episodes.filter(model_weights_uuid=name)
    _demand(len(found) == EPISODES_EACH, f"{len(found)} episodes by weights {name}, {EPISODES_EACH} were written")
    yield f"{len(found)} episodes by {name[:8]}; no data read"
    updates = (min(weights.values()), max(weights.values()) + 1)
    found = episodes.filter(update_count=updates, where="return > 10")
    wanted = {name for name, steps in written.items() if float(steps["reward"].sum()) > 10}
    _demand({episode.id for episode in found} == wanted, "the filter and the written rewards disagree")
    yield f'{len(found)} of {len(written)} with "return > 10"; no data read'
    for episode, steps in zip(found, found.read("reward"), strict=True):
        _demand_equal(steps, {"reward": written[episode.id]["reward"]}, episode.id)
    yield f"reward of {len(found)} episodes, equal to what was written"
    found = opened().episodes.filter(episode_id=list(written))
    _demand(len(found) == len(written), f"{len(found)} of {len(written)} episodes are there")
    for episode, steps in zip(found, found.read(), strict=True):
        _demand_equal(steps, written[episode.id], episode.id)
    yield f"{len(found)} episodes, every bit as it was written"


def in_many_processes(opened: Callable[..., Archive], ranks: Ranks) -> Iterator[str]:
    """Ranks save, others resume, and nothing is lost; what came of each step."""
    saved = ranks.all(SAVED_BY, save)
    yield f"{sum(len(r['numbers']) for r in saved)} steps in the rings of {SAVED_BY} processes, one checkpoint"
    resumed = ranks.all(RESUMED_BY, resume)
    shares = ", ".join(str(len(r["numbers"])) for r in resumed)
    yield f"shares of {shares} steps; their next checkpoint sent {size(sum(r['sent'] for r in resumed))}"
    count, live, sound = account(saved, resumed, opened().checkpoints.of(ranks.run)[-1])
    _demand(sound, "steps were lost, doubled or changed")
    yield f"{count} steps and priorities, each once and on its step; with the new ones {live} are live"


def _write(arc: Archive) -> tuple[dict[str, Steps], dict[str, int]]:
    """Write episodes by several weights: id -> steps, and weights -> update count."""
    import numpy as np

    counts = arc.episodes.table["update_count_max"].drop_null().to_pylist()
    first = max(counts, default=0) + UPDATES_BETWEEN
    rng = np.random.default_rng(first)
    weights = {str(uuid.uuid4()): first + i * UPDATES_BETWEEN for i in range(WEIGHTS)}
    written = {}
    with arc.writer() as writer:
        for name, update_count in weights.items():
            writer.weights(name, update_count)
            for _ in range(EPISODES_EACH):
                steps = made_up_episode(rng, skill=update_count / first)
                written[writer.add_episode(steps, terminated=True)] = steps
    return written, weights


def made_up_episode(rng: Any, *, skill: float) -> Steps:
    """A few steps of an agent that walks to its goal, the straighter the greater its `skill`."""
    import numpy as np

    length = int(rng.integers(20, 60))
    place, goal = rng.uniform(0.1, 0.9, (2, 2))
    places, actions = np.empty((length, 2)), rng.integers(0, 4, length)
    for step in range(length):
        places[step] = place
        towards = goal - place
        if rng.random() < 0.25 * skill:  # else it goes anywhere
            axis = int(abs(towards[1]) > abs(towards[0]))
            actions[step] = 2 * axis + int(towards[axis] > 0)
        place = np.clip(place + MOVES[actions[step]], 0.05, 0.95)
    state = np.hstack([places, np.broadcast_to(goal, places.shape)]).astype(np.float32)
    reward = (0.8 - 2 * np.hypot(*(places - goal).T)).astype(np.float32)
    return {"obs": {"image": pictures(places, goal), "state": state}, "action": actions, "reward": reward}


def pictures(places: Any, goal: Any) -> Any:
    """An image for each place of the agent: an orange disc, and its goal, a green ring. # (T, SIDE, SIDE, 3)"""
    import numpy as np

    rows, columns = (np.mgrid[:SIDE, :SIDE] + 0.5) / SIDE
    shaded = 226 - 18 * ((rows * 8).astype(int) + (columns * 8).astype(int) & 1)
    out = np.repeat(np.broadcast_to(shaded, (len(places), SIDE, SIDE))[..., None], 3, axis=-1).astype(np.uint8)
    out[:, abs(np.hypot(columns - goal[0], rows - goal[1]) - 0.09) < 0.02] = (44, 140, 104)
    x, y = places.T[:, :, None, None]
    out[np.hypot(columns - x, rows - y) < 0.06] = (226, 106, 44)
    return out


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(f"the demonstration failed: {what}; please report it")


def _demand_equal(found: Steps, wanted: Steps, where: str) -> None:
    from archive.view import frames

    read, written = dict(frames.leaves(found)), dict(frames.leaves(wanted))
    _demand(read.keys() == written.keys(), f"{where} has fields {sorted(read)}, not {sorted(written)}")
    for name, value in written.items():
        same = read[name].dtype == value.dtype and read[name].tobytes() == value.tobytes()
        _demand(same, f"{where}/{name} differs from what was written")


def run(target: Target) -> tuple[str, list[dict[str, Any]]]:
    """The archive's URL, and all steps: what each did, how long it took, what it cost."""
    archives: list[Archive] = []
    ranks = Ranks(target)

    def opened(**how: Any) -> Archive:
        archives.append(target.open(**how))
        return archives[-1]

    def cost() -> dict[str, int]:
        stats = [*(arc.io_stats() for arc in archives), *ranks.cost]
        sums = (sum(s.requests for s in stats), sum(s.bytes_out for s in stats), sum(s.bytes_in for s in stats))
        return dict(zip(COSTS, sums, strict=True))

    rows, before, began = [], cost(), time.perf_counter()
    happened = itertools.chain(in_one_process(opened), in_many_processes(opened, ranks))
    for step, did in zip(STEPS, happened, strict=True):
        now, seconds = cost(), round(time.perf_counter() - began, 3)
        rows.append({"step": step, "did": did, "seconds": seconds} | {name: now[name] - before[name] for name in COSTS})
        before, began = now, time.perf_counter()
    return archives[0].url, rows


@command(LOOK, argument("url", metavar="[URL]", default="demo-archive"), writes=True)
def demo(target: Target) -> Output:
    """Write a sample archive, resume it, and check it.

    Writes episodes, finds them, reads them back and compares. Four ranks save a checkpoint, three resume it. Run again,
    the demo adds to the same archive.
    """
    url, rows = run(target)
    total = {name: sum(row[name] for row in rows) for name in ("seconds", *COSTS)}
    shown = [
        {**row, "what happened": row["did"], "sent": size(row["sent"]), "received": size(row["received"])}
        for row in (*rows, {"step": "all", "did": "", **total, "seconds": round(total["seconds"], 3)})
    ]
    called, place = program(), shlex.quote(target.url)
    more = [
        f"Look around: {called} info {place}; {called} episodes {place} --where 'return > 10'",
        f"Watch one: {called} export {place} --html best --where 'update_count > 0' -o episode.html",
        *([] if find_spec("starlette") else ["The viewer needs more: pip install 'trajectory-archive[view]'"]),
        f"Open the viewer: {called} view {place}",
    ]
    return Output({"url": url, "steps": rows}, [(shown, ("step", "what happened", "seconds", *COSTS)), *more])


def program() -> str:
    """The name of the command line, as one can type it here: the path it was called by, if it is not on the PATH."""
    called = sys.argv[0]
    return called if Path(called).name == "archive" and shutil.which("archive") is None else "archive"
