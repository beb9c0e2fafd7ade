"""Random batches of 256 steps: of frames on local disk, against RLinf's replay buffer (a .pt file a trajectory, and its
tensor cache); and of 2 KB steps from SeaweedFS with 20 ms of latency added to each request."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

sys.path.insert(0, str(common.ROOT))

TITLE = "sampling: batches of 256 random steps"
TRAJECTORIES, STEPS, FRAME = 500, 200, (84, 84)
BATCH, LATENCY_S = 256, 0.02
REMOTE_STEPS, REMOTE_BATCHES = 100_000, 40


def trajectory(number: int) -> dict[str, Any]:
    """Frames that no codec makes smaller, and small fields; its number and each step's are in the frames."""
    import torch

    generator = torch.Generator().manual_seed(number)
    frames = torch.randint(0, 256, (STEPS, *FRAME), dtype=torch.uint8, generator=generator)
    frames[:, 0, 0], frames[:, 0, 1] = number % 256, torch.arange(STEPS, dtype=torch.uint8)
    return {
        "obs": {"image": frames, "state": torch.rand(STEPS, 8, generator=generator)},
        "action": torch.rand(STEPS, 4, generator=generator),
        "reward": torch.rand(STEPS, 1, generator=generator),
        "done": (torch.arange(STEPS) == STEPS - 1)[:, None],
    }


def child_write(folder: str, compression: str, chunk_bytes: str) -> dict[str, Any]:
    import archive

    options = {"compression": None if compression == "none" else compression, "chunk_bytes": int(chunk_bytes) or None}
    with archive.create(folder).writer(**options) as w:
        for number in range(TRAJECTORIES):
            w.add_episode(trajectory(number))
    return {}


def child_write_pt(folder: str) -> dict[str, Any]:
    buffer = _peer(enable_cache=False, sample_window_size=0, auto_save=True, auto_save_path=folder)
    for number in range(0, TRAJECTORIES, 50):
        buffer.add_trajectories([_as_peer(trajectory(k)) for k in range(number, number + 50)])
    buffer.close()
    buffer.save_checkpoint(folder)
    return {}


def _peer(**options: Any) -> Any:
    from rlinf.data.replay_buffer import TrajectoryReplayBuffer

    return TrajectoryReplayBuffer(seed=1, **options)


def _as_peer(steps: dict[str, Any]) -> Any:
    from rlinf.data.embodied_io_struct import Trajectory

    return Trajectory(
        max_episode_length=STEPS,
        model_weights_id="w",
        actions=steps["action"][:, None],
        rewards=steps["reward"][:, None],
        dones=steps["done"][:, None],
        curr_obs={name: value[:, None] for name, value in steps["obs"].items()},
    )


def child_peer_uncached(folder: str) -> dict[str, Any]:
    buffer = _peer(enable_cache=False, sample_window_size=0, auto_save=True, auto_save_path=folder)
    buffer.load_checkpoint(folder)
    return _timed(lambda: buffer.sample(BATCH), 12)


def child_peer_cached() -> dict[str, Any]:
    buffer = _peer(enable_cache=True, cache_size=TRAJECTORIES, sample_window_size=TRAJECTORIES)
    for number in range(TRAJECTORIES):
        buffer.add_trajectories([_as_peer(trajectory(number))])
    return _timed(lambda: buffer.sample(BATCH), 300)


def child_uncached(folder: str) -> dict[str, Any]:
    """With no cache at all, so that each batch reads all of its chunks."""
    sampler = _sampler(folder, cache_bytes=0)
    return _timed(sampler.sample, 12, check=_check_frames)


def child_cold(folder: str) -> dict[str, Any]:
    """First batches of samplers that keep what they read, each with an empty cache."""
    return _timed(lambda: _sampler(folder).sample(), 8, check=_check_frames)


def child_cached(folder: str) -> dict[str, Any]:
    sampler = _sampler(folder)
    assert sampler.fill()
    assert sampler.ready == 1.0
    return _timed(sampler.sample, 300, check=_check_frames) | {"requests": sampler.io_stats.batch.requests}


def _sampler(folder: str, **options: Any) -> Any:
    import torch

    import archive
    from archive.torch import Sampler

    options = {"batch_size": BATCH, "replace": True, "index": True} | options
    return Sampler(archive.open(folder), generator=torch.Generator().manual_seed(1), **options)


