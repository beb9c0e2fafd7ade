"""Run as a program: four processes work on prompts, one kills itself at its k-th storage operation, three go on.

Usage: python -m tests.support.prompt_kill '{"url": ..., "options": {...}, "folder": ..., "victim": 0, "together": true,
"kills": [0, 5, ...] or null for all}' `folder` gets what was told durable. Prints one JSON line: what each kill led to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archive import facade
from archive.checkpoint import joining
from tests.support.checkpoint_kill import MAX_KILLS, RANKS, die_at, forked
from tests.support.prompt_checks import check_end, check_recovered
from tests.support.prompt_deaths import Fates, Life
from tests.support.prompt_job import Fact, Job, Rank, begin, last


def live(url: str, options: Any, job: Job, rank: int, log: Path, k: int | None) -> None:
    """One process of the first session; it ends without having closed anything."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(facts: Sequence[Fact]) -> None:
        os.write(descriptor, "".join(f"{json.dumps(fact)}\n" for fact in facts).encode())

    if k is not None:
        die_at(k)
    arc = facade.open(url, storage_options=options)
    w, me = begin(arc, job, rank, lambda: None, fresh=True)
    Rank(w, me, job, tell).run()
    os._exit(0)


def go_on(url: str, options: Any, job: Job, told: Sequence[Fact]) -> int:
    """Resume on three ranks, to the end of the data set; the exit code: how many episodes have no seal."""
    check_recovered(url, told, options)
    life = Life(url, last(job, "second", 3), Fates(None), options)
    life.run()
    for error in life.errors:
        raise error
    return check_end(url, together=job.together, options=options)


def ended(ranks: dict[int, int], victim: int) -> dict[int, int]:
    """Exit codes: when the victim dies, so do the others."""
    codes = {victim: os.waitstatus_to_exitcode(os.waitpid(ranks[victim], 0)[1])}
    for rank, pid in ranks.items():
        if rank != victim:
            if codes[victim]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


def once(given: dict[str, Any], k: int) -> tuple[bool, int]:
    """Whether the victim was killed, and how many episodes have no seal in the end."""
    victim, options = given["victim"], given["options"]
    job = Job("first", RANKS, 2, together=given["together"], journal_s=0.05)
    url, log = f"{given['url']}/{victim}-{k}", Path(given["folder"]) / f"{victim}-{k}"
    assert not os.waitstatus_to_exitcode(
        os.waitpid(forked(lambda: facade.create(url, storage_options=options) and None), 0)[1]
    )
    ranks = {
        rank: forked(lambda rank=rank: live(url, options, job, rank, log, k if rank == victim else None))
        for rank in range(RANKS)
    }
    codes = ended(ranks, victim)
    assert codes[victim] in (0, -signal.SIGKILL), codes
    assert all(code in (0, -signal.SIGKILL) for code in codes.values()), codes
    told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    orphans = os.waitstatus_to_exitcode(os.waitpid(forked(lambda: go_on(url, options, job, told)), 0)[1])
    assert 0 <= orphans <= RANKS, f"victim {victim}, operation {k}"
    return codes[victim] != 0, orphans


def main() -> None:
    given = json.loads(sys.argv[1])
    joining.STEP_IN_S, joining.MAX_POLL_S = 0.05, 0.05
    outcomes = []
    for k in given["kills"] or range(MAX_KILLS):
        outcomes.append((k, *once(given, k)))
        if given["kills"] is None and not outcomes[-1][1]:
            break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
