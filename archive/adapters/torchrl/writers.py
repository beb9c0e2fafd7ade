"""Writers: cursors, counters and the heap of the best items; and back, at any capacity."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from archive.adapters.torchrl.cells import Cells
from archive.adapters.torchrl.episodes import as_path
from archive.adapters.torchrl.parts import Parts, load_state, module, state_dict_of
from archive.adapters.torchrl.places import Placed
from archive.arrays import Ints
from archive.base import UsageError
from archive.fields import dtypes

_NOT_IN_HEAP = -1


def columns_of(parts: Parts, live: Ints) -> dict[str, Any]:
    """Rank of each live step in the heap of the best, and its place there."""
    if not parts.max_value:
        return {}
    heap = parts.writer._current_top_values or []
    size = max([len(parts.storage), *(int(slot) + 1 for _, slot in heap)])
    rank, place = np.zeros(size), np.full(size, _NOT_IN_HEAP, np.int64)
    for i, (value, slot) in enumerate(heap):
        rank[int(slot)], place[int(slot)] = float(value), i
    return {"heap_rank": rank[live], "heap_place": place[live]}


def state_of(parts: Parts) -> dict[str, Any]:
    """What the writer knows beside the columns."""
    writer = parts.writer
    out: dict[str, Any] = {"class": type(writer).__name__}
    if not (parts.round_robin or parts.max_value):
        return out | {"dict": state_dict_of(writer, "writer")}
    out |= {"cursor": int(writer._cursor), "write_count": int(writer._write_count)}
    if parts.round_robin:
        return out | {"generation": writer._generation if writer.tracks_generations else None}
    return out | {"reduction": writer._reduction, "rank_key": list(as_path(writer._rank_key) or ())}


def restore(parts: Parts, cells: Cells, placed: Placed) -> list[str]:
    """Give a writer its state again; what there is to say of that, for people."""
    writer, own = parts.writer, placed.own("writer")
    if not (parts.round_robin or parts.max_value):
        if own.get("class") == type(writer).__name__ and own.get("dict"):
            load_state(writer, own["dict"])
        return []
    rows = placed.target.rows
    if "cursor" in own:
        writer._cursor, writer._write_count = own["cursor"], own["write_count"]
    else:
        each = placed.target.columns if parts.round_robin else 1
        writer._cursor, writer._write_count = rows % max(1, -(-int(parts.storage.max_size) // each)), rows
    if parts.max_value:
        return _restore_heap(writer, cells, placed)
    if own.get("generation") is not None and writer.tracks_generations:
        writer._generation = own["generation"].clone()
        writer._align_generation_device()
    if "cursor" not in own and rows and hasattr(parts.storage, "_last_cursor"):
        parts.storage._set_last_cursor(rows - 1)
    return []


def _restore_heap(writer: Any, cells: Cells, placed: Placed) -> list[str]:
    notes: list[str] = []
    if "heap_rank" in placed.columns:
        rank, place = placed.columns["heap_rank"], placed.columns["heap_place"]
        held = np.flatnonzero(place != _NOT_IN_HEAP)
        held = held[np.argsort(place[held], kind="stable")]
        heap = [(float(rank[i]), int(placed.cells[i])) for i in held.tolist()]
    else:
        heap = _ranked(writer, cells, placed.cells)
        notes = ["the checkpoint has no heap of ranks: they are taken from the steps"]
    if "rank_key" not in placed.own("writer"):
        heapq.heapify(heap)
    writer._current_top_values = heap
    return notes


def _ranked(writer: Any, cells: Cells, placed: Ints) -> list[tuple[float, int]]:
    """The rank of each step by the writer's own key."""
    key = as_path(writer._rank_key) or ()
    values = cells.flat(key) if len(placed) else np.zeros(0)
    if values is None:
        raise UsageError(
            f"the steps have no field {writer._rank_key!r}, by which the writer ranks them; give it another rank_key"
        )
    reduce = module("utils")._reduce
    out = []
    for cell in placed.tolist():
        value = dtypes.to_torch(np.asarray(values[cell]))
        number = value if value.numel() == 1 else reduce(value.reshape(-1), writer._reduction, dim=0)
        out.append((float(number), cell))
    return out