def _check_frames(batch: Any) -> None:
    index, corner = batch["_index"], batch["obs"]["image"][:, 0]
    assert ((index // STEPS) % 256 == corner[:, 0]).all()
    assert (index % STEPS == corner[:, 1]).all()


def _timed(work: Callable[[], Any], times: int, check: Callable[[Any], None] = lambda batch: None) -> dict[str, Any]:
    """Median seconds of a call, after two that are not counted."""
    seconds = []
    for _ in range(times + 2):
        start = time.perf_counter()
        batch = work()
        seconds.append(time.perf_counter() - start)
        check(batch)
    return {"seconds": statistics.median(seconds[2:]), "least": min(seconds[2:])}


def child_remote(url: str, endpoint: str, fill: str) -> dict[str, Any]:
    """From an empty cache: steps a second over the first batches, and requests for each distinct chunk."""
    import archive
    from archive.torch import Sampler
    from tests.support import servers

    arc = archive.open(url, storage_options=servers.s3fs_options(endpoint))
    assert len(arc.episodes)
    start = time.perf_counter()
    sampler = Sampler(arc, batch_size=BATCH, prefetch=2, fill=fill == "fill")
    firsts, chunks = [], 0
    for _ in range(REMOTE_BATCHES):
        batch = sampler.sample()
        assert (batch["x"][:, 0].long() == batch["t"]).all()
        firsts.append(time.perf_counter() - start)
    total = sampler.io_stats.total
    chunks = sum(int(pool.present.sum()) for pool in sampler._gather._here().store._pools.values())
    sampler.close()
    return {
        "seconds": firsts[-1],
        "first": firsts[0],
        "requests": total.requests,
        "chunks": chunks,
        "bytes": total.bytes,
    }


def child_write_remote(url: str, endpoint: str) -> dict[str, Any]:
    import numpy as np

    import archive
    from tests.support import servers

    arc = archive.create(url, storage_options=servers.s3fs_options(endpoint))
    with arc.writer(compression=None) as w:
        for start in range(0, REMOTE_STEPS, STEPS):
            t = np.arange(start, start + STEPS)
            x = np.random.default_rng(start).random((STEPS, 480), np.float32)
            x[:, 0] = t
            w.add_episode({"t": t, "x": x, "action": x[:, :24], "reward": x[:, 0]})
    return {}


@contextmanager
def _remote() -> Iterator[tuple[str, str, Any]]:
    """(URL, the server's endpoint, a proxy before it)."""
    from tests.support import servers
    from tests.support.proxy import FaultProxy

    with pytest.MonkeyPatch.context() as patch, servers.seaweedfs() as endpoint:
        for name, value in servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        servers.make_bucket(endpoint, "bucket")
        with FaultProxy(endpoint) as proxy:
            yield "s3://bucket/sampling", endpoint, proxy


def measure() -> Sequence[common.Row]:
    return [*_local_rows(), *_remote_rows()]


def _local_rows() -> Iterator[common.Row]:
    peer_cached = common.child(__file__, "peer_cached")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        common.child(__file__, "write_pt", f"{folder}/pt")
        peer = common.child(__file__, "peer_uncached", f"{folder}/pt")
        for compression, chunk_bytes in (("none", 65_536), ("zstd:1", 65_536), ("none", 0), ("zstd:1", 0)):
            path = f"{folder}/archive-{compression[:4]}-{chunk_bytes}"
            common.child(__file__, "write", path, compression, chunk_bytes)
            ways = {way: common.child(__file__, way, path) for way in ("uncached", "cold", "cached")}
            told = f"{compression}, " + (f"chunks of {chunk_bytes // 1024} KB" if chunk_bytes else "usual chunks")
            yield common.bounded(
                f"uncached, against loading .pt files, {told}", peer["seconds"] / ways["uncached"]["seconds"], least=10,
                ours_s=ways["uncached"], peer_s=peer,
            )  # fmt: skip
            yield common.bounded(
                f"uncached, what is read is kept, {told}",
                peer["seconds"] / ways["cold"]["seconds"],
                ours_s=ways["cold"],
            )
            yield common.bounded(
                f"cached, against a gather from tensors, {told}", peer_cached["seconds"] / ways["cached"]["seconds"],
                least=1, ours_s=ways["cached"], peer_s=peer_cached,
            )  # fmt: skip


def _remote_rows() -> Iterator[common.Row]:
    with _remote() as (url, endpoint, proxy):
        common.child(__file__, "write_remote", url, endpoint)
        proxy.add("delay", times=-1, seconds=LATENCY_S)
        for fill in ("no", "fill"):
            proxy.log.clear()
            found = common.child(__file__, "remote", url, proxy.endpoint, fill)
            seen = sum("/shards/" in one.path for one in proxy.log)
            told = "SeaweedFS, 20 ms" + (", filling behind" if fill == "fill" else "")
            speed = REMOTE_BATCHES * BATCH / found["seconds"]
            yield common.bounded(f"{told}: steps of 2 KB", speed, least=1000, unit="1/s", **found)
            yield common.bounded(f"{told}: first batch", found["first"], most=2, unit="s")
            yield common.bounded(f"{told}: requests for each distinct chunk", seen / found["chunks"], most=1.2)


@pytest.mark.bench
def test_sampling() -> None:
    pytest.importorskip("rlinf.data.replay_buffer", reason="the peer is RLinf's replay buffer")
    common.report(TITLE, measure())


CHILDREN: dict[str, Callable[..., Any]] = {
    "write": child_write, "write_pt": child_write_pt, "peer_uncached": child_peer_uncached,
    "peer_cached": child_peer_cached, "uncached": child_uncached, "cold": child_cold, "cached": child_cached,
    "remote": child_remote, "write_remote": child_write_remote,
}  # fmt: skip

if __name__ == "__main__":
    common.main(TITLE, measure, CHILDREN)
