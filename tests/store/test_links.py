"""Symbolic links on the local disk: followed within an archive and where the caller allows it, nowhere else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base import ByteRange
from archive.base.errors import ArchiveError, UnsafePathError
from archive.store.bases import as_allowed
from archive.store.storage import Storage
from archive.testing import small_archive

SECRET = b"of another user"
READS: dict[str, Callable[[Storage, str], Any]] = {
    "get": lambda storage, key: storage.get(key),
    "get_head": lambda storage, key: storage.get_head(key, 100),
    "get_all": lambda storage, key: storage.get_all([key]),
    "get_ranges": lambda storage, key: storage.get_ranges([ByteRange(key, 0, 2), ByteRange(key, 4, 6)]),
    "iter_ranges": lambda storage, key: list(storage.iter_ranges([ByteRange(key, 0, 2)], max_bytes=100)),
    "scatter": lambda storage, key: storage.scatter(key, 0, [memoryview(bytearray(4))]),
    "exists": lambda storage, key: storage.exists(key),
}
WRITES: dict[str, Callable[[Storage, str], Any]] = {
    "put": lambda storage, key: storage.put(key, b"mine"),
    "create": lambda storage, key: storage.create(f"{key}-new", b"mine"),
    "delete": lambda storage, key: storage.delete([key]),
}
FOLDERS: dict[str, Callable[[Storage], Any]] = {
    "list": lambda storage: storage.list("shards"),
    "scan": lambda storage: list(storage.scan("shards")),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the archive's, of which nothing may change."""
    (tmp_path / "outside" / "deep").mkdir(parents=True)
    (tmp_path / "outside" / "x").write_bytes(SECRET)
    (tmp_path / "outside" / "deep" / "x").write_bytes(SECRET)
    return tmp_path / "outside"


def connected(tmp_path: Path, allowed: Any = ()) -> Storage:
    (tmp_path / "mine").mkdir(exist_ok=True)
    storage = Storage.connect(tmp_path / "mine")
    storage.allowed_bases = as_allowed(allowed)
    return storage


def untouched(outside: Path) -> bool:
    found = {path.relative_to(outside).as_posix(): path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    return found == {"x": SECRET, "deep/x": SECRET}


@pytest.mark.parametrize("verb", [*READS, *WRITES])
@pytest.mark.parametrize("target", ["../outside", "{outside}", "../mine/../outside", "../outside/deep"])
def test_a_folder_that_leads_out_is_not_used(tmp_path: Path, outside: Path, verb: str, target: str) -> None:
    storage = connected(tmp_path)
    (tmp_path / "mine" / "shards").symlink_to(target.format(outside=outside))
    with pytest.raises(UnsafePathError, match="symbolic link"):
        {**READS, **WRITES}[verb](storage, "shards/x")
    assert untouched(outside)


@pytest.mark.parametrize("verb", FOLDERS)
def test_a_folder_that_leads_out_is_not_listed(tmp_path: Path, outside: Path, verb: str) -> None:
    storage = connected(tmp_path)
    (tmp_path / "mine" / "shards").symlink_to(outside)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        FOLDERS[verb](storage)


@pytest.mark.parametrize("verb", READS)
def test_a_file_that_leads_out_is_not_read(tmp_path: Path, outside: Path, verb: str) -> None:
    storage = connected(tmp_path)
    (tmp_path / "mine" / "middle").symlink_to("../outside/x")
    (tmp_path / "mine" / "x").symlink_to("middle")  # by another one
    with pytest.raises(UnsafePathError, match="symbolic link"):
        READS[verb](storage, "x")


def test_writing_and_deleting_change_the_link_and_not_where_it_leads(tmp_path: Path, outside: Path) -> None:
    storage = connected(tmp_path)
    for name, target in (("x", outside / "x"), ("y", outside / "nowhere"), ("z", outside / "deep")):
        (tmp_path / "mine" / name).symlink_to(target)
    storage.put("x", b"mine")
    with pytest.raises(archive.AlreadyExistsError):
        storage.create("y", b"mine")
    storage.delete(["y", "z"])
    assert storage.get("x") == b"mine"
    assert storage.list("") == ["x"]
    assert untouched(outside)


def test_links_that_lead_nowhere_or_to_themselves_are_the_librarys_errors(tmp_path: Path) -> None:
    storage = connected(tmp_path)
    (tmp_path / "mine" / "loop").symlink_to("loop")
    (tmp_path / "mine" / "within").symlink_to("missing")
    for key in ("loop", "within", "loop/x"):
        with pytest.raises(ArchiveError):
            storage.get(key)
    assert not storage.exists("within")


def test_links_within_the_archive_and_to_it_are_followed(tmp_path: Path) -> None:
    connected(tmp_path).put("real/x", b"data")
    (tmp_path / "mine" / "folder").symlink_to("real")
    (tmp_path / "mine" / "x").symlink_to("folder/x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for root in (tmp_path / "mine", tmp_path / "link"):
        storage = Storage.connect(root)
        assert [storage.get(key) for key in ("x", "folder/x", "real/x")] == [b"data"] * 3
        assert storage.list("folder") == ["x"]


@pytest.mark.parametrize("allowed", [True, "outside", "elsewhere"])
def test_where_they_may_lead_is_what_the_caller_allows(tmp_path: Path, outside: Path, allowed: Any) -> None:
    """As of a snapshot of a hub's cache, whose files are links to blobs beside it."""
    given = allowed if allowed is True else [tmp_path / allowed]
    storage = connected(tmp_path, given)
    (tmp_path / "mine" / "x").symlink_to("../outside/x")
    for one in (storage, pickle.loads(pickle.dumps(storage))):
        if allowed == "elsewhere":
            with pytest.raises(UnsafePathError, match="allow_bases"):
                one.get("x")
        else:
            assert one.get("x") == SECRET


@pytest.mark.parametrize("part", ["archive.json", "commits", "manifest", "shards"])
def test_an_archive_that_somebody_packed_with_links_reads_nothing_else(tmp_path: Path, part: str) -> None:
    """Even if what they lead to is an archive, and its checksums right."""
    small_archive(tmp_path / "other", 2)
    small_archive(tmp_path / "mine", 2)
    for path in (tmp_path / "other").iterdir():
        if path.name == part:
            there = tmp_path / "mine" / part
            there.rename(tmp_path / f"was-{part}")
            there.symlink_to(path)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        archive.open(tmp_path / "mine").episodes.read()
    moved = tmp_path / f"was-{part}"
    (tmp_path / "mine" / part).unlink()
    (tmp_path / "mine" / part).symlink_to(moved)
    assert len(archive.open(tmp_path / "mine", allow_bases=tmp_path).episodes.read()) == 2
