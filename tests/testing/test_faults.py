"""Each kind of fault shows up as the library's own error, or is got over; what comes out of it is whole."""

from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base.errors import (
    AccessDeniedError,
    DeadlineError,
    IntegrityError,
    MissingObjectError,
    StorageError,
    StorageFullError,
    UsageError,
)
from archive.testing import EmptyRoot, assert_whole, faults, small_archive, steps
from tests.support.archives import contents
from tests.support.processes import FORKSERVER, end
from tests.support.tampering import same


@pytest.fixture(params=("memory", "local"))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "archive")


def add(url: str, name: str = "new", length: int = 5) -> None:
    with archive.open(url).writer() as w:
        w.add_episode(steps(length, 7), episode_id=name)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("fail", StorageError),
        ("deny", AccessDeniedError),
        ("full", StorageFullError),
        (PermissionError("mine"), AccessDeniedError),
    ],
)
@pytest.mark.parametrize("op", ["put", "create"])
def test_a_write_that_is_refused_is_an_error_with_its_cause(
    url: str, op: str, what: Any, error: type[Exception]
) -> None:
    arc = small_archive(url)
    with faults.at(arc, op=op, what=what, times=None) as fault, pytest.raises(error) as caught:
        add(url)
    assert fault.hits[0].startswith(f"{op} ")
    assert isinstance(caught.value.__cause__, OSError)
    assert_whole(arc.refresh())
    assert sorted(contents(arc)) == ["e0", "e1", "e2"]


@pytest.mark.parametrize(("what", "error"), [("vanish", MissingObjectError), ("truncate", archive.ArchiveError)])
def test_a_read_that_goes_wrong_is_an_error(url: str, what: str, error: type[Exception]) -> None:
    small_archive(url)
    with faults.at(url, op="get", key="shards/", what=what, times=None), pytest.raises(error):
        archive.open(url).episodes.read()


@pytest.mark.parametrize("key", ["shards/", "manifest/", "commits/"])
def test_flipped_bits_are_noticed(url: str, key: str) -> None:
    small_archive(url)
    with faults.at(url, op="get", key=key, what="corrupt", times=None) as fault, pytest.raises(IntegrityError):
        archive.open(url).episodes.read()
    assert fault.hits
    assert_whole(archive.open(url))


def test_what_the_store_keeps_wrong_is_noticed(url: str) -> None:
    arc = small_archive(url)
    with faults.at(url, op="put", key="shards/", what="corrupt") as fault:
        add(url, length=5000)  # so that the middle of the shard lies in a chunk
    assert fault.hits
    with pytest.raises(IntegrityError):
        archive.open(url).episodes["new"].read()
    with pytest.raises(AssertionError, match=r"is not whole:\n- shards/.*\n- the episodes cannot be read: Corrupt"):
        assert_whole(arc.refresh())


@pytest.mark.parametrize("what", ["reset", "throttle", "lose_answer", "delay"])
def test_what_is_tried_again_is_got_over_at_every_operation(url: str, what: str) -> None:
    arc = small_archive(url)
    before = contents(arc)
    for k in itertools.count(1):
        with faults.at(url, k=k, what=what, seconds=0.001) as fault:
            add(url, f"new-{k}")
        if not fault.hits:
            break
        got = archive.open(url).episodes[f"new-{k}"].read()
        assert same(got, steps(5, 7))
    assert k > 5
    assert_whole(arc.refresh())
    assert all(same(contents(arc)[name], data) for name, data in before.items())


@pytest.mark.parametrize(("what", "seconds"), [("throttle", 0.0), ("reset", 0.0), ("delay", 9.0)])
def test_what_never_ends_is_a_deadline(url: str, what: str, seconds: float) -> None:
    small_archive(url)
    with faults.at(url, what=what, times=None, seconds=seconds), pytest.raises(DeadlineError):
        archive.open(url, deadline_s=0.3)


def test_only_what_is_meant_is_broken(url: str, tmp_path: Path) -> None:
    small_archive(url)
    other = small_archive(tmp_path / "other")
    with faults.at(url, op="get", k=3, times=2, key="", what="deny") as fault:
        assert_whole(other)
        assert fault.seen == 0
        with pytest.raises(AccessDeniedError):
            archive.open(url).episodes.read()
        assert fault.seen >= 3
        assert len(fault.hits) <= 2
    archive.open(url).episodes.read()


def test_a_place_is_the_same_however_it_is_named(tmp_path: Path) -> None:
    small_archive(tmp_path / "archive")
    root = EmptyRoot(str(tmp_path / "archive"))
    for where in (root, root.open(), root.url, tmp_path / "archive", f"file://{root.url}", tmp_path):
        with faults.at(where, op="get", what="deny"), pytest.raises(AccessDeniedError):
            root.open()


def test_an_archive_that_is_open_is_meant_too(url: str) -> None:
    arc = small_archive(url)
    with faults.at(arc, op="get", what="deny"), pytest.raises(AccessDeniedError):
        arc.episodes.read()
    assert len(arc.episodes.read()) == 3


@pytest.mark.parametrize(
    "wrong", [{"op": "write"}, {"what": "explode"}, {"op": "list", "what": "corrupt"}, {"k": 0}, {"times": 0}]
)
def test_what_is_no_fault_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError), faults.at("memory://x", **wrong):
        pass


def _killed(url: str) -> None:
    with faults.at(url, op="create", key="commits/", k=2, what="kill"):  # the first names the session
        add(url)


def test_a_process_is_killed_where_one_says(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    arc = small_archive(url)
    child = FORKSERVER.Process(target=_killed, args=(url,))
    child.start()
    try:
        child.join(60)
        assert child.exitcode == -9
    finally:
        end(child)
    assert_whole(arc.refresh())
    assert sorted(contents(arc)) == ["e0", "e1", "e2", "new"]
