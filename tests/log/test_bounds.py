"""What has a bound is read within it, and JSON that is too deep,
too long or of another shape is an error that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import archive
from archive.base import Record, records
from archive.base.errors import (
    ArchiveError,
    CorruptChunkError,
    CorruptCommitError,
    CorruptManifestError,
    CorruptStateError,
)
from archive.log import commits
from archive.maintain import repair, verify
from archive.shard.groups import ShardView
from tests.support.backends import Proxied
from tests.support.nonsense import index_of, put_index, sealed
from tests.support.tampering import body, change_commit, change_table, commit_files, replace_text, seal, write_some

DEEP = 200_000


def deep(opening: str = '{"a":', closing: str = "}") -> bytes:
    return (opening * DEEP + "1" + closing * DEEP).encode()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_some(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize(
    "text", [deep(), deep("[", "]"), b"[" * DEEP, b'{"magic": "trajectory-archive", "id": ' + deep()]
)
def test_archive_json_that_is_nested_deeply(root: Path, text: bytes) -> None:
    (root / "archive.json").write_bytes(text[: records.MAX_SMALL_BYTES])
    with pytest.raises(CorruptCommitError, match=r"archive\.json"):
        archive.open(str(root))
    (root / "archive.json").write_bytes(text)
    with pytest.raises(CorruptCommitError, match=r"archive\.json has more than 65536 bytes"):
        archive.open(str(root), create=True)


@pytest.mark.parametrize("text", [deep(), deep("[", "]"), deep()[:-DEEP]])
def test_a_commit_that_is_nested_deeply(root: Path, text: bytes) -> None:
    commit_files(root)[-1].write_bytes(sealed(text[:990_000]))
    with pytest.raises(CorruptCommitError, match="commit 2 at"):
        archive.open(str(root))


def test_a_commit_that_is_nested_less_deeply_than_python_can_read(root: Path) -> None:
    nested: Any = 1
    for _ in range(records.MAX_DEPTH + 10):
        nested = {"a": nested}
    change_commit(root, lambda commit: commit.update(later=nested))
    with pytest.raises(CorruptCommitError, match=r"commit 2 at .* is nested more than 64 levels deep"):
        archive.open(str(root))


def test_a_schema_and_a_dtype_that_are_nested_deeply(tmp_path: Path) -> None:
    for place, text in enumerate([deep("[", "]").decode(), '{"fields": ' + deep("[", "]").decode() + "}"]):
        root = tmp_path / str(place)
        write_some(root)
        change_table(root, "segments", replace_text("schema", r"(?s).*", text))
        with pytest.raises(CorruptManifestError, match="schema"):
            archive.open(str(root)).episodes.read()
    root = tmp_path / "dtype"
    write_some(root)
    dtype = json.dumps("[" * 50_000)[1:-1]
    change_table(root, "segments", replace_text("schema", r"<f4", dtype))
    with pytest.raises(ArchiveError):
        archive.open(str(root)).episodes.read()


def test_zarr_json_that_is_nested_deeply() -> None:
    for text in (deep(), deep("[", "]"), b"{}", b"[]", b"1"):
        with pytest.raises(CorruptChunkError):
            ShardView(text).read_many("x", [(0, 1)], {})


def staged(root: Path) -> Path:
    with archive.create(str(root)).writer() as w:
        w.append({"x": np.arange(3)}, env_ids=0, first=True)
        w.checkpoint(1, state={"a": 1}, progress={"n": 1}).result()
    (found,) = root.glob("states/**/*.zip")
    return found


@pytest.mark.parametrize("text", [deep(), deep("[", "]"), b"[]", b"{}"])
def test_a_staged_index_that_is_nested_deeply_or_of_another_shape(tmp_path: Path, text: bytes) -> None:
    put_index(staged(tmp_path / "root"), text)
    with pytest.raises(ArchiveError, match=r"rank-00000\.zip"):
        archive.open(str(tmp_path / "root")).checkpoints["step-1"].state(0)


@pytest.mark.parametrize("name", ["rank", "session", "members", "buffers", "columns", "states", "nonce", "progress"])
def test_a_staged_index_that_lacks_or_changes_a_part(tmp_path: Path, name: str) -> None:
    path = staged(tmp_path / "root")
    whole = index_of(path)
    for changed in ({k: v for k, v in whole.items() if k != name}, whole | {name: [[1]]}):
        put_index(path, json.dumps(changed).encode())
        with pytest.raises(CorruptStateError, match=rf"(?s)rank-00000\.zip.*{name}"):
            archive.open(str(tmp_path / "root")).checkpoints["step-1"].state(0)


def test_an_index_that_claims_four_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = staged(tmp_path / "root")
    data = path.read_bytes()
    path.write_bytes(data[:18] + b"\xff" * 8 + data[26:])
    with pytest.raises(CorruptStateError, match=r"rank-00000\.zip says that its index has 4294967295 bytes"):
        archive.open(str(tmp_path / "root")).checkpoints["step-1"].state(0)


def grow(path: Path, size: int = 1 << 31) -> None:
    """Makes a file of 2 GB that takes no room."""
    with path.open("r+b") as file:
        file.truncate(size)


def test_commits_of_two_gigabytes_are_not_read_whole(root: Path) -> None:
    grow(commit_files(root)[-1])
    before = archive.open(str(root), commit=1)
    spent = before.io_stats()
    with pytest.raises(CorruptCommitError, match=r"commit 2 at .*000000002\.json has more than 1000066 bytes"):
        before.storage.stats and commits.read(before.storage, 2)
    assert (before.io_stats() - spent).bytes_in < 1_100_000
    assert not verify(archive.open(str(root), commit=1)).findings
    with pytest.raises(ArchiveError, match="move it away yourself"):
        repair(before.storage)


def test_archive_json_and_claims_of_two_gigabytes_are_not_read_whole(root: Path) -> None:
    (claim,) = root.glob("sessions/*/rank-*.json")
    grow(claim)
    arc = archive.open(str(root))
    spent = arc.io_stats()
    (found,) = verify(arc).findings
    assert "rank-00000.json has more than 65536 bytes" in found.problem
    assert (arc.io_stats() - spent).bytes_in < 200_000
    grow(root / "archive.json")
    with pytest.raises(CorruptCommitError, match=r"archive\.json has more than 65536 bytes"):
        archive.open(str(root))


@pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)
def test_a_bound_costs_no_request_and_an_empty_object_is_damage(proxied: Proxied) -> None:
    archive.create(proxied.url, storage_options=proxied.storage_options).writer(session="s").close()
    proxied.proxy.reset()
    archive.open(proxied.url, storage_options=proxied.storage_options)
    gets = [
        seen.path.partition("?")[0].rpartition("/")[2] for seen in proxied.proxy.log if "list-type" not in seen.path
    ]
    assert sorted(gets) == ["000000001.json", "archive.json"]  # S3 lists at once, so nothing beyond is asked for
    proxied.plant("commits/000000/000000001.json", b"")
    with pytest.raises(CorruptCommitError, match="commit 1 at"):
        archive.open(proxied.url, storage_options=proxied.storage_options)


@dataclass(frozen=True, slots=True)
class Number(Record):
    a: int


@dataclass(frozen=True, slots=True)
class Perhaps(Record):
    a: int | None = None


@dataclass(frozen=True, slots=True)
class NumberOrTruth(Record):
    a: Literal[True, 1]


@dataclass(frozen=True, slots=True)
class Numbers(Record):
    a: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts(Record):
    a: Mapping[str, tuple[str, ...]]


@pytest.mark.parametrize(
    ("value", "kind", "problem"),
    [
        ({"a": 1}, Number, ""),
        ({}, Number, "a is not there"),
        ({}, Perhaps, ""),
        ({"a": True}, Number, "a is True"),
        ({"a": True}, NumberOrTruth, ""),
        ({"a": [1, "x"]}, Numbers, "a[1] is 'x'"),
        ({"a": {"b": [None]}}, Texts, "a.b[0] is None"),
        ([], Texts, "it is a list, no object"),
        ({"a": []}, Texts, "a is a list, no object"),
        ({"a": 1}, Numbers, "a is 1, no list"),
    ],
)
def test_shapes(value: Any, kind: type[Record], problem: str) -> None:
    if not problem:
        kind.from_json(value, what="x", error=CorruptStateError)
        return
    with pytest.raises(CorruptStateError, match=rf"^x is not what it should be \({re.escape(problem)}"):
        kind.from_json(value, what="x", error=CorruptStateError)


def test_the_helpers_of_this_module(root: Path) -> None:
    path = commit_files(root)[-1]
    seal(path, body(path))
    assert len(archive.open(str(root)).episodes) == 3
