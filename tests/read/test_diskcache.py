"""The disk cache: an entry is right or not there, the bound holds with many processes,
and what is damaged is fetched again."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archive.base.errors import AccessDeniedError, StorageError, UsageError
from archive.read.chunks.diskcache import DiskCache
from archive.read.gather import Gather
from archive.shard.packing import checksum
from tests.support.gathering import check, made
from tests.support.places import ROOT

LENGTHS = np.array([50, 40, 60])
ENDS = np.cumsum(LENGTHS) - 1


def chunk(seed: int, size: int = 1000) -> tuple[bytes, int]:
    """A stored chunk, which ends in its own checksum, and that checksum."""
    body = np.random.default_rng(seed).bytes(size - 4)
    return body + checksum(body).to_bytes(4, "little"), checksum(body)


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/*") if path.is_file()]


def size_of(folder: Path) -> int:
    """Bytes of all entries."""
    out = 0
    for path in entries(folder):
        if len(path.name) < 38:  # somebody else's
            continue
        with contextlib.suppress(FileNotFoundError):  # another has removed it meanwhile
            out += path.stat().st_size
    return out


def test_what_was_put_is_there_for_whoever_names_it(tmp_path: Path) -> None:
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 10_000)
    assert cache.get("a", len(data), crc) is None
    assert cache.put("a", data, crc)
    again: DiskCache = pickle.loads(pickle.dumps(cache))
    assert again.get("a", len(data), crc) == data
    assert again.get("b", len(data), crc) is None
    assert again.get("a", len(data), crc + 1) is None
    assert cache.put("a", memoryview(data), crc)
    assert len(entries(tmp_path / "c")) == 1


@pytest.mark.parametrize("damage", ["short", "long", "flipped", "swapped", "empty"])
def test_a_damaged_entry_is_not_served_and_is_removed(tmp_path: Path, damage: str) -> None:
    data, crc = chunk(0)
    cache = DiskCache(tmp_path, 10_000)
    cache.put("a", data, crc)
    (path,) = entries(tmp_path)
    flipped = bytes([data[0] ^ 1]) + data[1:]
    bad = {"short": data[:-1], "long": data + b"x", "flipped": flipped, "swapped": chunk(1)[0], "empty": b""}[damage]
    path.write_bytes(bad)
    assert cache.get("a", len(data), crc) is None
    assert not path.exists()


def test_what_was_used_longest_ago_leaves_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10_000)
    chunks = [chunk(i) for i in range(14)]
    for i, (data, crc) in enumerate(chunks[:10]):
        cache.put(str(i), data, crc)
        for path in entries(tmp_path):
            os.utime(path, (0, path.stat().st_mtime - 100))
    assert cache.get("0", 1000, chunks[0][1]) is not None  # used again
    for i in range(10, 14):
        cache.put(str(i), *chunks[i])
        assert size_of(cache.folder) <= 10_000
    held = {i for i, (data, crc) in enumerate(chunks) if cache.get(str(i), len(data), crc) is not None}
    assert {0, 10, 11, 12, 13} <= held
    assert not held & {1, 2, 3}


def test_what_is_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 999)
    assert not cache.put("a", *chunk(0))
    assert size_of(cache.folder) == 0


def test_bytes_that_nobody_counted_are_found(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 5_000)
    cache.put("a", *chunk(0))
    (tmp_path / ".bytes").write_bytes(b"torn")
    for i in range(10):
        cache.put(str(i), *chunk(i))
        assert size_of(cache.folder) <= 5_000
    stale = tmp_path / "aa" / ".0.tmp"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"x" * 100)
    os.utime(stale, (time.time() - 1e5,) * 2)
    for i in range(10, 20):
        cache.put(str(i), *chunk(i))
    assert not stale.exists()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 10_000)
    assert cache.put("a", data, crc)
    shutil.rmtree(tmp_path / "c")
    assert cache.get("a", len(data), crc) is None
    assert cache.put("a", data, crc)
    assert cache.get("a", len(data), crc) == data


def test_bounds_and_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_bytes"):
        DiskCache(tmp_path, 0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="disk_cache"):
        DiskCache(tmp_path / "file")


def test_threads_stay_below_the_bound(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 20_000)

    def fill(first: int) -> None:
        for i in range(first, first + 60):
            cache.put(str(i), *chunk(i))

    threads = [threading.Thread(target=fill, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert size_of(cache.folder) <= 20_000
        time.sleep(0.01)
    assert size_of(cache.folder) > 10_000


READ = """
import sys, numpy as np, archive
from archive.read.chunks.diskcache import DiskCache
from archive.read.gather import Gather
from tests.support.gathering import check
from tests.read.test_diskcache import Path, size_of
lengths = np.array([50, 40, 60])
episodes = archive.open(sys.argv[1]).episodes
rng = np.random.default_rng(int(sys.argv[3]))
for _ in range(15):
    disk_cache = DiskCache(sys.argv[2], 60_000)
    gather = Gather(episodes, ["t", "x", "next", "image", "reward"], cache_bytes=0, disk_cache=disk_cache)
    t = rng.integers(0, 150, 30)
    check(gather.rows(*gather.place(t)), t, np.cumsum(lengths) - 1)
