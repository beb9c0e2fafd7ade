"""kill -9 of a job's driver at any storage operation, somebody else's commit, and the same call: each batch once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.backends import Backend
from tests.support.kills import said_by


def _walk(backend: Backend, folder: Path, kills: list[int] | None, timeout_s: float) -> list[tuple[int, bool, int]]:
    """(operation, whether the driver was killed there, batches that were found done) for each kill."""
    given = {"url": backend.url, "options": backend.storage_options, "folder": f"{folder}/calls", "kills": kills}
    (outcomes,) = said_by("job_kill", json.dumps(given), timeout_s=timeout_s)
    return [(k, killed, done) for k, killed, done in outcomes]


@pytest.mark.parametrize(
    ("backend", "kills"),
    [("local", [9, 46, 71, 104, 150]), ("moto", [11, 32]), ("seaweedfs", [12, 31])],
    indirect=["backend"],
)
def test_killed_at_a_sample_of_operations(backend: Backend, tmp_path: Path, kills: list[int]) -> None:
    outcomes = _walk(backend, tmp_path, kills, 120)
    assert [(k, killed) for k, killed, _ in outcomes] == [(k, True) for k in kills]
    done = [batches for _, _, batches in outcomes]
    assert done == sorted(done)
    assert done[0] < done[-1]


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["local", "moto", "seaweedfs"], indirect=True)
def test_killed_at_every_operation(backend: Backend, tmp_path: Path) -> None:
    outcomes = _walk(backend, tmp_path, None, 1500)
    assert not outcomes[-1][1], "beyond its last operation it lives"
    assert all(killed for _, killed, _ in outcomes[:-1])
    assert {done for _, _, done in outcomes} == {*range(5)}
