"""What the tests of checkpoints share: steps that name themselves, and what a checkpoint holds, by value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def steps(serials: Iterable[int], width: int = 4) -> dict[str, Any]:
    """Steps whose observations say which they are, each number once in the whole test."""
    serial = np.array(list(serials), np.int64)
    return {
        "obs": {"image": np.repeat(serial[:, None], width, 1).astype(np.float32)},
        "serial": serial,
        "reward": serial * 0.5,
    }


def serials(checkpoint: Any, buffer: str = "replay", rank: int | None = None) -> list[int]:
    """Which steps are live, in live order; that their observations are theirs is checked."""
    chosen = (
        checkpoint.episodes.filter(buffer=buffer)
        if rank is None
        else checkpoint.episodes.filter(buffer=buffer, rank=rank)
    )
    out: list[int] = []
    for data in chosen.read():
        assert (data["obs"]["image"] == data["serial"][:, None]).all()
        assert (data["reward"] == data["serial"] * 0.5).all()
        out += data["serial"].tolist()
    return out


def value_of(serial: Any) -> Any:
    """The priority that a step of this number has in these tests."""
    return np.asarray(serial, np.float64) * 3 + 1
