"""archive.buffers.TrajectoryReplayBuffer beside RLinf's: batches of 256 transitions of frames,
in memory and from disk."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "TrajectoryReplayBuffer: batches of 256 transitions"
TRAJECTORIES, STEPS, FRAME, BATCH = 500, 200, (84, 84), 256


def trajectory(number: int) -> Any:
    """Frames that no codec makes smaller; its number and each step's are in them."""
    import torch
    from rlinf.data.embodied_io_struct import Trajectory

    generator = torch.Generator().manual_seed(number)
    frames = torch.randint(0, 256, (STEPS, 1, *FRAME), dtype=torch.uint8, generator=generator)
    frames[:, 0, 0, 0], frames[:, 0, 0, 1] = number % 256, torch.arange(STEPS, dtype=torch.uint8)
    step = torch.arange(STEPS)[:, None, None] + 1000.0 * number
    return Trajectory(
        max_episode_length=STEPS, model_weights_id=f"w_{number}", actions=torch.rand(STEPS, 1, 4, generator=generator),
        rewards=step, dones=torch.zeros(STEPS + 1, 1, 1, dtype=torch.bool), prev_logprobs=step.clone(),
        curr_obs={"image": frames, "state": torch.rand(STEPS, 1, 8, generator=generator)},
    )  # fmt: skip


def _filled(buffer: Any) -> Any:
    for start in range(0, TRAJECTORIES, 25):
        buffer.add_trajectories([trajectory(k) for k in range(start, start + 25)])
    return buffer


def _ours(**options: Any) -> Any:
    from archive.buffers import TrajectoryReplayBuffer

    return TrajectoryReplayBuffer(seed=1, sample_window_size=0, **options)


def _theirs(**options: Any) -> Any:
    from rlinf.data.replay_buffer import TrajectoryReplayBuffer

    return TrajectoryReplayBuffer(seed=1, **options)


def _timed(work: Callable[[], Any], times: int) -> dict[str, Any]:
    seconds = []
    for _ in range(times + 2):
        start = time.perf_counter()
        batch = work()
        seconds.append(time.perf_counter() - start)
        _check(batch)
    return {"seconds": statistics.median(seconds[2:]), "least": min(seconds[2:])}


def _check(batch: Any) -> None:
    number, image = batch["prev_logprobs"][:, 0].long(), batch["curr_obs"]["image"]
    assert image.shape == (BATCH, *FRAME)
    assert ((number // 1000) % 256 == image[:, 0, 0]).all()
    assert (number % 1000 == image[:, 0, 1]).all()


def child_cached(folder: str) -> dict[str, Any]:
    buffer = _filled(_ours())
    return _timed(lambda: buffer.sample(BATCH), 300)


def child_peer_cached(folder: str) -> dict[str, Any]:
    buffer = _filled(_theirs(sample_window_size=TRAJECTORIES))
    return _timed(lambda: buffer.sample(BATCH), 300)


def child_write(folder: str) -> dict[str, Any]:
    """Also: what a checkpoint takes when all is there already."""
    with _filled(_ours(auto_save=True, auto_save_path=f"{folder}/ours/rank_0", enable_cache=False)) as buffer:
        buffer.save_checkpoint(f"{folder}/ours/rank_0")
        before = _bytes_below(folder)
        seconds = common.timed(lambda: buffer.save_checkpoint(f"{folder}/ours/rank_0"))
        return {"seconds": seconds, "bytes": _bytes_below(folder) - before}


def _bytes_below(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def child_peer_write(folder: str) -> dict[str, Any]:
    buffer = _filled(
        _theirs(auto_save=True, auto_save_path=f"{folder}/theirs", enable_cache=False, sample_window_size=0)
    )
    buffer.close()
    return {}


def child_uncached(folder: str) -> dict[str, Any]:
    """With no cache at all, so that each batch reads all of its chunks."""
    buffer = _ours(auto_save=True, auto_save_path=f"{folder}/ours/rank_0", enable_cache=False, cache_bytes=0)
    loading = common.timed(lambda: buffer.load_checkpoint(f"{folder}/ours/rank_0"))
    return _timed(lambda: buffer.sample(BATCH), 12) | {"load_s": loading}


def child_peer_uncached(folder: str) -> dict[str, Any]:
    buffer = _theirs(auto_save=True, auto_save_path=f"{folder}/theirs", enable_cache=False, sample_window_size=0)
    buffer.load_checkpoint(f"{folder}/theirs")
    return _timed(lambda: buffer.sample(BATCH), 8)


def measure() -> Sequence[common.Row]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found = {name: common.child(__file__, name, folder) for name in CHILDREN}
    cached = found["peer_cached"]["seconds"] / found["cached"]["seconds"]
    uncached = found["peer_uncached"]["seconds"] / found["uncached"]["seconds"]
    saved = found["write"]
    return [
        common.bounded("in memory, against RLinf's", cached, least=1, ours=found["cached"], peer=found["peer_cached"]),
        common.bounded(
            "from disk, against RLinf's .pt files", uncached, least=10, ours=found["uncached"],
            peer=found["peer_uncached"]
        ),
        common.bounded("a resume of 500 trajectories, none in memory", found["uncached"]["load_s"], unit="s"),
        common.bounded("a checkpoint with nothing new", saved["bytes"] / 1024, most=64, unit="KB", **saved),
    ]  # fmt: skip


@pytest.mark.bench
def test_trajectory_buffer() -> None:
    pytest.importorskip("rlinf.data.replay_buffer", reason="the peer is RLinf's replay buffer")
    common.report(TITLE, measure())


CHILDREN: dict[str, Callable[..., Any]] = {
    "cached": child_cached, "peer_cached": child_peer_cached, "write": child_write, "peer_write": child_peer_write,
    "uncached": child_uncached, "peer_uncached": child_peer_uncached,
}  # fmt: skip

if __name__ == "__main__":
    common.main(TITLE, measure, CHILDREN)