print(size_of(Path(sys.argv[2])))
"""


def test_many_processes_share_one_folder(tmp_path: Path) -> None:
    made(tmp_path / "a", LENGTHS, compression=None)
    command = [sys.executable, "-c", READ, str(tmp_path / "a"), str(tmp_path / "c")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = [subprocess.Popen([*command, str(k)], stdout=subprocess.PIPE, env=env) for k in range(4)]
    told = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4
    assert all(0 < int(out) <= 60_000 for out in told)
    assert size_of(tmp_path / "c") <= 60_000
    assert not [path for path in entries(tmp_path / "c") if path.suffix == ".tmp"]


def test_chunks_come_from_the_folder_and_a_damaged_one_from_the_store(tmp_path: Path) -> None:
    arc = made(tmp_path / "a", LENGTHS, compression=None)
    t = np.arange(150)
    first = Gather(arc.episodes, ["t", "x", "next", "image", "reward"], disk_cache=tmp_path / "c")
    check(first.rows(*first.place(t)), t, ENDS)
    fetched = first.io_stats.total
    assert fetched.disk_hits == 0
    second = Gather(arc.episodes, first.fields, disk_cache=tmp_path / "c")
    check(second.rows(*second.place(t)), t, ENDS)
    assert second.io_stats.total.disk_hits + second.io_stats.total.hits == fetched.chunks
    assert second.io_stats.total.requests == 0
    for path in entries(tmp_path / "c"):
        data = path.read_bytes()
        path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    third = Gather(arc.episodes, first.fields, disk_cache=tmp_path / "c")
    check(third.rows(*third.place(t)), t, ENDS)
    assert third.io_stats.total.disk_hits == 0
    assert third.io_stats.total.requests > 0
    fourth = Gather(arc.episodes, first.fields, disk_cache=tmp_path / "c")
    check(fourth.rows(*fourth.place(t)), t, ENDS)
    assert fourth.io_stats.total.requests == 0


# -- private -----------------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    """The mode of the folder, and of all in it, as kind -> all bits that any of its kind has."""
    found: dict[str, int] = {}
    for path in (folder, *folder.rglob("*")):
        kind = "folder" if path.is_dir() else "file"
        found[kind] = found.get(kind, 0) | stat.S_IMODE(path.lstat().st_mode)
    return found


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077, 0o177], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a user has set, or a container's image."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_cache_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 3_000)
    for i in range(6):
        cache.put(str(i), *chunk(i))
    assert size_of(cache.folder) > 0
    assert modes(tmp_path / "c") == {"folder": 0o700, "file": 0o600}


def test_a_cache_of_before_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    folder.chmod(0o777)
    data, crc = chunk(0)
    assert DiskCache(folder).put("a", data, crc)
    folder.chmod(0o755)
    assert DiskCache(folder).get("a", len(data), crc) == data
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_other_things_keeps_its_mode_and_they_stay(tmp_path: Path) -> None:
    """Somebody's home given as a disk cache."""
    mine = tmp_path / "home" / "aa" / "my-thesis"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"x" * 5_000)
    os.utime(mine, (0, 0))
    (tmp_path / "home").chmod(0o755)
    cache = DiskCache(tmp_path / "home", 3_000)
    for i in range(9):
        cache.put(str(i), *chunk(i))
        assert size_of(cache.folder) <= 3_000
    assert mine.read_bytes() == b"x" * 5_000
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in entries(tmp_path / "home") if path != mine)


