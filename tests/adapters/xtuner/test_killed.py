"""Jobs that are killed at their storage operations, twice: every prompt is trained on once, no rollout made twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kills import said_by
from tests.support.sampling import few_of
from tests.support.xtuner_jobs import PROMPTS


@pytest.mark.parametrize("apart", few_of([32, 16], 1))
@pytest.mark.parametrize("skip", [False, True])
def test_a_killed_job_loses_nothing_and_does_nothing_twice(skip: bool, apart: int, tmp_path: Path) -> None:
    kills = [[k, 7 * k % 90] for k in range(2, 130, apart)]
    given = json.dumps({"url": str(tmp_path), "options": {}, "kills": kills, "skip": skip})
    outcomes = said_by("xtuner_jobs", given)[-1]
    assert len(outcomes) == len(kills)
    for one in outcomes:
        assert not one["failed"], one["failed"][0]
        assert sorted(one["trained"]) == list(range(PROMPTS)), one
        assert not one["made_twice"], one
