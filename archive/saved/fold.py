"""Pure, no I/O: what ticks of a rank's journal add, checked against where they lie and what came before, without the
bytes of their shards; and what a session's ranks held when their journals ended: a fold of the checkpoint before it and
of what each rank's ticks add, as if all ranks had been cut then.

Live are the steps of the checkpoint and those that ticks added, without evicted ones. The newest value that was saved
or journaled counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, ascending
from archive.base import CorruptStateError, cached_property, jsontree
from archive.saved.columns import Values, alike, blank, compacted, fill, in_order
from archive.saved.index import PartIndex
from archive.saved.object import TickObject
from archive.tables import NO_ENV, coded
from archive.write import Column, Cut, Kind, RankRows, Stretch, live_steps, ordered

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Owner = tuple[int, str]  # rank, buffer
Saved = tuple[Mapping[str, Column], Mapping[str, Mapping[str, Any]]]  # columns; attributes, {episode id: value}
FOLDED = ("episode_id", *tables.LOCATING)  # columns of the segments table that a fold asks for
_TOGETHER = 256  # parts, which take more than what is in them
_MOST_VALUES = 1 << 20  # of a column that are kept beside those before
_ENDS = ("buffer", "shard", "env_id", "position", "length", "episode_id", "sequence", "last", "reason")


# -- what ticks add ----------------------------------------------------------------------------------------------------


class Delta:
    """Additions to a rank's buffers by one tick, or by several in a row.

    live: its contents when its journal began, if it resumed. gone: buffer -> evicted steps. By buffer and name:
    columns, from the oldest values to the newest; attributes, {episode id: value}.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[pa.Table]] = {"segments": [], "chunks": [], "ledger": []}
        self.objects = 0
        self.nbytes = 0
        self.sequence: int | None = None
        self.live: pa.Table | None = None
        self.resumed_from: int | None = None
        self.progress: str | None = None
        self.progress_at: int | None = None  # the number of the object that has it
        self.gone: dict[str, list[Stretch]] = {}
        self.columns: dict[str, dict[str, list[Values]]] = {}
        self.attributes: dict[str, dict[str, dict[str, Any]]] = {}

    @classmethod
    def of(cls, tick: TickObject, run: str, after: int) -> Self:
        """The delta of one object. IntegrityError if it is of another run, or its rows do not continue from `after`."""
        index, where = tick.index, tick.where
        if index.run != run:
            raise CorruptStateError(f"{where} is of run {index.run!r:.80}, not of {run!r:.80}")
        if index.sequence < after:
            raise CorruptStateError(f"{where} ends at row {index.sequence}, before the end of its predecessor, {after}")
        columns = [column.steps for of in index.columns.values() for column in of.values()]
        for *_, lo, hi in chain(*index.gone.values(), *columns):
            if lo > hi:
                raise CorruptStateError(f"{where} names steps {lo} to {hi}, which is no range")
        out = cls()
        out.objects, out.nbytes, out.sequence = 1, tick.nbytes, index.sequence
        out.resumed_from, out.progress = index.resumed_from, index.progress
        out.progress_at = None if index.progress is None else index.number
        rows = tick.rows
        for kind in ("segments", "ledger"):
            _check_rows(tick, kind, getattr(rows, kind), after)
        out._parts = {kind: [table] if table.num_rows else [] for kind, table in rows._asdict().items()}
        if "live" in index.rows:
            out.live = tick.table("live")
            _check_writer(tick, out.live, "live")
        out.gone = {buffer: [*steps] for buffer, steps in index.gone.items()}
        out.columns = {b: {name: [values] for name, values in of.items()} for b, of in tick.values().items()}
        out.attributes = _attributes(tick)
        return out

    def add(self, later: Delta) -> None:
        """Add the delta that comes after this one."""
        self.objects += later.objects
        self.nbytes += later.nbytes
        for name in ("sequence", "live", "resumed_from", "progress", "progress_at"):
            if (value := getattr(later, name)) is not None:
                setattr(self, name, value)
        for kind, parts in later._parts.items():
            self._parts[kind] += parts
            if len(self._parts[kind]) >= _TOGETHER:  # thousands of small tables take more than their rows
                self.table(kind)
        for buffer, steps in later.gone.items():
            self.gone.setdefault(buffer, []).extend(steps)
        for buffer, columns in later.columns.items():
            for name, values in columns.items():
                own = self.columns.setdefault(buffer, {}).setdefault(name, [])
                own += values
                more = sum(len(one.column.array) for one in own[1:])
                if len(own) >= _TOGETHER or more > max(len(own[0].column.array), _MOST_VALUES):
                    own[:] = compacted(own)
        for buffer, attributes in later.attributes.items():
            for name, given in attributes.items():
                self.attributes.setdefault(buffer, {}).setdefault(name, {}).update(given)

    def table(self, kind: str) -> pa.Table:
        """The rows that it adds to a table."""
        parts = self._parts[kind]
        if len(parts) != 1:
            parts[:] = [tables.concat(kind, parts).combine_chunks()]
        return parts[0]

    @property
    def rows(self) -> RankRows:
        """The rows that it adds to tables of a commit."""
        return RankRows(*map(self.table, RankRows._fields))