def test_a_folder_where_others_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "x").touch()
    (tmp_path / "theirs").chmod(0o1777)  # as /tmp
    with pytest.raises(AccessDeniedError, match=r"where other users may write.*chmod 700"):
        DiskCache(tmp_path / "theirs")
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o1777


@pytest.mark.parametrize("whose", ["folder", "link", "target"])
def test_a_folder_of_another_owner_is_refused(tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could read what is cached, or put their own there."""
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    owned = {"folder": tmp_path / "real", "link": tmp_path / "link", "target": tmp_path / "real"}[whose]
    if os.geteuid() == 0:
        os.chown(owned, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AccessDeniedError, match="belongs to another user"):
        DiskCache(tmp_path / ("real" if whose == "folder" else "link"))


def test_a_link_of_ones_own_to_another_disk_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "scratch")
    data, crc = chunk(0)
    assert DiskCache(tmp_path / "c").put("a", data, crc)
    assert DiskCache(tmp_path / "c").get("a", len(data), crc) == data


def test_a_link_planted_as_an_entry_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 10_000)
    cache.put("a", data, crc)
    (entry,) = entries(tmp_path / "c")
    outside = tmp_path / "outside"
    outside.write_bytes(data)  # even the right bytes
    for target in (outside, tmp_path / "nowhere"):
        entry.unlink()
        entry.symlink_to(target)
        assert cache.get("a", len(data), crc) is None
        assert not entry.is_symlink()
        entry.symlink_to(target)
        assert cache.put("a", data, crc)
        assert not entry.is_symlink()
        assert cache.get("a", len(data), crc) == data
    assert outside.read_bytes() == data
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Nothing is read, written, counted or removed where it leads."""
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 1_500)
    cache.put("a", data, crc)
    (entry,) = entries(tmp_path / "c")
    outside = tmp_path / "outside"
    entry.parent.rename(outside)
    entry.parent.symlink_to(outside)
    assert cache.get("a", len(data), crc) is None
    with pytest.raises(StorageError, match="is no folder"):
        cache.put("a", data, crc)
    (tmp_path / "c" / ".bytes").unlink()
    for i in range(20):  # shrinks again and again
        with contextlib.suppress(StorageError):
            cache.put(str(i), *chunk(i))
    assert [path.read_bytes() for path in outside.iterdir()] == [data]


@pytest.mark.parametrize("name", [".bytes", "entry"])
def test_what_is_no_file_is_neither_waited_for_nor_followed(tmp_path: Path, name: str) -> None:
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 10_000)
    cache.put("a", data, crc)
    (entry,) = entries(tmp_path / "c")
    if name == "entry":
        entry.unlink()
        os.mkfifo(entry)
        assert cache.get("a", len(data), crc) is None
        return
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "c" / ".bytes").unlink()
    (tmp_path / "c" / ".bytes").symlink_to(target)
    with pytest.raises(StorageError, match="cannot be written"):
        cache.put("b", *chunk(1))
    assert target.read_bytes() == b"precious"


def test_a_link_planted_at_a_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who could guess the name."""
    data, crc = chunk(0)
    cache = DiskCache(tmp_path / "c", 10_000)
    cache.put("a", data, crc)
    (entry,) = entries(tmp_path / "c")
    entry.unlink()
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    (entry.parent / f".{'0' * 16}.tmp").symlink_to(target)
    with pytest.raises(StorageError, match="File exists"):
        cache.put("a", data, crc)
    assert target.read_bytes() == b"precious"
