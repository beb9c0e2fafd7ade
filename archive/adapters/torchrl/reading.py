"""Reading the steps of a share in order: as rows of arrays where all fields are numbers, else episode by episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from archive.adapters.torchrl.places import Given
from archive.arrays import Ints, spans
from archive.fields import nesting
from archive.read import Gather

_BATCH_BYTES = 32 * 1024 * 1024
_CACHE_BYTES = 8 * _BATCH_BYTES
Batches = Iterator[tuple[int, dict[str, Any]]]


def batches(given: Given) -> Batches:
    """(number of the first step, steps) in order, of one source rank and one kind of fields, some megabytes at a time."""
    rows = Gather(given.part.episodes, cache_bytes=_CACHE_BYTES)
    try:
        groups = _alike(given)
        first = [_plain_bytes(rows, int(lo)) for lo, _ in groups]
        yield from _by_episodes(given) if 0 in first else _by_rows(given, rows, groups, first)
    finally:
        rows.close()


def _alike(given: Given) -> list[tuple[int, int]]:
    """Episodes [lo, hi) that follow each other, of one source rank and with the same fields; those with steps."""
    source, code, length = given.layout.source_rank, given.part.schema_numbers, np.asarray(given.layout.length)
    some = np.flatnonzero(length > 0)
    if not len(some):
        return []
    changes = np.flatnonzero((source[some][1:] != source[some][:-1]) | (code[some][1:] != code[some][:-1])) + 1
    edges = np.r_[0, some[changes], len(length)].astype(np.int64)
    edges[0] = some[0]
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _plain_bytes(rows: Gather, number: int) -> int:
    """Bytes of a step of this episode if all its fields are numbers of one shape; else 0."""
    leaves = [leaf for _, leaf in nesting.flatten(rows.rows([number], [0]))]
    plain = all(isinstance(leaf, np.ndarray) and leaf.dtype != object for leaf in leaves)
    return max(1, sum(leaf.nbytes for leaf in leaves)) if plain and leaves else 0


def _by_rows(given: Given, rows: Gather, groups: list[tuple[int, int]], step_bytes: list[int]) -> Batches:
    """A batch at a time, in any number of episodes."""
    begins = np.cumsum(given.layout.length) - given.layout.length
    for (lo, hi), nbytes in zip(groups, step_bytes, strict=True):
        length: Ints = np.asarray(given.layout.length[lo:hi], np.int64)
        numbers, steps = np.repeat(np.arange(lo, hi), length), spans(np.zeros(len(length), np.int64), length)
        depth = max(1, _BATCH_BYTES // nbytes)
        for at in range(0, len(numbers), depth):
            some = slice(at, at + depth)
            batch = rows.rows(numbers[some], steps[some])
            yield int(begins[lo]) + at, given.part.renumber_rows(batch, numbers[some])


def _by_episodes(given: Given) -> Batches:
    """Episode by episode, those of one kind put together."""
    held: list[dict[tuple[str, ...], Any]] = []
    kind: Any = None
    start = steps = nbytes = 0
    for i, (_, nest) in enumerate(given.part.stream()):
        leaves = {p: v for p, v in nesting.flatten(nest) if v is not None and not (isinstance(v, dict) and not v)}
        length = int(given.layout.length[i])
        if not length:
            continue
        this = int(given.layout.source_rank[i]), {p: _form(v) for p, v in leaves.items()}
        if held and (this != kind or nbytes > _BATCH_BYTES):
            yield start, _joined(held)
            held, start, nbytes = [], steps, 0
        kind, steps = this, steps + length
        held.append(leaves)
        nbytes += sum(int(getattr(v, "nbytes", 64)) for v in leaves.values())
    if held:
        yield start, _joined(held)


def _form(leaf: Any) -> Any:
    return "list" if isinstance(leaf, list) else (leaf.dtype, leaf.shape[1:])


def _joined(parts: list[dict[tuple[str, ...], Any]]) -> dict[str, Any]:
    out: dict[tuple[str, ...], Any] = {}
    for path, first in parts[0].items():
        every = [part[path] for part in parts]
        if len(every) == 1:
            out[path] = first
        else:
            out[path] = [v for e in every for v in e] if isinstance(first, list) else np.concatenate(every)
    return nesting.unflatten(out)
