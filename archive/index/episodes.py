"""Episodes as a table: one summary row each, from the segments table alone; filters over it. No data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from archive.arrays import Ints, Mask, arrow, numbers, texts
from archive.base import UsageError, cached_property
from archive.fields import Objects, schema
from archive.index import chains
from archive.index.chains import ByWriter
from archive.index.labels import PREFIX, Labels
from archive.index.snapshot import Snapshot, run_of_session
from archive.log import Commit, Sequences
from archive.tables import ADDRESS, NO_ENV, coded, segments_of

if TYPE_CHECKING:
    import pyarrow as pa

_OF_LAST = (
    "episode_id", "return", "terminated", "truncated", "reason", "rank", "session", "buffer", "metadata", "created_at",
    "commit",
)  # fmt: skip
COLUMNS = (
    "episode_id", "length", "return", "complete", "model_weights_uuids", "update_count_min", "update_count_max",
    "terminated", "truncated", "reason", "env_id", "rank", "run", "session", "buffer", "metadata", "created_at",
    "commit",
)  # fmt: skip

_BY_VALUE = ("episode_id", "buffer", "session", "run", "rank", "env_id")  # columns filtered by a list of values
METADATA_COLUMN = "metadata."  # of columns
_FOUND = ("chains", "episode_of_row", "beyond_steps", "_run_of", "metadata")  # what an index computes once


class EpisodeIndex:
    """The episodes of a snapshot, in the order in which they were last written.

    live: live rows of the segments table; an episode has these rather than the rows that superseded them.
    branch: the session whose view this is, and the offsets of its ranks (None: all that is there).
    """

    def __init__(
        self,
        snapshot: Snapshot,
        live: Callable[[], Ints] | None = None,
        branch: tuple[str, Sequences | None] | None = None,
    ) -> None:
        self.snapshot = snapshot
        self._live = live
        self._branch = branch
        self._labels: tuple[pa.Table, Labels] | None = None

    def as_of(self, commit: Commit) -> EpisodeIndex:
        """The index as of another commit; cached results stay where that commit has the same episodes."""
        same = self.snapshot.commit.same_episodes(commit)
        return self._of(self.snapshot.as_of(commit), _FOUND if same else ())

    def frozen(self) -> EpisodeIndex:
        """The same, which later labels and derived columns do not reach."""
        return self._of(self.snapshot.frozen(), _FOUND)

    def _of(self, snapshot: Snapshot, kept: Iterable[str]) -> EpisodeIndex:
        out = EpisodeIndex(snapshot, self._live, self._branch)
        out.__dict__.update((name, self.__dict__[name]) for name in kept if name in self.__dict__)
        return out

    @cached_property
    def chains(self) -> chains.Chains:
        marks = self.snapshot.columns(chains.COLUMNS)
        return chains.resolve(marks, lambda: self.snapshot.columns(chains.DETAIL), self._live, self._current)

    def _current(self, rows: pa.Table, episode: Ints) -> Mask:
        """Mask of the rows visible on this branch; without a branch, of the rows that no branch left behind."""
        if self._branch is None:
            known = self.snapshot.branches
            return known.current(ByWriter(rows), episode) if known else np.ones(len(episode), bool)
        return ByWriter(rows).seen(self.snapshot.branches.sight(*self._branch))

    def __len__(self) -> int:
        return self.chains.episodes

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the summary table, for all episodes."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if name in _OF_LAST:
            return self._at_last(name)
        if name == "env_id":
            env = numbers(self._at_last("env_id"), NO_ENV).astype(np.int64, copy=False)
            return pa.chunked_array([arrow(env, env != NO_ENV)])
        if name == "run":
            return self._runs()
        if name == "length":
            return pc.add(self._at_last("episode_start"), self._at_last("length"))
        if name == "complete":
            whole = self._flag("first", self.chains.firsts()) & self._flag("last", self.chains.lasts())
            return pa.chunked_array([arrow(whole)])
        if name in ("update_count_min", "update_count_max"):
            return self._extreme(name)
        if name == "model_weights_uuids":
            return self._uuids()
        if name.startswith(PREFIX):
            return self.labels.column(name)
        if name.startswith(METADATA_COLUMN):
            return pa.chunked_array([self.metadata.column(name.removeprefix(METADATA_COLUMN))])
        raise UsageError(f"there is no column {name!r}; columns: {', '.join(self.names)}")

    @property
    def labels(self) -> Labels:
        """The labels of the episodes, as of the commit whose labels apply."""
        said = self.snapshot.annotations.labels
        if self._labels is None or self._labels[0] is not said:
            row = segments_of(said, self.snapshot.columns(ADDRESS)) if said.num_rows else np.zeros(0, np.int64)
            episode = np.where(row >= 0, self.episode_of_row[row], -1) if self.snapshot.rows else np.full(len(row), -1)
            self._labels = said, Labels(said, episode, len(self))
        return self._labels[1]

    @cached_property
    def metadata(self) -> Objects:
        """The episodes' metadata by name."""
        return Objects(self.column("metadata"), "metadata of an episode")

    @property
    def names(self) -> list[str]:
        """The columns but those of metadata: COLUMNS, then one for each key of a label."""
        return [*COLUMNS, *self.labels.names]

    @property
    def metadata_names(self) -> list[str]:
        """The columns of metadata: the names that most episodes have a value for, at most 100."""
        return [METADATA_COLUMN + name for name in self.metadata.names]

    def check_comparable(self, name: str) -> None:
        """UsageError for a label or metadata whose values are scalars of several types."""
        of_label, of_metadata = name.startswith(PREFIX), name.startswith(METADATA_COLUMN)
        fine = self.labels.is_comparable(name) if of_label else True
        if not fine or (of_metadata and not self.metadata.is_comparable(name.removeprefix(METADATA_COLUMN))):
            raise UsageError(f"{name} has values of several types and cannot be compared; filter by another column")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "metadata"} | {"_labels": None}

    def table(self, columns: Sequence[str] = COLUMNS) -> pa.Table:
        import pyarrow as pa

        return pa.table({name: self.column(name) for name in columns})

    @cached_property
    def episode_of_row(self) -> Ints:
        """Number of the episode that each row of the segments table belongs to; -1 for superseded ones."""
        out = np.full(self.snapshot.rows, -1, np.int64)
        out[self.chains.rows] = np.repeat(np.arange(len(self)), np.diff(self.chains.offsets))
        return out

    @cached_property
    def beyond_steps(self) -> Mask:
        """Mask of the rows of the segments table that may hold more than their own steps (axes free and offset)."""
        texts, row = coded(self.snapshot.columns(["schema"])["schema"])
        held = [any(f.axis in ("free", "offset") for f in schema.loads(text).fields) for text in texts]
        out: Mask = np.array(held, bool)[row]
        return out

    def _at_last(self, name: str) -> pa.ChunkedArray:
        column = self.snapshot.columns([name])[name]
        identity = self.chains.single and self.chains.episodes == len(column)
        return column if identity else column.take(arrow(self.chains.lasts()))

    @cached_property
    def _run_of(self) -> dict[str, str | None]:
        return run_of_session(self.snapshot)

    def _runs(self) -> pa.ChunkedArray:
        """The run of each episode's session."""
        import pyarrow as pa

        sessions = self._at_last("session").cast(pa.string()).combine_chunks().dictionary_encode()
        if not len(sessions):
            return pa.chunked_array([], pa.dictionary(pa.int32(), pa.string()))
        runs = texts([self._run_of.get(s) for s in sessions.dictionary.to_pylist()])
        return pa.chunked_array([runs.take(sessions.indices).dictionary_encode()])

    def _flag(self, name: str, rows: Ints) -> Mask:
        values: Mask = numbers(self.snapshot.columns([name])[name], False)
        return values[rows]

    def _extreme(self, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        if self.chains.single:
            return self._at_last(name)
        column = self.snapshot.columns([name])[name]
        least = name.endswith("_min")
        empty = np.iinfo(np.int64).max if least else np.iinfo(np.int64).min
        values = numbers(column, empty)[self.chains.rows]
        reduce: Any = np.minimum if least else np.maximum
        out = reduce.reduceat(values, self.chains.offsets[:-1]) if len(self) else values
        return pa.chunked_array([arrow(out, out != empty)])

    def _uuids(self) -> pa.ChunkedArray:
        import pyarrow as pa

        if self.chains.single:
            return self._at_last("model_weights_uuids")
        lists = self.snapshot.take(self.chains.rows, ["model_weights_uuids"])["model_weights_uuids"].to_pylist()
        ends = self.chains.offsets.tolist()
        joined = [list(dict.fromkeys(u for uuids in lists[a:b] for u in uuids or ())) for a, b in pairwise(ends)]
        edges = np.cumsum([0, *map(len, joined)], dtype=np.int32)
        return pa.chunked_array([pa.ListArray.from_arrays(arrow(edges), texts(list(chain.from_iterable(joined))))])

    def mask(self, **conditions: Any) -> Mask:
        """A mask of the episodes that meet all conditions (see Episodes.filter); None stands for no condition."""
        out = np.ones(len(self), bool)
        for name, value in conditions.items():
            if value is not None:
                out &= self._meets(name, value)
        return out

    def _meets(self, name: str, value: Any) -> Mask:
        if name in _BY_VALUE:
            return self._is_in(name, value)
        if name == "model_weights_uuid":
            return self._any_segment(self._made_with(value))
        if name == "update_count":
            return self._any_segment(self._made_between(*update_range(value)))
        if name == "complete":
            complete: Mask = self.column(name).to_numpy()
            return complete if value else ~complete
        raise UsageError(f'episodes cannot be filtered by {name!r}; use where="..." for any column')

    def _any_segment(self, rows: Mask) -> Mask:
        """Mask of the episodes with a marked segment."""
        picked = rows[self.chains.rows]
        if self.chains.single or not len(self):
            return picked
        return np.logical_or.reduceat(picked, self.chains.offsets[:-1])

    def _is_in(self, name: str, value: Any) -> Mask:
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.string())
        found: Mask = pc.is_in(column, value_set=value_set(name, value, column.type)).to_numpy()
        return found

    def _made_with(self, value: str | Iterable[str]) -> Mask:
        """Mask of the segments that have a step made with one of these weights."""
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted = value_set("model_weights_uuid", value, pa.string())
        rows = np.zeros(self.snapshot.rows, bool)
        at = 0
        for part in self.snapshot.columns(["model_weights_uuids"])["model_weights_uuids"].chunks:
            uuids = pc.list_flatten(part)
            hit = pc.equal(uuids, wanted[0]) if len(wanted) == 1 else pc.is_in(uuids, value_set=wanted)
            places = np.flatnonzero(hit.to_numpy(zero_copy_only=False))
            rows[at + pc.list_parent_indices(part).to_numpy()[places]] = True
            at += len(part)
        return rows

    def _made_between(self, low: int, high: int) -> Mask:
        """Mask of the segments that have a step made with one of these update counts."""
        least, most = (
            numbers(self.snapshot.columns([n])[n], fill)
            for n, fill in (("update_count_min", np.iinfo(np.int64).max), ("update_count_max", np.iinfo(np.int64).min))
        )
        found: Mask = (most >= low) & (least < high)
        return found


