"""Chunks that are read straight into their place: the values, requests and errors are those of any other read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import CorruptChunkError, ShortReadError
from archive.read.chunks import landing
from archive.store import IOStats
from tests.support.archives import mixed as episode
from tests.support.tampering import same

LENGTHS = (700, 3, 1, 950, 400, 64, 1200)


@pytest.fixture(params=["packed", "directory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    arc = archive.create(str(tmp_path / "root"), layout=request.param)
    with arc.writer(compression=None) as w:
        for i, steps in enumerate(LENGTHS):
            w.add_episode(episode(steps, i), episode_id=f"e{i}")
            if i == 3:
                w.commit()
    return tmp_path / "root"


@pytest.fixture(params=[landing.PART_BYTES, 100_000])
def landed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Members that were read into their place."""
    seen: list[str] = []

    def read(*args: Any) -> landing.Landed:
        out = original(*args)
        seen.extend(out.sound)
        return out

    original = landing.read
    monkeypatch.setattr(landing, "PART_BYTES", request.param)
    monkeypatch.setattr(landing, "read", read)
    return seen


def counted(read: Callable[[archive.Episodes], Any], root: Path) -> tuple[Any, IOStats]:
    arc = archive.open(str(root))
    found = read(arc.episodes)
    return found, arc.storage.stats


def test_values_requests_and_bytes_are_those_of_any_read(
    root: Path, landed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, stats = counted(lambda episodes: episodes.read(), root)
    assert len([member for member in landed if member.startswith("frame/")]) > 10
    assert all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, found, strict=True)))
    before = len(landed)
    monkeypatch.setattr(landing, "LEAST_BYTES", 1 << 60)
    assert counted(lambda episodes: episodes.read(), root)[1] == stats
    assert len(landed) == before


def test_parts_of_chunks_and_of_episodes(root: Path, landed: list[str]) -> None:
    found, _ = counted(lambda episodes: episodes[6].read(start=11, stop=1111), root)
    assert any(member.startswith("frame/") for member in landed)
    assert same(found, {name: value[11:1111] for name, value in episode(LENGTHS[6], 6).items()})


def test_episodes_that_are_streamed_bring_each_byte_once(root: Path, landed: list[str]) -> None:
    found, stats = counted(lambda episodes: [data for _, data in episodes.stream(max_bytes=3_000_000)], root)
    assert all(same(data, episode(steps, i)) for i, (steps, data) in enumerate(zip(LENGTHS, found, strict=True)))
    assert stats.bytes_in < 1.05 * sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert landed


def test_rows_that_go_to_many_places_are_put_there_as_ever(tmp_path: Path, landed: list[str]) -> None:
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
    assert landed == []


@pytest.mark.usefixtures("landed")
def test_a_damaged_chunk_is_an_error_that_names_object_episode_and_field(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = episode(LENGTHS[0], 0)["frame"][3].tobytes()
    path = next(one for one in root.glob("shards/**/*") if one.is_file() and frame in one.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(frame) + 700] ^= 4
    path.write_bytes(data)
    messages = []
    for least in (landing.LEAST_BYTES, 1 << 60):
        monkeypatch.setattr(landing, "LEAST_BYTES", least)
        with pytest.raises(
            CorruptChunkError, match=r"(?s)array 'frame' of shard .*episode 'e.*archive verify"
        ) as caught:
            archive.open(str(root)).episodes.read()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.usefixtures("landed")
def test_a_shard_that_is_cut_off_is_a_short_read(root: Path) -> None:
    path = next(one for one in sorted(root.glob("shards/**/*")) if one.is_file() and one.stat().st_size > 20_000)
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(ShortReadError, match=r"(?s)^shard shards/.*episode 'e.*archive verify"):
        archive.open(str(root)).episodes.read()
