"""Writes folders that RLinf's own `load_checkpoint` reads, on any fsspec filesystem."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from archive.adapters.rlinf.files import dump
from archive.adapters.rlinf.folder import METADATA
from archive.adapters.rlinf.numbers import Numbered, Trajectories, listed_at
from archive.adapters.rlinf.source import INDEXES
from archive.base import AlreadyExistsError, UsageError, one_line
from archive.store import Storage

_WEIGHTS = re.compile(r"[^/\\\x00-\x1f]*")
_MOST_BYTES = 200  # of weights in a name, which may have 255


def check_free(storage: Storage, prefix: str) -> None:
    """Refuse a folder that a buffer lies in already."""
    names = storage.list(prefix)
    taken = [name for name in names if name in (METADATA, *INDEXES) or name.startswith(("trajectory_", "rank_"))]
    if taken:
        raise AlreadyExistsError(f"{storage.full_url(prefix + taken[0])} is there already; export to an empty folder")


def write(storage: Storage, prefix: str, found: Trajectories) -> int:
    """Write one buffer's folder; how many trajectories. metadata.json comes last: without it RLinf loads nothing."""
    entries: dict[int, dict[str, Any]] = {}
    kind = found.file_kind

    def files() -> Iterator[tuple[str, bytes]]:
        for one in found:
            entries[one.number] = one.entry
            yield prefix + _name(one, kind), dump(one.tree, kind)

    storage.put_many(files())
    order = sorted(entries, key=listed_at(found.state))
    index = {"trajectory_index": {str(n): entries[n] for n in order}, "trajectory_id_list": order}
    metadata = {
        "trajectory_format": kind,
        "size": len(entries),
        "total_samples": sum(entry["num_samples"] for entry in entries.values()),
        "trajectory_counter": max(int(found.state.get("counter", 0)), max(entries, default=-1) + 1),
        "seed": found.seed,
    }
    storage.put(prefix + INDEXES[0], json.dumps(index).encode())
    storage.put(prefix + METADATA, json.dumps(metadata).encode())
    return len(entries)


def _name(one: Numbered, kind: str) -> str:
    weights = one.entry["model_weights_id"]
    if not _WEIGHTS.fullmatch(weights) or one_line(weights) != weights or len(weights.encode()) > _MOST_BYTES:
        raise UsageError(f"trajectory {one.number}: model_weights_id {weights!r} cannot be part of a file's name")
    return f"trajectory_{one.number}_{weights}.{kind}"