def value_set(name: str, value: Any, kind: pa.DataType) -> pa.Array:
    """One value or several, as the values of a column."""
    import pyarrow as pa

    one = isinstance(value, (str, int, np.generic, UUID)) or not isinstance(value, Iterable)
    values = [str(v) if isinstance(v, UUID) else v for v in ([value] if one else value)]
    try:
        if pa.types.is_integer(kind) and not all(
            v is None or type(v) is int or isinstance(v, np.integer) for v in values
        ):
            raise TypeError("that is no integer")  # Arrow would truncate it
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeEncodeError) as e:
        raise UsageError(f"{name}={value!r:.200}: give one or several values of type {kind} ({e})") from e


def update_range(value: Any) -> tuple[int, int]:
    """Half-open (start, stop) of an update count, a (start, stop) or a range; None leaves a side open."""
    if isinstance(value, (int, np.integer)):
        return int(value), int(value) + 1
    if isinstance(value, (range, slice)):
        value = (value.start, value.stop)
    big = np.iinfo(np.int64)
    try:
        low, high = value
        return (big.min + 1 if low is None else int(low)), (big.max if high is None else int(high))
    except (TypeError, ValueError, OverflowError) as e:
        raise UsageError(f"update_count={value!r}: give a number, or (start, stop), half-open") from e
