"""RLinf's own objects for tests: trajectories of all sorts, live buffers, and comparisons to the bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.places import DATA

FIXTURE, DOCUMENTED = DATA / "rlinf", DATA / "rlinf_documented_names"


def package() -> Any:
    """RLinf's module with the buffer, or a skip."""
    module = pytest.importorskip("rlinf.data.replay_buffer", reason="rlinf is not installed", exc_type=ImportError)
    logging.getLogger(module.get_logger().name).setLevel(logging.ERROR)
    return module


def tree(
    number: int, steps: int = 4, envs: int = 2, *, done_rows: int = 1, update: int | None = None
) -> dict[str, Any]:
    """What RLinf saves of one trajectory: next_obs mostly the next curr_obs, another dtype in `states`."""
    g = torch.Generator().manual_seed(number)
    images = torch.randint(0, 255, (steps + 1, envs, 6, 6, 3), generator=g, dtype=torch.uint8)
    dones = torch.rand((steps + done_rows, envs, 1), generator=g) < 0.3
    weights = f"0b5aa3e2-0000-5000-8000-{number:012d}"
    return {
        "max_episode_length": 50, "model_weights_id": weights if update is None else f"{weights}_{update}",
        "actions": torch.randn((steps, envs, 3), generator=g), "rewards": torch.randn((steps, envs, 1), generator=g),
        "dones": dones, "terminations": dones[done_rows:].clone(), "truncations": torch.zeros_like(dones[done_rows:]),
        "prev_logprobs": torch.randn((steps, envs, 3), generator=g).to(torch.float64),
        "prev_values": torch.randn((steps + 1, envs, 1), generator=g),
        "versions": torch.full((steps, envs), float(number)),
        "forward_inputs": {"tokens": torch.randint(0, 99, (steps, envs, 5), generator=g)},
        "curr_obs": {"images": images[:-1].clone(), "states": torch.randn((steps, envs, 4), generator=g).bfloat16()},
        "next_obs": {"images": images[1:].clone(), "states": torch.randn((steps, envs, 4), generator=g)},
    }  # fmt: skip


def trajectory(number: int, **options: Any) -> Any:
    """The same as RLinf's object."""
    return trajectory_of(tree(number, **options))


def trajectory_of(fields: dict[str, Any]) -> Any:
    """A tree as RLinf's object."""
    made = package().Trajectory()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def buffer(
    numbers: Sequence[int] = (), *, folder: Path | None = None, window: int = 3, seed: int = 5, cache: int = 2
) -> Any:
    """A live buffer with these trajectories; with a folder, auto_save is on."""
    kept: dict[str, Any] = {} if folder is None else {"auto_save": True, "auto_save_path": str(folder)}
    made = package().TrajectoryReplayBuffer(seed=seed, sample_window_size=window, cache_size=cache, **kept)
    for number in numbers:
        made.add_trajectories([trajectory(number, steps=3 + number % 4)])
    wait_for_files(made)
    return made


def wait_for_files(made: Any) -> None:
    """RLinf writes them in the background, and cannot sample what is not there yet."""
    deadline = time.monotonic() + 60
    for number in made._trajectory_file_path:
        while True:
            try:
                made._load_trajectory(number, made._trajectory_index[number]["model_weights_id"])
                break
            except (OSError, RuntimeError, EOFError):
                assert time.monotonic() < deadline, number
                time.sleep(0.01)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equal to the bit: types, keys, dtypes, shapes and bytes."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert _bits(one) == _bits(other), where
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert one == other, where


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def saved_trees(folder: Path) -> dict[str, Any]:
    """File name -> tree, of all trajectory files below a folder."""
    files = sorted(folder.rglob("trajectory_*.pt"))
    return {str(f.relative_to(folder)): torch.load(f, weights_only=True) for f in files}


def samples(made: Any, count: int = 20, chunks: int = 6) -> list[Any]:
    return [made.sample(chunks) for _ in range(count)]


def plain_state(made: Any) -> dict[str, Any]:
    """What a buffer knows, but for its seed's generator and the folder that it writes to."""
    cache = made._flat_trajectory_cache
    return {
        "index": made._trajectory_index, "list": made._trajectory_id_list, "counter": made._trajectory_counter,
        "stats": made.get_stats(), "size": len(made), "version": made._index_version, "seed": made.seed,
        "files": sorted(made._trajectory_file_path),
        "window": [made._window_cache_size, made._window_cache_version, made._window_cache_ids],
        "ends": [made._window_cache_cumulative_ends, made._window_cache_cumulative_ends_tensor],
        "samples": [made._total_samples, made._window_cache_total_samples],
        "generator": made.random_generator.get_state(),
        "cache": [cache.cache, cache._last_slot, cache._slot_to_id, cache._traj_num_samples, cache._traj_key_lengths],
        "held": {number: cache.get(number) for number in cache.cache},
    }  # fmt: skip
