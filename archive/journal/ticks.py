"""Pure, no I/O but for the objects' own: what a tick says beside steps (what is gone, values of columns and attributes,
progress), and the numbered object that it becomes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import AlreadyExistsError, ColumnError, SessionInUseError, SupersededError, escape, jsontree, layout
from archive.journal import tails
from archive.log import Place, Sighting, tablefiles
from archive.saved import Stretch, TickColumn, TickIndex, Values, next_sequence, pack
from archive.shard import Member, ShardWriter, encode
from archive.write import Buffer, ObjectDraft, Seal, Upload, Written, cut, encoded

if TYPE_CHECKING:
    import pyarrow as pa

Name = tuple[str, str]  # of a buffer, and of its column or attribute
ALL = ""  # in place of an episode's id: all live steps


@dataclass(frozen=True)
class Said:
    """What one tick says. `live`: rows of what a resumed rank began with. By buffer and name: column values by
    episode, the newest alone; attributes by episode id."""

    gone: Mapping[str, tuple[Stretch, ...]] = field(default_factory=dict)
    live: pa.Table | None = None
    columns: Mapping[Name, Mapping[str, Values]] = field(default_factory=dict)
    attributes: Mapping[Name, Mapping[str, Any]] = field(default_factory=dict)
    progress: str | None = None

    def __bool__(self) -> bool:
        return bool(self.gone or self.columns or self.attributes) or None is not self.progress or self.live is not None

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns by path in the object's group, in stored form."""
        return {
            _path(*name): np.concatenate([one.column.array for one in of.values()]) for name, of in self.columns.items()
        }

    @property
    def entries(self) -> dict[str, dict[str, TickColumn]]:
        """The columns as the object's index has them."""
        out: dict[str, dict[str, TickColumn]] = {}
        for (buffer, name), of in self.columns.items():
            steps = tuple(run for one in of.values() for run in one.steps)
            dtype = next(iter(of.values())).column.dtype
            out.setdefault(buffer, {})[name] = TickColumn(_path(buffer, name), dtype, steps)
        return out

    @property
    def texts(self) -> dict[str, dict[str, str]]:
        """The attributes as the object's index has them."""
        out: dict[str, dict[str, str]] = {}
        for (buffer, name), values in self.attributes.items():
            out.setdefault(buffer, {})[name] = jsontree.dumps(dict(values), where=f"attributes.{name}")
        return out


def _path(buffer: str, name: str) -> str:
    """No field has such a path: `%c` is no escape."""
    return f"%columns/{escape(buffer)}/{escape(name)}"


