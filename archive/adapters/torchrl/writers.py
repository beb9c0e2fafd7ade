"""Writers: cursors, counters and the heap of the best items; and back, at any capacity."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl.parts import Parts, load_state, module
from archive.adapters.torchrl.samplers import Placed
from archive.adapters.torchrl.saving import Cells
from archive.arrays import Ints
from archive.base import UsageError

_NOT_IN_HEAP = -1


def columns_of(parts: Parts, live: Ints) -> dict[str, Any]:
    """Rank of each live step in the heap of the best, and its place there."""
    if not parts.max_value:
        return {}
    heap = parts.writer._current_top_values
    size = max(len(parts.storage), *(int(slot) + 1 for _, slot in heap), 0) if heap else len(parts.storage)
    rank, place = np.zeros(size), np.full(size, _NOT_IN_HEAP, np.int64)
    for i, (value, slot) in enumerate(heap):
        rank[int(slot)], place[int(slot)] = float(value), i
    return {"heap_rank": rank[live], "heap_place": place[live]}


def state_of(parts: Parts) -> dict[str, Any]:
    writer = parts.writer
    out: dict[str, Any] = {"class": type(writer).__name__}
    if parts.round_robin:
        generation = writer._generation if writer.tracks_generations else None
        return out | {
            "cursor": int(writer._cursor), "write_count": int(writer._write_count),
            "generation": None if generation is None else generation,
        }  # fmt: skip
    if parts.max_value:
        key = writer._rank_key
        return out | {
            "cursor": int(writer._cursor), "write_count": int(writer._write_count), "reduction": writer._reduction,
            "rank_key": [key] if isinstance(key, str) else list(key),
        }  # fmt: skip
    try:
        return out | {"dict": dict(writer.state_dict())}
    except NotImplementedError as e:
        raise UsageError(f"the writer {type(writer).__name__} has no state_dict(), so its state cannot be saved") from e


def restore(parts: Parts, cells: Cells, states: Mapping[int, Any], own: Any, placed: Placed) -> list[str]:
    """Give a writer its state again. own: its state where nothing moved, else None."""
    if parts.max_value:
        return _restore_heap(parts, cells, own, placed)
    if parts.round_robin:
        _restore_cursor(parts, own, placed)
        return []
    if own and own["class"] == type(parts.writer).__name__ and own.get("dict"):
        load_state(parts.writer, own["dict"])
    return []


def _restore_cursor(parts: Parts, own: Any, placed: Placed) -> None:
    writer, storage = parts.writer, parts.storage
    if own and "cursor" in own:
        writer._cursor, writer._write_count = own["cursor"], own["write_count"]
        if own.get("generation") is not None and writer.tracks_generations:
            writer._generation = own["generation"].clone()
            writer._align_generation_device()
        return
    capacity = -(-int(storage.max_size) // max(1, placed.inner))
    writer._cursor, writer._write_count = placed.rows % max(1, capacity), placed.rows
    if placed.rows and hasattr(storage, "_last_cursor"):
        storage._set_last_cursor(placed.rows - 1)


def _restore_heap(parts: Parts, cells: Cells, own: Any, placed: Placed) -> list[str]:
    writer = parts.writer
    notes: list[str] = []
    if "heap_rank" in placed.columns:
        rank, place = (np.asarray(placed.columns[n]) for n in ("heap_rank", "heap_place"))
        held = np.flatnonzero(place != _NOT_IN_HEAP)
        held = held[np.argsort(place[held], kind="stable")]
        heap = [(float(rank[i]), int(placed.cells[i])) for i in held.tolist()]
    else:
        heap = _ranked(writer, cells, placed)
        notes = ["the checkpoint has no heap of ranks: they are taken from the steps"]
    if not (own and "rank_key" in own):
        heapq.heapify(heap)
    writer._current_top_values = heap
    if own and "cursor" in own:
        writer._cursor, writer._write_count = own["cursor"], own["write_count"]
    else:
        writer._cursor, writer._write_count = placed.rows % max(1, int(parts.storage.max_size)), placed.rows
    return notes


def _ranked(writer: Any, cells: Cells, placed: Placed) -> list[tuple[float, int]]:
    """The rank of each step by the writer's own key."""
    key = writer._rank_key
    values = cells.flat((key,) if isinstance(key, str) else tuple(key)) if len(placed.cells) else []
    if values is None:
        raise UsageError(f"the steps have no field {key!r}, by which the writer ranks them; give it another rank_key")
    reduce = module("utils")._reduce
    out = []
    for cell in placed.cells.tolist():
        value = torch.as_tensor(values[cell])
        out.append(
            (float(value) if value.numel() == 1 else float(reduce(value.reshape(-1), writer._reduction, dim=0)), cell)
        )
    return out