def _check_rows(tick: TickObject, kind: str, table: pa.Table, after: int) -> None:
    """The object's rows of a table must be its rank's own, numbered from `after` on."""
    import pyarrow.compute as pc

    index, where = tick.index, tick.where
    _check_writer(tick, table, kind)
    if not table.num_rows:
        return
    numbers = pc.min_max(table["sequence"]).as_py()
    if numbers["min"] is None or numbers["min"] < after or numbers["max"] >= index.sequence:
        raise CorruptStateError(
            f"{where} has {kind} rows {numbers['min']} to {numbers['max']}, not of {after} to {index.sequence}"
        )


def _check_writer(tick: TickObject, table: pa.Table, kind: str) -> None:
    """The rows must be as many as the index says, of its rank and (contents at the start aside) of its session."""
    index, where = tick.index, tick.where
    if table.num_rows != index.rows.get(kind, 0):
        raise CorruptStateError(f"{where} has {table.num_rows} {kind} rows, its index says {index.rows.get(kind, 0)}")
    ranks = set(table["rank"].unique().to_pylist())
    sessions = set() if kind == "live" else set(table["session"].unique().to_pylist())
    if ranks - {index.rank} or sessions - {index.session}:
        raise CorruptStateError(f"{where} has {kind} rows of another rank or session")


def _attributes(tick: TickObject) -> dict[str, dict[str, dict[str, Any]]]:
    given = tick.index.attributes
    out = {b: {n: jsontree.loads(text, where=tick.where) for n, text in of.items()} for b, of in given.items()}
    if not all(isinstance(value, Mapping) for of in out.values() for value in of.values()):
        raise CorruptStateError(f"{tick.where} has an attribute that is no object of episodes and values")
    return out


def counted(segments: pa.Table) -> tuple[int, int]:
    """The numbers of steps and of episodes in rows of the segments table."""
    import pyarrow.compute as pc

    if not segments.num_rows:
        return 0, 0
    return int(pc.sum(segments["length"]).as_py()), int(pc.count_distinct(segments["episode_id"]).as_py())


# -- what a session held -----------------------------------------------------------------------------------------------


class Before(NamedTuple):
    """The checkpoint that a fold begins with; by default there is none.

    own: it is of the session whose ticks are added, and `sequences` bounds the rows in it; else the session
    went on from it. live: its rows of the live table; left_out: rows, as of that table, that its ranks held beside
    it. parts: rank -> index of its part. values: the columns and attributes of a rank's buffer.
    """

    own: bool = False
    world_size: int = 0
    live: pa.Table | None = None
    left_out: pa.Table | None = None
    parts: Mapping[int, PartIndex] = {}
    sequences: Mapping[int, int] = {}
    values: Callable[[int, str], Saved] = lambda rank, buffer: ({}, {})


