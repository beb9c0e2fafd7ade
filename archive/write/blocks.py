"""Pure, no I/O: appended steps as blocks, and blocks laid out as the arrays and segments of one shard.

A shard is a slab of time: blocks in the order they came, sorted by env row within the slab, so that a contiguous range
of a stream is a contiguous range of every array, and a ring overwrites the oldest shards first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, ascending, offsets_of, run_starts, spans
from archive.base import cached_property
from archive.fields import NODES, Array, Extent, Layout, Ragged, ShardSchema, axis_of, dtypes

UNKNOWN = np.iinfo(np.int64).min  # in place of an update count
_WEIGHTS = ("steps", "model_weights_uuid", "update_count")


@dataclass(frozen=True)
class Block:
    """Steps appended by one call, in stored form, owned (no other code can change them).

    runs: ranges of env rows by offset, in the order of the rows, with the number of their `episode` and the weights
    that made them (see `weighed`).  whole: it belongs to one episode wholly; only such blocks have fields that are not
    per step, and only such blocks may be empty: a row without steps, in the place of its episode.
    """

    schema: ShardSchema
    data: dict[str, Array | Ragged]
    runs: Steps
    whole: bool = False

    @cached_property
    def length(self) -> int:
        return int(self.runs.length.sum())

    @cached_property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.data.values())) + 24 * self.length


def weighed(runs: Steps, uuid: Any = None, update: Any = None) -> Steps:
    """The ranges with columns `uuid` (None if unknown) and `update` (or UNKNOWN). Either is one value for all or an
    array of one a step; ranges are cut where it changes."""
    apart = isinstance(uuid, np.ndarray) or isinstance(update, np.ndarray)
    if apart and not runs.length.any():
        uuid, update, apart = None, None, False
    rows = runs.each() if apart else runs
    count = len(rows.lo)
    uuids = np.empty(count, object)
    uuids[:] = uuid  # np.full would cut trailing zeros of a text
    weights = {"uuid": uuids, "update": np.full(count, UNKNOWN if update is None else update)}
    found = Steps(rows.stream, rows.lo, rows.hi, follows=(), **rows.columns, **weights)
    return found.merged() if apart else found


class Slab(NamedTuple):
    """The content of one shard: arrays by zarr path, and its segments.

    segments: ranges of env rows by offset, with the number of their `episode`, and the weights of their last step.
    columns: of their rows in the segments table.  reward: its sum over each.  env_rows: the number of env rows in the
    arrays.
    """

    schema: ShardSchema
    arrays: dict[str, Array]
    segments: Steps
    columns: dict[str, Any]
    reward: list[float | None]
    env_rows: int


def _nbytes(value: Array | Ragged) -> int:
    if isinstance(value, Ragged):
        return _nbytes(value.values) + value.lengths.nbytes
    return sum(len(s) for s in value.flat) + 8 * value.size if value.dtype == object else value.nbytes


def split(block: Block, max_bytes: int) -> Iterator[Block]:
    """The block in parts of at most `max_bytes` (at least one step each), in order."""
    if block.nbytes <= max_bytes or block.length < 2:
        yield block
        return
    pieces = min(block.length, -(-block.nbytes // max_bytes))
    cuts = [block.length * i // pieces for i in range(pieces + 1)]
    for lo, hi in pairwise(cuts):
        yield _rows(block, lo, hi)


def merge(blocks: Sequence[Block]) -> Block:
    """Small blocks of one schema as one, in order; only for blocks of plain steps."""
    first = blocks[0]
    data: dict[str, Array | Ragged] = {}
    for name in first.data:
        parts = [b.data[name] for b in blocks]
        if isinstance(first.data[name], Ragged):
            data[name] = Ragged(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        else:
            data[name] = np.concatenate(parts)
    return Block(first.schema, data, Steps.joined([b.runs for b in blocks]).merged())


def _rows(block: Block, lo: int, hi: int) -> Block:
    axes = {name: axis_of(block.schema.by_name[name]) for name in block.data}
    data = {name: axes[name].cut(v, lo, hi, block.length) for name, v in block.data.items()}
    return replace(block, data=data, runs=_between(block.runs, lo, hi))


def _between(runs: Steps, lo: int, hi: int) -> Steps:
    """Rows [lo, hi) of ranges that are end to end."""
    start = offsets_of(runs.length)
    kept = np.flatnonzero((start[1:] > lo) & (start[:-1] < hi))
    skip, upto = np.maximum(lo - start[kept], 0), np.minimum(hi - start[kept], runs.length[kept])
    return runs.cut(kept, runs.lo[kept] + skip, runs.lo[kept] + upto)


def assemble(blocks: Sequence[Block], reward: str | None) -> Slab:
    """Lay out blocks of one schema as one shard: in order of their env rows, then the episodes without steps."""
    schema, runs = blocks[0].schema, Steps.joined([b.runs for b in blocks])
    order, rank = None, np.where(runs.length > 0, runs.stream, np.iinfo(np.int64).max)
    if not (rank[1:] >= rank[:-1]).all():
        by = np.argsort(rank, kind="stable")
        order, runs = spans(offsets_of(runs.length)[:-1][by], runs.length[by]), runs.pick(by)
    runs = runs.merged()
    heads = run_starts(runs.stream, runs["episode"], np.cumsum(np.append(False, runs.lo[1:] != runs.hi[:-1])))
    ends = np.append(heads, len(runs))[1:]
    start, last = offsets_of(runs.length)[heads], runs.pick(ends - 1)
    segments = last.cut(slice(None), runs.lo[heads], last.hi)
    first = {number: i for i, number in reversed(list(enumerate(segments["episode"].tolist())))}
    lengths, of = zip(*((b.length, first[int(b.runs["episode"][0])] if b.whole else -1) for b in blocks), strict=True)
    layout = Layout(order, start, segments.length, np.array(lengths, np.int64), np.array(of, np.int64))
    arrays, extents = _arrays(schema, blocks, layout)
    columns = _weights(runs, heads.tolist()) | {
        "start": start,
        "length": segments.length,
        "env_id": segments.stream,
        "position": segments.lo,
        "extents": tables.extents(extents, len(segments)),
        "schema": schema.dumps(),
    }
    returns = _returns(schema, arrays, reward, start, segments.length)
    # episodes that were added whole are no env rows of a slab of time: they are evicted whole
    env_rows = 1 if blocks[0].whole else max(1, len(ascending(segments.stream[segments.length > 0])))
    return Slab(schema, arrays, segments, columns, returns, env_rows)


def _arrays(schema: ShardSchema, blocks: Sequence[Block], layout: Layout) -> tuple[dict[str, Array], dict[str, Extent]]:
    """The arrays by zarr path, and the extents of the fields that do not have one row a step."""
    arrays: dict[str, Array] = {}
    extents: dict[str, Extent] = {}
    for spec in sorted(schema.fields, key=lambda spec: bool(spec.next_of)):  # after the field that they follow
        if spec.axis in NODES:
            continue
        stored, extent = axis_of(spec).lay_out([b.data[spec.name] for b in blocks], layout, arrays)
        arrays |= stored
        if extent is not None:
            extents[spec.name] = extent
    return arrays, extents


def _weights(runs: Steps, heads: Sequence[int]) -> dict[str, list[Any]]:
    """Distinct weights uuids, least and greatest update count, and ranges of weights (None where all steps have the
    same) of each segment; its ranges are those from its head to the next one's."""
    updates = [None if n == UNKNOWN else n for n in runs["update"].tolist()]
    made = list(zip(runs.length.tolist(), runs["uuid"].tolist(), updates, strict=True))
    segments = [made[lo:hi] for lo, hi in pairwise([*heads, len(made)])]
    known = [[n for *_, n in some if n is not None] for some in segments]
    return {
        "model_weights_uuids": [[*dict.fromkeys(u for _, u, _ in some if u is not None)] for some in segments],
        "update_count_min": [min(some, default=None) for some in known],
        "update_count_max": [max(some, default=None) for some in known],
        "weights": [
            [dict(zip(_WEIGHTS, run, strict=True)) for run in some] if len(some) > 1 else None for some in segments
        ],
    }


def _returns(
    schema: ShardSchema, arrays: dict[str, Array], reward: str | None, start: Ints, length: Ints
) -> list[float | None]:
    """Sum of the reward field over each segment; None without such a field."""
    rows = arrays.get(reward) if reward else None
    rows = rows if rows is None or not reward else dtypes.as_numbers(rows, schema.by_name[reward].dtype)
    if rows is None:
        return [None] * len(start)
    with np.errstate(invalid="ignore", over="ignore"):  # rewards may be infinite, both ways
        sums = rows.reshape(len(rows), -1).sum(axis=1, dtype=np.float64) if rows.size else np.zeros(len(rows))
        add = np.sum if np.isfinite(sums).all() else np.nansum
        return [float(add(sums[a : a + n])) for a, n in zip(start.tolist(), length.tolist(), strict=True)]
