"""A checkpoint as units to deal out: the live episodes of each of its buffers, from the manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from archive.arrays import (
    Ints,
    Mask,
    Steps,
    arrow,
    ascending,
    group_of,
    merge_runs,
    numbers,
    offsets_of,
    run_heads,
    run_starts,
    run_tails,
    since_head,
    spans,
    sums,
)
from archive.base import ColumnError, NotFoundError, UsageError, cached_property
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.fields import dtypes
from archive.read import Episodes, Spans
from archive.saved import common
from archive.tables import among


def sources_of(checkpoint: Checkpoint) -> dict[str, SourceBuffer]:
    """The buffers of a checkpoint, by name. A recovery of prompts alone has none; the main one is empty then."""
    return {name: SourceBuffer(checkpoint, name) for name in checkpoint.buffers or (MAIN_BUFFER,)}


class SourceBuffer:
    """The live steps of one buffer over all source ranks: ranges of segments, grouped into units.

    pieces: ranges of rows of the segments table; rank, env: their source; at: their place in the rank's columns.
    heads: the first range of each unit.  number: the episode of each in the index.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name = checkpoint, name
        live = checkpoint.live
        pieces = checkpoint.located.pick(among(live["buffer"], {name})[checkpoint.located["run"]])
        rank, env = (numbers(live[of]).astype(np.int64)[pieces["run"]] for of in ("rank", "env_id"))
        at = offsets_of(pieces.length)[:-1]
        episode = checkpoint.index.episode_of_row[pieces.stream]
        # a unit begins with another episode, rank or env row, or after a hole, where positions leave their steps behind
        # (but not after a beginning without steps, which belongs to those that follow, wherever they stand)
        holes = (np.diff(pieces["position"] - at) != 0) & (pieces.length[:-1] > 0)
        self.heads = run_starts(episode, rank, env, np.cumsum(np.append(False, holes))[: len(at)])
        self.offsets = np.append(self.heads, len(at))
        self.number: Ints = episode[self.heads]
        self.pieces = pieces.beside(follows=("at",), rank=rank, env=env, at=since_head(at, run_heads(rank)))

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str, pieces: Steps, heads: Ints, number: Ints, units: Steps) -> Self:
        """Some of the units of a buffer, as they were found in the whole checkpoint."""
        out = cls.__new__(cls)
        out.checkpoint, out.name, out.pieces, out.heads, out.number = checkpoint, name, pieces, heads, number
        out.offsets = np.append(heads, len(pieces))
        out.__dict__["units"] = units
        return out

    def __reduce__(self) -> Any:
        return SourceBuffer, (self.checkpoint, self.name)

    @property
    def spans(self) -> Spans:
        """The steps of each unit, in the form of an episode's."""
        return Spans(self.offsets, self.pieces.stream, self.pieces.lo, self.pieces.hi)

    @property
    def episodes(self) -> Episodes:
        """The units, each with its live steps, as episodes."""
        return Episodes(self.checkpoint.reader, self.checkpoint.index, self.number, self.spans, self.checkpoint)

    @property
    def first(self) -> Ints:
        """The first range of each unit that has steps; of a unit without steps, its first."""
        if not len(self.heads):
            return self.heads
        none = len(self.pieces)
        found = np.minimum.reduceat(np.where(self.pieces.length > 0, np.arange(none), none), self.heads)
        return np.where(found < none, found, self.heads)

    @property
    def position(self) -> Ints:
        """The offset of the first step of each unit; of a unit without steps, its own place."""
        return self.pieces["position"][self.first]

    def cut(self, parts: Steps) -> tuple[Ints, Steps]:
        """The ranges of segments behind ranges of units, and the start of each."""
        first = self.offsets[parts.stream]
        counts = self.offsets[parts.stream + 1] - first
        index, owner = spans(first, counts), np.repeat(np.arange(len(parts)), counts)
        begins = offsets_of(self.pieces.length)
        before = begins[index] - begins[first][owner]  # steps of the unit before this piece
        lo, hi, steps = parts.lo[owner] - before, parts.hi[owner] - before, self.pieces.length[index]
        kept = (np.minimum(hi, steps) > np.maximum(lo, 0)) | (steps == 0) & (lo <= 0) & (hi >= 0)
        start = self.pieces.lo[index[kept]]
        lo, hi = (np.clip(edge, 0, steps)[kept] + start for edge in (lo, hi))
        cut = self.pieces.cut(index[kept], lo, hi)
        return offsets_of(np.bincount(owner[kept], minlength=len(parts))), cut

    def column(self, name: str, pieces: Steps) -> np.ndarray[Any, Any]:
        """The values of a column at some of these ranges, in their order, fetched once for each source rank."""
        ck = self.checkpoint
        steps, begins = pieces.length, offsets_of(pieces.length)
        ranks = ascending(pieces["rank"][steps > 0]).tolist()
        columns = {rank: ck.column_ref(name, rank, self.name) for rank in ranks or self._having(name)}
        kind = common((column.dtype, column.shape) for column in columns.values())
        if kind is None:
            known = ", ".join(f"{rank}: {column.dtype} {[*column.shape]}" for rank, column in columns.items())
            raise ColumnError(
                f"column {name!r} of buffer {self.name!r} has dtypes or shapes of which none holds all values (rank "
                f"{known}); read those of one rank with checkpoint.column(name, rank), or plan for as many ranks"
            )
        out = np.empty((int(begins[-1]), *dtypes.given_shape(*kind)), dtypes.to_numpy(kind[0]))
        for source_rank in ranks:
            mine = np.flatnonzero((pieces["rank"] == source_rank) & (steps > 0))
            wanted = spans(pieces["at"][mine], steps[mine])
            begin, stop = merge_runs(pieces["at"][mine], pieces["at"][mine] + steps[mine])
            column = columns[source_rank]
            runs = list(zip(begin.tolist(), stop.tolist(), strict=True))
            values = np.concatenate(ck.file(column).column_rows(column, runs))
            run = group_of(begin, wanted)
            out[spans(begins[mine], steps[mine])] = values[wanted - begin[run] + offsets_of(stop - begin)[run]]
        return out

    def _having(self, name: str) -> list[int]:
        """The first rank that has a column: of which kind its values are where there are none."""
        ck = self.checkpoint
        return [next(rank for rank in ck.ranks if name in ck.staged(rank).index.columns.get(self.name, {}))]

    @cached_property
    def units(self) -> Steps:
        """The units in the form of `placement`, without their weights."""
        first, number = self.first, self.number
        index = self.checkpoint.index
        columns = ["episode_start", "commit", "position", "first", "last"]
        table = self.checkpoint.snapshot.columns(columns)
        begin, commit, position, is_first, is_last = (numbers(table[name]) for name in columns)
        rows, offset = self.pieces.stream[first], self.pieces.lo[first]
        steps = sums(self.pieces.length, self.offsets)
        start = begin[rows] + offset
        whole = numbers(index.column("length"))[number]
        left = (start > 0) | ((steps == 0) & (whole > 0))
        tailless = (start + steps < whole) | ~is_last[index.chains.lasts()[number]]
        flags: dict[str, Any] = {
            "headless": left | ~is_first[index.chains.firsts()[number]],
            "tailless": tailless,
            "open": tailless & self._going_on(),
        }
        rank, env = self.pieces["rank"][first], self.pieces["env"][first]
        age = _ages(commit[rows], position[rows] + offset)
        return Steps(np.arange(len(steps)), np.zeros_like(steps), steps, rank=rank, env=env, age=age, **flags)

    def _going_on(self) -> Mask:
        """A mask of the units that are the newest live part of an episode that is open in their env row."""
        out = np.zeros(len(self.heads), bool)
        if opened := self.open_episodes:
            newest = np.flatnonzero(run_tails(self.pieces["rank"][self.heads], self.pieces["env"][self.heads]))
            ids = self.checkpoint.index.column("episode_id").take(arrow(self.number[newest]))
            out[newest] = among(ids, opened.values())
        return out

    @cached_property
    def open_episodes(self) -> dict[tuple[int, int], str]:
        """(rank, env) -> id of the episode that is open there."""
        staged = self._staged.items()
        return {(rank, env): name for rank, one in staged for env, name in one.open_episodes.items()}

    @property
    def _staged(self) -> dict[int, Any]:
        """Source rank -> its staged index of this buffer."""
        found = {rank: part.index.buffers.get(self.name) for rank, part in self.checkpoint.all_staged().items()}
        return {rank: one for rank, one in found.items() if one is not None}

    @property
    def gapless(self) -> bool:
        """True if the steps of each env row follow each other up to its next offset, as a ring's do."""
        rank, env, position = self.pieces["rank"], self.pieces["env"], self.pieces["position"]
        after = position + np.maximum(self.pieces.length, 1)
        tails = run_tails(rank, env)
        follows = (after[:-1] == position[1:]) | (position[:-1] == position[1:])  # a beginning without steps, moved
        if (~follows & ~tails[:-1]).any():
            return False
        following = {(r, e): at for r, one in self._staged.items() for e, at in one.next_positions.items()}
        rows = zip(rank[tails].tolist(), env[tails].tolist(), after[tails].tolist(), strict=True)
        return all(following.get((r, e)) == at for r, e, at in rows)

    @property
    def divisible(self) -> bool:
        """True if steps are independent of each other, by the schema of all that is live."""
        schemas = self.checkpoint.reader.segments(self.pieces.stream).schemas
        return bool(schemas) and all(one.unit == "step" for one in schemas)

    def passing(self, conditions: Any) -> Mask:
        """Mask of the units that meet conditions, as for `Episodes.filter`, or for its `where`."""
        out = np.ones(len(self.heads), bool)
        if conditions is not None:
            given = conditions if isinstance(conditions, Mapping) else {"where": conditions}
            out[:] = False
            out[self.episodes.places_of(**given)] = True
        return out

    def weights(self, by: str | None) -> Ints:
        """The weight of each unit: its steps, its bytes, or the sum of a column."""
        if by == "bytes":
            return self.checkpoint.reader.as_written().sizes(self.spans)
        if by in (None, "steps") or not self._has_column(str(by)):
            return self.units.length
        ranks = ascending(self.pieces["rank"]).tolist()
        parts = [self.checkpoint.column(str(by), rank, self.name) for rank in ranks]
        parts = [np.asarray(part, np.float64).reshape(len(part), -1).sum(axis=1) for part in parts if len(part)]
        values = np.concatenate([np.zeros(0), *parts])
        if (values < 0).any() or not np.isfinite(values).all():
            raise UsageError(f"weights={by!r}: the column has negative or infinite values, which cannot be balanced")
        scale = 2**40 / max(float(values.sum()), 1e-300)
        return sums(np.floor(values * scale).astype(np.int64), offsets_of(self.units.length))

    def _has_column(self, name: str) -> bool:
        """True if the buffer has a column; an error if no buffer of the checkpoint has one of that name."""
        columns = {buffer: about["columns"] for buffer, about in self.checkpoint.buffers.items()}
        if self.checkpoint.replay_saved and not any(name in of for of in columns.values()):
            known = sorted({c for of in columns.values() for c in of})
            raise NotFoundError(
                f"weights={name!r}: give 'steps', 'bytes' or one of the columns: {', '.join(known) or 'none'}"
            )
        return name in columns[self.name]


def _ages(commit: Ints, position: Ints) -> Ints:
    """Ages, of which smaller ones are older: by commit, then by position in the stream, the time of a ring's step."""
    span = int(position.max(initial=0)) + 1
    if int(commit.max(initial=0)) < 2**62 // span:
        return commit * span + position
    out = np.empty_like(commit)
    out[np.lexsort((position, commit))] = np.arange(len(commit))
    return out
