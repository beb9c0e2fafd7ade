"""Reading the steps of a share in order: as rows of arrays where all fields are numbers, else episode by episode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from archive.adapters.torchrl.places import Given
from archive.arrays import run_starts, spans
from archive.fields import Path, leaves, nesting, unflatten
from archive.read import Gather

_BATCH_BYTES = 32 * 1024 * 1024
_CACHE_BYTES = 8 * _BATCH_BYTES
Batches = Iterator[tuple[int, dict[str, Any]]]


def batches(given: Given) -> Batches:
    """(number of the first step, steps) in order, of one source rank and one kind of fields,
    some megabytes at a time."""
    rows = Gather(given.part.episodes, cache_bytes=_CACHE_BYTES)
    try:
        groups = _alike(given)
        step_bytes = [_plain_bytes(rows, lo) for lo, _ in groups]
        yield from _by_episodes(given) if 0 in step_bytes else _by_rows(given, rows, groups, step_bytes)
    finally:
        rows.close()


def _alike(given: Given) -> list[tuple[int, int]]:
    """Episodes [lo, hi) that follow each other, of one source rank and with the same fields; those with steps."""
    source, code, length = given.layout.source_rank, given.part.schema_numbers, np.asarray(given.layout.length)
    some = np.flatnonzero(length > 0)
    return list(pairwise([*some[run_starts(source[some], code[some])].tolist(), len(length)]))


def _plain_bytes(rows: Gather, number: int) -> int:
    """Bytes of a step of this episode if all its fields are numbers of one shape; else 0."""
    fields = [leaf for _, leaf in nesting.flatten(rows.rows([number], [0]))]
    plain = all(isinstance(leaf, np.ndarray) and leaf.dtype != object for leaf in fields)
    return max(1, sum(leaf.nbytes for leaf in fields)) if plain and fields else 0


def _by_rows(given: Given, rows: Gather, groups: list[tuple[int, int]], step_bytes: list[int]) -> Batches:
    """A batch at a time, in any number of episodes."""
    begins = np.cumsum(given.layout.length) - given.layout.length
    for (lo, hi), nbytes in zip(groups, step_bytes, strict=True):
        length = np.asarray(given.layout.length[lo:hi], np.int64)
        numbers, steps = np.repeat(np.arange(lo, hi), length), spans(np.zeros(len(length), np.int64), length)
        depth = max(1, _BATCH_BYTES // nbytes)
        for at in range(0, len(numbers), depth):
            some = slice(at, at + depth)
            batch = rows.rows(numbers[some], steps[some])
            yield int(begins[lo]) + at, given.part.renumber_rows(batch, numbers[some])


def _by_episodes(given: Given) -> Batches:
    """Episode by episode, those of one kind put together."""
    held: list[dict[Path, Any]] = []
    kind: Any = None
    start = steps = nbytes = 0
    for i, (_, nest) in enumerate(given.part.stream()):
        length = int(given.layout.length[i])
        if not length:
            continue
        fields = leaves(nest)
        own = {p: "list" if isinstance(v, list) else (v.dtype, v.shape[1:]) for p, v in fields.items()}
        this = int(given.layout.source_rank[i]), own
        if held and (this != kind or nbytes > _BATCH_BYTES):
            yield start, _joined(held)
            held, start, nbytes = [], steps, 0
        kind, steps = this, steps + length
        held.append(fields)
        nbytes += sum(int(getattr(v, "nbytes", 64)) for v in fields.values())
    if held:
        yield start, _joined(held)


def _joined(parts: list[dict[Path, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return unflatten(parts[0])
    every = {path: [part[path] for part in parts] for path in parts[0]}
    return unflatten(
        {
            p: [v for e in all_ for v in e] if isinstance(all_[0], list) else np.concatenate(all_)
            for p, all_ in every.items()
        }
    )
