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

from archive.arrays import Ints, spans
from archive.fields import LENGTHS, PLACES, Array, FieldSpec, Ragged, ShardSchema, dtypes
from archive.write import arena


@dataclass(frozen=True)
class Block:
    """Steps appended by one call, in stored form, owned (nobody else can change them).

    `single` is the episode of a block that belongs to one episode wholly; only such blocks have fields that are not
    per step, and only such blocks may be empty. `uuids` and `updates` are per row, or one value for all rows.
    """

    schema: ShardSchema
    data: dict[str, Array | Ragged]
    env_ids: Ints
    positions: Ints
    episodes: Ints
    uuids: Array | str | None = None
    updates: Ints | int | None = None
    single: int | None = None
    env_id: int = -1  # where an empty block stands
    position: int = 0

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(v) for v in self.data.values()) + 24 * self.length


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
    extents: list[list[dict[str, Any]] | None]
    uuids: list[list[str]]
    update_min: list[int | None]
    update_max: list[int | None]
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
    env_ids, positions, episodes = (
        np.concatenate([getattr(b, n) for b in blocks]) for n in ("env_ids", "positions", "episodes")
    )
    uuids, updates = (_joined([getattr(b, n) for b in blocks], blocks) for n in ("uuids", "updates"))
    if updates is not None and not isinstance(updates, int):
        updates = np.array([_UNKNOWN if u is None else u for u in updates], np.int64)
    return Block(first.schema, data, env_ids, positions, episodes, uuids, updates)


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
    data = {name: _cut(block.schema.by_name[name], v, lo, hi, block.length) for name, v in block.data.items()}
    uuids = block.uuids[lo:hi] if isinstance(block.uuids, np.ndarray) else block.uuids
    updates = block.updates[lo:hi] if isinstance(block.updates, np.ndarray) else block.updates
    return replace(
        block, data=data, env_ids=block.env_ids[lo:hi], positions=block.positions[lo:hi],
        episodes=block.episodes[lo:hi], uuids=uuids, updates=updates,
    )  # fmt: skip


def _cut(spec: FieldSpec, value: Array | Ragged, lo: int, hi: int, length: int) -> Array | Ragged:
    """Steps [lo, hi) of a field: extra rows of an offset field go with the last step, free rows with the first."""
    if isinstance(value, Ragged):
        ends = np.concatenate([[0], np.cumsum(value.lengths)])
        return Ragged(value.values[ends[lo] : ends[hi]], value.lengths[lo:hi])
    if spec.axis == "offset":
        return value[lo:] if hi == length else value[lo:hi]
    if spec.axis == "free":
        return value if lo == 0 else value[:0]
    return value[lo:hi]


def assemble(blocks: Sequence[Block], reward: str | None) -> Slab:
    """Lay blocks of one schema out as one shard."""
    schema = blocks[0].schema
    order, envs, positions, episodes = _order(blocks)
    heads = _heads(envs, positions, episodes)
    start, env_id, position, episode = heads, envs[heads], positions[heads], episodes[heads]
    length = np.diff(np.r_[heads, len(envs)])
    for block in blocks:
        if block.length == 0 and block.single is not None:
            start, length = np.r_[start, len(envs)], np.r_[length, 0]
            env_id = np.r_[env_id, block.env_id]
            position, episode = np.r_[position, block.position], np.r_[episode, block.single]
    arrays, extents = _arrays(schema, blocks, order, episode, length)
    _drop_repeats(schema, arrays, extents, start, length)
    uuids, low, high = _weights(blocks, order, start, length)
    return Slab(
        schema, arrays, episode, env_id, position, start, length, [e or None for e in extents], uuids, low, high,
        _returns(schema, arrays, reward, start, length), _runs(blocks, envs),
    )  # fmt: skip


def _order(blocks: Sequence[Block]) -> tuple[Ints | None, Ints, Ints, Ints]:
    """Row order by env (None if it is as it came), and env, position and episode of the ordered rows."""
    full = [b for b in blocks if b.length]
    empty = np.zeros(0, np.int64)
    envs = np.concatenate([b.env_ids for b in full]) if full else empty
    positions = np.concatenate([b.positions for b in full]) if full else empty
    episodes = np.concatenate([b.episodes for b in full]) if full else empty
    if (envs[1:] >= envs[:-1]).all():
        return None, envs, positions, episodes
    order = np.argsort(envs, kind="stable")
    return order, envs[order], positions[order], episodes[order]


def _heads(envs: Ints, positions: Ints, episodes: Ints) -> Ints:
    if len(envs) == 0:
        return np.zeros(0, np.int64)
    seam = (envs[1:] != envs[:-1]) | (episodes[1:] != episodes[:-1]) | (positions[1:] != positions[:-1] + 1)
    return np.flatnonzero(np.r_[True, seam])


def _runs(blocks: Sequence[Block], envs: Ints) -> int:
    """Env rows of a slab of time. Episodes that were added whole are no such rows: they leave whole."""
    if not len(envs) or blocks[0].single is not None:
        return 1
    return 1 + int(np.count_nonzero(envs[1:] != envs[:-1]))


Extents = list[list[dict[str, Any]]]


