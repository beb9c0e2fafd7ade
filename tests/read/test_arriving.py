"""Shards of remote stores, whose chunks are put into their places as they come, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import archive
from archive.arrays import ranges
from archive.base.errors import CorruptChunkError, MissingObjectError, ShortReadError
from archive.store import Filling
from archive.store.drivers import Buffer, Place, register, registry
from archive.store.drivers.local import LocalDriver
from tests.support.archives import mixed as episode
from tests.support.tampering import same

LENGTHS = (700, 3, 1, 950, 400, 64, 1200)


class FarDriver(LocalDriver):
    """A folder as if beyond a network. A shard's beginning, where its metadata lies, comes after the rest of it."""

    remote = True
    waits = True
    cut = ""  # the object that comes short by a byte

    def __init__(self, place: Place) -> None:
        super().__init__(
            Place("/" + place.target.removeprefix("far://"), "file", {}, "", place.deadline_s, place.width)
        )
        self._others: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def ranging(self) -> None:  # type: ignore[override]
        return None

    @property
    def scattering(self) -> None:
        return None

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        with self._lock:
            others = self._others.setdefault(key, threading.Event())
        if start == 0 and self.waits and key.endswith(".zip"):
            others.wait(5)
        data = self.get(key, start, stop - (key == self.cut), timeout_s)
        for at in range(0, len(data), 1000):
            take(data[at : at + 1000])
        if start:
            others.set()


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_DRIVERS", dict(registry._DRIVERS))
        patch.setitem(ranges.coalesce.__kwdefaults__, "max_block", 200_000)
        register("far", FarDriver)
        yield


@pytest.fixture(params=["packed", "directory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with archive.create(str(tmp_path / "root"), layout=request.param).writer(compression=None) as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i), episode_id=f"e{i}")
            if i == 3:
                w.commit()
    return tmp_path / "root"


def far(root: Path) -> archive.Episodes:
    return archive.open(f"far:/{root}", deadline_s=10).episodes


def test_all_rows_are_where_they_belong(root: Path) -> None:
    found = far(root).read()
    assert all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, found, strict=True)))


def test_requests_and_bytes_are_those_of_a_folder(root: Path) -> None:
    here, there = archive.open(str(root)), far(root)
    here.episodes.read()
    there.read()
    near, beyond = here.storage.stats, there.reader.snapshot.storage.stats
    assert (near.get, near.bytes_in) == (beyond.get, beyond.bytes_in)


def test_what_is_compressed_is_decoded_as_it_comes(tmp_path: Path) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i))
    found = far(tmp_path / "root").read()
    assert all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, found, strict=True)))


def test_parts_of_chunks_and_streams_of_episodes(root: Path) -> None:
    assert same(far(root)[6].read(start=11, stop=1111), {n: v[11:1111] for n, v in episode(LENGTHS[6], 6).items()})
    streamed = [data for _, data in far(root).stream(max_bytes=3_000_000)]
    assert all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, streamed, strict=True)))


def test_a_chunk_that_several_ask_for_is_put_in_both_places(root: Path) -> None:
    found = far(root)[[0, 0, 3]].read(fields=["frame", "name"])
    assert all(
        same(data, {n: episode(LENGTHS[i], i)[n] for n in ("frame", "name")})
        for i, data in zip((0, 0, 3), found, strict=True)
    )


def test_a_damaged_chunk_is_the_error_of_any_read(root: Path) -> None:
    frame = episode(LENGTHS[0], 0)["frame"][3].tobytes()
    path = next(one for one in root.glob("shards/**/*") if one.is_file() and frame in one.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(frame) + 700] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptChunkError, match=r"(?s)array 'frame' of shard .*episode 'e.*archive verify"):
        far(root).read()


def test_what_is_missing_or_short_names_shard_and_episode(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(one for one in sorted(root.glob("shards/**/*")) if one.is_file() and one.stat().st_size > 20_000)
    monkeypatch.setattr(FarDriver, "cut", path.relative_to(root).as_posix())
    monkeypatch.setattr(FarDriver, "waits", False)
    with pytest.raises(ShortReadError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        far(root).read()
    path.unlink()
    with pytest.raises(MissingObjectError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        far(root).read()


def test_nothing_is_written_once_an_error_was_raised(root: Path) -> None:
    storage = archive.open(f"far:/{root}").storage
    (key, *_) = [path.relative_to(root).as_posix() for path in sorted(root.glob("shards/**/*")) if path.is_file()]
    room = bytearray(100)
    used: list[int] = []

    def use(number: int) -> None:
        used.append(number)
        raise ZeroDivisionError

    fillings = [Filling(key, at, [memoryview(room)[:50], memoryview(room)[50:]]) for at in range(1, 50)]
    with pytest.raises(ZeroDivisionError):
        storage.fill(fillings, use, max_bytes=400)
    assert 1 <= len(used) <= 4
