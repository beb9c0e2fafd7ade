"""Gathering steps and windows: the values are those of a plain read, whatever the cache;
memory and requests are bounded."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Schema
from archive.base.errors import CorruptChunkError, FieldError, MissingObjectError, UsageError
from archive.read import gather as gather_of_reads
from archive.read.gather import Gather, Source
from tests.support.gathering import SCHEMA, check, made, steps_of

LENGTHS = np.array([7, 1, 30, 12, 2, 25, 40, 3, 19, 60, 5, 8])
ENDS = np.cumsum(LENGTHS) - 1
STEPS = int(LENGTHS.sum())
FAST = ["t", "x", "next", "image", "reward"]


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    return made(tmp_path_factory.mktemp("gathering") / "a", LENGTHS)


def drawn(size: int = 64, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, STEPS, size)


@pytest.mark.parametrize("cache_bytes", [2**30, 300_000, 20_000, 0])
def test_rows_are_those_of_a_plain_read_whatever_the_cache_holds(arc: archive.Archive, cache_bytes: int) -> None:
    gather = Gather(arc.episodes, cache_bytes=cache_bytes)
    for seed in range(6):
        t = drawn(seed=seed)
        batch = gather.rows(*gather.place(t))
        check(batch, t, ENDS)
        assert batch["name"].tolist() == [f"step {v}" for v in t]
        assert batch["info"] == [{"a": v} for v in t.tolist()]
        assert [row.tolist() for row in batch["tokens"]] == [list(range(v % 5)) for v in t.tolist()]
        assert gather.held_bytes <= cache_bytes


@pytest.mark.parametrize("cache_bytes", [2**30, 0])
def test_windows_are_runs_of_one_episode(arc: archive.Archive, cache_bytes: int) -> None:
    gather = Gather(arc.episodes, cache_bytes=cache_bytes)
    rng = np.random.default_rng(1)
    numbers = rng.choice(np.flatnonzero(LENGTHS >= 5), 40)
    starts = (rng.random(40) * (LENGTHS[numbers] - 4)).astype(np.int64)
    batch = gather.windows(numbers, starts, 5)
    t = (ENDS - LENGTHS + 1)[numbers][:, None] + starts[:, None] + np.arange(5)
    check(batch, t, ENDS)
    assert batch["name"].shape == (40, 5)
    assert batch["info"][3][2] == {"a": int(t[3, 2])}
    assert [len(row) for row in batch["tokens"][7]] == (t[7] % 5).tolist()


def test_whole_episodes_come_with_their_lengths(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes)
    numbers = np.array([4, 1, 9])
    batch = gather.whole(numbers)
    t = np.concatenate([np.arange(ENDS[n] - LENGTHS[n] + 1, ENDS[n] + 1) for n in numbers])
    assert batch["x"].lengths.tolist() == [2, 1, 60]
    np.testing.assert_array_equal(batch["t"].values, t)
    assert [len(names) for names in batch["name"]] == [2, 1, 60]


def test_steps_that_are_not_there_are_refused(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes, "t")
    for numbers, steps, told in (
        ([12], [0], "numbered from 0 to 12"),
        ([0], [7], "has 7 steps"),
        ([0], [-1], "7 steps"),
    ):
        with pytest.raises(UsageError, match=told):
            gather.rows(numbers, steps)
    with pytest.raises(UsageError, match="7 steps"):
        gather.windows([0], [3], 5)
    with pytest.raises(UsageError, match="integers"):
        gather.rows([0.5], [1])
    with pytest.raises(UsageError, match="one step for each"):
        gather.rows([0, 1], [1])
    assert gather.rows([], [])["t"].shape == (0,)


def test_only_the_fields_asked_for_are_read(arc: archive.Archive) -> None:
    t = drawn()
    before = arc.io_stats()
    small = Gather(arc.episodes, ["reward"], cache_bytes=0)
    small.rows(*small.place(t))
    assert small.io_stats.batch.bytes < 10_000
    assert (arc.io_stats() - before).get - small.io_stats.total.requests <= 6  # chunk tables
    whole = Gather(arc.episodes, ["image"], cache_bytes=0)
    whole.rows(*whole.place(t))
    assert whole.io_stats.batch.chunks > small.io_stats.batch.chunks


def test_each_chunk_is_fetched_once_and_then_held(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes, FAST)
    t = np.arange(STEPS)
    gather.rows(*gather.place(t))
    first = gather.io_stats
    assert first.batch.requests <= 1.2 * (first.batch.chunks - first.batch.hits)
    gather.rows(*gather.place(drawn(200)))
    again = gather.io_stats
    assert again.batch.requests == 0
    assert again.batch.hits == again.batch.chunks > 0
    assert again.total.requests == first.total.requests


@pytest.mark.parametrize("compression", [None, "zstd:1", "gzip:1"])
def test_chunks_of_all_kinds_need_hardly_more_than_themselves(tmp_path: Path, compression: str | None) -> None:
    arc = made(tmp_path / "a", LENGTHS, compression=compression)
    gather = Gather(arc.episodes, FAST)
    t = drawn(200)
    check(gather.rows(*gather.place(t)), t, ENDS)
    found = gather.io_stats.batch
    assert found.requests <= 1.2 * (found.chunks - found.hits)
    shards = len(list((tmp_path / "a" / "shards").iterdir()))
    assert len(gather.episodes.reader.shards.views) == (shards if compression == "gzip:1" else 0)


@pytest.mark.parametrize("compression", ["zstd:1", "gzip:1"])
def test_chunks_that_end_early_leave_as_they_came(tmp_path: Path, compression: str) -> None:
    arc = made(tmp_path / "a", [37, 1, 130, 12, 77, 55], compression=compression, chunk_bytes=60_000)
    gather = Gather(arc.episodes, ["t", "image"], cache_bytes=400_000)
    rng = np.random.default_rng(0)
    for _ in range(60):
        t = rng.integers(0, 312, 4)
        batch = gather.rows(*gather.place(t))
        np.testing.assert_array_equal(batch["t"], t)
        np.testing.assert_array_equal(batch["image"], np.repeat(t[:, None], 600, 1))


def test_a_writer_may_be_told_the_size_of_chunks(tmp_path: Path) -> None:
    read = []
    for chunk_bytes in (5_000, 100_000):
        arc = made(tmp_path / str(chunk_bytes), [200], compression=None, chunk_bytes=chunk_bytes)
        gather = Gather(arc.episodes, ["image"])
        gather.rows([0], [100])
        read.append(gather.io_stats.batch.bytes)
    assert 2_400 < read[0] <= 5_004 < 90_000 < read[1] <= 100_004
    with pytest.raises(UsageError, match="chunk_bytes=0"):
        archive.open(tmp_path / "5000").writer(chunk_bytes=0)


def test_chunks_whose_first_bytes_mislead_are_read_by_their_metadata(tmp_path: Path) -> None:
    x = np.frombuffer(b"\x28\xb5\x2f\xfd" + bytes(range(4, 64)), np.uint8)
    y = np.frombuffer(b"\x1f\x8b" + bytes(range(2, 64)), np.uint8)
    arc = archive.create(tmp_path / "a")
    with arc.writer(compression=None) as w:
        w.add_episode({"x": x, "y": y})
    batch = Gather(archive.open(tmp_path / "a").episodes).rows(np.zeros(64, np.int64), np.arange(64))
    np.testing.assert_array_equal(batch["x"], x)
    np.testing.assert_array_equal(batch["y"], y)


def test_the_least_recently_used_leave(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes, ["image"], cache_bytes=300_000)
    for start in range(0, STEPS - 50, 50):
        gather.rows(*gather.place(np.arange(start, start + 50)))
    newest = np.arange(start, start + 50)
    gather.rows(*gather.place(newest))
    assert gather.io_stats.batch.requests == 0
    gather.rows(*gather.place(np.arange(50)))
    assert gather.io_stats.batch.requests > 0
    assert 0 < gather.held_bytes <= 300_000


def test_what_was_prefetched_is_there(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes, FAST)
    t = drawn()
    gather.prefetch(*gather.place(t))
    check(gather.rows(*gather.place(t)), t, ENDS)
    gather.close()
    assert gather.io_stats.total.requests == 0  # a new beginning
    gather.load(*gather.place(t))
    loaded = gather.io_stats.total.requests
    check(gather.rows(*gather.place(t)), t, ENDS)
    assert gather.io_stats.total.requests == loaded > 0
    assert gather.local(*gather.place(t)) == 1.0
    assert gather.local(*gather.place(np.arange(STEPS))) < 1.0 or loaded > 0


def test_a_failure_in_the_background_surfaces_at_the_next_call(tmp_path: Path) -> None:
    arc = made(tmp_path / "a", [20, 20])
    gather = Gather(arc.episodes, "t")
    gather.place(np.arange(3))
    for shard in (tmp_path / "a" / "shards").iterdir():
        shard.unlink()
    gather.prefetch([0], [0])
    gather._pool.shutdown()  # type: ignore[union-attr]
    with pytest.raises(MissingObjectError, match="archive verify"):
        gather.rows([1], [1])


def test_a_damaged_chunk_is_an_error_that_says_where(tmp_path: Path) -> None:
    arc = made(tmp_path / "a", [300], commits=1, compression=None)
    (shard,) = (tmp_path / "a" / "shards").iterdir()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    gather = Gather(arc.episodes, FAST)
    with pytest.raises(CorruptChunkError, match=r"shards/.*archive verify"):
        gather.rows(*gather.place(np.arange(300)))


def test_episodes_of_several_segments(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=SCHEMA) as w:
        for start in range(0, 40, 8):
            stop = start + 8
            w.append(steps_of(np.arange(start, stop), last=stop == 40), env_ids=0, first=start == 0, last=stop == 40)
            w.commit()
    gather = Gather(archive.open(tmp_path / "a").episodes, FAST)
    t = drawn(50) % 40
    batch = gather.rows(np.zeros(50, np.int64), t)
    np.testing.assert_array_equal(batch["t"], t)
    read = archive.open(tmp_path / "a").episodes[0].read(FAST)
    np.testing.assert_array_equal(batch["next"]["x"], read["next"]["x"][t])
    np.testing.assert_array_equal(gather.windows([0], [5], 30)["next"]["x"][0], read["next"]["x"][5:35])


def test_next_rows_that_differ_from_the_convention_were_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nests = [{"x": rng.random((n, 2)), "y": rng.random((n, 2))} for n in (9, 30, 4)]
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=Schema(next_of={"y": "x"})) as w:
        for nest in nests:
            nest["y"][2:4] = nest["x"][3:5] if len(nest["x"]) > 4 else nest["y"][2:4]
            w.add_episode(nest)
    gather = Gather(archive.open(tmp_path / "a").episodes, "y")
    numbers = rng.integers(0, 3, 60)
    steps = (rng.random(60) * np.array([9, 30, 4])[numbers]).astype(np.int64)
    wanted = np.stack([nests[n]["y"][s] for n, s in zip(numbers, steps, strict=True)])
    np.testing.assert_array_equal(gather.rows(numbers, steps)["y"], wanted)


def test_shards_as_folders_and_shards_of_other_archives(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a", layout="directory")
    with arc.writer(schema=SCHEMA) as w:
        for start in (0, 30):
            w.add_episode(steps_of(np.arange(start, start + 30)))
    made(tmp_path / "b", [30, 30])
    resharding.merge([str(tmp_path / "a"), str(tmp_path / "b")], to=str(tmp_path / "m"), copy=False)
    t = np.array([5, 29, 30, 59, 3])
    folders = Gather(archive.open(tmp_path / "a").episodes, FAST)
    check(folders.rows(*folders.place(t)), t, np.array([29, 59]))
    found = folders.io_stats.batch
    assert found.requests == found.chunks - found.hits > 0
    both = Gather(archive.open(tmp_path / "m", allow_bases=True).episodes, FAST, disk_cache=tmp_path / "c")
    for shift in (0, 60):
        check(both.rows(*both.place(t + shift)), t, np.array([29, 59]))


def test_fields_that_some_episodes_lack(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        w.add_episode({"a": np.arange(4)})
        w.add_episode({"a": np.arange(4) + 10, "b": np.arange(4.0)})
    eps = archive.open(tmp_path / "a").episodes
    numbers, steps = [0, 1, 1, 0], [1, 2, 0, 3]
    with pytest.raises(FieldError, match="'b'"):
        Gather(eps, ["a", "b"]).rows(numbers, steps)
    with pytest.raises(FieldError, match="'c'"):
        Gather(eps, ["c"]).rows(numbers, steps)
    assert set(Gather(eps, ["a", "b"], missing="skip").rows(numbers, steps)) == {"a"}
    filled = Gather(eps, ["a", "b"], missing=-1).rows(numbers, steps)
    assert filled["a"].tolist() == [1, 12, 10, 3]
    assert filled["b"].tolist() == [-1, 2, 0, -1]
    assert Gather(eps, ["b"]).rows([1], [3])["b"].tolist() == [3]


def test_dtypes_and_axes_of_all_kinds(tmp_path: Path) -> None:
    t = np.arange(12)
    nest = {
        "time": t.astype("M8[s]"),
        "bytes": np.array([b"ab%d" % v for v in t]),
        "text": np.array([f"n{v}" for v in t]),
        "flag": t % 2 == 0,
        "z": t * 1j,
        "none": np.zeros((12, 0, 3)),
        "bigger": np.arange(13),
        "of all": np.array([1.5, 2.5]),
        "nothing": None,
    }
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=Schema(axes={"bigger": "offset", "of all": "free"})) as w:
        w.add_episode(nest)
    eps = archive.open(tmp_path / "a").episodes
    batch = Gather(eps).rows(np.zeros(5, np.int64), [3, 1, 4, 1, 11])
    for name in ("time", "bytes", "text", "flag", "z", "none", "bigger"):
        np.testing.assert_array_equal(batch[name], nest[name][[3, 1, 4, 1, 11]], err_msg=name)  # type: ignore[index]
        assert batch[name].dtype == np.asarray(nest[name]).dtype
    assert batch["nothing"] is None
    assert "of all" not in batch
    assert Gather(eps, ["of all"]).rows([0, 0], [1, 2])["of all"][1].tolist() == [1.5, 2.5]
    assert Gather(eps).whole([0])["bigger"][0].tolist() == list(range(13))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_it_pickles_and_a_fork_begins_with_nothing(arc: archive.Archive) -> None:
    gather = Gather(arc.episodes, FAST)
    t = drawn()
    gather.rows(*gather.place(t))
    copy: Gather = pickle.loads(pickle.dumps(gather))
    assert copy.held_bytes == 0
    check(copy.rows(*copy.place(t)), t, ENDS)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gather.prefetch(*gather.place(t))
            check(gather.rows(*gather.place(t)), t, ENDS)
            gather.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert gather.rows(*gather.place(t)) is not None


def test_threads_that_begin_together_share_one_memory(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Source] = []
    both = threading.Barrier(2)

    class Late(Source):
        def __init__(self, *given: Any) -> None:
            made.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # until the other thread is here as well, which it must not
            super().__init__(*given)

    monkeypatch.setattr(gather_of_reads, "Source", Late)
    gather = Gather(arc.episodes, FAST)
    with ThreadPoolExecutor(2) as pool:
        for batch in pool.map(lambda seed: gather.rows(*gather.place(drawn(seed=seed))), range(2)):
            assert batch
    assert len(made) == 1
