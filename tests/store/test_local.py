"""What a folder of the local file system promises: durable, whole or absent, created once."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archive.base import ByteRange
from archive.base.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    NotExclusiveError,
    ShortReadError,
    StorageError,
    StorageFullError,
)
from archive.store.counts import IOStats
from archive.store.drivers import local
from archive.store.reads import BATCHES_AHEAD, PIECES
from archive.store.storage import Storage

DATA = bytes(range(250)) * 4


def test_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(NotExclusiveError, match="hard links"):
        Storage.connect(tmp_path).create("x", b"1")
    assert list(tmp_path.iterdir()) == []
    alone = Storage.connect(tmp_path, single_writer=True)
    alone.create("x", b"1")
    with pytest.raises(AlreadyExistsError):
        alone.create("x", b"2")
    assert alone.get("x") == b"1"


def test_a_link_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS resends a link request that it has already carried out, and then reports that the name is taken."""
    link = os.link

    def twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    storage = Storage.connect(tmp_path)
    storage.create("x", b"1")
    with pytest.raises(AlreadyExistsError):
        storage.create("x", b"2")
    assert storage.get("x") == b"1"


def test_local_writes_are_synced_before_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            events.append("fsync folder" if folder else name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, noted)

    storage = Storage.connect(tmp_path)
    for name in ("fsync", "link", "replace"):
        note(name)
    storage.put("x", b"1")
    storage.create("y", b"1")
    storage.put("new/z", b"1")
    put, create = ["fsync", "replace", "fsync folder"], ["fsync", "link", "fsync folder"]
    assert events == ["fsync folder", *put, *create, "fsync folder", *put]  # first of those above, which were made


def test_leftovers_of_a_crash_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    storage = Storage.connect(tmp_path)
    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, crash)
    with pytest.raises(Crash):
        storage.put("x", b"1")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    assert storage.list("") == []
    storage.put("x", b"2")
    assert storage.list("") == ["x"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    storage = Storage.connect(tmp_path)
    storage.put("x", b"old")

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", full)
    for write in (storage.put, storage.create):
        with pytest.raises(StorageFullError, match="no space left"):
            write("x" if write == storage.put else "y", b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]  # noqa: PTH208
    assert storage.get("x") == b"old"


@pytest.mark.parametrize("at_once", [7, 1003, 1 << 20])
def test_partial_writes_to_a_disk_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    def partly(descriptor: int, parts: Sequence[memoryview]) -> int:
        return write(descriptor, b"".join(parts)[:at_once])

    write = os.write
    monkeypatch.setattr(os, "writev", partly)
    storage = Storage.connect(tmp_path)
    storage.put("x", [DATA, b"", memoryview(DATA), *[b"1"] * 1500])
    monkeypatch.undo()
    assert storage.get("x") == DATA * 2 + b"1" * 1500


def test_partial_writes_of_single_parts_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.delattr(os, "writev")  # as on Windows
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    storage = Storage.connect(tmp_path)
    storage.put("x", [DATA, memoryview(DATA)])
    monkeypatch.undo()
    assert storage.get("x") == DATA * 2


def large(storage: Storage, count: int) -> tuple[list[ByteRange], list[bytes]]:
    """Ranges that are read one by one, and what lies there."""
    size = 3 << 19
    data = np.random.default_rng(1).bytes(count * size)
    storage.put("x", data)
    ranges = [ByteRange("x", i * size, (i + 1) * size) for i in range(count)]
    return ranges, [data[one.start : one.stop] for one in ranges]


@pytest.mark.parametrize("available", [True, False])
def test_large_files_are_whole_with_and_without_hints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, available: bool
) -> None:
    """What asks the system to write early changes no byte and no length, and may be missing."""
    if not available:
        monkeypatch.setattr(local, "_system_call", lambda *_: None)
    parts = [bytes([number]) * (3 * local.STEP_BYTES // 10 + number) for number in range(10)]
    Storage.connect(tmp_path).put("x", parts)
    assert (tmp_path / "x").read_bytes() == b"".join(parts)


def test_large_reads_use_memory_again_that_was_let_go(tmp_path: Path) -> None:
    storage = Storage.connect(tmp_path)
    ranges, expected = large(storage, 30)
    places = set()
    for found, data in zip(storage.iter_ranges(ranges, max_bytes=1 << 26), expected, strict=True):
        assert found == data
        places.add(np.frombuffer(found, np.uint8).ctypes.data)
    assert len(places) <= BATCHES_AHEAD + 3


def test_large_reads_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    storage = Storage.connect(tmp_path)
    ranges, expected = large(storage, 2 * PIECES)
    kept = [memoryview(found)[5:] for found in storage.iter_ranges(ranges, max_bytes=1 << 26)]
    assert all(one.readonly for one in kept)
    assert kept == [data[5:] for data in expected]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads into new memory there")
def test_large_reads_are_completed_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.connect(tmp_path)
    ranges, expected = large(storage, 2)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:999_999]], at))
    assert list(storage.iter_ranges(ranges, max_bytes=1 << 26)) == expected
    with (tmp_path / "x").open("r+b") as file:
        file.truncate(ranges[1].stop - 1)
    with pytest.raises(ShortReadError):
        list(storage.iter_ranges(ranges, max_bytes=1 << 26))


