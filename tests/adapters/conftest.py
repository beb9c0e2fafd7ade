"""A dataset of Minari, made by Minari."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.dataset_files import LENGTHS


@pytest.fixture
def pen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A local dataset with nested observations, an image, a tuple of actions and infos."""
    real = pytest.importorskip("minari", reason="minari is not installed")
    pytest.importorskip("h5py", reason="h5py is not installed")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    rng, buffers = np.random.default_rng(0), []
    for i, n in enumerate(LENGTHS):
        last = np.arange(n) == n - 1
        buffers.append(
            EpisodeBuffer(
                id=i, seed=7 + i, rewards=rng.normal(size=n), terminations=last & (i == 0), truncations=last & (i == 1),
                observations={
                    "state": rng.normal(size=(n + 1, 2)), "image": rng.integers(0, 255, (n + 1, 8, 8, 3), np.uint8),
                },
                actions=(rng.integers(0, 4, n), rng.normal(size=(n, 3)).astype(np.float32)),
                infos={"x": np.arange(n + 1)},
            )
        )  # fmt: skip
    seen = {"state": spaces.Box(-np.inf, np.inf, (2,), np.float64), "image": spaces.Box(0, 255, (8, 8, 3), np.uint8)}
    done = spaces.Tuple((spaces.Discrete(4), spaces.Box(-np.inf, np.inf, (3,), np.float32)))
    return real.create_dataset_from_buffers(
        "hand/pen-v0", buffers, observation_space=spaces.Dict(seen), action_space=done, algorithm_name="expert",
        author="somebody", jpeg_encoding=False,
    )  # fmt: skip
