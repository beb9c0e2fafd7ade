"""Run as a program: four processes work on prompts, one kills itself at its k-th storage operation, three ranks go on.

Usage: python -m tests.support.prompt_kill '{"url": ..., "options": {...}, "folder": ..., "victim": 0, "together": true,
"kills": [0, 5, ...] or null for all}' `folder` gets what was told durable. Prints one JSON line: what each kill led to.
With "nodes" so many machines keep journals for their ranks; with "alone" the others go on when one is killed.
With the victim null no rank of the first four is killed, but the process of the three that go on, in which two go on
after it: at any operation of their recovery, resume, and work.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from archive import opening
from archive.checkpoint import assembly
from tests.support.checkpoint_kill import RANKS
from tests.support.kills import at_each, code_of, die_at, forked, killed
from tests.support.processes import import_core
from tests.support.prompt_checks import check_end, check_recovered
from tests.support.prompt_deaths import Fates, Life
from tests.support.prompt_job import Fact, Job, Rank, Tell, begin, last


def teller(log: Path) -> Tell:
    """What is told goes to a file, also of who is killed right after."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(facts: Sequence[Fact]) -> None:
        os.write(descriptor, "".join(f"{json.dumps(fact)}\n" for fact in facts).encode())

    return tell


def told_to(log: Path) -> list[Fact]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def live(url: str, options: Any, job: Job, rank: int, log: Path, k: int | None) -> None:
    """One process of the first session; it ends without having closed anything."""
    tell = teller(log)
    if k is not None:
        die_at(k)
    arc = opening.open(url, storage_options=options)
    w, me = begin(arc, job, rank, lambda: None, fresh=True)
    Rank(w, me, job, tell).run()
    os._exit(0)


def go_on(url: str, options: Any, job: Job, log: Path, k: int | None = None) -> int:
    """Resume on several ranks in one process, and maybe be killed; the exit code is, at the end of the data set, how
    many episodes have no seal."""
    if k is None:
        check_recovered(url, told_to(log), options)
    life = Life(url, job, Fates(None), options, tell=teller(log))
    if k is not None:
        die_at(k)
    life.live()
    for error in life.errors:
        raise error
    if not job.finishes:
        os._exit(0)
    life.bury()
    return check_end(url, together=job.together, options=options)


def ended(ranks: dict[int, int], victim: int, *, alone: bool) -> dict[int, int]:
    """Exit codes: when the victim dies, so do the others, unless it dies alone."""
    codes = {victim: code_of(ranks[victim])}
    for rank, pid in ranks.items():
        if rank != victim:
            if codes[victim] and not alone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            codes[rank] = code_of(pid)
    return codes


def once(given: dict[str, Any], k: int) -> tuple[bool, int]:
    """Whether somebody was killed, and how many episodes have no seal in the end."""
    victim, options = given["victim"], given["options"]
    nodes, alone = given.get("nodes", 0), given.get("alone", False)
    job = Job("first", RANKS, 2, together=given["together"], checkpoints=not alone, journal_s=0.05, nodes=nodes)
    url, log = f"{given['url']}/{victim}-{k}", Path(given["folder"]) / f"{victim}-{k}"
    assert code_of(forked(lambda: opening.create(url, storage_options=options) and None)) == 0
    ranks = {
        rank: forked(lambda rank=rank: live(url, options, job, rank, log, k if rank == victim else None))
        for rank in range(RANKS)
    }
    codes = ended(ranks, victim or 0, alone=alone)
    assert all(code in (0, -signal.SIGKILL) for code in codes.values()), codes
    died = codes[victim or 0] != 0
    if victim is None:
        assert not died
        second = replace(job, session="second", world_size=3, batches=1)
        died = killed(lambda: go_on(url, options, second, log, k))
    end = last(job, "end", 2 if victim is None else 3)
    orphans = code_of(forked(lambda: go_on(url, options, end, log)))
    assert 0 <= orphans <= RANKS, f"victim {victim}, operation {k}"
    return died, orphans


def main() -> None:
    given = json.loads(sys.argv[1])
    import_core()
    assembly.STEP_IN_S, assembly.MAX_POLL_S = 0.05, 0.05
    at_each(given["kills"], partial(once, given))


if __name__ == "__main__":
    main()