class SessionFold:
    """The live steps, positions, open episodes, columns and attributes of all ranks.

    Steps are by stream, with columns `owner` (the buffer's), `env` and `position` (the place in it). Streams
    and owners are numbered as they are met.
    """

    def __init__(
        self,
        session: str,
        world_size: int,
        before: Before,
        deltas: Mapping[int, Delta],
        segments: pa.Table,
        spared: Mapping[str, Sequence[Stretch]] | None = None,
    ) -> None:
        """segments: rows of the segments table, old and new, for the live steps. spared: buffer -> steps that are live
        although they were evicted."""
        self._session = session
        self._before = before
        self._deltas = deltas
        self.world_size = world_size
        self._streams, self._owners = _Numbers(), _Numbers()
        self._saved, self._left_out = self._rows(before.live), self._rows(before.left_out)
        self._held = self._saved if before.own else self._resumed()  # at the start of the ticks
        every = Steps.joined([self._held, *self._appended()])  # from here on all streams of live steps have numbers
        gone = [self._stretches(buffer, some) for delta in deltas.values() for buffer, some in delta.gone.items()]
        kept = [self._stretches(buffer, some) for buffer, some in (spared or {}).items()]
        runs = every.minus(Steps.joined(gone).placed.minus(Steps.joined(kept)))
        self._ids: list[str] = []
        self._owner, self._located = self._episodes(runs, segments)
        self.lacking: dict[tuple[int, str, str], int] = {}  # rank, buffer, column -> steps without a value

    # -- live steps ----------------------------------------------------------------------------------------------------

    def _rows(self, *some: pa.Table | None) -> Steps:
        """Rows that have the columns of the live table."""
        live = tables.concat("live", [table.select(tables.schema("live").names) for table in some if table is not None])
        columns = [live[name].to_numpy() for name in ("lo", "hi", "env_id", "position")]
        stream = self._streams.of(live["buffer"], live["session"], live["stream_rank"], live["stream_env"])
        owner = self._owners.of(live["rank"], live["buffer"])
        lo, hi, env, position = columns
        return Steps(stream, lo, hi, follows=("position",), owner=owner, env=env, position=position)

    def _stretches(self, buffer: str, some: Iterable[Stretch]) -> Steps:
        """Ranges of a buffer's streams, also of streams without live steps."""
        known = self._streams.get
        columns = [(known((buffer, session, rank, env), -1), lo, hi) for session, rank, env, lo, hi in some]
        return Steps(*np.array(columns, np.int64).reshape(-1, 3).T)

    def _of(self, steps: Steps, owner: Owner) -> Steps:
        """The steps of one buffer."""
        return steps.pick(steps["owner"] == self._owners.get(owner, -1))

    def _appended(self) -> Iterator[Steps]:
        """The steps that ticks added since the checkpoint; episodes without steps are where their ranks put them."""
        import pyarrow.compute as pc

        for rank, delta in self._deltas.items():
            rows = delta.table("segments")
            fresh = pc.greater_equal(rows["sequence"], self._before.sequences.get(rank, 0))
            rows = rows.filter(pc.and_(fresh, pc.is_valid(rows["shard"])))
            stream = {"stream_rank": rows["rank"], "stream_env": rows["env_id"], "lo": rows["position"]}
            for name, column in (stream | {"hi": pc.add(rows["position"], rows["length"])}).items():
                rows = rows.append_column(name, column)
            yield self._rows(rows)

    def _resumed(self) -> Steps:
        """The steps that the ranks of a session without a checkpoint held when it began."""
        taken = self._rows(*(delta.live for delta in self._deltas.values()))
        dead = [rank for rank in range(self.world_size) if rank not in self._deltas or not self._deltas[rank].objects]
        if len(dead) == self.world_size == self._before.world_size:
            return self._saved
        return Steps.joined([taken, *self._left_over(taken, dead[0])]) if dead else taken

    def _left_over(self, taken: Steps, rank: int) -> Iterator[Steps]:
        """The steps that a rank gets if it died before its first journal object: those that no other rank took of the
        session's origin. Of several such ranks each has env rows of its own; without an env row they follow each
        other."""
        rest = self._saved.minus(taken.placed)
        rows, ends = Counter[str](), Counter[str]()  # by buffer, of the ranks so far
        for owner in sorted(self._owners):
            mine, (_, buffer) = self._of(rest, owner), owner
            env, position, alone = mine["env"], mine["position"], mine["env"] < 0
            yield mine.beside(
                owner=np.full(len(mine), self._owners[rank, buffer]),
                env=np.where(alone, env, env + rows[buffer]),
                position=np.where(alone, position + ends[buffer], position),
            )
            rows[buffer] += int(env.max(initial=-1)) + 1
            ends[buffer] += int((position + np.maximum(mine.length, 1))[alone].max(initial=0))

    def _episodes(self, runs: Steps, segments: pa.Table) -> tuple[Ints, Steps]:
        """The live steps as a live set, and the episode of each row; an error if a step is in no segment."""
        rank, buffer = self._owners.columns(runs["owner"], 2)
        _, session, stream_rank, stream_env = self._streams.columns(runs.stream, 4)
        live = {
            "rank": rank,
            "buffer": buffer,
            "env_id": runs["env"],
            "position": runs["position"],
            "session": session,
            "stream_rank": stream_rank,
            "stream_env": stream_env,
            "lo": runs.lo,
            "hi": runs.hi,
        }
        found = tables.locate(tables.from_columns("live", live), segments)
        (self._ids, episode), position = coded(segments["episode_id"]), segments["position"].to_numpy()
        run, row = found["run"], found.stream
        where = runs["env"][run], found["position"], found.length
        return runs["owner"][run], live_steps(*where, episode[row], runs.stream[run], position[row] + found.lo)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def cuts(self, rank: int) -> list[Cut]:
        """The buffers of a rank, as a checkpoint has them; also those without live steps."""
        delta, part = self._deltas.get(rank), self._before.parts.get(rank)
        named = {*delta.gone, *delta.columns, *delta.attributes} if delta is not None else set()
        named |= set(part.buffers) if part is not None else set()
        return [self._cut((rank, name)) for name in sorted(named | {name for r, name in self._owners if r == rank})]

    def _cut(self, owner: Owner) -> Cut:
        rank, buffer = owner
        runs = ordered(self._located.pick(self._owner == self._owners.get(owner, -1)))
        names = [self._ids[i] for i in runs["episode"].tolist()]
        rows = (self._deltas.get(rank) or Delta()).table("segments")
        positions = _ends(rows, buffer, *self._began(owner, runs, names))
        columns, attributes = self._values(owner, runs, set(names))
        left = self._of(self._left_out, owner)
        none = np.zeros(len(left), np.int64)
        beside = live_steps(left["env"], left["position"], left.length, none, left.stream, left.lo)
        streams = tuple(name[1:] for name in self._streams)
        return Cut(
            buffer, (self._session, rank), runs, streams, *positions, columns, attributes, None, {}, ordered(beside),
        )  # fmt: skip

    def _began(self, owner: Owner, runs: Steps, names: Sequence[str]) -> tuple[dict[int, int], dict[int, str]]:
        """Next offsets and open episodes, as far as they do not follow from the rows of ticks."""
        before, (rank, buffer), held = self._before, owner, self._of(self._held, owner)
        end = held["position"] + np.maximum(held.length, 1)
        env, end = np.append(runs.stream, held["env"]), np.append(runs.placed.hi, end)
        by = np.argsort(end, kind="stable")
        following = dict(zip(env[by].tolist(), end[by].tolist(), strict=True))
        as_many = len(before.parts) == before.world_size == self.world_size == len(self._deltas)
        same = before.own or (as_many and self._as_before(owner))
        own = before.parts[rank].buffers.get(buffer) if same and rank in before.parts else None
        if own is not None:
            following |= {env: max(end, following.get(env, 0)) for env, end in own.next_positions.items()}
            return following, dict(own.open_episodes)
        if before.own:
            return following, {}
        opened = {
            one for part in before.parts.values() for b in part.buffers.values() for one in b.open_episodes.values()
        }
        last = dict(zip(runs.stream.tolist(), names, strict=True))
        return following, {env: name for env, name in last.items() if name in opened}

    def _as_before(self, owner: Owner) -> bool:
        """True if a resumed rank began with what the same rank had held: a plan may have moved it. (Of a checkpoint
        that lacks a rank every plan closes episodes, also where nothing is live that could show it.)"""
        some = [self._of(steps, owner) for steps in (self._held, self._saved)]
        rows = [np.stack([one.stream, one.lo, one.hi, one["env"], one["position"]]) for one in some]
        began, before = (columns[:, np.lexsort(columns)] for columns in rows)
        return np.array_equal(began, before)

    # -- columns and attributes ----------------------------------------------------------------------------------------

    def _values(self, owner: Owner, runs: Steps, names: set[str]) -> tuple[dict[str, Column], dict[str, str]]:
        """The columns of live steps, and attributes of live episodes as JSON."""
        rank, buffer = owner
        given: dict[str, list[Values]] = {}
        streams = [name[1:] for name in self._streams]
        attributes: dict[str, dict[str, Any]] = {name: {} for name in self._attributes_before.get(buffer, ())}
        held = self._of(self._held, owner)
        for source in self._sources(owner, held):
            steps = in_order(self._of(self._saved, (source, buffer)))
            columns, known = self._before.values(source, buffer)
            for name, column in columns.items() if self._before.own or len(held.meet(steps).left) else ():
                given.setdefault(name, []).append(Values(column, steps, streams))
            for name, of in known.items():
                attributes.setdefault(name, {}).update(of)
        given = {name: alike(some) for name, some in given.items()}
        delta = self._deltas.get(rank) or Delta()
        for name, journaled in delta.columns.get(buffer, {}).items():
            given.setdefault(name, []).extend(journaled)
        for name, more in delta.attributes.get(buffer, {}).items():
            attributes.setdefault(name, {}).update(more)
        for name, (dtype, shape) in self._kinds.get(buffer, {}).items():
            given.setdefault(name, [Values(Column(blank(dtype, 0, shape), dtype), in_order(live_steps()), ())])
        live = {name: {key: value for key, value in of.items() if key in names} for name, of in attributes.items()}
        texts = {name: jsontree.dumps(of, where="attributes") for name, of in live.items()}
        return {name: self._filled(owner, name, runs, values) for name, values in given.items()}, texts

    def _sources(self, owner: Owner, held: Steps) -> list[int]:
        """The ranks of the checkpoint before that saved what a buffer held: few of many, whose columns alone are
        read."""
        rank, buffer = owner
        if self._before.own:
            return [rank] if rank in self._before.parts else []
        met = ascending(self._saved["owner"][held.placed.meet(self._saved.placed).right]).tolist()
        names = list(self._owners)
        saved = {source for source, name in (names[number] for number in met) if name == buffer}
        return sorted(saved & self._before.parts.keys())

    @cached_property
    def _attributes_before(self) -> dict[str, set[str]]:
        """The names of the attributes of each buffer, of a checkpoint that the session went on from."""
        out: dict[str, set[str]] = {}
        for index in self._before.parts.values() if not self._before.own else ():
            for buffer, names in index.attributes.items():
                out.setdefault(buffer, set()).update(names)
        return out

    @cached_property
    def _kinds(self) -> dict[str, dict[str, Kind]]:
        """The columns of each buffer that some rank has values for: a plan may deal its steps to any rank."""
        out: dict[str, dict[str, Kind]] = {}
        for index in self._before.parts.values():
            for buffer, refs in index.columns.items():
                out.setdefault(buffer, {}).update((name, (ref.dtype, ref.shape)) for name, ref in refs.items())
        for delta in self._deltas.values():
            for buffer, of in delta.columns.items():
                out.setdefault(buffer, {}).update((name, values[-1].kind) for name, values in of.items())
        return out

    def _filled(self, owner: Owner, name: str, runs: Steps, given: Sequence[Values]) -> Column:
        numbers = {name[1:]: number for name, number in self._streams.items() if name[0] == owner[1]}
        wanted = Steps(runs["source"], runs["written"], runs["written"] + runs.length)
        column, known = fill(wanted, numbers, given)
        if not known.all():
            self.lacking[*owner, name] = int((~known).sum())
        return column


