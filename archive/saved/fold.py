"""Pure, no I/O: what a session's ranks held when their journals ended: a fold of the checkpoint before it and of what
each rank's ticks add, as if all ranks had been cut then.

Live are the steps of before and those that came, less what left; of values the newest that was saved or journaled
counts. Runs are those of a live set, but that every stream has a number: `LiveRuns.stream` is a place among the names
of `_StreamNumbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, offsets_of, spans
from archive.base import cached_property, jsontree
from archive.fields import dtypes
from archive.saved.delta import Delta
from archive.saved.index import PartBuffer, PartIndex, Stretch
from archive.steps import Steps
from archive.tables import NO_ENV, coded
from archive.write import Column, Cut, LiveRuns, Stream, live_table

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Owner = tuple[int, str]  # rank, buffer
Saved = tuple[Mapping[str, Column], Mapping[str, Mapping[str, Any]]]  # columns; attributes, {episode id: value}
Kind = tuple[str, tuple[int, ...]]  # of a column: its dtype, and the shape of a row in stored form
FOLDED = ("episode_id", *tables.LOCATING)  # columns of the segments table that a fold asks for
_ENDS = ("buffer", "shard", "env_id", "position", "length", "episode_id", "sequence", "last", "reason")


class Before(NamedTuple):
    """The checkpoint that a fold begins with; as it is by default, there is none.

    own: it is of the session whose ticks are added, and `sequences` says which of its rows are in it; else the session
    went on from it. live: its rows of the live table; left_out: rows as of this table of what its ranks held beside
    it. parts: rank -> index of its part. values: gives what a rank has of a buffer.
    """

    own: bool = False
    world_size: int = 0
    live: pa.Table | None = None
    left_out: pa.Table | None = None
    parts: Mapping[int, PartIndex] = {}
    sequences: Mapping[int, int] = {}
    values: Callable[[int, str], Saved] = lambda rank, buffer: ({}, {})


class SessionFold:
    """The live steps, positions, open episodes, columns and attributes of all ranks."""

    def __init__(
        self, session: str, world_size: int, before: Before, deltas: Mapping[int, Delta], segments: pa.Table,
        spared: Mapping[str, Sequence[Stretch]] | None = None,
    ) -> None:  # fmt: skip
        """segments: rows of the segments table, old and new, which say what the live steps are of. spared: buffer ->
        steps that are live although they left."""
        self._session = session
        self._before = before
        self._deltas = deltas
        self.world_size = world_size
        self._streams = _StreamNumbers()
        self._saved = self._by_owner(before.live)
        self._left_out = self._by_owner(before.left_out)
        self._held = self._saved if before.own else self._resumed()  # when the ticks began
        self._spared = spared or {}
        runs = self._runs()
        self._ids: list[str] = []
        self._located = self._episodes(runs, segments)
        self.lacking: dict[tuple[int, str, str], int] = {}  # rank, buffer, column -> steps without a value

    # -- live steps ----------------------------------------------------------------------------------------------

    def _by_owner(self, live: pa.Table | None) -> dict[Owner, LiveRuns]:
        return {} if live is None else _by_owner(live, self._streams)

    def _runs(self) -> dict[Owner, LiveRuns]:
        """The steps that were live before or came, less those that left."""
        import pyarrow.compute as pc

        new: dict[Owner, LiveRuns] = {}
        for rank, delta in self._deltas.items():
            rows = delta.table("segments")
            fresh = rows.filter(pc.greater_equal(rows["sequence"], self._before.sequences.get(rank, 0)))
            new |= _appended(fresh, self._streams)
        named = ((rank, buffer) for rank in range(self.world_size) for buffer in self._named(rank))
        none = LiveRuns.empty()
        return {
            owner: self._left(owner, _together(self._held.get(owner, none), new.get(owner, none)))
            for owner in sorted({*self._held, *new, *named})
        }

    def _left(self, owner: Owner, runs: LiveRuns) -> LiveRuns:
        rank, buffer = owner
        gone = self._streams.steps(self._deltas[rank].gone.get(buffer, []) if rank in self._deltas else [])
        return _without(runs, gone.placed.minus(self._streams.steps(self._spared.get(buffer, []))))

    def _resumed(self) -> dict[Owner, LiveRuns]:
        """The steps that the ranks of a session without a checkpoint held when it began."""
        taken: dict[Owner, LiveRuns] = {}
        for delta in self._deltas.values():
            taken |= self._by_owner(delta.live)
        dead = [rank for rank in range(self.world_size) if rank not in self._deltas or not self._deltas[rank].objects]
        if len(dead) == self.world_size == self._before.world_size:
            return self._saved
        if dead:
            taken |= _left_over(self._saved, taken, dead[0])
        return taken

    def _named(self, rank: int) -> set[str]:
        """Buffers of a rank, also those in which nothing is live."""
        delta, part = self._deltas.get(rank), self._before.parts.get(rank)
        out = set() if delta is None else {*delta.gone, *delta.columns, *delta.attributes}
        return out if part is None else out | set(part.buffers)

    def _episodes(self, runs: Mapping[Owner, LiveRuns], segments: pa.Table) -> dict[Owner, LiveRuns]:
        """The live runs as runs of one episode each; an error if a live step is in no segment."""
        live = [live_table(o[1], (self._session, o[0]), one, self._streams.names) for o, one in runs.items()]
        every = tables.concat("live", live)
        located = tables.locate(every, segments)
        (self._ids, episode), position = coded(segments["episode_id"]), segments["position"].to_numpy()
        env = every["env_id"].to_numpy()[located["run"]]
        stream = self._streams.of(every["session"], every["stream_rank"], every["stream_env"])[located["run"]]
        lo = position[located.stream] + located.lo
        found = LiveRuns(env, located["position"], located.length, episode[located.stream], stream, lo)
        owner = np.repeat(np.arange(len(live)), [table.num_rows for table in live])[located["run"]]
        return {one: found.pick(owner == at).ordered() for at, one in enumerate(runs)}

    # -- cuts ----------------------------------------------------------------------------------------------------

    def cuts(self, rank: int) -> list[Cut]:
        """The buffers of a rank, as a checkpoint has them."""
        return [self._cut(owner) for owner in self._located if owner[0] == rank]

    def _cut(self, owner: Owner) -> Cut:
        rank, buffer = owner
        runs = self._located[owner]
        names = [self._ids[i] for i in runs.episode.tolist()]
        rows = (self._deltas.get(rank) or Delta()).table("segments")
        positions = _ends(rows, buffer, *self._began(owner, runs, names))
        columns, attributes = self._values(owner, runs, set(names))
        left = self._left_out.get(owner, LiveRuns.empty())
        return Cut(
            buffer, (self._session, rank), runs, tuple(self._streams.names), *positions, columns, attributes, None, {},
            left,
        )  # fmt: skip

    def _began(self, owner: Owner, runs: LiveRuns, names: Sequence[str]) -> tuple[dict[int, int], dict[int, str]]:
        """Next positions and open episodes as far as they do not follow from the rows of ticks."""
        before = self._before
        following = _ends_of(_together(runs, self._held.get(owner, LiveRuns.empty())))
        same = before.own or (before.world_size == self.world_size == len(self._deltas) and self._as_before(owner))
        own = self._saved_buffer(owner) if same else None
        if own is not None:
            following |= {env: max(end, following.get(env, 0)) for env, end in own.next_positions.items()}
            return following, dict(own.open_episodes)
        if before.own:
            return following, {}
        last = dict(zip(runs.env.tolist(), names, strict=True))
        return following, {env: name for env, name in last.items() if name in self._open_before}

    def _saved_buffer(self, owner: Owner) -> PartBuffer | None:
        rank, buffer = owner
        return self._before.parts[rank].buffers.get(buffer) if rank in self._before.parts else None

    def _as_before(self, owner: Owner) -> bool:
        """True if a resumed rank began with what the one of its number had held: a plan may have moved it."""
        began, before = (of.get(owner, LiveRuns.empty()).ordered() for of in (self._held, self._saved))
        return all(np.array_equal(one, other) for one, other in zip(began, before, strict=True))

    @cached_property
    def _open_before(self) -> set[str]:
        """Episodes that were open in the checkpoint which the session resumed from."""
        buffers = (buffer for part in self._before.parts.values() for buffer in part.buffers.values())
        return {name for buffer in buffers for name in buffer.open_episodes.values()}

    # -- columns and attributes ----------------------------------------------------------------------------------

    def _values(self, owner: Owner, runs: LiveRuns, names: set[str]) -> tuple[dict[str, Column], dict[str, str]]:
        """The columns of live steps, and attributes of live episodes as JSON."""
        rank, buffer = owner
        given: dict[str, list[tuple[Column, Steps]]] = {}
        attributes: dict[str, dict[str, Any]] = {}
        for source in [source for source in self._before.parts if source == rank or not self._before.own]:
            steps = self._saved.get((source, buffer), LiveRuns.empty()).written
            columns, known = self._before.values(source, buffer)
            for name, column in columns.items():
                given.setdefault(name, []).append((column, steps))
            for name, of in known.items():
                attributes.setdefault(name, {}).update(of)
        delta = self._deltas.get(rank) or Delta()
        for name, journaled in delta.columns.get(buffer, {}).items():
            given.setdefault(name, []).extend((column, self._streams.steps(steps)) for column, steps in journaled)
        for name, more in delta.attributes.get(buffer, {}).items():
            attributes.setdefault(name, {}).update(more)
        for name, (dtype, shape) in self._kinds.get(buffer, {}).items():
            given.setdefault(name, [(Column(_blank(dtype, 0, shape), dtype), self._streams.steps([]))])
        live = {name: {key: value for key, value in of.items() if key in names} for name, of in attributes.items()}
        texts = {name: jsontree.dumps(of, where="attributes") for name, of in live.items()}
        return {name: self._filled(owner, name, runs, values) for name, values in given.items()}, texts

    @cached_property
    def _kinds(self) -> dict[str, dict[str, Kind]]:
        """The columns of each buffer that some rank has values of: a plan may deal its steps to any rank."""
        out: dict[str, dict[str, Kind]] = {}
        for index in self._before.parts.values():
            for buffer, refs in index.columns.items():
                out.setdefault(buffer, {}).update((name, (ref.dtype, ref.shape)) for name, ref in refs.items())
        for delta in self._deltas.values():
            for buffer, of in delta.columns.items():
                newest = {name: values[-1].column for name, values in of.items()}
                kinds = {name: (column.dtype, column.array.shape[1:]) for name, column in newest.items()}
                out.setdefault(buffer, {}).update(kinds)
        return out

    def _filled(self, owner: Owner, name: str, runs: LiveRuns, given: Sequence[tuple[Column, Steps]]) -> Column:
        column, lacking = fill(runs.written, given)
        if lacking:
            self.lacking[*owner, name] = lacking
        return column


class _StreamNumbers:
    """Numbers of streams, in the order in which they are met."""

    def __init__(self) -> None:
        self.names: list[Stream] = []
        self._numbers: dict[Stream, int] = {}

    def number(self, stream: Stream) -> int:
        """The number of a stream; a new one gets the next."""
        if stream not in self._numbers:
            self._numbers[stream] = len(self.names)
            self.names.append(stream)
        return self._numbers[stream]

    def of(self, session: Any, rank: Any, env: Any) -> Ints:
        """The numbers of many, from three columns."""
        names = zip(session.to_pylist(), rank.to_pylist(), env.to_pylist(), strict=True)
        return np.array([self.number(name) for name in names], np.int64)

    def steps(self, some: Iterable[Stretch]) -> Steps:
        """Steps of these streams."""
        columns = [(self.number((session, rank, env)), lo, hi) for session, rank, env, lo, hi in some]
        return Steps(*np.array(columns, np.int64).reshape(-1, 3).T)


def _by_owner(live: pa.Table, streams: _StreamNumbers) -> dict[Owner, LiveRuns]:
    """Rows of the live table, by rank and buffer."""
    stream = streams.of(live["session"], live["stream_rank"], live["stream_env"])
    env, position, lo, hi = (live[name].to_numpy() for name in ("env_id", "position", "lo", "hi"))
    every = LiveRuns(env, position, hi - lo, np.zeros(len(lo), np.int64), stream, lo)
    parts = list(zip(live["rank"].to_pylist(), live["buffer"].to_pylist(), strict=True))
    places: dict[Owner, list[int]] = {}
    for place, part in enumerate(parts):
        places.setdefault(part, []).append(place)
    return {part: every.pick(np.array(some, np.int64)) for part, some in places.items()}


def _appended(segments: pa.Table, streams: _StreamNumbers) -> dict[Owner, LiveRuns]:
    """The steps that rows of the segments table have, and episodes without steps, where their ranks put them."""
    import pyarrow.compute as pc

    rows = segments.filter(pc.is_valid(segments["shard"]))
    names = ("rank", "buffer", "env_id", "position", "session")
    live = rows.select(names)
    end = pc.add(rows["position"], rows["length"])
    more = (("stream_rank", rows["rank"]), ("stream_env", rows["env_id"]), ("lo", rows["position"]), ("hi", end))
    for name, column in more:
        live = live.append_column(name, column)
    return _by_owner(live, streams)


def _together(*some: LiveRuns) -> LiveRuns:
    """The runs of all, in live order."""
    return LiveRuns.joined(some).ordered()


def _ends(
    segments: pa.Table, buffer: str, following: Mapping[int, int], opened: Mapping[int, str]
) -> tuple[dict[int, int], dict[int, str]]:  # fmt: skip
    """Env row of a buffer -> the position of its next step, and the id of the episode that is open there: as it was
    before, and as rows of ticks say. An episode that was added without an env row is never open: no step can follow it
    there."""
    following = dict(following)
    newest: dict[int, tuple[int, int, str | None]] = {}  # env row -> position, sequence, open episode of its last row
    closed: dict[str, int] = {}  # episode -> sequence of the row that closes it
    columns = zip(*(segments[column].to_pylist() for column in _ENDS), strict=True)
    for name, shard, env, position, length, episode, sequence, last, reason in columns:
        if name != buffer:
            continue
        if shard is None:
            closed[episode] = max(sequence, closed.get(episode, 0))
            continue
        following[env] = max(position + max(length, 1), following.get(env, 0))
        if (position, sequence) >= newest.get(env, (-1, -1, None))[:2]:
            newest[env] = position, sequence, None if last or reason is not None or env == NO_ENV else episode
    still = {env: name for env, name in opened.items() if env not in newest and name not in closed}
    each = ((env, sequence, name) for env, (_, sequence, name) in newest.items() if name is not None)
    return following, still | {env: name for env, sequence, name in each if closed.get(name, -1) < sequence}


def _ends_of(runs: LiveRuns) -> dict[int, int]:
    """Env row -> the position after its last step."""
    ordered = np.argsort(ends := runs.position + np.maximum(runs.length, 1), kind="stable")
    return dict(zip(runs.env[ordered].tolist(), ends[ordered].tolist(), strict=True))


def _without(runs: LiveRuns, gone: Steps) -> LiveRuns:
    """The runs less these steps, wherever they stand; an episode without steps goes with its position."""
    left = runs.written.minus(gone)
    return LiveRuns(left["env"], left["position"], left.length, left["episode"], left.stream, left.lo).ordered()


def _left_over(origin: Mapping[Owner, LiveRuns], taken: Mapping[Owner, LiveRuns], rank: int) -> dict[Owner, LiveRuns]:
    """What a rank gets that died before it said what it held: of what its session went on from all that no other took.

    Of several ranks each gets env rows of its own.
    """
    out: dict[Owner, LiveRuns] = {}
    for buffer in sorted({buffer for _, buffer in origin}):
        others = [runs for (_, name), runs in taken.items() if name == buffer]
        gone = _together(LiveRuns.empty(), *others).written.placed
        rest = [_without(runs, gone) for (_, name), runs in sorted(origin.items()) if name == buffer]
        rest = [runs for runs in rest if len(runs.lo)]
        if rest:
            out[rank, buffer] = _together(*(rest if len(rest) == 1 else _apart(rest)))
    return out


def _apart(some: Sequence[LiveRuns]) -> list[LiveRuns]:
    """Runs of several ranks, so that none stands where another does; without an env row they follow each other."""
    out, rows, position = [], 0, 0
    for runs in some:
        alone = runs.env < 0
        out.append(
            runs._replace(
                env=np.where(alone, runs.env, runs.env + rows),
                position=np.where(alone, runs.position + position, runs.position),
            )
        )
        ends = runs.position + np.maximum(runs.length, 1)
        rows += int(runs.env.max(initial=-1)) + 1
        position += int(ends[alone].max(initial=0))
    return out


# -- values of columns -------------------------------------------------------------------------------------------------


def fill(wanted: Steps, given: Sequence[tuple[Column, Steps]]) -> tuple[Column, int]:
    """The newest value of each step, of those given for steps from the oldest to the newest, and how many steps have
    none: these get NaN where the dtype has it, else its zero. Values of another dtype or shape than the newest ones do
    not count."""
    newest, _ = given[-1]
    own = offsets_of(wanted.length)
    out = _blank(newest.dtype, int(own[-1]), newest.array.shape[1:])
    known = np.zeros(len(out), bool)
    for column, steps in given:
        if column.dtype == newest.dtype and column.array.shape[1:] == newest.array.shape[1:]:
            met = wanted.meet(steps)
            count = met.hi - met.lo
            at = spans(own[met.left] + met.lo - wanted.lo[met.left], count)
            theirs = offsets_of(steps.length)[met.right] + met.lo - steps.lo[met.right]
            out[at] = column.array[spans(theirs, count)]
            known[at] = True
    return Column(out, newest.dtype), int((~known).sum())


def _blank(dtype: str, count: int, shape: tuple[int, ...]) -> Array:
    """Rows in stored form, of this shape each, of steps whose value nobody knows."""
    kind = dtypes.to_numpy(dtype)
    if kind.kind in "OUT":
        return np.full((count, *shape), "null" if dtype == "json" else "", object)
    has_nan = kind.kind in "fc" or dtype in dtypes.ML_NAMES
    unknown, _ = dtypes.to_stored(np.full(1, np.nan).astype(kind) if has_nan else np.zeros(1, kind))
    out: Array = np.empty((count, *shape), unknown.dtype)
    out[...] = unknown[0]
    return out
