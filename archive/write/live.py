"""Pure, no I/O: the live set of one buffer, which is its contents, in order; the evictions since the last journal
flush, by permanent addresses; a snapshot of it for a checkpoint, with columns, attributes and state; and the
contents that a writer takes over.

Live steps are `Steps` by env row and offset, in this order, with columns `episode`, `source` (the number of the stream
that they were written to) and `written` (their offset there). A row is of one episode, or an episode without steps.

Offsets are never used twice, so adding and evicting commute: both are noted, and applied together at the next query.
Notes are appended, and their result is replaced, so that a refused call can be cut off again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, ascending
from archive.base import ColumnError, Count, UsageError, cached_property, check_text, escape, jsontree
from archive.fields import dtypes, nests, trees
from archive.log import ForkedFrom, Origin
from archive.tables import NO_ENV
from archive.write.changes import kept
from archive.write.episodes import EpisodeRecord, EpisodeRecords

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Empty = Callable[[tuple[int, ...], Any], Array]  # (shape, dtype) -> memory
POLICIES = ("keep", "drop")
OWN = -1  # number of a stream: the writer's own of that env row, where steps are written at their offset
_MAX_NOTES = 4096  # notes of added steps before they are applied
_MAX_EVICTED = 1 << 14  # rows of notes before they are joined
_NOTHING = Steps.joined([])
Kind = tuple[str, tuple[int, ...]]  # of a column: its dtype, and the shape of a row in stored form
Stream = tuple[str, int, int]  # session, rank, env id
Stretch = tuple[str, Count, int, Count, Count]  # session, rank, env id; steps [lo, hi) of that stream
_NONE = np.zeros(0, np.int64)


def live_steps(
    env: Ints = _NONE,
    position: Ints = _NONE,
    length: Ints = _NONE,
    episode: Ints = _NONE,
    source: Ints = _NONE,
    written: Ints = _NONE,
) -> Steps:
    """Steps of a live set, by env row and offset."""
    columns = {"episode": episode, "source": source, "written": written}
    return Steps(env, position, position + length, follows=("written",), **columns)


def ordered(live: Steps) -> Steps:
    """The same in live order. Those of an env row mostly are in it, and sorting by env row is quick."""
    order = np.argsort(live.stream, kind="stable")
    env, position = live.stream[order], live.lo[order]
    later = (env[1:] > env[:-1]) | (position[1:] > position[:-1])
    return live.pick(order if later.all() else np.lexsort((live.length, live.lo, live.stream)))


@dataclass(frozen=True)
class Column:
    """One value for each live step, in live order, in stored form."""

    array: Array
    dtype: str

    @cached_property
    def digest(self) -> str:
        """A digest that shows changes. It is computed at the first use, as a checkpoint's caller waits for the rest."""
        return digest(self.array)


@dataclass(frozen=True)
class Cut:
    """A snapshot of one buffer for a checkpoint."""

    name: str
    place: tuple[str, int]  # session and rank
    runs: Steps
    streams: Sequence[Stream]
    next_positions: dict[int, int]
    open_episodes: dict[int, str]
    columns: dict[str, Column]
    attributes: dict[str, str]  # name -> JSON of {episode id: value}
    state: tuple[dict[str, Any], dict[str, Array]] | None
    discarded: dict[str, dict[str, int]]
    left: Steps  # live steps that are not in it

    @cached_property
    def live(self) -> pa.Table:
        """Rows of the live table, made in the background, as a checkpoint's caller waits for the rest."""
        return _live_table(self.name, self.place, self.runs, self.streams)

    @property
    def left_out(self) -> pa.Table:
        """Rows, as of the live table, of live steps that are not in it."""
        return _live_table(self.name, self.place, self.left, self.streams)

    @property
    def steps(self) -> int:
        return int(self.runs.length.sum())

    @property
    def episodes(self) -> int:
        return len(ascending(self.runs["episode"]))


