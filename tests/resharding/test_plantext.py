"""The text of a plan that says what cannot be is refused before anybody follows it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import archive
import resharding
from archive.base import IntegrityError
from tests.support.fuzzing.plans import checkpoint_of_three

NOTHING = {"rules": {"world_size": 2}, "parts": [[]] * 6, "dropped": [[]] * 4}
PARTS = ("buffers", "replay", "parts")


@pytest.fixture(scope="module")
def checkpoint() -> archive.Checkpoint:
    return checkpoint_of_three()


def test_the_text_of_a_plan_is_that_plan(checkpoint: archive.Checkpoint) -> None:
    plan = resharding.plan(checkpoint, world_size=2, max_length=2)
    assert resharding.Plan.from_json(plan.to_json(), checkpoint) == plan


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("world_size",), 1 << 40, "ranks"),
        (("world_size",), "2", "no whole number"),
        (("digest",), None, "no text"),
        (("origin",), [1], "no list of 5"),
        (("origin",), [1, "main", 1, {}, None], "no text"),
        (("buffers", "other"), NOTHING, "no buffer 'other'"),
        (("buffers", "replay", "rules"), {}, "world_size is not there"),
        (PARTS, [[0]] * 5, "no list of 6"),
        (PARTS, [[0]] * 5 + [[]], "several lengths"),
        ((*PARTS, 0, 0), 2, "a rank beyond"),
        ((*PARTS, 1, 0), 99, "episodes that the checkpoint has not"),
        ((*PARTS, 3, 0), 99, "steps that are not there"),
        ((*PARTS, 4, 0), 1 << 70, "more than 64 bits"),
        ((*PARTS, 4, 0), 0.5, "other than whole numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be(checkpoint: archive.Checkpoint, place: tuple[Any, ...], value: Any, why: str) -> None:
    text = json.loads(resharding.plan(checkpoint, world_size=2).to_json())
    owner = text
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    with pytest.raises(IntegrityError, match=why):
        resharding.Plan.from_json(json.dumps(text), checkpoint)
