"""Pure, no I/O but for the objects' own: the records of a tick beside steps (evictions, values of columns and
attributes, progress), and its numbered object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Steps
from archive.base import AlreadyExistsError, ColumnError, SessionInUseError, SupersededError, jsontree, layout
from archive.journal import tails
from archive.log import Place, Sighting, tablefiles
from archive.saved import Delta, TickIndex, Values, pack
from archive.shard import ShardWriter, encode
from archive.write import Buffer, Seal, Stretch, Upload, Written, encoded, live

if TYPE_CHECKING:
    import pyarrow as pa

Name = tuple[str, str]  # of a buffer, and of its column or attribute
ALL = ""  # in place of an episode's id: all live steps


class Saying:
    """The changes since the last tick. Values are replaced, never changed. The writer's lock serialises calls."""

    def __init__(self) -> None:
        self._columns: dict[Name, dict[str, Values]] = {}  # by episode, only the newest
        self._attributes: dict[Name, dict[str, Any]] = {}
        self._progress: str | None = None
        self.live: pa.Table | None = None  # rows of a resumed rank's contents at its start

    def columns(self, inner: Buffer, columns: Mapping[str, Any]) -> None:
        """Add values of columns of a buffer: name -> {episode id: one value for each of its live steps}, or values of
        all live steps, which replace those of single episodes."""
        runs, numbers = inner.live_set.runs(), inner.streams.records.number_of
        runs, made = runs.pick(runs.length > 0), dict(self._columns)
        for name, given in columns.items():
            key = inner.name, name
            if isinstance(given, Mapping):
                known = [-1 if (number := numbers(one)) is None else number for one in given]
                some = runs.pick(np.isin(runs["episode"], known))
                each = zip(known, given.items(), strict=True)
                parts = {one: _values(inner, name, {one: v}, some.pick(some["episode"] == n)) for n, (one, v) in each}
                values = made.get(key, {}) | {n: one for n, one in parts.items() if len(one.column.array)}
                _check_alike(key, values)
            else:
                values = {ALL: _values(inner, name, given, runs)}
            made |= {key: values} if values else {}
        self._columns = made

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

    def take(self, gone: Mapping[str, Sequence[Stretch]]) -> Delta:
        """The changes, and the evictions; the next tick starts empty."""
        out = Delta()
        out.gone = {buffer: [*steps] for buffer, steps in gone.items()}
        out.live, out.progress = self.live, self._progress
        for (buffer, name), values in self._columns.items():
            out.columns.setdefault(buffer, {})[name] = [*values.values()]
        for (buffer, name), given in self._attributes.items():
            out.attributes.setdefault(buffer, {})[name] = given
        self._columns, self._attributes, self._progress, self.live = {}, {}, None, None
        return out


def _values(inner: Buffer, name: str, given: Any, runs: Steps) -> Values:
    """Values of the steps of these ranges."""
    return Values(live.column(name, given, runs, inner.streams.records), inner.live_set.addresses(runs))


def _check_alike(name: Name, values: Mapping[str, Values]) -> None:
    """Refuse values of one tick that do not fit in one array."""
    kinds = {(one.column.dtype, one.column.array.shape[1:]) for one in values.values() if len(one.column.array)}
    if len(kinds) > 1:
        raise ColumnError(f"column {name[1]!r} of buffer {name[0]!r} has values of several dtypes or shapes: {kinds}")


class JournalObjects:
    """The numbered objects of one rank's journal. A tick that memory cannot hold goes on in the next object: its
    objects only count together."""

    sealed = True

    def __init__(
        self, writer: ShardWriter, place: Place, resumed_from: int | None, seen: Callable[[], Sighting | None]
    ) -> None:
        """seen: gives the newest commit that the rank knows."""
        self._writer = writer
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
        said: Delta = Delta() if seal is None else seal.said
        tables = {kind: table for kind in ("segments", "ledger") if (table := getattr(rows, kind)).num_rows}
        tables |= {} if said.live is None else {"live": said.live}

        def packed() -> tuple[list[Any], pa.Table]:
            """The object's buffers, and the chunk rows of its shard."""
            index = TickIndex(
                run=self._place.run, session=self._place.session, rank=self._place.rank, number=upload.number,
                nonce=secrets.token_hex(8), sequence=sequence, goes_on=seal is None,
                rows={kind: table.num_rows for kind, table in tables.items()},
                gone={buffer: tuple(steps) for buffer, steps in said.gone.items()}, columns=said.entries,
                attributes=said.texts, progress=said.progress, resumed_from=self._resumed_from, seen=self._seen(),
            )  # fmt: skip
            if slab is not None:
                shard = encoded(self._writer, slab, said.arrays)
            else:
                shard = encode(said.arrays, attributes={}) if said.columns else []
            buffers, placed = pack(index, {kind: table for kind, table in tables.items() if table.num_rows}, shard)
            if seal is not None:
                self.took(time.monotonic() - seal.made)
            return buffers, rows.chunks if slab is None else tablefiles.chunk_rows(key, placed)

        def put(found: tuple[list[Any], pa.Table]) -> Written:
            buffers, chunks = found
            try:
                self._writer.storage.create_once(key, buffers)
            except AlreadyExistsError as e:
                if (by := tails.ended_by(self._writer.storage, key)) is not None:
                    self.ended(error := self._place.superseded(by))
                    raise error from e
                raise SessionInUseError(
                    f"{self._writer.storage.full_url(key)} is there already: another process writes, or wrote, as "
                    "this rank of this session; end one of them, and open this one's writer under a session name of "
                    "its own"
                ) from e
            return Written(rows._replace(chunks=chunks), upload.number + 1)

        upload.complete(packed, put)
