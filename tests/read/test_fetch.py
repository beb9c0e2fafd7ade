"""Rows of large shards, read into their place from a folder or put there as they come over a network: the values,
requests and errors are those of any other read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.arrays import Pieces, ranges
from archive.base.errors import CorruptChunkError, MissingObjectError, ShortReadError
from archive.read import Gather
from archive.read.chunks import fetch
from archive.read.chunks.wants import Want
from archive.store import Filling, IOStats
from archive.store.drivers import Buffer, Location, register, registry
from archive.store.drivers.local import LocalDriver
from tests.support.archives import mixed as episode
from tests.support.tampering import same

LENGTHS = (700, 3, 1, 950, 400, 64, 1200)
AS_THEY_COME = "as they come"


class FarDriver(LocalDriver):
    """A folder as if beyond a network. A shard's beginning, where its metadata lies, comes after the rest of it."""

    remote = True
    waits = True
    cut = ""  # the object that comes short by a byte

    def __init__(self, place: Location) -> None:
        super().__init__(
            Location("/" + place.target.removeprefix("far://"), "file", {}, "", place.deadline_s, place.width)
        )
        self._others: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def can(self, verb: str) -> bool:
        return verb not in ("get_ranges", "read_into") and super().can(verb)

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


@pytest.fixture(params=["packed", "directory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with archive.create(str(tmp_path / "root"), layout=request.param).writer(compression=None) as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i), episode_id=f"e{i}")
            if i == 3:
                w.commit()
    return tmp_path / "root"


@pytest.fixture
def _far(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_DRIVERS", dict(registry._DRIVERS))
        patch.setitem(ranges.coalesce.__kwdefaults__, "max_block", 200_000)
        register("far", FarDriver)
        yield


@pytest.fixture(params=[AS_THEY_COME, fetch.PART_BYTES, 100_000])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], archive.Archive]:
    """Opens an archive as if beyond a network, or in a folder whose shards are read by so many bytes at a time."""
    if request.param == AS_THEY_COME:
        request.getfixturevalue("_far")
        return lambda root: archive.open(f"far:/{root}", deadline_s=10)
    monkeypatch.setattr(fetch, "PART_BYTES", request.param)
    return lambda root: archive.open(str(root))


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Members that were read into their place."""
    seen: list[str] = []

    def parts(one: fetch.ShardRead, *most_bytes: float) -> list[fetch.RequestPart]:
        out = original(one, *most_bytes)
        seen.extend(piece.member for part in out for piece, rooms in part.members if len(rooms) > 1)
        return out

    original = fetch.ShardRead.parts
    monkeypatch.setattr(fetch.ShardRead, "parts", parts)
    return seen


def counted(arc: archive.Archive) -> tuple[list[dict[str, Any]], IOStats]:
    return arc.episodes.read(), arc.storage.stats


def all_there(found: list[dict[str, Any]]) -> bool:
    return all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, found, strict=True)))


def damage(root: Path) -> None:
    frame = episode(LENGTHS[0], 0)["frame"][3].tobytes()
    path = next(one for one in root.glob("shards/**/*") if one.is_file() and frame in one.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(frame) + 700] ^= 4
    path.write_bytes(data)


def large_shard(root: Path) -> Path:
    return next(one for one in sorted(root.glob("shards/**/*")) if one.is_file() and one.stat().st_size > 20_000)


Opened = Callable[[Path], archive.Archive]


def test_values_requests_and_bytes_are_those_of_any_read(
    root: Path, opened: Opened, placed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, stats = counted(opened(root))
    assert len([member for member in placed if member.startswith("frame/")]) > 10
    assert all_there(found)
    placed.clear()
    monkeypatch.setattr(fetch, "LEAST_BYTES", 1 << 60)
    _, ahead = counted(archive.open(str(root)))
    assert (ahead.get, ahead.bytes_in) == (stats.get, stats.bytes_in)
    assert placed == []


def test_what_is_compressed_is_decoded_as_it_comes(tmp_path: Path, opened: Opened) -> None:
    with archive.create(str(tmp_path / "root")).writer() as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i))
    assert all_there(counted(opened(tmp_path / "root"))[0])


def test_parts_of_chunks_and_of_episodes(root: Path, opened: Opened, placed: list[str]) -> None:
    found = opened(root).episodes[6].read(start=11, stop=1111)
    assert any(member.startswith("frame/") for member in placed)
    assert same(found, {name: value[11:1111] for name, value in episode(LENGTHS[6], 6).items()})


def test_episodes_that_are_streamed_bring_each_byte_once(root: Path, opened: Opened, placed: list[str]) -> None:
    arc = opened(root)
    assert all_there([data for _, data in arc.episodes.stream(max_bytes=3_000_000)])
    everything = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert arc.storage.stats.bytes_in < 1.05 * everything
    assert placed


def test_a_chunk_that_several_ask_for_is_put_in_both_places(root: Path, opened: Opened) -> None:
    found = opened(root).episodes[[0, 0, 3]].read(fields=["frame", "name"])
    assert all(
        same(data, {n: episode(LENGTHS[i], i)[n] for n in ("frame", "name")})
        for i, data in zip((0, 0, 3), found, strict=True)
    )


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:1"])
def test_batches_of_steps_come_as_episodes_do(tmp_path: Path, opened: Opened, compression: str | None) -> None:
    with archive.create(str(tmp_path / "root")).writer(compression=compression) as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i), episode_id=f"e{i}")
    gather = Gather(opened(tmp_path / "root").episodes, ["frame", "x", "done"], disk_cache=tmp_path / "cache")
    steps = np.random.default_rng(0).permutation(sum(LENGTHS))
    for again in (False, True):
        found = gather.rows(*gather.place(steps))
        for name, rows in found.items():
            whole = np.concatenate([episode(count, i)[name] for i, count in enumerate(LENGTHS)])
            np.testing.assert_array_equal(rows, whole[steps])
        cost = gather.io_stats.batch
        assert cost.disk_hits == (cost.chunks if again else 0)
        assert (cost.requests == 0) if again else (0 < cost.requests <= cost.chunks + 1)
        gather.close()


def test_members_that_share_bytes_are_both_read(tmp_path: Path, opened: Opened) -> None:
    """Nobody writes such a shard, but a table may say so: neither chunk can have its bytes in its own place."""
    with archive.create(str(tmp_path / "root")).writer(compression=None) as w:
        w.add_episode(episode(950, 0))
    episodes = opened(tmp_path / "root").episodes
    (true,) = episodes.read(fields=["frame"])
    (index,) = episodes.reader.shards.indexes.values()
    chunks = index.arrays["frame"]
    for column in (chunks.offset, chunks.size, chunks.crc32c):
        column[5] = column[4]
    (found,) = episodes.read(fields=["frame"])
    rows = np.arange(len(true["frame"]))
    assert (found["frame"] == true["frame"][np.where(rows // chunks.rows == 5, rows - chunks.rows, rows)]).all()


def test_rows_that_go_to_many_places_are_put_there_as_ever(tmp_path: Path, placed: list[str]) -> None:
    arc = archive.create(str(tmp_path / "root"))
    values = np.arange(2_000_000).reshape(-1, 50)
    with arc.writer(compression=None) as w:
        for i in range(0, len(values), 4):
            w.add_episode({"x": values[i : i + 4], "y": values[i : i + 4, 0]})
    out = np.empty_like(values)
    episodes = archive.open(str(tmp_path / "root")).episodes
    backwards = episodes[np.arange(len(episodes))[::-1]]
    backwards.read(fields=["x"], out={"x": out})
    assert (out.reshape(-1, 4, 50)[::-1].reshape(-1, 50) == values).all()
    assert placed == []


def test_a_damaged_chunk_is_an_error_that_names_object_episode_and_field(
    root: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(root)
    messages = []
    for least in (fetch.LEAST_BYTES, 1 << 60):
        monkeypatch.setattr(fetch, "LEAST_BYTES", least)
        with pytest.raises(
            CorruptChunkError, match=r"(?s)array 'frame' of shard .*episode 'e.*archive verify"
        ) as caught:
            opened(root).episodes.read()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    gather = Gather(opened(root).episodes, ["frame"])
    with pytest.raises(CorruptChunkError, match=r"(?s)array 'frame' of shard .*episode 'e.*archive verify"):
        gather.rows(*gather.place(np.arange(gather.steps)))
    assert not gather._here().store._busy


def test_a_shard_that_is_cut_off_or_gone_is_named_with_its_episode(root: Path, opened: Opened) -> None:
    path = large_shard(root)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(ShortReadError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        opened(root).episodes.read()
    path.unlink()
    with pytest.raises(MissingObjectError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        opened(root).episodes.read()


@pytest.mark.usefixtures("_far")
def test_an_answer_that_comes_short_is_a_short_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FarDriver, "cut", large_shard(root).relative_to(root).as_posix())
    monkeypatch.setattr(FarDriver, "waits", False)
    with pytest.raises(ShortReadError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        archive.open(f"far:/{root}", deadline_s=10).episodes.read()


@pytest.mark.usefixtures("_far")
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


@pytest.mark.parametrize("shard", [[3, 1, 2, 1, 3], [1, 1, 2, 3, 3], [4, 4]])
def test_wanted_rows_are_parted_by_shard_without_copies_for_each(shard: list[int]) -> None:
    numbers = np.arange(len(shard))
    out = np.zeros(len(shard))
    want = Want("x", out[:0], np.array(shard), numbers, numbers + 1, 10 * numbers, Pieces(np.zeros(1, np.int64), [out]))
    parts = list(want.by_shard())
    assert [number for number, _ in parts] == sorted({*shard})
    for number, part in parts:
        mine = [i for i, one in enumerate(shard) if one == number]
        assert part.shard.tolist() == [number] * len(mine)
        assert (part.start.tolist(), part.at.tolist()) == (mine, [10 * i for i in mine])
    assert len({id(part.start if part.start.base is None else part.start.base) for _, part in parts}) == 1
