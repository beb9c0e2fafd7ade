"""kill -9 of one of four processes at any storage operation of a checkpoint: the old one or the new one, whole,
and on."""

from __future__ import annotations

import json

import pytest

from tests.support.backends import Backend
from tests.support.kills import said_by


def _walk(backend: Backend, victim: int, kills: list[int] | None, timeout_s: float) -> list[tuple[int, bool, int]]:
    """(operation, whether the victim was killed there, step found afterwards) for each kill."""
    given = {"url": backend.url, "options": backend.storage_options, "victim": victim, "kills": kills}
    (outcomes,) = said_by("checkpoint_kill", json.dumps(given), timeout_s=timeout_s)
    return [(k, killed, step) for k, killed, step in outcomes]


@pytest.mark.parametrize(
    ("backend", "victim", "kills"),
    [("local", 0, [1, 9, 17]), ("local", 2, [3, 7]), ("seaweedfs", 0, [0, 3])],
    indirect=["backend"],
)
def test_killed_at_a_sample_of_operations(backend: Backend, victim: int, kills: list[int]) -> None:
    outcomes = _walk(backend, victim, kills, 120)
    assert [(k, killed) for k, killed, _ in outcomes] == [(k, True) for k in kills]
    assert outcomes[0][2] == 1, "killed ahead of staging: the checkpoint before is found"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "victim"), [("local", 0), ("local", 3), ("seaweedfs", 0), ("moto", 1)], indirect=["backend"]
)
def test_killed_at_every_operation(backend: Backend, victim: int) -> None:
    outcomes = _walk(backend, victim, None, 1500)
    assert not outcomes[-1][1], "beyond its last operation it lives"
    assert all(killed for _, killed, _ in outcomes[:-1])
    assert {step for _, _, step in outcomes} == {1, 2}
    steps = [step for _, _, step in outcomes]
    assert steps == sorted(steps), "once it has staged, the others complete the checkpoint without it"
