"""A checkpoint as units to deal out: its live episodes per buffer, from the manifest alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from archive.checkpoints import Checkpoint
from archive.errors import UsageError
from archive.liveview import Located
from archive.ranges import Ints
from archive.schema import loads
from resharding.assignment import Mask, Units


@dataclass(frozen=True)
class SourceBuffer:
    """The live steps of one buffer over all source ranks: pieces of segments, grouped into units."""

    name: str
    pieces: Located
    rank: Ints  # per piece
    env: Ints
    heads: Ints  # first piece of each unit
    number: Ints  # per unit: its episode in the index
    column_at: Ints  # per piece: where its steps stand in the source rank's columns

    @property
    def offsets(self) -> Ints:
        return np.append(self.heads, len(self.pieces.row))

    @property
    def steps(self) -> Ints:
        return per_unit(self.pieces.hi - self.pieces.lo, self.offsets)

    @property
    def position(self) -> Ints:
        return self.pieces.position[self.heads]


def per_unit(values: Ints, offsets: Ints) -> Ints:
    total = np.concatenate([[0], np.cumsum(values)])
    return total[offsets[1:]] - total[offsets[:-1]]


class Source:
    """What a plan needs to know of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @cached_property
    def buffers(self) -> dict[str, SourceBuffer]:
        """By name; those without live steps too."""
        live, located = self.checkpoint.live, self.checkpoint.located
        names = np.array(live["buffer"].cast("string").to_pylist(), object)[located.run]
        rank = live["rank"].to_numpy().astype(np.int64)[located.run]
        env = live["env_id"].to_numpy()[located.run]
        out = {}
        for name in self.checkpoint.buffers:
            mine = np.flatnonzero(names == name)
            out[name] = self._buffer(name, located.pick(mine), rank[mine], env[mine])
        return out

    def _buffer(self, name: str, pieces: Located, rank: Ints, env: Ints) -> SourceBuffer:
        steps = pieces.hi - pieces.lo
        ends = np.cumsum(steps)
        new_rank = np.r_[True, rank[1:] != rank[:-1]] if len(rank) else np.zeros(0, bool)
        at = ends - steps
        column_at = at - np.maximum.accumulate(np.where(new_rank, at, 0)) if len(at) else at
        episode = self.checkpoint.index.episode_of_row[pieces.row]
        heads = _heads(episode, rank, env, pieces)
        return SourceBuffer(name, pieces, rank, env, heads, episode[heads], column_at)

    def open_episodes(self, name: str) -> dict[tuple[int, int], str]:
        """(rank, env) -> id of the episode that is open there."""
        out = {}
        for rank in self.checkpoint.ranks:
            entry = self.checkpoint.staged(rank).index["buffers"].get(name, {"open": []})
            out |= {(rank, int(env)): str(episode) for env, episode in entry["open"]}
        return out

    def divisible(self, buffer: SourceBuffer) -> bool:
        """Whether steps are independent of each other, by the schema of all that is live."""
        schemas = self._schemas(buffer)
        return bool(schemas) and all(loads(text).unit == "step" for text in schemas)

    def _schemas(self, buffer: SourceBuffer) -> set[str]:
        rows = np.unique(buffer.pieces.row)
        column = self.checkpoint.snapshot.take(rows, ["schema"])["schema"]
        return set(column.cast("string").unique().to_pylist())

    def units(self, buffer: SourceBuffer, weights: str | None = None) -> Units:
        first = buffer.heads
        steps = buffer.steps
        snapshot = self.checkpoint.snapshot
        table = snapshot.columns(["episode_start", "commit"])
        rows = buffer.pieces.row[first]
        begun = self._flag("first", self.checkpoint.index.chains.firsts()[buffer.number])
        start = table["episode_start"].to_numpy()[rows] + buffer.pieces.lo[first]
        ended = self._flag("last", self.checkpoint.index.chains.lasts()[buffer.number])
        opened = set(self.open_episodes(buffer.name).values())
        names = self._ids(buffer)
        is_open = np.array([n in opened for n in names], bool) if opened else np.zeros(len(first), bool)
        return Units(
            buffer.rank[first], buffer.env[first], steps, self._weights(buffer, weights, steps),
            table["commit"].to_numpy()[rows], (start > 0) | ~begun, is_open & ~ended,
        )  # fmt: skip

    def ids(self, name: str) -> list[str]:
        """Episode id of each unit."""
        return self._ids(self.buffers[name])

    def _ids(self, buffer: SourceBuffer) -> list[str]:
        import pyarrow as pa

        ids: list[str] = self.checkpoint.index.column("episode_id").take(pa.array(buffer.number)).to_pylist()
        return ids

    def _flag(self, name: str, rows: Ints) -> Mask:
        values: Mask = self.checkpoint.snapshot.columns([name])[name].to_numpy()
        return values[rows]

    def _weights(self, buffer: SourceBuffer, weights: str | None, steps: Ints) -> Ints:
        if weights in (None, "steps"):
            return steps
        if weights == "bytes":
            return steps * self._bytes_per_step(buffer)
        parts = [self.checkpoint.column(str(weights), r, buffer.name) for r in self.checkpoint.ranks]
        values = np.concatenate(parts).reshape(int(steps.sum()), -1).sum(axis=1, dtype=np.float64)
        if (values < 0).any() or not np.isfinite(values).all():
            raise UsageError(
                f"weights={weights!r}: the column has negative or infinite values, which cannot be balanced"
            )
        scale = 2**40 / max(float(values.sum()), 1e-300)
        return per_unit(np.floor(values * scale).astype(np.int64), np.concatenate([[0], np.cumsum(steps)]))

    def _bytes_per_step(self, buffer: SourceBuffer) -> Ints:
        """Bytes of one step of each unit's fields, by its schema (fields of any length count as nothing)."""
        rows = buffer.pieces.row[buffer.heads]
        texts = self.checkpoint.snapshot.take(rows, ["schema"])["schema"].cast("string").to_pylist()
        size = {text: _row_bytes(text) for text in set(texts)}
        return np.array([size[t] for t in texts], np.int64)