class LiveSet:
    """The live steps of one buffer of a rank, and its evictions."""

    def __init__(self, place: tuple[str, int], *, journaled: bool = False) -> None:
        """place: session and rank.  journaled: evictions are noted for `take_left`."""
        self._own = place
        self.journaled = journaled
        self._runs = live_steps()
        self._added: list[Steps] = []  # ranges of env rows, each with the number of its episode
        self._evicted: list[Steps] = []  # ranges of env rows
        self._left: list[Steps] = []  # the same, since `take_left`
        self._left_runs: list[Steps] = []  # evictions by episodes, since then
        self._said = _NOTHING  # for env rows, the offset before which all evictions were taken
        self.streams: Sequence[Stream] = ()  # of other ranks and sessions that have live steps here
        self._foreign = live_steps()  # their steps, as they were taken over
        self._first: Mapping[int, int] = {}  # env row -> the first offset of its own stream
        self.kept = kept(self, "_runs", "_said", grown=("_added", "_evicted", "_left", "_left_runs"))

    def resume(self, runs: Steps, streams: Sequence[Stream], next_positions: Mapping[int, int]) -> None:
        """Begin with these steps, which are in the streams of others."""
        self._runs = self._foreign = runs
        self.streams, self._first = list(streams), next_positions

    # -- additions and evictions ---------------------------------------------------------------------------------------

    def add(self, steps: Steps) -> None:
        """Add ranges of env rows, by offset, with the column `episode`."""
        self._added.append(steps)
        if len(self._added) > _MAX_NOTES:
            self.runs()

    def evict(self, steps: Steps) -> None:
        """Evict these steps of env rows; steps that are not live are skipped."""
        self._evicted.append(steps)
        if self.journaled:
            self._left.append(steps)
        for notes in (self._evicted, self._left):
            if len(notes) * len(steps) > _MAX_EVICTED:
                self._evicted, self._left = ([Steps.joined(some).union()] for some in (self._evicted, self._left))

    def remove(self, episodes: Ints) -> int:
        """Evict all live steps of these episodes; their number."""
        runs = self.runs()
        gone = np.isin(runs["episode"], episodes)
        self._leave(runs.pick(gone))
        self._runs = runs.pick(~gone)
        return int(runs.length[gone].sum())

    def clear(self) -> None:
        self._leave(self.runs())
        self._runs = live_steps()

    def _leave(self, runs: Steps) -> None:
        if self.journaled:
            self._left_runs.append(runs)

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def steps_at_most(self) -> int:
        """The number of live steps; recent evictions may still be counted."""
        return sum(int(steps.length.sum()) for steps in (self._runs, *self._added))

    def runs(self) -> Steps:
        """The live steps, sorted, neighbours merged."""
        if self._added or self._evicted:
            every = [self._runs, _own(Steps.joined(self._added))] if self._added else [self._runs]
            left = ordered(Steps.joined(every)).merged().minus(Steps.joined(self._evicted))
            self._runs, self._added, self._evicted = left, [], []
        return self._runs

    # -- evictions -----------------------------------------------------------------------------------------------------

    def take_left(self) -> tuple[Stretch, ...]:
        """The evictions since the last call. All steps of an env row before some offset may be evicted: that is one
        range, and no list."""
        out: list[Stretch] = []
        if self._left:
            left = Steps.joined(self._left).union()
            out += self._at(left.minus(self._said))
            self._said, self._left = Steps.joined([self._said, left.pick(left.lo == 0)]).union(), []
        if self._left_runs:
            out += self._at(joined(ordered(Steps.joined(self._left_runs))).placed)
            self._left_runs = []
        return tuple(out)

    def _at(self, places: Steps) -> list[Stretch]:
        """The addresses of steps at positions of env rows."""
        steps, streams = self.written(places)
        rows = zip(steps.stream.tolist(), steps.lo.tolist(), steps.hi.tolist(), strict=True)
        return [(*streams[number], lo, hi) for number, lo, hi in rows]

    def written(self, places: Steps) -> tuple[Steps, list[Stream]]:
        """The addresses of steps at positions of env rows, by the place of a stream among the streams, with what else
        `places` has: those of the writer's own streams, and those that were taken over. Any thread may ask."""
        envs, row = np.unique(places.stream, return_inverse=True)
        first = np.array([self._first.get(env, 0) for env in envs.tolist()], np.int64)[row]
        own = places.cut(slice(None), np.maximum(places.lo, first), places.hi)
        met, foreign = places.meet(self._foreign.placed), self._foreign
        taken = places.cut(met.left, met.lo, met.hi)
        lo = foreign["written"][met.right] + met.lo - foreign.lo[met.right]
        other = -2 - foreign["source"][met.right]  # below all env rows
        theirs = Steps(other, lo, lo + taken.length, follows=taken.follows, **taken.columns)
        both = Steps.joined([own.pick(own.length > 0), theirs])
        codes, stream = np.unique(both.stream, return_inverse=True)
        names = [(*self._own, code) if code >= NO_ENV else self.streams[-2 - code] for code in codes.tolist()]
        return Steps(stream, both.lo, both.hi, follows=both.follows, **both.columns), names

    # -- a checkpoint --------------------------------------------------------------------------------------------------

    def rows(self, buffer: str) -> pa.Table:
        """The live steps as rows of the live table."""
        return _live_table(buffer, self._own, self.runs(), self.streams)

    def cut(
        self,
        buffer: str,
        records: EpisodeRecords,
        positions: tuple[dict[int, int], dict[int, str]],
        *,
        columns: Mapping[str, Any] | None,
        attributes: Mapping[str, Mapping[str, Any]] | None,
        state: Any,
        incomplete: str,
        empty: Empty = np.empty,
    ) -> Cut:
        """A copy of all that belongs to a checkpoint; errors name what does not fit, and nothing is written.
        empty: memory for the columns."""
        if incomplete not in POLICIES:
            raise UsageError(f"incomplete={incomplete!r}: give 'keep' or 'drop'")
        runs = self.runs()
        made = {n: column(n, v, runs, records, empty) for n, v in (columns or {}).items()}
        texts = {n: attribute(n, v, runs, records) for n, v in (attributes or {}).items()}
        flat = None if state is None else trees.flatten(state, where="state")
        dropped: dict[str, dict[str, int]] = {}
        left = live_steps()
        if incomplete == "drop":
            following, opened = positions
            dropped, keep = _incomplete(runs, records, {env: following[env] for env in opened})
            made = made if keep.all() else {n: _picked(c, np.repeat(keep, runs.length), empty) for n, c in made.items()}
            runs, left = runs.pick(keep), runs.pick(~keep)
        return Cut(buffer, self._own, runs, tuple(self.streams), *positions, made, texts, flat, dropped, left)