class _Numbers(dict[Any, int]):
    """Numbers of names, in the order in which they are met."""

    def __missing__(self, name: Any) -> int:
        self[name] = len(self)
        return self[name]

    def of(self, *columns: pa.ChunkedArray) -> Ints:
        """The numbers of many names; each name has one entry of each column."""
        names = zip(*(column.to_pylist() for column in columns), strict=True)
        return np.array([self[name] for name in names], np.int64)

    def columns(self, numbers: Ints, width: int) -> list[list[Any]]:
        """The names of these numbers, as columns of `width` entries."""
        names = list(self)
        return [[names[number][at] for number in numbers.tolist()] for at in range(width)]


def _ends(
    segments: pa.Table, buffer: str, following: Mapping[int, int], opened: Mapping[int, str]
) -> tuple[dict[int, int], dict[int, str]]:
    """Env row of a buffer -> the offset of its next step, and the id of its open episode: from before, and from rows of
    ticks. An episode that was added without an env row is never open: no step can follow it."""
    following = dict(following)
    newest: dict[int, tuple[int, int, str | None]] = {}  # env row -> offset, sequence, open episode of its last row
    closed: dict[str, int] = {}  # episode -> sequence of the row that closes it
    lies: dict[str, tuple[int, int]] = {}  # episode -> sequence and env row of its newest row: a revision has another
    columns = zip(*(segments[column].to_pylist() for column in _ENDS), strict=True)
    for name, shard, env, position, length, episode, sequence, last, reason in columns:
        if name != buffer:
            continue
        if shard is None:
            closed[episode] = max(sequence, closed.get(episode, 0))
            continue
        lies[episode] = max((sequence, env), lies.get(episode, (-1, env)))
        following[env] = max(position + max(length, 1), following.get(env, 0))
        if (position, sequence) >= newest.get(env, (-1, -1, None))[:2]:
            newest[env] = position, sequence, None if last or reason is not None or env == NO_ENV else episode
    still = {env: name for env, name in opened.items() if env not in newest and name not in closed}
    each = ((env, sequence, name) for env, (_, sequence, name) in newest.items() if name is not None)
    still |= {env: name for env, sequence, name in each if closed.get(name, -1) < sequence}
    return following, {env: name for env, name in still.items() if lies.get(name, (0, env))[1] == env}
