"""Bytes that are missing, damaged, forged or refused are an error that names them; they never come back as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import archive
from archive.base.errors import (
    ArchiveError,
    CorruptChunkError,
    CorruptCommitError,
    CorruptManifestError,
    MissingObjectError,
    ShortReadError,
)
from archive.testing import steps
from tests.support.backends import Proxied
from tests.support.tampering import commit_files, same, write_some, zip_structure

Change = Callable[[pa.Table], pa.Table]


def read_all(root: Path) -> list[dict[str, Any]]:
    arc = archive.open(str(root))
    assert len(arc.episodes) == 3
    return arc.episodes.read()


def wrong(root: Path) -> str:
    """What a reader gets that is not what was written: an empty string stands for nothing, or an error."""
    try:
        found = read_all(root)
    except ArchiveError as error:
        return "" if str(error) else "an error without a message"
    return "" if all(same(data, steps(4 + i, i)) for i, data in enumerate(found)) else "wrong values"


def only(root: Path, pattern: str) -> Path:
    (found,) = root.glob(pattern)
    return found


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << (at * 5 % 8))]) + data[at + 1 :]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_some(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    write_some(tmp_path / "root", layout="directory")
    return tmp_path / "root"


def flips_that_lie(root: Path, path: Path, places: range | list[int]) -> list[int]:
    """Places where one flipped bit gives wrong values."""
    data = path.read_bytes()
    lies = []
    for at in places:
        path.write_bytes(flipped(data, at))
        if wrong(root):
            lies.append(at)
    path.write_bytes(data)
    return lies


def test_any_flipped_bit_of_a_packed_shard_is_an_error_or_harmless(root: Path) -> None:
    shard = only(root, "shards/*.zip")
    data = shard.read_bytes()
    structure = list(zip_structure(data))
    content = sorted(set(range(len(data))) - set(structure))
    assert flips_that_lie(root, shard, content[::5] + structure[::40]) == []


@pytest.mark.parametrize(
    ("pattern", "error", "words"),
    [
        ("shards/*.zip", CorruptChunkError, "episode 'e.*archive verify"),
        ("commits/*/*2.json", CorruptCommitError, "commit 2 at .*archive repair"),
        ("manifest/*.segments.parquet", CorruptManifestError, "segments.parquet.*archive verify"),
        ("manifest/*.chunks.parquet", CorruptManifestError, "chunks.parquet.*archive verify"),
        ("archive.json", ArchiveError, "archive.json"),
    ],
)
def test_flipped_bits_of_each_kind_of_object(root: Path, pattern: str, error: type[ArchiveError], words: str) -> None:
    path = only(root, pattern)
    size = path.stat().st_size
    assert flips_that_lie(root, path, range(0, size, max(1, size // 60))) == []
    at = path.read_bytes().index(b"trajectory-archive") if pattern == "archive.json" else 60
    at = next(iter(sorted(set(range(size)) - set(zip_structure(path.read_bytes()))))) if "zip" in pattern else at
    path.write_bytes(flipped(path.read_bytes(), at))
    with pytest.raises(error, match=rf"(?s){words}"):
        read_all(root)


def test_flipped_bits_of_loose_objects(loose: Path) -> None:
    (shard,) = loose.glob("shards/*.zarr")
    read = [path for path in shard.rglob("*") if path.is_file()]
    assert len(read) > 8
    for path in read:
        assert flips_that_lie(loose, path, [path.stat().st_size // 2, path.stat().st_size - 1]) == []
    for path in (shard / "zarr.json", next(shard.glob("obs/c/0/*"))):
        data = path.read_bytes()
        path.write_bytes(flipped(data, len(data) // 2))
        with pytest.raises(CorruptChunkError, match=rf"(?s){shard.name}.*episode 'e.'"):
            read_all(loose)
        path.write_bytes(data)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("shards/*.zip", ShortReadError),
        ("commits/*/*2.json", CorruptCommitError),
        ("manifest/*.segments.parquet", ShortReadError),
        ("manifest/*.chunks.parquet", ShortReadError),
        ("archive.json", CorruptCommitError),
    ],
)
def test_truncated_objects(root: Path, pattern: str, error: type[ArchiveError], kept: float) -> None:
    path = only(root, pattern)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    if pattern.startswith("shards") and kept == 0.99:  # the ZIP's directory, which is not what a reader goes by
        assert wrong(root) == ""
        return
    with pytest.raises(error, match=path.name.split(".")[0].lstrip("0")) as caught:
        read_all(root)
    if pattern.startswith("shards"):
        assert "episode 'e" in str(caught.value)
        assert "archive verify" in str(caught.value)


def test_missing_objects(root: Path) -> None:
    for pattern in ("shards/*", "manifest/*.segments.parquet", "manifest/*.chunks.parquet"):
        path = only(root, pattern)
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(MissingObjectError, match=rf"(?s){path.name}.*archive verify") as caught:
            read_all(root)
        assert pattern != "shards/*" or "episode 'e" in str(caught.value)
        path.write_bytes(data)
    assert wrong(root) == ""


def test_a_missing_chunk_is_not_read_as_zeros(loose: Path) -> None:
    chunk = next(loose.glob("shards/*/action/c/0"))
    chunk.unlink()
    with pytest.raises(MissingObjectError, match=r"(?s)action/c/0.*"):
        read_all(loose)


def test_the_error_names_the_shard_that_is_broken_not_one_that_is_waited_for(proxied: Proxied) -> None:
    with archive.create(proxied.url, storage_options=proxied.storage_options).writer() as w:
        for i in range(6):
            w.add_episode(steps(4 + i, i), episode_id=f"e{i}")
            w.commit()
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    proxied.proxy.add("delay", path=arc.shards[0], seconds=1.0)
    proxied.proxy.add("status", path=arc.shards[4], status=404, code="NoSuchKey")
    with pytest.raises(MissingObjectError, match=rf"^shard {arc.shards[4]} .*episode 'e4'"):
        arc.episodes.read()


def test_a_damaged_newest_commit_is_never_a_step_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_some(root, episodes=3, commits=3)
    old = archive.open(str(root), commit=3)
    archive.open(str(root)).writer().close()
    newest = commit_files(root)[-1]
    newest.write_bytes(flipped(newest.read_bytes(), 100))
    with pytest.raises(CorruptCommitError, match=r"commit 5 .*archive repair"):
        archive.open(str(root))
    assert len(old.episodes) == 2  # what lies before it can still be read, if asked for
    assert len(archive.open(str(root), commit=4).episodes) == 3


def test_a_damaged_commit_stops_a_writer_that_has_not_seen_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_some(root)
    late = archive.open(str(root), create=True).writer(run="late")
    late.add_episode(steps(3))
    archive.open(str(root)).writer(run="other").close()
    newest = commit_files(root)[-1]
    newest.write_bytes(flipped(newest.read_bytes(), 100))
    with pytest.raises(CorruptCommitError, match="commit 4"):
        late.commit()
    assert len(commit_files(root)) == 4
    with pytest.raises(InterruptedError), late:
        raise InterruptedError
