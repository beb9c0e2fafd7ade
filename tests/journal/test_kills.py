"""kill -9 of one of four processes with journal, ledger and checkpoints at any storage operation, and then three go on:
nothing told durable is lost, no prompt is skipped or trained twice, no episode doubled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import Backend
from tests.support.kills import said_by

Outcomes = list[tuple[int, bool, int]]  # operation, whether the victim was killed there, episodes without a seal


# victim: the rank that is killed; None: the process of those who recover and resume
def walk(
    backend: Backend, folder: Path, victim: int | None, kills: list[int] | None, *, together: bool, **more: Any
) -> Outcomes:
    given: dict[str, Any] = {"url": backend.url, "options": backend.storage_options, "folder": str(folder)}
    given |= {"victim": victim, "together": together, "kills": kills, **more}
    (outcomes,) = said_by("prompt_kill", json.dumps(given))
    print(f"{sum(killed for _, killed, _ in outcomes)} kills")
    return [(k, killed, orphans) for k, killed, orphans in outcomes]


@pytest.mark.parametrize(
    ("backend", "victim", "kills", "together"),
    [
        ("local", 1, [47], True),
        ("local", None, [33], True),
        ("seaweedfs", 0, [19], True),
    ],
    indirect=["backend"],
)
def test_killed_at_a_sample_of_operations(
    backend: Backend, victim: int | None, kills: list[int], together: bool, tmp_path: Path
) -> None:
    outcomes = walk(backend, tmp_path, victim, kills, together=together)
    assert [(k, killed) for k, killed, _ in outcomes] == [(k, True) for k in kills]
    assert not together or not any(orphans for *_, orphans in outcomes)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "victim", "together"),
    [
        *(("local", victim, True) for victim in range(4)),
        ("local", None, True),
        ("local", 0, False),
        ("seaweedfs", 0, True),
    ],
    indirect=["backend"],
)
def test_killed_at_every_operation(backend: Backend, victim: int | None, together: bool, tmp_path: Path) -> None:
    outcomes = walk(backend, tmp_path, victim, None, together=together)
    assert not outcomes[-1][1], "beyond its last operation it lives"
    assert all(killed for _, killed, _ in outcomes[:-1])
    assert not together or not any(orphans for *_, orphans in outcomes)


# alone: the others go on, and one of them stores for all; else all of them die
@pytest.mark.parametrize(
    ("backend", "victim", "kills", "nodes", "alone"),
    [
        ("local", 0, [25], 1, True),
        ("local", 1, [33], 2, False),
        ("seaweedfs", 0, [14], 2, True),
    ],
    indirect=["backend"],
)
def test_ranks_that_share_objects_are_killed_at_a_sample_of_operations(
    backend: Backend, victim: int, kills: list[int], nodes: int, alone: bool, tmp_path: Path
) -> None:
    outcomes = walk(backend, tmp_path, victim, kills, together=True, nodes=nodes, alone=alone)
    assert outcomes == [(k, True, 0) for k in kills]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("backend", "victim", "nodes", "alone"),
    [
        *(("local", victim, 1, True) for victim in range(4)),
        ("local", 0, 2, False),
        ("local", None, 2, False),
        ("seaweedfs", 0, 2, True),
    ],
    indirect=["backend"],
)
def test_ranks_that_share_objects_are_killed_at_every_operation(
    backend: Backend, victim: int | None, nodes: int, alone: bool, tmp_path: Path
) -> None:
    outcomes = walk(backend, tmp_path, victim, None, together=True, nodes=nodes, alone=alone)
    assert not outcomes[-1][1], "beyond its last operation it lives"
    assert all(killed and not orphans for _, killed, orphans in outcomes[:-1])
