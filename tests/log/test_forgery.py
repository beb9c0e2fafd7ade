"""A manifest that somebody made up, with checksums that are right: paths stay below the root,
rows stay what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import archive
from archive.base.errors import (
    AccessDeniedError,
    CorruptChunkError,
    CorruptCommitError,
    CorruptManifestError,
    IntegrityError,
    NotFoundError,
    ShortReadError,
    StorageError,
    UnsafePathError,
    UpgradeError,
)
from archive.read.chunks import shards
from archive.testing import steps
from tests.support.backends import Proxied
from tests.support.tampering import (
    change_commit,
    change_table,
    commit_files,
    replace_text,
    same,
    seal,
    set_column,
    write_some,
)

OUTSIDE = (
    "../secret.zip",
    "shards/../../secret.zip",
    "/etc/secret.zip",
    "shards/..",
    "shards//x.zip",
    "shards/./x.zip",
)
everywhere = pytest.mark.parametrize("path", OUTSIDE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_some(tmp_path / "root")
    (tmp_path / "secret.zip").write_bytes(b"secret" * 10_000)
    return tmp_path / "root"


def read_all(root: Path) -> list[dict[str, Any]]:
    return archive.open(str(root)).episodes.read()


@everywhere
def test_a_shard_outside_the_archive(root: Path, path: str) -> None:
    change_table(root, "chunks", replace_text("shard", ".*zip", path))
    change_table(root, "segments", replace_text("shard", ".*zip", path))
    with pytest.raises(UnsafePathError, match=r"(?s)secret|shards"):
        read_all(root)


@everywhere
def test_a_manifest_file_outside_the_archive(root: Path, path: str) -> None:
    def segments(body: dict[str, Any]) -> None:
        body["segments"][0]["path"] = path

    change_commit(root, segments)
    with pytest.raises(UnsafePathError):
        len(archive.open(str(root)).episodes)


@everywhere
def test_a_chunk_table_outside_the_archive(root: Path, path: str) -> None:
    change_table(root, "segments", replace_text("chunks", ".*parquet", path))
    with pytest.raises(UnsafePathError):
        read_all(root)


@pytest.mark.parametrize("member", ["../../../secret.zip", "/etc/x", "obs/../../x", "obs//c"])
def test_a_member_outside_its_shard(tmp_path: Path, member: str) -> None:
    write_some(tmp_path / "root", layout="directory")
    change_table(tmp_path / "root", "chunks", replace_text("member", "obs/c/0/0", member))
    with pytest.raises(UnsafePathError):
        read_all(tmp_path / "root")


def test_a_listing_with_a_path_outside(tmp_path: Path) -> None:
    write_some(tmp_path / "root")
    (tmp_path / "root" / "commits" / "000000" / "a\\..\\b").mkdir()
    with pytest.raises(UnsafePathError, match="remove that object"):
        archive.open(str(tmp_path / "root"))


def test_a_shard_that_the_chunk_table_does_not_have(root: Path) -> None:
    change_table(root, "segments", replace_text("shard", "shards/.*zip", "shards/elsewhere.zip"))
    with pytest.raises(CorruptManifestError, match=r"shards/elsewhere.zip.*archive verify"):
        read_all(root)


def swapped(column: str, first: int, second: int) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[first], values[second] = values[second], values[first]
        return set_column(table, column, pa.array(values, table[column].type))

    return change


def chunk_rows(table: pa.Table, array: str) -> list[int]:
    return [i for i, name in enumerate(table["array"].to_pylist()) if name == array]


def test_chunks_whose_rows_are_swapped(tmp_path: Path) -> None:
    """Each chunk is whole by itself; that it is the one that was meant is checked as well."""
    root = tmp_path / "root"
    data = {"x": np.arange(200_000, dtype=np.int64), "y": -np.arange(200_000, dtype=np.int64)}
    with archive.create(str(root)).writer(compression=None) as w:
        w.add_episode(data)
    assert same(read_all(root)[0], data)
    original = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for columns in (("offset",), ("offset", "size"), ("crc32c",), ("member", "crc32c")):
        for one, other in (("x", "x"), ("x", "y")):

            def change(table: pa.Table, columns: Any = columns, one: str = one, other: str = other) -> pa.Table:
                first, second = chunk_rows(table, one)[0], chunk_rows(table, other)[1]
                for column in columns:
                    table = swapped(column, first, second)(table)
                return table

            change_table(root, "chunks", change)
            with pytest.raises(CorruptChunkError, match=r"(?s)shards/.*'[xy]'.*episode"):
                read_all(root)
            for path, content in original.items():
                path.write_bytes(content)


def test_rows_in_another_order_are_the_same_table(root: Path) -> None:
    change_table(root, "chunks", lambda table: table.take(list(reversed(range(table.num_rows)))))
    assert all(same(data, steps(4 + i, i)) for i, data in enumerate(read_all(root)))


@pytest.mark.parametrize("lacking", ["x", ""])
def test_a_chunk_table_that_lacks_rows(tmp_path: Path, lacking: str) -> None:
    root = tmp_path / "root"
    with archive.create(str(root)).writer(compression=None) as w:
        w.add_episode({"x": np.arange(200_000)})

    def change(table: pa.Table) -> pa.Table:
        roots = [i for i, name in enumerate(table["member"].to_pylist()) if name == "zarr.json"]
        gone = chunk_rows(table, "x")[1] if lacking else roots[0]
        return table.take([i for i in range(table.num_rows) if i != gone])

    change_table(root, "chunks", change)
    with pytest.raises((IntegrityError, StorageError), match=r"shards/.*archive verify"):
        read_all(root)


@pytest.mark.parametrize(("column", "value"), [("length", 16), ("length", 10**6), ("start", -3), ("start", 10**6)])
def test_segments_that_reach_beyond_their_shard(root: Path, column: str, value: int) -> None:
    change_table(root, "segments", lambda table: set_column(table, column, pa.array([value] * 3, pa.int64())))
    with pytest.raises(IntegrityError, match=r"shards/.*archive verify"):
        read_all(root)


@pytest.mark.parametrize(
    ("block", "words"),
    [({"read": 3}, "format 3"), ({"features": ["tides"]}, "tides"), ({"read": "x"}, "no format"),
     ({"features": ["journal", "tides"]}, "tides"), ({"features": "journal"}, "no format"),
     ({"features": [["journal"]]}, "no format"), ({"features": None}, "no format"), ({"read": True}, "no format"),
     ({"read": 0}, "no format")],
)  # fmt: skip
def test_a_newer_format(root: Path, block: dict[str, Any], words: str) -> None:
    change_commit(root, lambda body: body["format"].update(block))
    with pytest.raises(UpgradeError, match=rf"(?s)commit 2.*{words}.*upgrade"):
        archive.open(str(root))
    assert len(archive.open(str(root), commit=1).episodes) == 0


@pytest.mark.parametrize(("version", "words"), [(3, "upgrade"), (1, "no release wrote")])
def test_another_format_of_the_archive(root: Path, version: int, words: str) -> None:
    about = json.loads((root / "archive.json").read_bytes())
    block = {"read": version, "write": version, "features": []}
    (root / "archive.json").write_text(json.dumps(about | {"format": block}))
    for create in (False, True):
        with pytest.raises(UpgradeError, match=rf"archive.json is written in format {version}.*{words}"):
            archive.open(str(root), create=create)


@pytest.mark.parametrize("content", [[], "text", 1, None, {}])
def test_a_commit_that_is_no_commit(root: Path, content: object) -> None:
    seal(commit_files(root)[-1], content)
    with pytest.raises((CorruptCommitError, UpgradeError), match="commit 2"):
        archive.open(str(root))


def test_a_commit_under_another_number(root: Path) -> None:
    first, second = commit_files(root)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptCommitError, match="holds number 1"):
        archive.open(str(root))


def test_a_commit_of_another_archive(tmp_path: Path) -> None:
    write_some(tmp_path / "a")
    write_some(tmp_path / "b")
    commit_files(tmp_path / "a")[-1].write_bytes(commit_files(tmp_path / "b")[-1].read_bytes())
    with pytest.raises(CorruptCommitError, match="belongs to archive"):
        archive.open(str(tmp_path / "a"))
    (tmp_path / "a" / "archive.json").write_text('{"something": "else"}')
    with pytest.raises(NotFoundError, match="does not belong to a trajectory archive"):
        archive.open(str(tmp_path / "a"))


@pytest.mark.parametrize("proxied", ["moto", "seaweedfs"], indirect=True)
def test_short_cut_and_refused_answers(proxied: Proxied) -> None:
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer(compression=None) as w:
        w.add_episode({"x": np.arange(10_000)}, episode_id="e")
    faults: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"action": "shorten", "keep": 40}, ShortReadError, "archive verify"),
        ({"action": "corrupt"}, CorruptChunkError, "archive verify"),
        ({"action": "status", "status": 403, "code": "AccessDenied"}, AccessDeniedError, "check the credentials"),
    )
    for fault, error, remedy in faults:
        arc = archive.open(proxied.url, storage_options=proxied.storage_options)
        proxied.proxy.add(**fault, method="GET", path="/shards/", times=-1)
        with pytest.raises(error, match=rf"(?s)shards/.*episode 'e'.*{remedy}|shards/.*{remedy}.*episode 'e'"):
            arc.episodes["e"].read()
        proxied.proxy.faults.clear()
        assert same(arc.episodes["e"].read(), {"x": np.arange(10_000)})
        proxied.proxy.add("truncate", method="GET", path="/shards/", times=2, keep=20)
        assert same(arc.episodes["e"].read(), {"x": np.arange(10_000)})
        proxied.proxy.faults.clear()


def test_shard_metadata_that_is_dropped_while_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_VIEWS", 2)
    write_some(tmp_path / "root", episodes=6, commits=6)
    arc = archive.open(str(tmp_path / "root"))
    arc.episodes[4:].read()
    for _ in range(2):
        assert all(same(data, steps(4 + i, i)) for i, data in enumerate(arc.episodes.read()))
