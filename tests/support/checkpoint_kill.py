"""Run as a program: four processes checkpoint, one kills itself at its k-th storage operation, then somebody resumes.

Usage: python -m tests.support.checkpoint_kill '{"url": ..., "options": {...}, "victim": 0, "kills": [0, 5, ...] or null
for all}' Prints one JSON line: what each kill led to. Processes are forked off this one, which has only imported
things, so that many kills take little time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from typing import Any

import numpy as np

import archive
from archive import opening
from archive.base.errors import RanksMissingError
from archive.checkpoint import assembly
from tests.support.kills import at_each, code_of, die_at, forked
from tests.support.processes import import_core

RANKS = 4
PER_RANK = 30


def grow(w: archive.Writer, rank: int, begin: int) -> None:
    serial = rank * 1_000_000 + np.arange(begin, begin + PER_RANK)
    w.append({"serial": serial, "frame": np.repeat(serial[:, None], 8, 1)}, env_ids=0, first=begin == 0)


def columns(rank: int, lo: int, hi: int) -> dict[str, Any]:
    return {"priority": (rank * 1_000_000 + np.arange(lo, hi)) * 3.0, "fixed": np.ones(hi - lo)}


def run_rank(arc: archive.Archive, rank: int, victim: int, k: int) -> None:
    w = arc.writer(rank, RANKS, session="one")
    grow(w, rank, 0)
    w.checkpoint(1, columns=columns(rank, 0, PER_RANK), state={"at": 1}).result()
    grow(w, rank, PER_RANK)
    w.evict(0, before=10)
    if rank == victim:
        die_at(k)
    try:
        w.checkpoint(2, columns=columns(rank, 10, 2 * PER_RANK), state={"at": 2}, timeout_s=0.6).result()
    except RanksMissingError:
        if rank == victim:
            raise
    os._exit(0)


def check(ck: Any) -> tuple[int, int]:
    """The checkpoint is whole; which steps each rank has."""
    assert (ck.whole, ck.missing_ranks, ck.ranks) == (True, [], list(range(RANKS))), ck
    lo, hi = {1: (0, PER_RANK), 2: (10, 2 * PER_RANK), 3: (10, 3 * PER_RANK)}[ck.step]
    if ck.step == 3 and ck.column("origin", 0)[0] == 1:
        lo, hi = 0, 2 * PER_RANK
    for rank in range(RANKS):
        (data,) = ck.episodes.filter(rank=rank).read()
        want = rank * 1_000_000 + np.arange(lo, hi)
        assert data["serial"].tolist() == want.tolist(), (rank, data["serial"])
        assert (data["frame"] == want[:, None]).all()
        assert (ck.column("priority", rank) == want * 3.0).all()
        assert ck.state(rank) == {"at": ck.step}
    return lo, hi


def come_back(arc: archive.Archive) -> int:
    """Open, check, resume with all ranks in a new session, checkpoint, check; the step that was found."""
    found = arc.checkpoints.latest
    assert found is not None
    lo, hi = check(found)
    writers = [arc.writer(rank, RANKS, session="two", resume=found) for rank in range(RANKS)]
    for rank, w in enumerate(writers):
        grow(w, rank, hi)
    origin = {"origin": np.full(hi + PER_RANK - lo, found.step)}
    pendings = [
        w.checkpoint(3, columns=columns(rank, lo, hi + PER_RANK) | origin, state={"at": 3})
        for rank, w in enumerate(writers)
    ]
    for pending in pendings:
        pending.result()
    for w in writers:
        w.close()
    latest = arc.refresh().checkpoints.latest
    assert latest is not None
    assert latest.step == 3
    check(latest)
    for old in arc.checkpoints:
        check(old)
    return found.step


def once(url: str, options: dict[str, Any], victim: int, k: int) -> tuple[bool, int]:
    """Whether the victim was killed, and the step of the checkpoint that was found afterwards."""

    def opened() -> archive.Archive:
        return opening.open(f"{url}/{victim}-{k}", create=True, storage_options=options)

    ranks = {rank: forked(lambda rank=rank: run_rank(opened(), rank, victim, k)) for rank in range(RANKS)}
    codes = {rank: code_of(pid) for rank, pid in ranks.items()}
    assert all(code == 0 for rank, code in codes.items() if rank != victim), codes
    assert codes[victim] in (0, -signal.SIGKILL), codes
    step = code_of(forked(lambda: come_back(opened())))
    assert step in (1, 2), step
    return codes[victim] != 0, step


def main() -> None:
    given = json.loads(sys.argv[1])
    import_core()
    assembly.STEP_IN_S, assembly.MAX_POLL_S = 0.05, 0.05
    at_each(given["kills"], partial(once, given["url"], given["options"], given["victim"]))


if __name__ == "__main__":
    main()
