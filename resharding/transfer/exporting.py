"""Bulk export: episodes as plain files that need nothing of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive import Archive
from archive import open as open_archive
from archive.base import UsageError, escape_path
from archive.fields import Ragged, flatten
from archive.read import Episodes
from archive.store import Storage
from resharding.transfer import rows
from resharding.transfer.rows import plain

FORMATS = ("npz", "parquet")
EPISODES_PER_FILE = 64


def export(
    source: Any,
    to: Any,
    *,
    format: str = "npz",
    fields: Any = None,
    missing: Any = "error",
    episodes_per_file: int = EPISODES_PER_FILE,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write episodes to files below the URL `to`; their names, in the episodes' order. Files of the same names are
    replaced.

    source: an archive, its URL, or some Episodes of it.  format: "npz" (arrays `<episode>/<field>`, episodes numbered
    within the file, and `episodes`, a JSON list of what is known of each; ragged fields as `<field>.values` end to end
    and `<field>.lengths`) or "parquet" (one row a step, see `resharding.transfer.rows`).
    progress: called with (files done, files).
    """
    if format not in FORMATS:
        raise UsageError(f"format={format!r}: give one of {', '.join(FORMATS)}")
    if episodes_per_file < 1:
        raise UsageError(f"episodes_per_file={episodes_per_file}: give 1 or more")
    episodes = _episodes(source, storage_options)
    target = Storage.connect(to, dict(storage_options or {}))
    starts = range(0, len(episodes), episodes_per_file)
    names = [f"part-{i:06d}.{format}" for i in range(len(starts))]
    for done, (name, start) in enumerate(zip(names, starts, strict=True), 1):
        part = episodes[start : start + episodes_per_file]
        data = part.read(fields, missing=missing, ragged="flat")
        about = part.table.drop_columns(["created_at"]).to_pylist()
        target.put(name, _npz(about, data) if format == "npz" else rows.parquet(part, data))
        if progress is not None:
            progress(done, len(names))
    return names


def _episodes(source: Any, options: Mapping[str, Any] | None) -> Episodes:
    if isinstance(source, Episodes):
        return source
    return (source if isinstance(source, Archive) else open_archive(source, storage_options=options)).episodes


def _leaves(steps: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, array) of each field; ragged ones as two, values of JSON fields as text."""
    for path, leaf in flatten(steps):
        name = escape_path(path)
        if isinstance(leaf, Ragged):
            yield f"{name}.values", leaf.values
            yield f"{name}.lengths", leaf.lengths
        elif isinstance(leaf, list):
            yield name, np.array([json.dumps(value, default=str) for value in leaf])
        elif isinstance(leaf, np.ndarray):
            yield name, leaf.astype(str) if leaf.dtype == object else leaf


def _npz(about: Sequence[dict[str, Any]], data: Sequence[dict[str, Any]]) -> bytes:
    """numpy's own format; dtypes that it does not know are stored as their bits."""
    arrays = {"episodes": np.array(json.dumps(about))}
    for i, steps in enumerate(data):
        arrays |= {f"{i}/{name}": plain(array) for name, array in _leaves(steps)}
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # a name may not be that of its options, says numpy
    return out.getvalue()