class Saying:
    """The changes since the last tick. Calls are serialised by the writer's lock."""

    def __init__(self) -> None:
        self._columns: dict[Name, dict[str, Values]] = {}
        self._attributes: dict[Name, dict[str, Any]] = {}
        self._progress: str | None = None
        self._live: pa.Table | None = None

    def mark(self) -> Any:
        """The state that a call may change: values that are replaced, and never changed."""
        return self._columns, self._attributes, self._progress, self._live

    def cut_back(self, mark: Any) -> None:
        """Be as it was."""
        self._columns, self._attributes, self._progress, self._live = mark

    def columns(self, inner: Buffer, columns: Mapping[str, Any]) -> None:
        """Values of columns of a buffer: name -> {episode id: one value a live step of it}, or of all live steps."""
        whole = {name: values for name, values in columns.items() if not isinstance(values, Mapping)}
        for column, values in whole.items():
            self._whole(inner, column, values)
        some = {name: values for name, values in columns.items() if name not in whole}
        made = {(inner.name, name): _values(inner, name, values) for name, values in some.items()}
        for name, values in made.items():
            _check_alike(name, self._columns.get(name, {}) | values)
        merged = {name: self._columns.get(name, {}) | values for name, values in made.items() if values}
        self._columns = self._columns | merged

    def _whole(self, inner: Buffer, name: str, values: Any) -> None:
        """Values of all live steps, in live order, in place of what was said of some."""
        runs = inner.live_set.runs()
        runs = runs.pick(runs.length > 0)
        column = cut.column(name, values, runs, inner.streams.records)
        of_all = Values(column, tuple(map(tuple, inner.live_set.addresses(runs))))  # type: ignore[arg-type]
        self._columns = self._columns | {(inner.name, name): {ALL: of_all}}

    def attributes(self, inner: Buffer, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        """Values of attributes of a buffer: name -> {episode id: JSON value}."""
        runs, _ = inner.live_runs()
        made = {
            (inner.name, name): jsontree.loads(cut.attribute(name, values, runs, inner.streams.records))
            for name, values in attributes.items()
        }
        merged = {name: self._attributes.get(name, {}) | values for name, values in made.items() if values}
        self._attributes = self._attributes | merged

    def progress(self, value: Any) -> None:
        """The run's counters, as JSON."""
        text = jsontree.dumps(value, where="progress")
        self._progress = text

    def live(self, rows: pa.Table) -> None:
        """Take the live rows that a resumed rank began with."""
        self._live = rows

    def take(self, gone: Mapping[str, tuple[Stretch, ...]]) -> Said:
        """The changes, and what is gone; the next tick begins anew."""
        said = Said(gone, self._live, self._columns, self._attributes, self._progress)
        self._columns, self._attributes, self._progress, self._live = {}, {}, None, None
        return said


def _values(inner: Buffer, name: str, values: Mapping[str, Any]) -> dict[str, Values]:
    records = inner.streams.records
    numbers = {key: number for key in values if (number := records.number_of(key)) is not None}
    runs = inner.live_set.runs()
    runs = runs.pick((runs.length > 0) & np.isin(runs.episode, list(numbers.values())))
    out = {}
    for key, value in values.items():
        mine = runs.pick(runs.episode == numbers.get(key, -1))
        column = cut.column(name, {key: value}, mine, records)
        out[key] = Values(column, tuple(map(tuple, inner.live_set.addresses(mine))))  # type: ignore[arg-type]
    return out


def _check_alike(name: Name, values: Mapping[str, Values]) -> None:
    """Refuse values of one tick that cannot lie in one array."""
    kinds = {(one.column.dtype, one.column.array.shape[1:]) for one in values.values() if len(one.column.array)}
    if len(kinds) > 1:
        raise ColumnError(f"column {name[1]!r} of buffer {name[0]!r} has values of several dtypes or shapes: {kinds}")


Packed = tuple[list[Any], "pa.Table | None"]  # an object's buffers, and the chunk rows of its shard


class Tick(Seal):
    """The end of a tick: all that was handed in before it is made durable together, and what is said with it.

    `positions`: of each buffer and env row the next one, when it was made. `oldest`: when the first of it was added.
    """

    said: Said

    def __init__(self, said: Said, positions: Mapping[tuple[str, int], int], oldest: float | None) -> None:
        super().__init__(said)
        self.positions = positions
        self.oldest = oldest


class JournalObjects:
    """The numbered objects of one rank's journal. What memory was short for goes on in the next: it counts with the
    rest of its tick only."""

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
        # called in the background: how long a tick took; and that a newer session has ended the journal
        self.took: Callable[[float], None] = lambda seconds: None
        self.ended: Callable[[SupersededError], None] = lambda error: None

    def key(self, number: int) -> str:
        return layout.journal_key(self._place.session, self._place.rank, number)

    def complete(self, draft: ObjectDraft, seal: Seal | None) -> Upload:
        rows = draft.rows
        self._sequence = max(self._sequence, next_sequence(rows.get("segments"), rows.get("ledger")))
        sequence, nonce = self._sequence, secrets.token_hex(8)

        def packed() -> Packed:
            found = self._pack(draft, rows, seal, sequence, nonce)
            if seal is not None:
                self.took(time.monotonic() - seal.made)
            return found

        def put(found: Packed) -> Written:
            try:
                self._writer.storage.create_once(draft.key, found[0])
            except AlreadyExistsError as e:
                if (by := tails.ended_by(self._writer.storage, draft.key)) is not None:
                    self.ended(error := self._place.superseded(by))
                    raise error from e
                raise SessionInUseError(
                    f"{self._writer.storage.full_url(draft.key)} is there already: another process writes, or wrote, "
                    "as this rank of this session; end one of them, and open this one's writer under a session name of "
                    "its own"
                ) from e
            return Written(rows.get("segments"), found[1], draft.nbytes, rows.get("ledger"), draft.number + 1)

        return Upload(packed, put)

    def _pack(
        self, draft: ObjectDraft, rows: Mapping[str, pa.Table], seal: Seal | None, sequence: int, nonce: str
    ) -> Packed:  # fmt: skip
        said: Said = Said() if seal is None else seal.said
        shard = self._shard(draft, said.arrays)
        rows = dict(rows) if said.live is None else {**rows, "live": said.live}
        index = TickIndex(
            run=self._place.run, session=self._place.session, rank=self._place.rank, number=draft.number, nonce=nonce,
            sequence=sequence, goes_on=seal is None, rows={kind: table.num_rows for kind, table in rows.items()},
            gone=said.gone, columns=said.entries, attributes=said.texts, progress=said.progress,
            resumed_from=self._resumed_from, seen=self._seen(),
        )  # fmt: skip
        buffers, placed = pack(index, {kind: table for kind, table in rows.items() if table.num_rows}, shard)
        return buffers, None if draft.slab is None else tablefiles.chunk_rows(draft.key, placed)

    def _shard(self, draft: ObjectDraft, columns: Mapping[str, Any]) -> list[Member]:
        if draft.slab is not None:
            return encoded(self._writer, draft.slab, columns)
        return encode(columns, attributes={}) if columns else []