def _arrays(
    schema: ShardSchema, blocks: Sequence[Block], order: Ints | None, episode: Ints, length: Ints
) -> tuple[dict[str, Array], Extents]:
    arrays: dict[str, Array] = {}
    extents: Extents = [[] for _ in episode]
    for spec in schema.fields:
        parts = [b.data[spec.name] for b in blocks if spec.name in b.data]
        if not parts:
            continue
        if spec.axis == "ragged":
            arrays[spec.name], arrays[spec.name + LENGTHS] = _ragged([p for p in parts if isinstance(p, Ragged)], order)
            ends = np.concatenate([[0], np.cumsum(arrays[spec.name + LENGTHS])])
            stops = np.cumsum(length)
            _extend(extents, spec.name, ends[stops - length], ends[stops] - ends[stops - length])
        elif spec.axis in ("offset", "free"):
            arrays[spec.name] = _whole(spec, blocks, episode, extents)
        else:
            rows = arena.end_to_end([p for p in parts if isinstance(p, np.ndarray)])
            arrays[spec.name] = rows if order is None else rows[order]
    return arrays, extents


def _ragged(parts: Sequence[Ragged], order: Ints | None) -> tuple[Array, Array]:
    values = np.concatenate([p.values for p in parts])
    lengths = np.concatenate([p.lengths for p in parts])
    if order is None:
        return values, lengths
    starts = np.cumsum(lengths) - lengths
    taken = lengths[order]
    return values[spans(starts[order], taken)], taken


def _whole(spec: FieldSpec, blocks: Sequence[Block], episode: Ints, extents: Extents) -> Array:
    """Rows of a field that are not one a step: each segment's rows from its episode's blocks, end to end."""
    pieces: dict[int, list[tuple[Array, int]]] = {}
    for block in blocks:
        value = block.data.get(spec.name)
        if isinstance(value, np.ndarray) and block.single is not None:
            pieces.setdefault(block.single, []).append((value, block.length))
    out: list[Array] = []
    at = 0
    for i, index in enumerate(episode):
        rows = _joinable(spec, pieces.pop(int(index), []))
        count = sum(len(r) for r in rows)
        extents[i].append({"field": spec.name, "start": at, "rows": count})
        out += rows
        at += count
    return np.concatenate(out)


def _joinable(spec: FieldSpec, pieces: list[tuple[Array, int]]) -> list[Array]:
    """An offset field's extra rows come again as the first ones of the block that follows."""
    if spec.axis != "offset":
        return [rows for rows, _ in pieces]
    return [rows if i == len(pieces) - 1 else rows[:length] for i, (rows, length) in enumerate(pieces)]


def _extend(extents: Extents, name: str, starts: Ints, rows: Ints) -> None:
    for entry, start, count in zip(extents, starts.tolist(), rows.tolist(), strict=True):
        entry.append({"field": name, "start": start, "rows": count})


def _drop_repeats(schema: ShardSchema, arrays: dict[str, Array], extents: Extents, start: Ints, length: Ints) -> None:
    """Fields declared in next_of keep only the rows that are not the next row of the field they follow."""
    for spec in schema.fields:
        if not spec.next_of or spec.name not in arrays:
            continue
        rows, followed = arrays[spec.name], arrays[spec.next_of]
        keep = np.ones(len(rows), bool)
        if len(rows) > 1 and rows.dtype == followed.dtype and rows.shape == followed.shape:
            keep[:-1] = _differ(rows[:-1], followed[1:])
        keep[(start + length - 1)[length > 0]] = True
        kept = np.flatnonzero(keep)
        arrays[spec.name] = rows[kept]
        first, last = np.searchsorted(kept, start), np.searchsorted(kept, start + length)
        arrays[spec.name + PLACES] = kept - np.repeat(start, last - first)
        _extend(extents, spec.name, first, last - first)


def _differ(a: Array, b: Array) -> Any:
    """Per row: whether the bits differ (so that NaN equals itself and -0.0 is not 0.0)."""
    if a.dtype == object:
        return (a != b).reshape(len(a), -1).any(axis=1)
    if a[0:1].nbytes == 0:
        return np.zeros(len(a), bool)
    bits = [np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b)]
    return (bits[0] != bits[1]).any(axis=1)


def _weights(
    blocks: Sequence[Block], order: Ints | None, start: Ints, length: Ints
) -> tuple[list[list[str]], list[int | None], list[int | None]]:
    """Distinct weights uuids and least and greatest update count of each segment."""
    codes: dict[str | None, int] = {None: -1}
    uuid = _per_row([_codes(b.uuids, codes) for b in blocks], blocks, order)
    update = _per_row([_updates(b.updates) for b in blocks], blocks, order)
    names = {code: name for name, code in codes.items()}
    tails = [b for b in blocks if b.length == 0 and b.single is not None]
    uuids: list[list[str]] = []
    low: list[int | None] = []
    high: list[int | None] = []
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
    return uuids, low, high


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
    sums = rows.reshape(len(rows), -1).sum(axis=1, dtype=np.float64) if rows.size else np.zeros(len(rows))
    total = np.concatenate([[0.0], np.cumsum(sums)])
    if np.isfinite(total[-1]):
        return [float(sums[a : a + n].sum()) for a, n in zip(start.tolist(), length.tolist(), strict=True)]
    return [float(np.nansum(sums[a : a + n])) for a, n in zip(start.tolist(), length.tolist(), strict=True)]
