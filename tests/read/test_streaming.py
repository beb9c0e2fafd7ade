"""Episodes one after the other: streamed in bounded memory, read ahead while iterating, and how large they are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import ArchiveError, UsageError
from archive.read import episode as one_episode
from archive.read import sizes

COUNT = 60


def steps(i: int) -> dict[str, Any]:
    n = 1 + i % 4
    return {
        "obs": np.full((n + 1, 8), i, np.float32), "reward": np.full(n, float(i)),
        "tokens": [np.arange(t + i) for t in range(n)], "goal": np.arange(i % 3),
    }  # fmt: skip


@pytest.fixture
def arc(tmp_path: Path) -> archive.Archive:
    made = archive.create(tmp_path / "a")
    with made.writer(schema=archive.Schema(axes={"obs": "offset", "goal": "free"})) as w:
        for i in range(COUNT):
            w.add_episode(steps(i), episode_id=f"e{i}")
            if i % 20 == 19:
                w.flush()
        w.checkpoint(1, wait=True)
    return archive.open(tmp_path / "a")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.tolist() == b.tolist()


@pytest.mark.parametrize("max_bytes", [1, 4000, 2**28])
def test_a_stream_gives_what_reading_gives_in_order(arc: archive.Archive, max_bytes: int) -> None:
    for eps in (arc.episodes, arc.episodes[::-1][:7], arc.checkpoints[0].episodes, arc.episodes[:0]):
        found = list(eps.stream(max_bytes=max_bytes))
        assert [ep.id for ep, _ in found] == [ep.id for ep in eps]
        assert all(same(data, whole) for (_, data), whole in zip(found, eps.read(), strict=True))


def test_a_stream_takes_what_read_takes(arc: archive.Archive) -> None:
    _, data = next(arc.episodes.stream(["reward", "none"], missing=1, ragged="flat"))
    assert data.keys() == {"reward", "none"}
    _, data = next(arc.episodes.stream("tokens", ragged="flat"))
    assert isinstance(data["tokens"], archive.Ragged)
    assert "has_next" in next(arc.episodes.stream(["reward"], derive="has_next"))[1]
    with pytest.raises(UsageError, match="max_bytes=0"):
        next(arc.episodes.stream(max_bytes=0))


def test_a_stream_holds_one_run_at_a_time(arc: archive.Archive) -> None:
    held = arc.episodes.sizes(["obs"])
    wanted = list(sizes.runs(held, 2000))
    assert all(held[a:b].sum() <= 2000 for a, b in wanted)
    before = arc.io_stats().get
    stream = arc.episodes.stream(["obs"], max_bytes=8000)
    next(stream)
    first = arc.io_stats().get - before
    for _ in range(wanted[0][1] - 1):
        next(stream)
    assert arc.io_stats().get - before == first  # nothing more until the run is through
    assert len(list(stream)) == COUNT - wanted[0][1]


def test_shares_are_streamed_by_the_same_code(arc: archive.Archive) -> None:
    share = resharding.plan(arc.checkpoints[0], world_size=2).share(1)
    found = list(share.stream(max_bytes=5000))
    assert [ep.id for ep, _ in found] == [ep.id for ep in share]
    assert all(same(data, ep.read()) for ep, data in found)


def requests(arc: archive.Archive, work: Any) -> int:
    list(arc.episodes[:1].read())  # indexes and metadata
    before = arc.io_stats().get
    work()
    return arc.io_stats().get - before


def test_iterating_reads_ahead(arc: archive.Archive) -> None:
    alone = requests(arc, lambda: [arc.episodes[i].read() for i in range(COUNT)])
    found: list[Any] = []
    along = requests(arc, lambda: found.extend(ep.read() for ep in arc.episodes))
    assert all(same(a, b) for a, b in zip(found, arc.episodes.read(), strict=True))
    assert along * 3 < alone


def test_reading_ahead_is_not_in_the_way(arc: archive.Archive) -> None:
    whole = arc.episodes.read()
    eps = list(arc.episodes)
    orders = (
        [*range(COUNT)],
        [*range(10), *range(5), 30, 31, 32, 33, 12, *range(13, COUNT)],
        [3, 3, 4, 4, 5, 5, 6, 6, 7],
    )
    for order in orders:
        assert all(same(eps[i].read(), whole[i]) for i in order)
    for i, ep in enumerate(eps):  # fields change from one to the next, and parts are read in between
        data = ep.read(["reward"] if i % 2 else None)
        assert same(data, {"reward": whole[i]["reward"]} if i % 2 else whole[i])
        assert ep.read(["reward"], stop=1)["reward"].tolist() == [float(i)]
    mine = eps[20].read()
    mine["reward"][:] = 9  # one's own
    assert same(eps[20].read(), whole[20])
    assert same(pickle.loads(pickle.dumps(eps[7])).read(), whole[7])


def test_what_is_damaged_further_on_is_told_of_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = archive.create(tmp_path / "a")
    with made.writer() as w:
        for i in range(8):
            w.add_episode({"x": np.full(3, i)})
            w.flush()
    shard = tmp_path / "a" / made.shards[6]
    data = bytearray(shard.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    shard.write_bytes(data)
    got: list[int] = []

    def look_at_all() -> None:
        for ep in archive.open(tmp_path / "a").episodes:
            got.append(int(ep.read()["x"][0]))

    with pytest.raises(ArchiveError):
        look_at_all()
    assert got == list(range(6))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_middle_reads_on(arc: archive.Archive) -> None:
    eps = list(arc.episodes)
    for ep in eps[:5]:
        ep.read()
    shared, _ = eps[5]._ahead or pytest.fail("it reads ahead")
    with shared._lock:  # another thread reads at that moment
        child = os.fork()
        if not child:
            os._exit(0 if eps[5].read()["reward"].tolist() == steps(5)["reward"].tolist() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_is_held_ahead_is_bounded(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_episode, "AHEAD_BYTES", 3000)
    held = []
    for ep in arc.episodes:
        ep.read()
        shared, _ = ep._ahead or pytest.fail("it reads ahead")
        held.append(int(arc.episodes.sizes()[[*shared._held]].sum()) if shared._held else 0)
    assert 0 < max(held) <= 3000


def test_sizes_count_all_fields(arc: archive.Archive) -> None:
    for i, (size, data) in enumerate(zip(arc.episodes.sizes().tolist(), arc.episodes.read(), strict=True)):
        arrays = [data["obs"], data["reward"], data["goal"], *data["tokens"]]
        assert size == sum(a.nbytes for a in arrays) + 8 * len(data["tokens"]), i
    assert arc.checkpoints[0].episodes.nbytes == arc.episodes.nbytes == int(arc.episodes.sizes().sum())
    assert arc.episodes.sizes(["reward"]).tolist() == [8 * ep.length for ep in arc.episodes]
    cut = archive.open(arc.url)
    with cut.writer(resume=cut.checkpoints[0]) as w:
        w.evict(before=60)
        ck = w.checkpoint(2, wait=True).result()
    assert ck.episodes.nbytes < arc.episodes.nbytes


def test_text_is_told_of_beside_the_bytes(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=archive.Schema(next_of={"next": "x"})) as w:
        w.add_episode({"x": np.zeros(4), "next": np.zeros(4)})
        assert arc.episodes.nbytes == 0
    assert (arc.episodes.nbytes, arc.episodes.size_told) == (64, "64 B")
    with arc.writer() as w:
        w.add_episode({"note": ["abc"]})
    assert arc.episodes.size_told == "72 B and text"
    assert "72 B and text" in arc._repr_html_()
    assert "72 B and text" in arc.episodes._repr_html_()
