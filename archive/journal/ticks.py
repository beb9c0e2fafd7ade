"""Pure, no I/O but for the objects' own: the records of a tick beside steps (evictions, values of columns and
attributes, progress), and its numbered object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Steps
from archive.base import (
    AlreadyExistsError,
    ColumnError,
    SessionInUseError,
    SupersededError,
    UsageError,
    cached_property,
    escape,
    jsontree,
    layout,
)
from archive.journal import ends
from archive.journal.node import NodeJournal
from archive.log import Place, Sighting, tablefiles
from archive.saved import TickColumn, TickIndex, Values, changed, described, in_order, lying, newest, pack
from archive.shard import ShardWriter, encode
from archive.write import Buffer, Column, Cut, Kind, LiveSet, Seal, Stretch, Upload, Written, encoded, live

if TYPE_CHECKING:
    import pyarrow as pa

Name = tuple[str, str]  # of a buffer, and of its column or attribute
_MOST_BASES = 3


class GivenValues:
    """Values of a column as somebody said them, of steps at positions of env rows; `whole`: of all that are live. The
    addresses of the steps are found when they are needed, in the background."""

    def __init__(self, column: Column, steps: Steps, live_set: LiveSet, *, whole: bool = False) -> None:
        self.column, self.whole = column, whole
        self._steps, self._live_set = steps, live_set

    @property
    def kind(self) -> Kind:
        """The dtype of the values, and the shape of a row."""
        return self.column.dtype, self.column.array.shape[1:]

    @cached_property
    def values(self) -> Values:
        """The values by addresses."""
        return Values(self.column, *self._live_set.written(in_order(self._steps)))


Base = tuple[GivenValues, ...]  # from the oldest to the newest, the first one of all live steps


@dataclass(frozen=True)
class TickChanges:
    """One tick beside its steps. columns: of each what was said, and what was known before (see Saying)."""

    gone: Mapping[str, Sequence[Stretch]]
    columns: Mapping[Name, tuple[Sequence[GivenValues], Sequence[Base]]]
    attributes: Mapping[Name, Mapping[str, Any]]
    progress: str | None = None
    live: pa.Table | None = None

    @property
    def says(self) -> bool:
        """True if it says anything; for the background, as columns may take a moment."""
        some = self.progress is not None or self.live is not None
        return some or bool(self.gone or self.attributes or self._changed)

    @cached_property
    def _changed(self) -> dict[Name, Values]:
        """The values of columns that are not as they were known to be."""
        out = {}
        for name, (said, bases) in self.columns.items():
            values = newest([one.values for one in said])
            values = changed(values, [[one.values for one in base] for base in bases])
            if len(values.column.array) or not bases:
                out[name] = values
        return out

    def described(self) -> tuple[dict[str, dict[str, TickColumn]], dict[str, Any]]:
        """The columns as the index of the tick's object has them, by buffer and name, and their arrays by path."""
        columns: dict[str, dict[str, TickColumn]] = {}
        arrays: dict[str, Any] = {}
        for (buffer, name), values in self._changed.items():
            column, own = described(values, f"{escape(buffer)}/{escape(name)}")
            columns.setdefault(buffer, {})[name] = column
            arrays |= own
        return columns, arrays

    @property
    def texts(self) -> dict[str, dict[str, str]]:
        """The attributes as the index of the tick's object has them."""
        out: dict[str, dict[str, str]] = {}
        for (buffer, name), values in self.attributes.items():
            out.setdefault(buffer, {})[name] = jsontree.dumps(values, where=f"attributes.{name}")
        return out


