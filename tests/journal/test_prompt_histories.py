"""Random histories of a job of prompts: sessions of any number of ranks, each of which ends anywhere, with or without a
checkpoint, and is recovered by the next or by somebody who looks; in the end each prompt was trained on once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from archive.checkpoint import assembly
from tests.support.prompt_deaths import Death, lives
from tests.support.prompt_job import Job, last
from tests.support.sampling import one_in

DEATHS = st.builds(Death, st.integers(0, 3), st.integers(1, 50), st.booleans(), st.integers(0, 20))
SESSIONS = st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans(), st.none() | DEATHS, st.booleans())
EXAMPLES = 48


@pytest.mark.parametrize("count", one_in(8))
def test_any_history_ends_with_each_prompt_trained_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "STEP_IN_S", 0.01)
    monkeypatch.setattr(assembly, "MAX_POLL_S", 0.01)

    @settings(max_examples=EXAMPLES // count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(SESSIONS, min_size=1, max_size=4), st.integers(1, 4), st.booleans())
    def histories(sessions: list[Any], world_size: int, together: bool) -> None:
        jobs = [
            Job(f"s{i}", ranks, batches, together=together, checkpoints=checkpoints)
            for i, (ranks, batches, checkpoints, *_) in enumerate(sessions)
        ]
        unseen = [i for i, (*_, seen) in enumerate(sessions) if not seen]
        deaths = [death for *_, death, _ in sessions]
        _, orphans = lives([*jobs, last(jobs[0], "end", world_size)], [*deaths, None], unseen)
        assert orphans <= (0 if together else sum(job.world_size for job in jobs))

    histories()