@pytest.mark.parametrize("available", [True, False])
def test_a_read_into_many_rooms_is_completed_or_refused_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, available: bool
) -> None:
    storage = Storage.connect(tmp_path)
    storage.put("x", DATA * 4)
    before = storage.stats.snapshot()
    rooms = [memoryview(bytearray(1 + i % 3)) for i in range(1500)]
    wanted = sum(len(room) for room in rooms)
    read = getattr(os, "preadv", None)
    if read is None or not available:
        monkeypatch.delattr(os, "preadv", raising=False)
    else:
        monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:2]], at))
    storage.scatter("x", 5, rooms)
    storage.scatter("x", 5 + wanted, [memoryview(bytearray(7))], again=True)
    assert b"".join(rooms) == (DATA * 4)[5 : 5 + wanted]
    assert (storage.stats - before).as_dict() == IOStats(get=1, bytes_in=wanted + 7).as_dict()
    with pytest.raises(ShortReadError, match="3 of the 9 bytes"):
        storage.scatter("x", 4 * len(DATA) - 3, [memoryview(bytearray(4)), memoryview(bytearray(5))])


@pytest.mark.parametrize("name", ["writev", "fsync", "replace", "link"])
def test_a_disk_that_fails_leaves_the_old_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    storage = Storage.connect(tmp_path)
    storage.put("x", b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, name, fail)
    if name != "link":
        with pytest.raises(StorageError, match="broken"):
            storage.put("x", b"new")
    if name != "replace":
        with pytest.raises(StorageError, match="broken"):
            storage.create("y", b"new")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["x"]  # noqa: PTH208
    assert storage.get("x") == b"old"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessDeniedError):
        Storage.connect(tmp_path).put("x", b"")


def test_local_refusals_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "open", refuse)
    storage = Storage.connect(tmp_path)
    for call in (lambda: storage.get("x"), lambda: storage.put("x", b"")):
        with pytest.raises(AccessDeniedError):
            call()


def test_the_clock_of_a_folder_from_elsewhere_is_that_of_its_newest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives its files their times has another clock than this machine, and says it by them alone."""
    listed = tmp_path / "mountinfo"
    root = tmp_path / "a b"
    escaped = str(root).replace(" ", r"\040")
    listed.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {escaped} rw shared:1 - nfs4 server:/a rw\n")
    monkeypatch.setattr(local, "_MOUNTS", listed)
    storage, beside = (Storage.connect(str(tmp_path / name)) for name in ("a b", "a bc"))
    for one in (storage, beside):
        one.put_many((f"f/{k}", b"") for k in range(2))
    day = 86_400
    os.utime(root / "f" / "0", (day, day))
    os.utime(root / "f" / "1", (2 * day, 2 * day))
    assert storage.clock("f").timestamp() == 2 * day
    assert abs(beside.clock("f").timestamp() - time.time()) < 60
    with pytest.raises(StorageError, match="says no time"):
        storage.clock("nothing")
