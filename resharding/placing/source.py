"""A checkpoint as units to deal out: its live episodes per buffer, from the manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.arrays import Ints, Mask, offsets_of, run_heads, run_starts, run_tails, since_head, sums
from archive.base import NotFoundError, UsageError, cached_property
from archive.checkpoint import Checkpoint
from archive.read import Episodes, Spans
from archive.steps import Steps
from archive.tables import among
from resharding.placing.records import Units


@dataclass(frozen=True)
class SourceBuffer:
    """The live steps of one buffer over all source ranks: pieces of segments, grouped into units."""

    name: str
    pieces: Steps  # of rows of the segments table; rank, env: where from; at: where they stand in the rank's columns
    heads: Ints  # first piece of each unit
    first: Ints  # that of its first live step, or the same
    number: Ints  # per unit: its episode in the index

    @property
    def offsets(self) -> Ints:
        return np.append(self.heads, len(self.pieces))

    @property
    def spans(self) -> Spans:
        """The steps of each unit, as those of an episode."""
        return Spans(self.offsets, self.pieces.stream, self.pieces.lo, self.pieces.hi)

    @property
    def steps(self) -> Ints:
        return sums(self.pieces.length, self.offsets)

    @property
    def position(self) -> Ints:
        """Of each unit, where its first step stands; of one without steps, where itself does."""
        return self.pieces["position"][self.first]


class Source:
    """What a plan needs to know of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._units: dict[tuple[str, str | None], Units] = {}

    def __reduce__(self) -> Any:
        return Source, (self.checkpoint,)

    @cached_property
    def buffers(self) -> dict[str, SourceBuffer]:
        """By name; those without live steps too."""
        live, located = self.checkpoint.live, self.checkpoint.located
        names = np.array(live["buffer"].cast("string").to_pylist(), object)
        rank = live["rank"].to_numpy().astype(np.int64)[located["run"]]
        env = live["env_id"].to_numpy()[located["run"]]
        out = {}
        for name in self.checkpoint.buffers:
            mine = np.flatnonzero((names == name)[located["run"]])
            out[name] = self._buffer(name, located.pick(mine), rank[mine], env[mine])
        return out

    def _buffer(self, name: str, pieces: Steps, rank: Ints, env: Ints) -> SourceBuffer:
        steps = pieces.length
        at = offsets_of(steps)[:-1]
        episode = self.checkpoint.index.episode_of_row[pieces.stream]
        # a unit begins with another episode, rank or env row, or after a hole, where positions leave their steps behind
        # (but not after a beginning without steps, which belongs to those that follow, wherever they stand)
        holes = (np.diff(pieces["position"] - at) != 0) & (steps[:-1] > 0)
        heads = run_starts(episode, rank, env, np.cumsum(np.append(False, holes))[: len(at)])
        first = _first_with_steps(heads, steps)
        every = pieces.beside(follows=("at",), rank=rank, env=env, at=since_head(at, run_heads(rank)))
        return SourceBuffer(name, every, heads, first, episode[heads])

    def open_episodes(self, name: str) -> dict[tuple[int, int], str]:
        """(rank, env) -> id of the episode that is open there."""
        out: dict[tuple[int, int], str] = {}
        for rank in self.checkpoint.ranks:
            buffer = self.checkpoint.staged(rank).index.buffers.get(name)
            out |= {(rank, env): episode for env, episode in (buffer.open_episodes if buffer else {}).items()}
        return out

    def gapless(self, buffer: SourceBuffer) -> bool:
        """Whether the steps of each env row follow each other up to where its next one goes, as a ring's do."""
        rank, env, position = buffer.pieces["rank"], buffer.pieces["env"], buffer.pieces["position"]
        after = position + np.maximum(buffer.pieces.length, 1)
        tails = run_tails(rank, env)
        follows = (after[:-1] == position[1:]) | (position[:-1] == position[1:])  # a beginning without steps, moved
        if (~follows & ~tails[:-1]).any():
            return False
        newest = np.flatnonzero(tails)
        following = {
            (rank, env): at
            for rank in self.checkpoint.ranks
            if (staged := self.checkpoint.staged(rank).index.buffers.get(buffer.name))
            for env, at in staged.next_positions.items()
        }
        rows = zip(rank[newest].tolist(), env[newest].tolist(), after[newest].tolist(), strict=True)
        return all(following.get((r, e)) == at for r, e, at in rows)

    def divisible(self, buffer: SourceBuffer) -> bool:
        """Whether steps are independent of each other, by the schema of all that is live."""
        schemas = self.checkpoint.reader.segments(buffer.pieces.stream).schemas
        return bool(schemas) and all(one.unit == "step" for one in schemas)

    def units(self, buffer: SourceBuffer, weights: str | None = None) -> Units:
        key = (buffer.name, weights)
        if key not in self._units:
            self._units[key] = self._made_units(buffer, weights)
        return self._units[key]

    def _made_units(self, buffer: SourceBuffer, weights: str | None) -> Units:
        first, steps = buffer.first, buffer.steps
        index = self.checkpoint.index
        table = self.checkpoint.snapshot.columns(["episode_start", "commit", "position"])
        commit, begin, position = (table[n].to_numpy() for n in ("commit", "episode_start", "position"))
        rows, offset = buffer.pieces.stream[first], buffer.pieces.lo[first]
        start = begin[rows] + offset
        whole = index.column("length").to_numpy()[buffer.number]
        left = (start > 0) | ((steps == 0) & (whole > 0))
        headless = left | ~self._flag("first", index.chains.firsts()[buffer.number])
        tailless = (start + steps < whole) | ~self._flag("last", index.chains.lasts()[buffer.number])
        return Units(
            buffer.pieces["rank"][first], buffer.pieces["env"][first], steps, self._weights(buffer, weights, steps),
            _ages(commit[rows], position[rows] + offset), headless, tailless, tailless & self._going_on(buffer),
        )  # fmt: skip

    def _going_on(self, buffer: SourceBuffer) -> Mask:
        """Units that are the newest live part of an episode that is open in their env row."""
        import pyarrow as pa

        opened = self.open_episodes(buffer.name)
        if not opened or not len(buffer.heads):
            return np.zeros(len(buffer.heads), bool)
        rank, env = buffer.pieces["rank"][buffer.heads], buffer.pieces["env"][buffer.heads]
        newest = np.flatnonzero(run_tails(rank, env))
        ids = self.checkpoint.index.column("episode_id").take(pa.array(buffer.number[newest]))
        out = np.zeros(len(buffer.heads), bool)
        out[newest] = among(ids, opened.values())
        return out

    def episodes(self, buffer: SourceBuffer) -> Episodes:
        """The units, each with its live steps, as episodes."""
        ck = self.checkpoint
        return Episodes(ck.reader, ck.index, buffer.number, buffer.spans, ck)

    def ids(self, name: str) -> list[str]:
        """Episode id of each unit."""
        import pyarrow as pa

        numbers = pa.array(self.buffers[name].number)
        ids: list[str] = self.checkpoint.index.column("episode_id").take(numbers).to_pylist()
        return ids

    def _flag(self, name: str, rows: Ints) -> Mask:
        values: Mask = self.checkpoint.snapshot.columns([name])[name].to_numpy()
        return values[rows]

    def _weights(self, buffer: SourceBuffer, weights: str | None, steps: Ints) -> Ints:
        if weights in (None, "steps"):
            return steps
        if weights == "bytes":
            return self.checkpoint.reader.as_written().sizes(buffer.spans)
        if not self._has_column(buffer.name, str(weights)):
            return steps
        parts = [
            self.checkpoint.column(str(weights), r, buffer.name) for r in np.unique(buffer.pieces["rank"]).tolist()
        ]
        parts = [np.asarray(p, np.float64).reshape(len(p), -1).sum(axis=1) for p in parts if len(p)]
        values = np.concatenate([np.zeros(0), *parts])
        if (values < 0).any() or not np.isfinite(values).all():
            raise UsageError(
                f"weights={weights!r}: the column has negative or infinite values, which cannot be balanced"
            )
        scale = 2**40 / max(float(values.sum()), 1e-300)
        return sums(np.floor(values * scale).astype(np.int64), offsets_of(steps))

    def _has_column(self, buffer: str, name: str) -> bool:
        """Whether a buffer has a column; an error if no buffer of the checkpoint has one of that name."""
        columns = {n: about["columns"] for n, about in self.checkpoint.buffers.items()}
        if self.checkpoint.replay_saved and not any(name in of for of in columns.values()):
            known = sorted({c for of in columns.values() for c in of})
            raise NotFoundError(
                f"weights={name!r}: give 'steps', 'bytes' or one of the columns: {', '.join(known) or 'none'}"
            )
        return name in columns[buffer]


def _first_with_steps(heads: Ints, steps: Ints) -> Ints:
    """Of each unit, beginning at these pieces, the first piece that has steps; of one without any, the first."""
    if not len(heads):
        return heads
    none = len(steps)
    found = np.minimum.reduceat(np.where(steps > 0, np.arange(none), none), heads)
    return np.where(found < none, found, heads)


def _ages(commit: Ints, position: Ints) -> Ints:
    """Smaller is older: by commit, then by position in the stream, which is the time of a ring's step."""
    span = int(position.max(initial=0)) + 1
    if int(commit.max(initial=0)) < 2**62 // span:
        return commit * span + position
    out = np.empty_like(commit)
    out[np.lexsort((position, commit))] = np.arange(len(commit))
    return out


def filtered(source: Source, buffer: SourceBuffer, conditions: Any) -> Mask:
    """Which units a filter lets pass, by conditions as `Episodes.filter` takes them, or what its `where` takes."""
    out = np.ones(len(buffer.heads), bool)
    if conditions is not None:
        given = conditions if isinstance(conditions, Mapping) else {"where": conditions}
        out[:] = False
        out[source.episodes(buffer).places_of(**given)] = True
    return out
