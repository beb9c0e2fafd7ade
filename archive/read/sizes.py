"""Pure, no I/O: the bytes of episodes' steps, uncompressed, from their rows of the segments table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.arrays import Ints, numbers, sums
from archive.fields import NODES, FieldSpec, ShardSchema, to_numpy
from archive.read.selection import Selection
from archive.read.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("extents", "length")
TEXT = ("str", "json")


def of_spans(spans: Spans, rows: pa.Table, schemas: Sequence[ShardSchema], code: Ints, selection: Selection) -> Ints:
    """Bytes of each episode in the selected fields; `rows` are COLUMNS of the segments table, one row for each span,
    and `code` is the number of its schema.

    Ragged, offset and free fields count with all of their rows; text counts as 8 bytes a value,
    as its length is not known.
    """
    specs = [{s.name: s for s in selection.specs(one).values() if s.axis not in NODES} for one in schemas]
    per_step = np.array([_of_step(of.values()) for of in specs] or [0], np.float64)[code]
    length = np.maximum(1, numbers(rows["length"]))
    share = np.where(numbers(rows["length"]) > 0, (spans.hi - spans.lo) / length, 1.0)
    segment, names, field, _, counts = tables.extents_of(rows["extents"])
    sized = [[_of_row(of[n]) if n in of and of[n].axis != "step" else 0 for n in names] for of in specs]
    own = np.array(sized, np.float64)[code[segment], field] * counts if len(segment) else None
    total = per_step * (spans.hi - spans.lo) + np.bincount(segment, own, minlength=len(spans.rows)) * share
    return sums(np.rint(total).astype(np.int64), spans.offsets)


def step_bytes(schemas: Iterable[ShardSchema], *selections: Selection) -> int:
    """Bytes of one step in the fields of all selections, those of one row a step and the lengths of ragged ones; by the
    schema with most."""
    return max((sum(_of_step(one.specs(schema).values()) for one in selections) for schema in schemas), default=0)


def _of_step(specs: Iterable[FieldSpec]) -> int:
    return sum(8 if s.axis == "ragged" else _of_row(s) if s.axis == "step" else 0 for s in specs)


def _of_row(spec: FieldSpec) -> int:
    return int(to_numpy(spec.dtype).itemsize * prod(spec.shape))


def runs(nbytes: Ints, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges (start, stop) of episodes that have at most `max_bytes` together, each of one or more."""
    start, held = 0, 0
    for i, size in enumerate(nbytes.tolist()):
        if i > start and held + size > max_bytes:
            yield start, i
            start, held = i, 0
        held += size
    if start < len(nbytes):
        yield start, len(nbytes)