def _own(steps: Steps) -> Steps:
    """Steps of the writer's own streams, in the form of a live set."""
    return steps.beside(follows=("written",), source=np.full(len(steps), OWN), written=steps.lo)


def _live_table(buffer: str, place: tuple[str, int], runs: Steps, streams: Sequence[Stream]) -> pa.Table:
    """Rows of the live table: ranges joined over episodes, streams named."""
    session, rank = place
    runs = joined(runs)
    env, source, lo = runs.stream, runs["source"], runs["written"]
    each = zip(source.tolist(), env.tolist(), strict=True)
    names = [(session, rank, e) if number == OWN else streams[number] for number, e in each]
    return tables.from_columns(
        "live",
        {
            "rank": np.full(len(env), rank),
            "buffer": [buffer] * len(env),
            "env_id": env,
            "position": runs.lo,
            "session": [n[0] for n in names],
            "stream_rank": [n[1] for n in names],
            "stream_env": [n[2] for n in names],
            "lo": lo,
            "hi": lo + runs.length,
        },
    )


def joined(runs: Steps) -> Steps:
    """Neighbouring steps of one stream as one row, whatever their episodes; episodes without steps alone."""
    some = runs.length > 0
    full = runs.pick(some)
    return ordered(Steps.joined([full.beside(episode=np.zeros(len(full), np.int64)).merged(), runs.pick(~some)]))