class Saying:
    """The changes since the last tick: values that are replaced, and never changed. Calls are serialised by the
    writer's lock.

    What a recovery would find of a column follows from one of its `bases`: what came first is all of it, as a tick or
    a checkpoint has it, and the rest was said of some steps in later ticks. A checkpoint may fail or not be there yet,
    so what was known without it stays one. Only values that some base does not have are written.
    """

    def __init__(self) -> None:
        self._columns: dict[Name, tuple[GivenValues, ...]] = {}
        self._bases: dict[Name, tuple[Base, ...]] = {}
        # of the values that a recovery may find, as it takes one kind; None: that of the contents that were taken over
        self._kinds: dict[Name, frozenset[Kind | None]] = {}
        self._attributes: dict[Name, dict[str, Any]] = {}
        self._progress: str | None = None
        self.live: pa.Table | None = None  # rows of a resumed rank's contents at its start

    def columns(self, inner: Buffer, columns: Mapping[str, Any]) -> None:
        """Values of columns of a buffer: name -> {episode id: one value a live step of it}, or of all live steps, which
        come in place of what was said of some."""
        runs, records = inner.live_set.runs(), inner.streams.records
        runs, made = runs.pick(runs.length > 0), dict(self._columns)
        for name, given in columns.items():
            some, whole = runs, not isinstance(given, Mapping)
            if not whole:
                known = [-1 if (number := records.number_of(one)) is None else number for one in given]
                some = runs.pick(np.isin(runs["episode"], known))
            column = live.column(name, given, some, records)
            self._add(made, inner, name, GivenValues(column, some, inner.live_set, whole=whole))
        self._columns = made

    def changes(self, inner: Buffer, changes: Mapping[str, Any]) -> None:
        """New values of some steps: name -> (env ids, positions, values)."""
        made = dict(self._columns)
        for name, given in changes.items():
            if not isinstance(given, tuple) or len(given) != 3:
                raise UsageError(f"changes of column {name!r} are no tuple (env ids, positions, values)")
            steps = inner.steps_at(*given[:2])
            self._add(made, inner, name, GivenValues(live.values_of(name, given[2], steps), steps, inner.live_set))
        self._columns = made

    def _add(self, made: dict[Name, tuple[GivenValues, ...]], inner: Buffer, name: str, one: GivenValues) -> None:
        """Keep values for the next tick. Those of some steps must be of the kind of all the others."""
        if not one.whole and not len(one.column.array):
            return
        key = inner.name, name
        if not one.whole and (others := self._known(inner, name) - {one.kind}):
            raise ColumnError(
                f"the values of some steps of column {name!r} of buffer {inner.name!r} are of {one.kind}, and it has "
                f"{', '.join(map(str, sorted(others)))}: give values of the same dtype and shape, or the whole column"
            )
        made[key] = (one,) if one.whole else (*made.get(key, ()), one)
        self._kinds = self._kinds | {key: frozenset([one.kind])}

    def _known(self, inner: Buffer, name: str) -> set[Kind]:
        """The kinds of the values that a recovery may find of a column."""
        kinds = self._kinds.get((inner.name, name), {None})
        taken = inner.column_kinds().get(name, ()) if None in kinds else ()
        return {kind for kind in (*kinds, *taken) if kind is not None}

    def attributes(self, inner: Buffer, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Add values of attributes of a buffer: name -> {episode id: JSON value}."""
        runs, made = inner.live_set.runs(), dict(self._attributes)
        for name, given in attributes.items():
            values = jsontree.loads(live.attribute(name, given, runs, inner.streams.records))
            made |= {(inner.name, name): made.get((inner.name, name), {}) | values} if values else {}
        self._attributes = made

    def progress(self, value: Any) -> None:
        """Set the run's counters, as JSON."""
        self._progress = jsontree.dumps(value, where="progress")

    def take(self, gone: Mapping[str, Sequence[Stretch]]) -> TickChanges:
        """The changes, and what is gone; the next tick begins anew."""
        columns = {key: (said, self._bases.get(key, ())) for key, said in self._columns.items()}
        out = TickChanges(gone, columns, self._attributes, self._progress, self.live)
        self._bases = self._bases | {key: _after(*one) for key, one in columns.items()}
        self._columns, self._attributes, self._progress, self.live = {}, {}, None, None
        return out

    def checkpoint(self, cuts: Sequence[Cut], live_sets: Mapping[str, LiveSet]) -> None:
        """A checkpoint is on its way from which a recovery goes on once it is there: with these columns, and none of
        those that were said before."""
        bases = {}
        for key, known in self._bases.items():
            cut = next((one for one in cuts if one.name == key[0] and key[1] in one.columns), None)
            if cut is not None and 0 < len(known) < _MOST_BASES:
                saved = GivenValues(cut.columns[key[1]], cut.runs, live_sets[key[0]], whole=True)
                bases[key] = (*known, (saved,))
        every = {(cut.name, name): column for cut in cuts for name, column in cut.columns.items()}
        self._kinds = self._kinds | {
            key: self._kinds.get(key, frozenset([None])) | {(one.dtype, one.array.shape[1:])}
            for key, one in every.items()
        }
        self._bases = bases


def _after(said: Base, bases: tuple[Base, ...]) -> tuple[Base, ...]:
    """The bases once a tick has said this. None are kept that take more memory than a whole column twice."""
    made = (said,) if said[0].whole else tuple((*base, *said) for base in bases)
    long = (sum(len(one.column.array) for one in more) > len(first.column.array) for first, *more in made)
    return () if any(long) else made


class JournalObjects:
    """The numbered objects of one rank's journal. A tick that memory cannot hold goes on in the next object: its
    objects only count together."""

    sealed = True

    def __init__(
        self,
        writer: ShardWriter,
        place: Place,
        resumed_from: int | None,
        seen: Callable[[], Sighting | None],
        node: NodeJournal | None = None,
    ) -> None:
        """seen: gives the newest commit that the rank knows.  node: shares objects with other ranks of its node."""
        self._writer = writer
        self._node = node
        self._place = place
        self._resumed_from = resumed_from
        self._seen = seen
        self._sequence = 0  # rows of this rank below it are in the objects so far
        # called in the background: with the time that a tick took; when a newer session has ended the journal
        self.took: Callable[[float], None] = lambda seconds: None
        self.ended: Callable[[SupersededError], None] = lambda error: None

    def key(self, number: int) -> str:
        return layout.journal_key(self._place.session, self._place.rank, number)

    def complete(self, upload: Upload, seal: Seal | None) -> None:
        key, slab, rows = upload.key, upload.slab, upload.rows
        self._sequence = sequence = max(self._sequence, rows.next_sequence)
        said: TickChanges = TickChanges({}, {}, {}) if seal is None else seal.said
        tables = {kind: table for kind in ("segments", "ledger") if (table := getattr(rows, kind)).num_rows}
        tables |= {} if said.live is None else {"live": said.live}

        spent: list[float] = []

        def packed() -> tuple[list[Any], pa.Table]:
            """The object's buffers, and the chunk rows of its shard."""
            columns, arrays = said.described()
            scattered = any(one.ranges is not None for of in columns.values() for one in of.values())
            block = layout.format_block(layout.PART_VERSION)
            index = TickIndex(
                run=self._place.run, session=self._place.session, rank=self._place.rank, number=upload.number,
                nonce=secrets.token_hex(8), sequence=sequence, goes_on=seal is None,
                rows={kind: table.num_rows for kind, table in tables.items()},
                gone={buffer: tuple(steps) for buffer, steps in said.gone.items()}, columns=columns,
                attributes=said.texts, progress=said.progress, resumed_from=self._resumed_from, seen=self._seen(),
                format=layout.with_feature(block, layout.SCATTERED) if scattered else block,
            )  # fmt: skip
            if slab is not None:
                shard = encoded(self._writer, slab, arrays)
            else:
                shard = encode(arrays, attributes={}) if arrays else []
            buffers, placed = pack(index, {kind: table for kind, table in tables.items() if table.num_rows}, shard)
            if seal is not None:
                self.took(seconds := time.monotonic() - seal.made)
                spent.append(seconds)
            return buffers, rows.chunks if slab is None else tablefiles.chunk_rows(key, placed)

        def put(found: tuple[list[Any], pa.Table]) -> Written:
            buffers, chunks = found
            return self._stored(Written(rows._replace(chunks=chunks), upload.number + 1), upload.number, buffers, spent)

        upload.complete(packed, put)

    def _stored(self, made: Written, number: int, buffers: list[Any], spent_s: Sequence[float]) -> Written:
        """Put a tick's object, by the node's journal or by itself; its rows, as they lie there."""
        key = self.key(number)
        try:
            shared = None if self._node is None else self._node.store(number, buffers)
        except SupersededError as e:
            self.ended(e)
            raise
        if shared is not None:
            self.took(sum(spent_s) + shared.waited_s)
            return made._replace(rows=lying(made.rows, key, shared.shard, shared.offset))
        try:
            self._writer.storage.create_once(key, buffers)
        except AlreadyExistsError as e:
            if (by := ends.ended_by(self._writer.storage, key)) is not None:
                self.ended(error := self._place.superseded(by))
                raise error from e
            raise SessionInUseError(
                f"{self._writer.storage.full_url(key)} is there already: another process writes, or wrote, as "
                "this rank of this session; end one of them, and open this one's writer under a session name of "
                "its own"
            ) from e
        return made
