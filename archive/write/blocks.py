"""Pure, no I/O: appended steps as blocks, and blocks laid out as the arrays and segments of one shard.

A shard is a slab of time: blocks in the order they came, sorted by env row within the slab, so that a contiguous part
of a stream is a contiguous part of every array, and what a ring overwrites first lies in the oldest shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, offsets_of, run_starts, spans
from archive.base import cached_property
from archive.fields import NODES, Array, Ragged, ShardSchema, dtypes
from archive.fields.axes import Extent, Layout, axis_of
from archive.steps import Steps


@dataclass(frozen=True)
class Block:
    """Steps appended by one call, in stored form, owned (nobody else can change them).

    `single` is the episode of a block that belongs to one episode wholly; only such blocks have fields that are not
    per step, and only such blocks may be empty. `uuids` and `updates` are per row, or one value for all rows.
    """

    schema: ShardSchema
    data: dict[str, Array | Ragged]
    runs: Steps  # env rows by position, each with the number of its `episode`, in the order in which the rows lie
    uuids: Array | str | None = None
    updates: Ints | int | None = None
    single: int | None = None
    env_id: int = -1  # where an empty block stands
    position: int = 0

    @cached_property
    def length(self) -> int:
        return int(self.runs.length.sum())

    @cached_property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.data.values())) + 24 * self.length


class Slab(NamedTuple):
    """One shard's worth: arrays by zarr path, and its segments as columns (one entry a segment).

    `runs`: how many env rows follow each other in its arrays.
    """

    schema: ShardSchema
    arrays: dict[str, Array]
    episode: Ints
    env_id: Ints
    position: Ints
    start: Ints
    length: Ints
    extents: dict[str, Extent]  # by field, where its rows are not one a step
    uuids: list[list[str]]
    update_min: list[int | None]
    update_max: list[int | None]
    weights: list[list[dict[str, Any]] | None]  # where steps of a segment differ in these: runs of those that do not
    reward: list[float | None]
    runs: int


def _nbytes(value: Array | Ragged) -> int:
    if isinstance(value, Ragged):
        return _nbytes(value.values) + value.lengths.nbytes
    return sum(len(s) for s in value.flat) + 8 * value.size if value.dtype == object else value.nbytes


def split(block: Block, max_bytes: int) -> Iterator[Block]:
    """The block in pieces of at most `max_bytes` (at least one step each), in order."""
    if block.nbytes <= max_bytes or block.length < 2:
        yield block
        return
    pieces = min(block.length, -(-block.nbytes // max_bytes))
    cuts = [block.length * i // pieces for i in range(pieces + 1)]
    for lo, hi in pairwise(cuts):
        yield _rows(block, lo, hi)


def merge(blocks: Sequence[Block]) -> Block:
    """Small blocks of one schema as one, in order; for blocks that hold nothing but steps."""
    first = blocks[0]
    data: dict[str, Array | Ragged] = {}
    for name in first.data:
        parts = [b.data[name] for b in blocks]
        if isinstance(first.data[name], Ragged):
            data[name] = Ragged(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        else:
            data[name] = np.concatenate(parts)
    uuids, updates = (_joined([getattr(b, n) for b in blocks], blocks) for n in ("uuids", "updates"))
    if updates is not None and not isinstance(updates, int):
        updates = np.array([_UNKNOWN if u is None else u for u in updates], np.int64)
    return Block(first.schema, data, Steps.joined([b.runs for b in blocks]).merged(), uuids, updates)


def _joined(values: list[Any], blocks: Sequence[Block]) -> Any:
    """One value where all agree, else one a row."""
    plain = not any(isinstance(v, np.ndarray) for v in values)
    if plain and all(v == values[0] for v in values):
        return values[0]
    rows = np.empty(sum(b.length for b in blocks), object)
    at = 0
    for value, block in zip(values, blocks, strict=True):
        rows[at : at + block.length] = value
        at += block.length
    return rows


def _rows(block: Block, lo: int, hi: int) -> Block:
    axes = {name: axis_of(block.schema.by_name[name]) for name in block.data}
    data = {name: axes[name].cut(v, lo, hi, block.length) for name, v in block.data.items()}
    uuids = block.uuids[lo:hi] if isinstance(block.uuids, np.ndarray) else block.uuids
    updates = block.updates[lo:hi] if isinstance(block.updates, np.ndarray) else block.updates
    return replace(block, data=data, runs=_between(block.runs, lo, hi), uuids=uuids, updates=updates)


def assemble(blocks: Sequence[Block], reward: str | None) -> Slab:
    """Lay blocks of one schema out as one shard."""
    schema = blocks[0].schema
    order, runs = _by_env(Steps.joined([b.runs for b in blocks]))
    ends = offsets_of(runs.length)
    start, env_id, position, length, episode = ends[:-1], runs.stream, runs.lo, runs.length, runs["episode"]
    for block in blocks:
        if block.length == 0 and block.single is not None:
            start, length = np.r_[start, ends[-1]], np.r_[length, 0]
            env_id = np.r_[env_id, block.env_id]
            position, episode = np.r_[position, block.position], np.r_[episode, block.single]
    layout = Layout(order, start, length, np.array([b.length for b in blocks], np.int64), _segment_of(blocks, episode))
    arrays, extents = _arrays(schema, blocks, layout)
    uuids, low, high, weights = _weights(blocks, order, start, length)
    return Slab(
        schema, arrays, episode, env_id, position, start, length, extents, uuids, low, high, weights,
        _returns(schema, arrays, reward, start, length), _env_rows(blocks, runs),
    )  # fmt: skip


def _by_env(runs: Steps) -> tuple[Ints | None, Steps]:
    """Rows in order of their env rows: where each was (None if they are so already), and their runs."""
    if (runs.stream[1:] >= runs.stream[:-1]).all():
        return None, runs.merged()
    by = np.argsort(runs.stream, kind="stable")
    return spans(offsets_of(runs.length)[:-1][by], runs.length[by]), runs.pick(by).merged()


def _between(runs: Steps, lo: int, hi: int) -> Steps:
    """Rows [lo, hi) of those that lie end to end."""
    start = offsets_of(runs.length)
    kept = np.flatnonzero((start[1:] > lo) & (start[:-1] < hi))
    skip, upto = np.maximum(lo - start[kept], 0), np.minimum(hi - start[kept], runs.length[kept])
    return runs.cut(kept, runs.lo[kept] + skip, runs.lo[kept] + upto)


def _env_rows(blocks: Sequence[Block], runs: Steps) -> int:
    """The number of env rows of a slab of time. Episodes that were added whole are no such rows: they leave whole."""
    if not len(runs) or blocks[0].single is not None:
        return 1
    return 1 + int(np.count_nonzero(runs.stream[1:] != runs.stream[:-1]))


def _arrays(schema: ShardSchema, blocks: Sequence[Block], layout: Layout) -> tuple[dict[str, Array], dict[str, Extent]]:
    """The arrays by zarr path, and where the rows of the fields lie that are not one row a step."""
    arrays: dict[str, Array] = {}
    extents: dict[str, Extent] = {}
    for spec in sorted(schema.fields, key=lambda spec: bool(spec.next_of)):  # after what they follow
        if spec.axis in NODES:
            continue
        stored, extent = axis_of(spec).lay_out([b.data[spec.name] for b in blocks], layout, arrays)
        arrays |= stored
        if extent is not None:
            extents[spec.name] = extent
    return arrays, extents


def _segment_of(blocks: Sequence[Block], episode: Ints) -> Ints:
    """The first segment of each block's episode; -1 for blocks of several episodes."""
    first = {index: i for i, index in reversed(list(enumerate(episode.tolist())))}
    return np.array([-1 if b.single is None else first[b.single] for b in blocks], np.int64)


