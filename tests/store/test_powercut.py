"""What a folder of the local file system promises over a power cut: what was acknowledged, or found by somebody else,
is there, whole; of what was not, a name never shows a part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archive.base import AlreadyExistsError, MissingObjectError, StorageError, layout
from archive.store.drivers import entries
from archive.store.storage import Storage
from tests.support.powercut import LEAST, Chance, Disk, Everything, FolderSynced, Survival

KEYS = ("a", "deep/er/x", "deep/y")
SEEDS = 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    made = Disk(tmp_path / "disk")
    with made.recorded():
        yield made


def at(disk: Disk, root: str = "root") -> Storage:
    """The storage of one more process."""
    return Storage.connect(disk.base / root)


def whole(left: dict[str, bytes | None], root: str = "root") -> dict[str, bytes]:
    """Objects, without what was never given its name."""
    found = {path.removeprefix(f"{root}/"): data for path, data in left.items() if data is not None}
    return {key: data for key, data in found.items() if not layout.is_temporary(key)}


@pytest.mark.parametrize("verb", ["put", "create"])
@pytest.mark.parametrize("root", ["root", "some/where/root"])
def test_what_was_acknowledged_is_there_and_nothing_is_torn(disk: Disk, verb: str, root: str) -> None:
    storage = at(disk, root)
    acknowledged = {}
    for key in KEYS:
        getattr(storage, verb)(key, key.encode() * 1000)
        acknowledged[disk.now] = key
    for cut in range(disk.now + 1):
        survivals: list[Survival] = [LEAST, *map(Chance, range(SEEDS))]
        for survival in survivals:
            found = whole(disk.left(cut, survival), root)
            assert found.keys() >= {key for then, key in acknowledged.items() if then <= cut}
            assert all(data == key.encode() * 1000 for key, data in found.items())


def test_what_was_replaced_is_the_old_or_the_new_one(disk: Disk) -> None:
    storage = at(disk)
    storage.put("x", b"old" * 99)
    begun = disk.now
    storage.put("x", b"new" * 100)
    for cut in range(begun, disk.now + 1):
        found = {whole(disk.left(cut, Chance(seed)))["x"] for seed in range(SEEDS)}
        assert found <= ({b"old" * 99, b"new" * 100} if cut < disk.now else {b"new" * 100})


def _reads(storage: Storage) -> bool:
    try:
        return storage.get("new/x") == b"first"
    except MissingObjectError:
        return False


def _is_refused(storage: Storage) -> bool:
    try:
        storage.create("new/x", b"second")
    except AlreadyExistsError:
        return True
    return False


@pytest.mark.parametrize("finds", [_reads, lambda storage: storage.exists("new/x"), _is_refused])
@pytest.mark.parametrize("dies_at", range(11))
def test_what_another_process_has_found_is_there(disk: Disk, finds: Callable[[Storage], bool], dies_at: int) -> None:
    """Its maker was killed, or is slow, between any two operations; who finds the object goes by it."""
    with disk.killed_after(dies_at):
        at(disk).create("new/x", b"first")
    is_there = "new/x" in whole(disk.left(disk.now, Everything()))
    assert finds(at(disk)) == is_there
    assert not is_there or whole(disk.left(disk.now))["new/x"] == b"first"


@pytest.mark.parametrize("dies_at", range(11))
def test_a_folder_that_another_process_has_just_made(disk: Disk, dies_at: int) -> None:
    with disk.killed_after(dies_at):
        at(disk).put("new/er/x", b"first")
    at(disk).put("new/er/y", b"second")
    assert whole(disk.left(disk.now))["new/er/y"] == b"second"


def test_a_folder_that_was_removed_is_made_anew(disk: Disk) -> None:
    storage = at(disk)
    storage.put("new/er/x", b"first")
    storage.delete(["new/er/x"])
    (disk.base / "root" / "new" / "er").rmdir()
    (disk.base / "root" / "new").rmdir()
    begun = disk.now
    storage.put("new/er/x", b"second")
    assert storage.get("new/er/x") == b"second"
    assert [one.folder for one in disk.operations[begun:] if isinstance(one, FolderSynced)][-3:] == [
        "root",
        "root/new",
        "root/new/er",
    ]


def test_a_folder_that_cannot_be_synced_acknowledges_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the object that is there keeps the mark by which whoever finds it tries again."""
    storage = Storage.connect(disk.base / "root", deadline_s=0.1)
    storage.create("x", b"1")

    def refuse(folder: str) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(entries, "sync_folder", refuse)
        for _ in range(2):
            with pytest.raises(StorageError, match="broken"):
                storage.create_once("y", b"2")
    assert "y" not in whole(disk.left(disk.now))
    storage.create_once("y", b"2")
    assert whole(disk.left(disk.now))["y"] == b"2"


class _Queue:
    """A lock that tells when so many wait for it."""

    def __init__(self, count: int) -> None:
        self._lock, self._count, self.full = threading.Lock(), count, threading.Event()
        self._came: list[int] = []

    def __enter__(self) -> None:
        self._came.append(1)
        if len(self._came) == self._count:
            self.full.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_who_waits_for_a_sync_shares_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one under way may have begun before a name was given; the next one serves all that wait meanwhile."""
    count, synced = 12, []
    turns, queue = entries._Turns(), _Queue(count)
    turns._lock = queue  # type: ignore[assignment]

    def sync(folder: str) -> None:
        assert queue.full.wait(60)
        synced.append(folder)

    monkeypatch.setattr(entries, "sync_folder", sync)
    threads = [threading.Thread(target=turns.take, args=("f",)) for _ in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert synced == ["f", "f"]
    turns.take("f")
    assert len(synced) == 3
