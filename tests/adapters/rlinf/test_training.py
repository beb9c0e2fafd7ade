"""TrajectoryReplayBuffer as training uses it: batches, the window and the cache, filters, threads,
RLinf's own datasets."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import archive
from archive.adapters.rlinf.contents import Rows, Slab
from archive.base.errors import NotFoundError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.backends import make_backend
from tests.support.places import ROOT
from tests.support.trajectories import check_batch, everything, make, rlinf, saved_trees


def test_the_example_runs(tmp_path: Path) -> None:
    """In 15 lines: what a worker of RLinf does, on any filesystem."""
    url, rank, demo = str(tmp_path), 0, TrajectoryReplayBuffer()
    for start in range(2):
        buf = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{url}/rank_{rank}", sample_window_size=100)
        if start:
            buf.load_checkpoint(f"{url}/rank_{rank}", world_size=1)
        for step in range(3):
            trajectories = [make(10 * start + step)]
            buf.add_trajectories(trajectories)
            demo.add_trajectories(trajectories)
            assert buf.sample(8)["rewards"].shape == (8, 1)
            if step % 2 == 0:
                buf.save_checkpoint(f"{url}/rank_{rank}")
        buf.close()
    assert [len(ck.episodes) for ck in archive.open(url).checkpoints] == [1, 3, 4, 6]


def test_the_interface_is_the_documented_one() -> None:
    _, theirs = rlinf()
    for name in (
        "__init__",
        "add_trajectories",
        "sample",
        "sample_chunks",
        "save_checkpoint",
        "load_checkpoint",
        "close",
    ):
        wanted = list(inspect.signature(getattr(theirs, name)).parameters.values())
        have = inspect.signature(getattr(TrajectoryReplayBuffer, name)).parameters
        plain = [p for p in have.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert [p.name for p in plain] == [p.name for p in wanted], name
        defaults = {p.name: p.default for p in wanted} | {"world_size": None}  # None: the job's own
        assert all(p.default == defaults[p.name] for p in plain), name
    for name in ("get_stats", "is_ready", "is_ready_async", "clear", "clear_cache", "total_samples", "__len__"):
        assert hasattr(TrajectoryReplayBuffer, name)


def test_statistics_and_readiness() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    assert not buffer.is_ready(0)
    buffer.add_trajectories([make(0), make(1, steps=6)])
    assert buffer.get_stats() == {"num_trajectories": 2, "total_samples": 20, "cache_size": 2}
    assert (len(buffer), buffer.size, buffer.total_samples) == (2, 2, 20)
    assert buffer.is_ready(2)
    assert not asyncio.run(buffer.is_ready_async(3))
    assert repr(buffer) == "<TrajectoryReplayBuffer of 2 trajectories, 20 transitions>"
    with pytest.raises(UsageError, match="pickle"):
        pickle.dumps(buffer)


def test_draws_are_uniform_over_the_transitions_of_the_window() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=3)
    buffer.add_trajectories([make(0), make(1, steps=2), make(2, steps=10), make(3, steps=3, envs=1)])
    counts: dict[int, int] = {}
    for number in check_batch(buffer.sample(27_000, replace=True), 27_000):
        counts[number] = counts.get(number, 0) + 1
    shapes = {1: (2, 2), 2: (10, 2), 3: (3, 1)}
    every = {10000 * t + 100 * s + e for t, (n, b) in shapes.items() for s in range(n) for e in range(b)}
    assert counts.keys() == every
    assert all(abs(count - 1000) < 200 for count in counts.values())


@pytest.mark.parametrize("as_dict", [False, True])
def test_dicts_and_objects_are_taken_alike(tmp_path: Path, as_dict: bool) -> None:
    given = vars(make(4)) if as_dict else make(4)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([given])
        assert everything(buffer) == {4}
        buffer.save_checkpoint(tmp_path)
    (tree,) = saved_trees(tmp_path)
    assert tree["max_episode_length"] == 50


def test_cache_and_archive_give_the_same_batches(tmp_path: Path) -> None:
    """The same draws, whether all, some or none of the trajectories are in memory."""
    given = [make(i, steps=3 + i % 4, envs=1 + i % 2) for i in range(12)]
    batches = []
    for cache_size in (12, 3, 0):
        url = tmp_path / str(cache_size)
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=url / "rank_0", cache_size=cache_size) as buffer:
            buffer.add_trajectories(given)
            buffer.flush()
            assert buffer.get_stats()["cache_size"] == cache_size
            batches.append([check_batch(buffer.sample(40), 40) for _ in range(5)])
    assert batches[0] == batches[1] == batches[2]


def test_clear_cache_frees_what_can_be_read_again(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([make(0)])
        buffer.clear_cache()
        assert buffer.get_stats()["cache_size"] == 1  # it is nowhere else
        buffer.save_checkpoint(tmp_path)
        buffer.clear_cache()
        assert buffer.get_stats()["cache_size"] == 0
        assert everything(buffer) == {0}
        assert buffer.add_trajectories([make(1)]) == [1]
        assert everything(buffer) == {0, 1}


def test_weights_are_kept_and_can_be_filtered(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.add_trajectories([make(i) for i in range(4)])  # "weights-3_30", as documented
        plain = make(4)
        plain.model_weights_id = "0d8b7d9a-3c60-5f31-8c6e-1f6f7a1d5f00"  # as newer releases have it
        buffer.add_trajectories([plain], model_update_count=40)
        buffer.add_trajectories([make(5)], model_weights_uuid="w", model_update_count=50)
        buffer.add_trajectories([vars(make(6)) | {"model_weights_uuid": "x", "model_update_count": 60}])
        buffer.save_checkpoint(tmp_path)
    eps = archive.open(tmp_path).episodes
    assert [e.update_count for e in eps] == [0, 10, 20, 30, 40, 50, 60]
    assert [e.metadata["model_update_count"] for e in eps] == [0, 10, 20, 30, 40, 50, 60]
    assert [e.model_weights_uuid for e in eps][3:] == ["weights-3", "0d8b7d9a-3c60-5f31-8c6e-1f6f7a1d5f00", "w", "x"]
    chosen = eps.filter(update_count=(10, 41))
    assert [e.metadata["trajectory_id"] for e in chosen] == [1, 2, 3, 4]
    assert len(eps.filter(model_weights_uuid="weights-2")) == 1
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        buffer.load_episodes(chosen, in_memory=2)
        assert buffer.trajectory_ids == [1, 2, 3, 4]
        assert buffer.get_stats()["cache_size"] == 2
        assert everything(buffer) == {1, 2, 3, 4}


def test_any_archives_episodes_can_be_sampled(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for i in range(3):
            number = torch.arange(5) + 10 * i
            w.add_episode({"number": number, "obs": {"x": number[:, None].double()}, "text": ["a"] * 5})
    buffer = TrajectoryReplayBuffer()
    for in_memory in (0, 1, 3):
        buffer.load_episodes(arc.episodes, in_memory=in_memory)
        batch = buffer.sample(15)
        assert batch.keys() == {"number", "obs"}
        assert torch.equal(batch["obs"]["x"][:, 0], batch["number"].double())


def test_threads_may_add_sample_and_save_at_once(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path, cache_size=2, auto_save_interval_s=0.01, sample_window_size=10
    )
    buffer.add_trajectories([make(0)])
    failed: list[BaseException] = []
    stop = threading.Event()

    def sampling() -> None:
        try:
            while not stop.is_set():
                check_batch(buffer.sample(64, replace=True), 64)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=sampling) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(1, 40):
        assert buffer.add_trajectories([make(i)]) == [i]
        if i % 13 == 0:
            buffer.save_checkpoint(tmp_path)
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    buffer.close()
    assert not failed
    assert [len(ck.episodes) for ck in archive.open(tmp_path).checkpoints] == [14, 27, 40]
    assert len(archive.open(tmp_path).episodes) == 40


def test_what_is_not_in_memory_is_read_by_chunks(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A batch takes about a request for each chunk, and a fraction of the trajectories' bytes;
    in memory it takes none."""
    backend = make_backend(request, "moto", tmp_path)
    options = {"storage_options": backend.storage_options, "sample_window_size": 0}
    frames = [make(i, steps=90) for i in range(8)]
    for t in frames:
        t.curr_obs["image"] = torch.randint(0, 256, (90, 2, 48, 48), dtype=torch.uint8)
    with TrajectoryReplayBuffer(missing="skip", **options) as buffer:  # type: ignore[arg-type]
        buffer.add_trajectories(frames)
        buffer.save_checkpoint(backend.url)
    total = 8 * 90 * 2 * 48 * 48
    with TrajectoryReplayBuffer(**options) as buffer:  # type: ignore[arg-type]
        arc = archive.open(backend.url, storage_options=backend.storage_options)
        buffer.load_episodes(arc.episodes, in_memory=0)
        before = arc.io_stats()
        drawn = buffer.sample(4)
        used = arc.io_stats() - before
        assert used.bytes_in < total / 4
        rows = [(int(n) // 10000, int(n) % 10000 // 100, int(n) % 100) for n in drawn["prev_logprobs"][:, 0]]
        for (t, s, e), image in zip(rows, drawn["curr_obs"]["image"], strict=True):
            assert torch.equal(image, frames[t].curr_obs["image"][s, e])
        again = buffer.sample(1400)
        assert again["curr_obs"]["image"].shape == (1400, 48, 48)
        before = arc.io_stats()
        buffer.sample(1400)
        assert (arc.io_stats() - before).requests == 0  # the chunks are in memory now


@pytest.mark.parametrize("name", ["local", "moto"])
def test_a_url_that_cannot_be_written_says_so(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    backend = make_backend(request, name, tmp_path)
    url = backend.url.replace("bucket", "no-such-bucket") if name == "moto" else "/proc/nowhere/rank_0"
    buffer = TrajectoryReplayBuffer(storage_options=backend.storage_options)
    buffer.add_trajectories([make(0)])
    with pytest.raises((archive.ArchiveError, OSError)):
        buffer.save_checkpoint(url)
    with pytest.raises(NotFoundError):
        buffer.load_checkpoint(backend.url)
    assert everything(buffer) == {0}


@pytest.mark.parametrize("preload", [False, True])
def test_rlinfs_datasets_take_it(preload: bool) -> None:
    rlinf()
    datasets = pytest.importorskip("rlinf.data.embodied_buffer_dataset")
    kind = datasets.PreloadReplayBufferDataset if preload else datasets.ReplayBufferDataset
    replay, demo = TrajectoryReplayBuffer(), TrajectoryReplayBuffer()
    replay.add_trajectories([make(i) for i in range(3)])
    demo.add_trajectories([make(i) for i in range(5, 7)])
    dataset = kind(replay, demo, batch_size=8, min_replay_buffer_size=1, min_demo_buffer_size=1, prefetch_size=2)
    batch = next(iter(dataset))
    of = {n // 10000 for n in check_batch(batch, 8)}
    assert of & {0, 1, 2}
    assert of & {5, 6}
    if preload:
        dataset.close()


def test_what_was_added_is_committed_when_the_interpreter_ends(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom tests.support.trajectories import make\n"
        "from archive.buffers import TrajectoryReplayBuffer\n"
        "for i, wait in enumerate((None, False)):\n"
        "    b = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f'{sys.argv[1]}/{i}')\n"
        "    b.add_trajectories([make(0), make(1)])\n"
        "    if wait is not None: b.close(wait=wait)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True, timeout=60, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "uncommitted steps" not in done.stderr
    assert [len(archive.open(tmp_path / str(i)).episodes) for i in range(2)] == [2, 2]


def test_an_error_in_the_loop_waits_for_no_rank(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fail_in_the_loop(f"{tmp_path}/rank_0")
    assert time.monotonic() - started < 30


def fail_in_the_loop(path: str) -> None:
    with TrajectoryReplayBuffer(world_size=2, rank=0, session="s") as buffer:
        buffer.add_trajectories([make(0)])
        buffer.save_checkpoint(path)
        _ = 1 // 0


def test_a_slab_keeps_rows_apart_whatever_comes_and_goes() -> None:
    generator = torch.Generator().manual_seed(7)
    slab, held = Slab(), dict[int, Rows]()
    for key in range(300):
        count = int(torch.randint(1, 9, (), generator=generator))
        rows = {("a",): torch.full((count, 2), key), ("b", "c"): torch.arange(count) + 1000 * key}
        slab.put(key, rows, count)
        held[key] = rows
        while len(held) > int(torch.randint(1, 12, (), generator=generator)):
            gone = next(iter(held))
            del slab.spans[gone], held[gone]
        for other, rows in held.items():
            assert all(torch.equal(slab.view(other)[path], rows[path]) for path in rows)
    assert sum(t.nbytes for t in slab._tensors.values()) < 100 * 24


def test_sampling_from_memory_is_as_fast_as_rlinfs() -> None:
    kind, theirs = rlinf()
    logging.disable(logging.INFO)
    buffers = (TrajectoryReplayBuffer(), theirs())
    for buffer in buffers:
        for i in range(20):
            buffer.add_trajectories([make(i, steps=100, kind=kind)])
    took: list[list[float]] = [[], []]
    for _ in range(40):  # in turns, so that what else goes on hits both
        for times, buffer in zip(took, buffers, strict=True):
            started = time.perf_counter()
            buffer.sample(256)
            times.append(time.perf_counter() - started)
    logging.disable(logging.NOTSET)
    assert min(took[0]) < min(took[1])
