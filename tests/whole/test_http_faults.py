"""Each operation, with each request of it broken in each way, on a real server through both clients."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_faults import FAULTS, TRANSPORTS, HttpFault, Scene, broken_at, requests_of, scene
from tests.support.operations import OPERATIONS, Operation

SAMPLE = (
    ("create", "500", 1),
    ("append and commit", "expired", 5),
    ("append and commit", "flipped upload", 1),
    ("append and commit", "flipped", 2),
    ("label", "reset after", 6),
)  # an operation, a fault, and the number of the request


SOME = 8  # descriptors of threads and connections that are about to end


@pytest.fixture(params=TRANSPORTS)
def made(request: pytest.FixtureRequest, seaweedfs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with scene(seaweedfs_endpoint, request.param, monkeypatch) as found:
        yield found


@pytest.mark.parametrize(("operation", "fault", "k"), SAMPLE)
def test_a_request_broken(operation: str, fault: str, k: int, made: Scene, tmp_path: Path) -> None:
    (what,) = (one for one in OPERATIONS if one.name == operation)
    (wrong,) = (one for one in FAULTS if one.name == fault)
    assert broken_at(what, wrong, k, made.fresh(tmp_path)) == ("unhurt" if wrong.passing else "CorruptCommitError")


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_request_broken(operation: Operation, fault: HttpFault, made: Scene, tmp_path: Path) -> None:
    usual = requests_of(operation, made.fresh(tmp_path))
    concerned = sum(fault.concerns(seen) for seen in usual)
    open_before = _descriptors()
    came = Counter(broken_at(operation, fault, k, made.fresh(tmp_path)) for k in range(concerned))
    assert _descriptors() <= open_before + SOME  # no connection stays that a request was broken on
    print(f"{operation}, {fault}: {dict(came)}")


def _descriptors() -> int:
    """How many files and connections this process has open, where that can be told."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
