"""The part of `archive demo` where four ranks save their buffers and three resume them,
as processes of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archive.checkpoint import Checkpoint
    from archive.store import IOStats

ENVS, STEPS, KEPT, NEW = 4, 120, 100, 6  # env rows a rank, steps each has made and still holds, steps after the resume


@dataclass
class Ranks:
    """A run of its own in the archive: its name, and what its ranks have written."""

    url: str
    storage_options: Mapping[str, Any]
    single_writer: bool = False
    run: str = field(default_factory=lambda: f"demo-{secrets.token_hex(3)}")
    cost: list[IOStats] = field(default_factory=list)

    def all(self, world_size: int, work: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """What `work` gives on every rank; the ranks run at the same time."""
        how = {"storage_options": dict(self.storage_options), "single_writer": self.single_writer}
        with self._pool(world_size) as pool:
            jobs = [pool.submit(work, self.url, how, self.run, r, world_size) for r in range(world_size)]
            results = [job.result() for job in jobs]
        self.cost += [result["cost"] for result in results]
        return results

    def _pool(self, count: int) -> Executor:
        """Processes; threads where the store lives in this one, or no other may write there."""
        if self.single_writer or self.url.startswith("memory:"):
            return ThreadPoolExecutor(count)
        return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


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
    steps = steps_of(rank, 0, STEPS)
    last = np.repeat((np.arange(STEPS) + rank) % 25 == 24, ENVS)
    writer.append(steps, env_ids=steps["env"], last=last)
    for env in range(ENVS):
        writer.evict(env, before=STEPS - KEPT)
    numbers = steps["number"].reshape(STEPS, ENVS)[-KEPT:].T.ravel()  # as they are live: one env row after the other
    writer.checkpoint(1, columns={"priority": numbers / 7}, progress={"steps": STEPS}).result()
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
    """How many steps were resumed, how many are live now, and whether all is well.

    It is if every step that was saved was resumed once, whole, with its priority; and nothing is there twice.
    """
    import numpy as np

    before, after = (np.sort(np.concatenate([r["numbers"] for r in results])) for results in (saved, resumed))
    now = np.concatenate([d["number"] for d in checkpoint.episodes.read(["number"])])
    wanted = len(before) + len(resumed) * ENVS * NEW
    sound = np.array_equal(before, after) and all(r["sound"] for r in resumed)
    return len(after), wanted, bool(sound and len(now) == len(np.unique(now)) == wanted)
