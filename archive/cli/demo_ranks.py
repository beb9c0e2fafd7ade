"""Tool: the part of `archive demo` where four ranks save their buffers and three resume them, as processes of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from archive.base import IntegrityError

if TYPE_CHECKING:
    from archive.checkpoint import Checkpoint

SAVED_BY, RESUMED_BY = 4, 3
ENVS, STEPS, KEPT, NEW = 4, 120, 100, 6  # env rows a rank, steps each has made and still holds, steps after the resume


@dataclass
class Ranks:
    """A run of its own in the archive: its name, and what its ranks have written."""

    url: str
    storage_options: Mapping[str, Any]
    single_writer: bool = False
    run: str = field(default_factory=lambda: f"demo-{secrets.token_hex(3)}")
    cost: list[dict[str, int]] = field(default_factory=list)

    def all(self, world_size: int, work: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
        """What `work` gives on every rank; the ranks run at the same time."""
        how = {"storage_options": dict(self.storage_options), "single_writer": self.single_writer}
        alone = self.single_writer or self.url.startswith("memory:")
        with _pool(world_size, alone=alone) as pool:
            jobs = [pool.submit(work, self.url, how, self.run, r, world_size) for r in range(world_size)]
            results = [job.result() for job in jobs]
        self.cost += [result.pop("cost") for result in results]
        return results


def _pool(count: int, *, alone: bool) -> Executor:
    """Processes; threads where the store lives in this one, or no other may write there."""
    if alone:
        return ThreadPoolExecutor(count)
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def steps_of(rank: int, times: Any) -> dict[str, Any]:
    """Made-up steps of all env rows of a rank; each carries a checksum of what it is."""
    import numpy as np

    envs = np.arange(ENVS)
    number = (rank * 1_000_000 + np.repeat(times, ENVS) * 1000 + np.tile(envs, len(times))).astype(np.int64)
    reward = np.ones(len(number), np.float32)
    return {"number": number, "check": checksum(number), "env": np.tile(envs, len(times)), "reward": reward}


def checksum(number: Any) -> Any:
    return number * 2_654_435_761 % 4_294_967_291


def save(url: str, how: dict[str, Any], run: str, rank: int, world_size: int) -> dict[str, Any]:
    """One of the ranks that save: a ring of env rows, a priority for each step, one checkpoint."""
    import numpy as np

    import archive

    arc = archive.open(url, **how)
    writer = arc.writer(rank, world_size, run, f"{run}-first", archive.Schema(env_id=["env"]))
    times = np.arange(STEPS)
    last = np.repeat((times + rank) % 25 == 24, ENVS)
    writer.append(steps_of(rank, times), env_ids=np.tile(np.arange(ENVS), STEPS), last=last)
    for env in range(ENVS):
        writer.evict(env, before=STEPS - KEPT)
    numbers = np.concatenate([steps_of(rank, times[-KEPT:])["number"].reshape(KEPT, ENVS)[:, e] for e in range(ENVS)])
    writer.checkpoint(1, columns={"priority": numbers / 7}, progress={"steps": STEPS}).result()
    writer.close()
    return {"numbers": numbers, "cost": arc.io_stats().as_dict()}


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
    numbers = np.concatenate([s["number"] for s in steps])
    sound = bool((np.concatenate([s["check"] for s in steps]) == checksum(numbers)).all())
    sound &= bool((share.columns["priority"] == numbers / 7).all())
    writer = arc.writer(resume=share, session=f"{run}-second", schema=archive.Schema(env_id=["env"]))
    before = arc.io_stats()
    new = steps_of(10 + rank, np.arange(NEW))
    writer.append(new, env_ids=new["env"])
    writer.checkpoint(2).result()
    sent = (arc.io_stats() - before).bytes_out
    writer.close()
    return {"numbers": numbers, "sound": sound, "sent": sent, "cost": arc.io_stats().as_dict()}


def account(saved: Sequence[Mapping[str, Any]], resumed: Sequence[Mapping[str, Any]], checkpoint: Checkpoint) -> str:
    """Whether every step that was saved was resumed once, whole, with its priority; and nothing is there twice."""
    import numpy as np

    before = np.sort(np.concatenate([r["numbers"] for r in saved]))
    after = np.sort(np.concatenate([r["numbers"] for r in resumed]))
    now = np.concatenate([d["number"] for d in checkpoint.episodes.read(["number"])])
    wanted = len(before) + RESUMED_BY * ENVS * NEW
    if (
        not np.array_equal(before, after)
        or not all(r["sound"] for r in resumed)
        or not len(now) == len(np.unique(now)) == wanted
    ):
        raise IntegrityError("the demonstration failed: steps were lost, doubled or changed; please report it")
    return f"{len(after)} steps and priorities, each once and on its step; with the new ones {wanted} are live"