def _incomplete(
    runs: Steps, records: EpisodeRecords, following: Mapping[int, int]
) -> tuple[dict[str, dict[str, int]], Any]:
    """Live episodes that lack steps or their end, and their live steps, counted by what they lack; mask of the ranges
    of the others. following: env row -> its next offset, where an episode is open."""
    numbers, episode = np.unique(runs["episode"], return_inverse=True)
    live = np.bincount(episode, runs.length, len(numbers)).astype(np.int64)
    full = runs.pick(runs.length > 0)
    begun = set(zip(full["episode"].tolist(), full.stream.tolist(), full.lo.tolist(), strict=True))
    each = zip(numbers.tolist(), live.tolist(), strict=True)
    why = np.array([_lack(number, records, steps, begun, following) for number, steps in each], object)
    counts = {
        reason: {"episodes": int((why == reason).sum()), "steps": int(live[why == reason].sum())}
        for reason in ("headless", "open")
        if (why == reason).any()
    }
    return counts, (why == "")[episode]


def _lack(
    number: int, records: EpisodeRecords, live: int, begun: set[tuple[int, int, int]], following: Mapping[int, int]
) -> str:
    """The reason that an episode is not complete: its first step is not live, or the last, or one between; "" if it is.
    live: the number of its live steps; begun: episode, env row and offset where ranges of live steps begin."""
    record, end = records[number], records.end(number)
    stop = following.get(record.env_id) if end is None else end.position
    has_no_steps = not live if stop is None else stop == record.begin  # rows without an env have no next offset
    has_first = has_no_steps or (number, record.env_id, record.begin) in begun
    if record.headless or not has_first:
        return "headless"
    return "" if end is not None and not end.broken and live == end.position - record.begin else "open"


def column(name: str, value: Any, runs: Steps, records: EpisodeRecords, empty: Empty = np.empty) -> Column:
    """A column of these ranges, copied: one value a step, or a dict of episode id to array; ColumnError if that does
    not fit."""
    check_text(name, "column name")
    array = _by_episode(name, value, runs, records) if isinstance(value, Mapping) else nests.as_array(value, name)
    steps = int(runs.length.sum())
    if array.ndim == 0 or len(array) != steps:
        count = "no axis" if array.ndim == 0 else f"{len(array)} values"
        raise ColumnError(
            f"column {name!r} has {count}, the buffer has {steps} live steps; give one value a live step, in the "
            "order of w.live, or a dict of episode id to array"
        )
    return _copied(*dtypes.to_stored(array), empty)


def values_of(name: str, value: Any, steps: Steps) -> Column:
    """Values of a column, copied: one each of these steps; ColumnError if there are others."""
    array = nests.as_array(value, check_text(name, "column name"))
    if array.ndim == 0 or len(array) != len(steps):
        count = "no axis" if array.ndim == 0 else f"{len(array)} values"
        raise ColumnError(f"column {name!r} has {count} for {len(steps)} positions; give one value a position")
    return _copied(*dtypes.to_stored(array), np.empty)


def _copied(stored: Array, logical: str, empty: Empty) -> Column:
    own = empty(stored.shape, stored.dtype)
    own[...] = stored
    return Column(own, logical)


def _picked(column: Column, steps: Any, empty: Empty) -> Column:
    return _copied(column.array[steps], column.dtype, empty)


