"""Ranks that checkpoint again and again beside a reader and prunes, and what each round takes of their processes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import archive
from archive import Keep
from archive.base import MissingObjectError
from tests.support import servers

STEPS, ENVS, HELD = 8, 2, 3  # of a checkpoint and env, of a rank, checkpoints whose steps its buffer holds
WAIT_S = 2  # of the prunes: who reads for longer may miss something
RANK = 1_000_000_000


@dataclass(frozen=True)
class Taken:
    """What a round took of a process, and what that has at the end of it."""

    seconds: float
    cpu_s: float
    requests: int
    nbytes: int
    memory: int  # that it shares with nobody
    descriptors: int
    threads: int
    yardstick_s: float  # of the processor, for work that is always the same: others use it, too


def taken(arc: archive.Archive, work: Callable[[], Any]) -> Taken:
    """Do the work, with that archive alone; what it took."""
    began, cpu, before = time.monotonic(), time.process_time(), arc.io_stats()
    work()
    sent = arc.io_stats() - before
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    rollup = Path("/proc/self/smaps_rollup").read_text()
    memory = 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
    descriptors, threads = (len(list(Path(f"/proc/self/{of}").iterdir())) for of in ("fd", "task"))
    return Taken(
        seconds, cpu, sent.requests, sent.bytes_in + sent.bytes_out, memory, descriptors, threads, yardstick_s()
    )


def yardstick_s() -> float:
    began = time.process_time()
    json.loads(json.dumps([{"number": i, "text": str(i)} for i in range(1000)]))
    return time.process_time() - began


def note(log: str, what: Taken) -> None:
    with Path(log).open("a") as file:
        file.write(f"{json.dumps(astuple(what))}\n")


def noted(log: Path) -> list[Taken]:
    return [Taken(*json.loads(line)) for line in log.read_text().splitlines()]


def opened(where: Mapping[str, Any]) -> archive.Archive:
    gc.freeze()  # what came with the fork stays shared: to collect it is to copy it, which would look like growth
    servers.set_environment()
    return archive.open(where["url"], storage_options=where["options"])


def values(rank: int, lo: int, hi: int) -> dict[str, Any]:
    """The steps lo to hi of each env of a rank, one after the other."""
    serial = rank * RANK + np.arange(lo, hi)
    return {"serial": np.tile(serial, ENVS), "obs": np.repeat(np.tile(serial, ENVS)[:, None], 16, 1)}


def write(where: Mapping[str, Any], run: str, rank: int, world_size: int, count: int, log: str) -> None:
    """Make checkpoints of a ring as a rank of a run; each is noted once it is made."""
    arc = opened(where)
    with arc.writer(rank, world_size, run, f"{run}-only", keep=Keep(last=2), forget="unreferenced") as w:
        for step in range(count):
            note(log, taken(arc, partial(_checkpoint, w, rank, step)))


def _checkpoint(w: archive.Writer, rank: int, step: int) -> None:
    lo, hi = step * STEPS, (step + 1) * STEPS
    last = np.tile(np.arange(lo, hi) == hi - 1, ENVS)
    w.append(values(rank, lo, hi), env_ids=np.repeat(np.arange(ENVS), STEPS), last=last)
    keep_from = max(0, hi - HELD * STEPS)
    for env in range(ENVS):
        w.evict(env, before=keep_from)
    columns = {"p": np.tile(np.arange(keep_from, hi) * 0.5, ENVS)}
    w.checkpoint(step, columns=columns, state={"step": step}, progress={"step": step}).result()


def check(ck: Any) -> None:
    """A checkpoint is whole: steps, columns and states of all its ranks."""
    hi = (ck.step + 1) * STEPS
    lo = max(0, hi - HELD * STEPS)
    for rank in range(ck.world_size):
        expected = np.sort(values(rank, lo, hi)["serial"])
        read = ck.episodes.filter(rank=rank).read()
        np.testing.assert_array_equal(np.sort(np.concatenate([one["serial"] for one in read])), expected)
        assert all((one["obs"] == one["serial"][:, None]).all() for one in read)
        assert ck.state(rank) == {"step": ck.step}
        np.testing.assert_array_equal(ck.column("p", rank), np.tile(np.arange(lo, hi) * 0.5, ENVS))
    assert ck.progress == {"step": ck.step}


def read(where: Mapping[str, Any], log: str) -> None:
    """Look at the newest checkpoint of each run, by one archive that is refreshed, until all writers have ended."""
    arc = opened(where)
    _until_stopped(where, lambda: note(log, taken(arc, partial(_look, arc, where["runs"]))), 0.5)


def _look(arc: archive.Archive, runs: list[str]) -> None:
    began = time.monotonic()
    try:
        arc.refresh()
        for run in runs:
            if (ck := arc.checkpoints.of(run).latest) is not None:
                check(ck)
    except MissingObjectError:
        if time.monotonic() - began < WAIT_S - 1:  # stores tell times in whole seconds
            raise


def prune(where: Mapping[str, Any], log: str) -> None:
    """Delete what the writers let go of, until all have ended; how much it was is noted."""

    def some() -> None:
        done = opened(where).prune(f"{WAIT_S}s", dry_run=False, force=True)
        with Path(log).open("a") as file:
            file.write(f"{done.deleted}\n")

    _until_stopped(where, some, 2.0)


def _until_stopped(where: Mapping[str, Any], work: Callable[[], None], pause_s: float) -> None:
    while not Path(where["stop"]).exists():
        work()
        time.sleep(pause_s)
