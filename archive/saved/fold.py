"""Pure, no I/O: the buffers of a session's ranks when their journals ended: a fold of the checkpoint before and of each
rank's ticks, as if all ranks had been cut then.

Live are the steps of the checkpoint and those that ticks added, without evicted ones. The newest value that was saved
or journaled counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, offsets_of, spans
from archive.base import cached_property, jsontree
from archive.fields import dtypes
from archive.saved.delta import Delta
from archive.saved.index import PartIndex
from archive.tables import NO_ENV, coded
from archive.write import Column, Cut, Stretch, live_steps, ordered

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Owner = tuple[int, str]  # rank, buffer
Saved = tuple[Mapping[str, Column], Mapping[str, Mapping[str, Any]]]  # columns; attributes, {episode id: value}
Kind = tuple[str, tuple[int, ...]]  # of a column: its dtype, and the shape of a row in stored form
FOLDED = ("episode_id", *tables.LOCATING)  # columns of the segments table that a fold needs
_ENDS = ("buffer", "shard", "env_id", "position", "length", "episode_id", "sequence", "last", "reason")


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
        self, session: str, world_size: int, before: Before, deltas: Mapping[int, Delta], segments: pa.Table,
        spared: Mapping[str, Sequence[Stretch]] | None = None,
    ) -> None:  # fmt: skip
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
            "rank": rank, "buffer": buffer, "env_id": runs["env"], "position": runs["position"], "session": session,
            "stream_rank": stream_rank, "stream_env": stream_env, "lo": runs.lo, "hi": runs.hi,
        }  # fmt: skip
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
        same = before.own or (before.world_size == self.world_size == len(self._deltas) and self._as_before(owner))
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
        """True if a resumed rank began with what the same rank had held: a plan may have moved it."""
        some = [self._of(steps, owner) for steps in (self._held, self._saved)]
        rows = [np.stack([one.stream, one.lo, one.hi, one["env"], one["position"]]) for one in some]
        began, before = (columns[:, np.lexsort(columns)] for columns in rows)
        return np.array_equal(began, before)

    # -- columns and attributes ----------------------------------------------------------------------------------------

    def _values(self, owner: Owner, runs: Steps, names: set[str]) -> tuple[dict[str, Column], dict[str, str]]:
        """The columns of live steps, and attributes of live episodes as JSON."""
        rank, buffer = owner
        given: dict[str, list[tuple[Column, Steps]]] = {}
        attributes: dict[str, dict[str, Any]] = {}
        for source in [source for source in self._before.parts if source == rank or not self._before.own]:
            steps = self._of(self._saved, (source, buffer))
            columns, known = self._before.values(source, buffer)
            for name, column in columns.items():
                given.setdefault(name, []).append((column, steps))
            for name, of in known.items():
                attributes.setdefault(name, {}).update(of)
        delta = self._deltas.get(rank) or Delta()
        for name, journaled in delta.columns.get(buffer, {}).items():
            given.setdefault(name, []).extend((column, self._stretches(buffer, steps)) for column, steps in journaled)
        for name, more in delta.attributes.get(buffer, {}).items():
            attributes.setdefault(name, {}).update(more)
        for name, (dtype, shape) in self._kinds.get(buffer, {}).items():
            given.setdefault(name, [(Column(_blank(dtype, 0, shape), dtype), self._stretches(buffer, []))])
        live = {name: {key: value for key, value in of.items() if key in names} for name, of in attributes.items()}
        texts = {name: jsontree.dumps(of, where="attributes") for name, of in live.items()}
        return {name: self._filled(owner, name, runs, values) for name, values in given.items()}, texts

    @cached_property
    def _kinds(self) -> dict[str, dict[str, Kind]]:
        """The columns of each buffer that some rank has values for: a plan may deal its steps to any rank."""
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

    def _filled(self, owner: Owner, name: str, runs: Steps, given: Sequence[tuple[Column, Steps]]) -> Column:
        column, lacking = fill(Steps(runs["source"], runs["written"], runs["written"] + runs.length), given)
        if lacking:
            self.lacking[*owner, name] = lacking
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


# -- values of columns -------------------------------------------------------------------------------------------------


def fill(wanted: Steps, given: Sequence[tuple[Column, Steps]]) -> tuple[Column, int]:
    """The newest value of each step, from values of steps, oldest first; and the number of steps without one: these get
    NaN where the dtype has it, else its zero. Values of another dtype or shape than the newest ones do not count."""
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
    """Rows in stored form, of this shape, for steps without a known value."""
    kind = dtypes.to_numpy(dtype)
    if kind.kind in "OUT":
        return np.full((count, *shape), "null" if dtype == "json" else "", object)
    has_nan = kind.kind in "fc" or dtype in dtypes.ML_NAMES
    unknown, _ = dtypes.to_stored(np.full(1, np.nan).astype(kind) if has_nan else np.zeros(1, kind))
    out: Array = np.empty((count, *shape), unknown.dtype)
    out[...] = unknown[0]
    return out