def _by_episode(name: str, values: Mapping[str, Any], runs: Steps, records: EpisodeRecords) -> Array:
    """Values in live order, from one array for each episode."""
    arrays = {key: nests.as_array(v if not np.isscalar(v) else [v], name) for key, v in values.items()}
    taken = dict.fromkeys(arrays, 0)
    parts = []
    for index, length in zip(runs["episode"].tolist(), runs.length.tolist(), strict=True):
        key = records.id_of(index)
        if key not in arrays:
            raise ColumnError(f"column {name!r} has no values for live episode {key!r}; give one array a live episode")
        parts.append(arrays[key][taken[key] : taken[key] + length])
        taken[key] += length
    wrong = [k for k, a in arrays.items() if len(a) != taken[k]]
    if wrong:
        raise ColumnError(
            f"column {name!r} has {len(arrays[wrong[0]])} values for episode {wrong[0]!r}, of which {taken[wrong[0]]} "
            "steps are live; give one value a live step"
        )
    return _together(name, parts or [a[:0] for a in arrays.values()] or [np.zeros(0)])


def _together(name: str, parts: Sequence[Array]) -> Array:
    """Parts of a column end to end; ColumnError if one dtype does not hold all of their values as they are."""
    some = [part for part in parts if len(part)] or parts[:1]
    kinds = {(part.dtype.name, part.shape[1:]) for part in some}
    if len({shape for _, shape in kinds}) == 1:
        with np.errstate(all="ignore"), suppress(TypeError):  # of dtypes that have none in common
            out = np.concatenate(some)
            if len(kinds) == 1 or all(_same(part, part.astype(out.dtype).astype(part.dtype)) for part in some):
                return out
    raise ColumnError(f"column {name!r} has values of several dtypes or shapes, give all of them one: {sorted(kinds)}")


def _same(some: Array, others: Array) -> bool:
    return some.dtype.kind not in "iu" or bool((some == others).all())


def attribute(name: str, values: Mapping[str, Any], runs: Steps, records: EpisodeRecords) -> str:
    """An attribute of episodes of these runs, as JSON; ColumnError if it has a value for another."""
    numbers = [-1 if (number := records.number_of(key)) is None else number for key in values]
    for key, is_live in zip(values, np.isin(numbers, runs["episode"]).tolist(), strict=True):
        if not is_live:
            count = len(ascending(runs["episode"]))
            raise ColumnError(
                f"attribute {name!r} has a value for {key!r}, which is not among the {count} live episodes"
            )
    return jsontree.dumps(dict(values), where=f"attributes.{check_text(name, 'attribute name')}")


def column_path(buffer: str, name: str) -> str:
    return f"columns/{escape(buffer)}/{escape(name)}"


def digest(array: np.ndarray[Any, Any]) -> str:
    """Tells whether a column has changed."""
    head = f"{array.dtype.str}{array.shape}".encode()
    if array.dtype == object:
        return hashlib.sha256(head + json.dumps(array.tolist()).encode()).hexdigest()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


# -- the contents that a writer takes over -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferResume:
    """One buffer as a new writer takes it over. `episode` and `source` of the ranges index the two lists."""

    runs: Steps
    episodes: Sequence[EpisodeRecord]
    streams: Sequence[Stream]
    next_positions: Mapping[int, int]
    open_episodes: Mapping[int, int]  # env id -> place in `episodes`
    to_close: Sequence[int] = ()  # open ones that the resume's policy ends: each gets a segment row of length 0
    dropped: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # reason -> episodes, steps that the plan left behind
    column_kinds: Callable[[], Mapping[str, Collection[Kind]]] = field(
        default=dict, compare=False
    )  # of values of its steps


@dataclass(frozen=True)
class Resume:
    """A writer's start: its place and its buffers."""

    rank: int
    world_size: int
    run: str
    buffers: Mapping[str, BufferResume]
    seen: int  # number of the newest commit known at the decision
    checkpoint: int | None = None  # the commit that it was read from
    origin: Origin | None = None  # the branch that its session is part of; None if it takes nothing over
    name: str | None = None  # of that checkpoint
    forked_from: ForkedFrom | None = None  # where a new run begins there
    saved_by: int | None = None  # the number of ranks that saved it
    holders: Callable[[], Mapping[str, int]] = field(default=dict, compare=False)  # episode -> rank that has it live
    takes_all: bool = False  # all that the run has, as of `seen`, is gone on from: nothing may be left behind unawares
