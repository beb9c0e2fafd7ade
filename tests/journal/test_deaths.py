"""A rank ends at any of its requests, and the job goes on with another number of ranks: nothing that was told durable
is lost, no prompt is skipped, none is trained twice, no episode is doubled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from archive.checkpoint import assembly
from tests.support.prompt_deaths import Death, lives
from tests.support.prompt_job import Job, last
from tests.support.sampling import ALL, one_in, sampled

FIRST = Job("first", 4, 2)
MOST = {False: 80, True: 30}  # requests of a rank, of all kinds or those that change something, and some more


@pytest.fixture(autouse=True)
def _quick_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "STEP_IN_S", 0.01)
    monkeypatch.setattr(assembly, "MAX_POLL_S", 0.01)


def walk(count: int, jobs: Sequence[Job], death_of: int) -> Iterator[int]:
    """Have each rank of one of the jobs die at its k-th request, before and after it is done, for each k until it
    lives; how many episodes are without a seal."""
    died, lived = 0, set()
    cases = [(victim, after) for victim in range(jobs[death_of].world_size) for after in (False, True)]
    for k, (victim, after) in sampled([(k, case) for case in cases for k in range(1, MOST[case[1]])], count):
        if (victim, after) not in lived:
            deaths: list[Death | None] = [None] * len(jobs)
            deaths[death_of] = Death(victim, k, after, lag=k % 3 * 6)
            happened, orphans = lives(jobs, deaths, range(death_of))
            died += happened
            lived |= set() if happened else {(victim, after)}
            yield orphans
    print(f"{died} deaths")
    assert died > 0
    assert count != ALL or lived == set(cases), "beyond its last request it lives"


@pytest.mark.parametrize("count", one_in(80))
def test_a_rank_dies_at_any_request(count: int) -> None:
    for orphans in walk(count, (FIRST, last(FIRST, "second", 3)), 0):
        assert orphans == 0


@pytest.mark.parametrize("count", one_in(144))
def test_what_was_not_said_together_may_leave_episodes_without_a_seal(count: int) -> None:
    first = replace(FIRST, together=False)
    for orphans in walk(count, (first, last(first, "second", 3)), 0):
        assert orphans <= first.world_size, "each rank had one rollout between its two calls at most"


@pytest.mark.parametrize("count", one_in(54))
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_rank_dies_while_the_run_is_recovered_or_resumed(checkpoints: bool, count: int) -> None:
    """The first session is gone with what it had not synced; the second dies, before its first checkpoint too."""
    second = replace(FIRST, session="second", world_size=3, batches=1, checkpoints=checkpoints)
    for orphans in walk(count, (FIRST, second, last(FIRST, "third", 2)), 1):
        assert orphans == 0


def test_sessions_that_make_no_checkpoint_are_recovered_one_after_the_other() -> None:
    jobs = [
        replace(FIRST, session=f"s{n}", world_size=n, batches=1, checkpoints=n == 4) for n in (4, 3, 5, 2)
    ]  # fmt: skip
    assert lives([*jobs, last(FIRST, "end", 3)], [None] * 5) == (False, 0)