def _row_bytes(text: str) -> int:
    from archive.dtypes import to_numpy

    fields = [f for f in loads(text).fields if f.per_step]
    return max(1, sum(to_numpy(f.dtype).itemsize * int(np.prod(f.shape, dtype=np.int64)) for f in fields))


def _heads(episode: Ints, rank: Ints, env: Ints, pieces: Located) -> Ints:
    """Where a unit begins: another episode, rank or env row, or a hole in the row."""
    if not len(episode):
        return np.zeros(0, np.int64)
    hole = pieces.position[1:] != (pieces.position + pieces.hi - pieces.lo)[:-1]
    seam = (episode[1:] != episode[:-1]) | (rank[1:] != rank[:-1]) | (env[1:] != env[:-1]) | hole
    return np.flatnonzero(np.r_[True, seam])


def filtered(source: Source, buffer: SourceBuffer, conditions: Any) -> Mask:
    """Which units a filter lets pass; conditions as `Episodes.filter` takes them, or a condition as text."""
    if conditions is None:
        return np.ones(len(buffer.heads), bool)
    given = {"where": conditions} if isinstance(conditions, str) else dict(conditions)
    complete = given.pop("complete", None)
    mask = source.checkpoint.index.mask(**{k: v for k, v in given.items() if k != "where"})[buffer.number]
    if complete is not None:
        units = source.units(buffer)
        whole = source.checkpoint.index.column("complete").to_numpy()[buffer.number]
        mask &= (whole & ~units.headless & ~units.open) == bool(complete)
    if given.get("where") is not None:
        mask &= _where(source, buffer, given["where"])
    return mask


def _where(source: Source, buffer: SourceBuffer, condition: Any) -> Mask:
    import pyarrow as pa

    from archive.index import matching

    index, numbers = source.checkpoint.index, pa.array(buffer.number)

    def column(name: str) -> Any:
        return pa.array(buffer.steps) if name == "length" else index.column(name).take(numbers)

    return matching(condition, column, len(buffer.heads))