def _weights(
    blocks: Sequence[Block], order: Ints | None, start: Ints, length: Ints
) -> tuple[list[list[str]], list[int | None], list[int | None], list[list[dict[str, Any]] | None]]:
    """Distinct weights uuids, least and greatest update count, and runs of weights of each segment."""
    codes: dict[str | None, int] = {None: -1}
    uuid = _per_row([_codes(b.uuids, codes) for b in blocks], blocks, order)
    update = _per_row([_updates(b.updates) for b in blocks], blocks, order)
    names = {code: name for name, code in codes.items()}
    tails = [b for b in blocks if b.length == 0 and b.single is not None]
    uuids: list[list[str]] = []
    low: list[int | None] = []
    high: list[int | None] = []
    runs: list[list[dict[str, Any]] | None] = []
    for at, count in zip(start.tolist(), length.tolist(), strict=True):
        block = tails.pop(0) if count == 0 else None
        u = np.array([_codes(block.uuids, codes)]).reshape(-1) if block else uuid[at : at + count]
        n = np.array([_updates(block.updates)]).reshape(-1) if block else update[at : at + count]
        if block:
            names = {code: name for name, code in codes.items()}
        distinct = [u[0]] if len(u) and u[0] == u[-1] and (u == u[0]).all() else list(dict.fromkeys(u.tolist()))
        uuids.append([str(names[int(c)]) for c in distinct if c >= 0])
        known = n[n != _UNKNOWN]
        low.append(int(known.min()) if len(known) else None)
        high.append(int(known.max()) if len(known) else None)
        runs.append(_runs_of(u, n, names) if count > 1 and (len(distinct) > 1 or (n != n[0]).any()) else None)
    return uuids, low, high, runs


def _runs_of(uuid: Ints, update: Ints, names: dict[int, str | None]) -> list[dict[str, Any]]:
    starts = run_starts(uuid, update)
    steps = np.diff(np.append(starts, len(uuid))).tolist()
    found = zip(steps, uuid[starts].tolist(), update[starts].tolist(), strict=True)
    return [
        {"steps": n, "model_weights_uuid": names[code], "update_count": None if count == _UNKNOWN else count}
        for n, code, count in found
    ]


_UNKNOWN = np.iinfo(np.int64).min


def _codes(value: Array | str | None, codes: dict[str | None, int]) -> Any:
    def code(name: str | None) -> int:
        return codes.setdefault(name, len(codes) - 1)

    return np.array([code(v) for v in value], np.int64) if isinstance(value, np.ndarray) else code(value)


def _updates(value: Ints | int | None) -> Any:
    return _UNKNOWN if value is None else value


def _per_row(values: list[Any], blocks: Sequence[Block], order: Ints | None) -> Ints:
    rows = [np.broadcast_to(np.asarray(v, np.int64), b.length) for v, b in zip(values, blocks, strict=True) if b.length]
    joined = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return joined if order is None else joined[order]


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
