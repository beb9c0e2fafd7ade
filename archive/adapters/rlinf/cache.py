"""The cache of RLinf's buffer: its slots as state, and filled again, slot by slot or with the newest trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.fields import mapped


def cache_state(cache: Any) -> dict[str, Any] | None:
    """Which trajectory is in which slot, and what the slots are made of; not what they hold."""
    if cache is None:
        return None
    return {
        "max_size": cache.max_size, "slot_length": cache._traj_num_samples, "last_slot": cache._last_slot,
        "ids": np.array(list(cache.cache), np.int64), "slots": np.array(list(cache.cache.values()), np.int64),
        "rows": None if cache._buffer is None else mapped(cache._buffer, lambda t: (t.dtype, tuple(t.shape[1:]))),
    }  # fmt: skip


@dataclass
class ExactCache:
    """A cache with its slots as they were, waiting for what they hold."""

    cache: Any
    slots: Mapping[int, int]

    def put(self, number: int, trajectory: Any, flatten: Callable[[Any], dict[str, Any]]) -> None:
        """Fill the slot of a trajectory, if it has one."""
        if number not in self.slots:
            return
        value = flatten(trajectory)
        self.cache._traj_key_lengths[number] = self.cache._get_key_lengths(value)
        self.cache._insert_into_buffer(value, self.cache._buffer, self.slots[number] * self.cache._traj_num_samples)


def restore_cache(cache: Any, state: Mapping[str, Any] | None) -> ExactCache | None:
    """The cache's slots as they were; None if it is of another size now."""
    if state is None or state["max_size"] != cache.max_size:
        return None
    cache.clear()
    slots = dict(zip(state["ids"].tolist(), state["slots"].tolist(), strict=True))
    if state["rows"] is not None:
        cache._traj_num_samples = state["slot_length"]
        rows = cache.max_size * state["slot_length"]
        cache._buffer = mapped(state["rows"], lambda row: torch.zeros((rows, *row[1]), dtype=row[0]))
    cache.cache.update(slots)
    cache._slot_to_id.update({slot: number for number, slot in slots.items()})
    cache._last_slot = state["last_slot"]
    return ExactCache(cache, slots)
