"""Pure, no I/O: what objects of a journal say: checked against where they lie and what came before, and kept without
the bytes of their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import CorruptStateError, jsontree
from archive.journal.entries import Entry, JournalColumn, Read, Stretch, parse
from archive.shard import ShardView, inflate
from archive.tables import distinct

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
_METADATA = "zarr.json"


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a column in stored form, one each of these steps, in order."""

    dtype: str
    array: Array
    steps: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Notes:
    """What one object says. live: what its rank held when its journal began, if it resumed."""

    entry: Entry
    nbytes: int
    segments: pa.Table
    chunks: pa.Table
    ledger: pa.Table
    live: pa.Table | None
    columns: Mapping[str, Mapping[str, Values]]
    attributes: Mapping[str, Mapping[str, Mapping[str, Any]]]  # buffer -> name -> {episode id: value}


def read(data: bytes, key: str, where: str, run: str, after: int) -> Notes:
    """What the object says that lies at `key`; an IntegrityError if it is damaged, or another run's, or if its rows do
    not follow those before `after`."""
    found = parse(data, key, where)
    entry = found.entry
    if entry.run != run:
        raise CorruptStateError(f"{where} says that it is of run {entry.run!r:.80}, not of {run!r:.80}")
    if entry.sequence < after:
        raise CorruptStateError(f"{where} ends at row {entry.sequence}, and the object before it at {after}")
    for steps in _all_steps(entry):
        if steps[3] > steps[4]:
            raise CorruptStateError(f"{where} names steps {steps[3]} to {steps[4]}, which are none")
    rows = {kind: _rows(found, kind, where, after) for kind in ("segments", "ledger")}
    live = found.table("live", where) if "live" in entry.rows else None
    if live is not None:
        _check_writer(live, "live", entry, where)
    return Notes(
        entry, len(data), rows["segments"], found.chunks(), rows["ledger"], live, _columns(found, where),
        _attributes(entry, where),
    )  # fmt: skip


def _all_steps(entry: Entry) -> list[Stretch]:
    columns = [one.steps for of in entry.columns.values() for one in of.values()]
    return [steps for group in (*entry.gone.values(), *columns) for steps in group]


def _rows(found: Read, kind: str, where: str, after: int) -> pa.Table:
    """Its rows of a table, if they are its rank's own, numbered from `after` on, and lie in it."""
    import pyarrow.compute as pc

    entry, table = found.entry, found.table(kind, where)
    _check_writer(table, kind, entry, where)
    if not table.num_rows:
        return table
    numbers = pc.min_max(table["sequence"]).as_py()
    if numbers["min"] is None or numbers["min"] < after or numbers["max"] >= entry.sequence:
        raise CorruptStateError(
            f"{where} has {kind} rows {numbers['min']} to {numbers['max']}, not of {after} to {entry.sequence}"
        )
    if kind == "segments":
        _check_segments(table, entry, where)
    return table


def _check_writer(table: pa.Table, kind: str, entry: Entry, where: str) -> None:
    """The rows must be as many as it says, of its rank and (what was live before aside) of its session."""
    if table.num_rows != entry.rows.get(kind, 0):
        raise CorruptStateError(f"{where} has {table.num_rows} {kind} rows, and says {entry.rows.get(kind, 0)}")
    ranks = set(table["rank"].unique().to_pylist())
    sessions = set() if kind == "live" else set(table["session"].unique().to_pylist())
    if ranks - {entry.rank} or sessions - {entry.session}:
        raise CorruptStateError(f"{where} has {kind} rows of another rank or session")


def _check_segments(table: pa.Table, entry: Entry, where: str) -> None:
    """They must lie in this object."""
    if {*distinct(table["shard"])} - {entry.key}:
        raise CorruptStateError(f"{where} has rows of steps that do not lie in it")


def _columns(found: Read, where: str) -> dict[str, dict[str, Values]]:
    """The values of its columns, decoded."""
    if not any(found.entry.columns.values()):
        return {}
    packed = found.member(_METADATA)
    view = ShardView(packed if packed[:1] == b"{" else inflate(packed))
    return {
        buffer: {name: _values(found, view, column, where) for name, column in of.items()}
        for buffer, of in found.entry.columns.items()
    }


def _values(found: Read, view: ShardView, column: JournalColumn, where: str) -> Values:
    count = sum(steps[4] - steps[3] for steps in column.steps)
    if column.array not in view.paths or view.describe(column.array).rows != count:
        raise CorruptStateError(f"{where} has no array {column.array!r:.80} of {count} rows, as its columns say")
    chunks = {one.name: found.member(one.name) for one in found.entry.members if one.array == column.array}
    return Values(column.dtype, view.read(column.array, 0, count, chunks), column.steps)


def _attributes(entry: Entry, where: str) -> dict[str, dict[str, Mapping[str, Any]]]:
    out = {b: {n: jsontree.loads(text, where=where) for n, text in of.items()} for b, of in entry.attributes.items()}
    if not all(isinstance(value, Mapping) for of in out.values() for value in of.values()):
        raise CorruptStateError(f"{where} has an attribute that is no object of episodes and values")
    return out


class Gathering:
    """The notes of one rank's tail, put together as they come; those of a tick count once the tick is complete."""

    def __init__(self) -> None:
        self._parts: dict[str, list[pa.Table]] = {"segments": [], "chunks": [], "ledger": []}
        self._tick: list[Notes] = []
        self.after = 0  # rows of the next object are not below it
        self.found = 0  # objects, also those of a tick that is not complete
        self.objects = 0
        self.nbytes = 0
        self.sequence: int | None = None
        self.live: pa.Table | None = None
        self.resumed_from: int | None = None
        self.progress: str | None = None
        self.gone: dict[str, list[Stretch]] = {}
        self.columns: dict[str, dict[str, list[Values]]] = {}
        self.attributes: dict[str, dict[str, dict[str, Any]]] = {}

    def add(self, notes: Notes) -> None:
        """The next object's."""
        self.found += 1
        self.after = notes.entry.sequence
        self._tick.append(notes)
        if not notes.entry.goes_on:
            for one in self._tick:
                self._take(one)
            self._tick = []

    def table(self, kind: str) -> pa.Table:
        """All rows of one of its tables."""
        parts = self._parts[kind]
        if len(parts) != 1:
            parts[:] = [tables.concat(kind, parts).combine_chunks()]
        return parts[0]

    def _take(self, notes: Notes) -> None:
        entry = notes.entry
        self.objects += 1
        self.nbytes += notes.nbytes
        self.sequence = entry.sequence
        self.progress = self.progress if entry.progress is None else entry.progress
        self.live = self.live if notes.live is None else notes.live
        self.resumed_from = self.resumed_from if entry.resumed_from is None else entry.resumed_from
        for kind in self._parts:
            self._add_rows(kind, getattr(notes, kind))
        for buffer, steps in entry.gone.items():
            self.gone.setdefault(buffer, []).extend(steps)
        for buffer, columns in notes.columns.items():
            for name, values in columns.items():
                self.columns.setdefault(buffer, {}).setdefault(name, []).append(values)
        for buffer, attributes in notes.attributes.items():
            for name, given in attributes.items():
                self.attributes.setdefault(buffer, {}).setdefault(name, {}).update(given)

    def _add_rows(self, kind: str, rows: pa.Table) -> None:
        """Thousands of small tables take more than their rows: they are put together now and then."""
        if rows.num_rows:
            self._parts[kind].append(rows)
            if len(self._parts[kind]) >= _TOGETHER:
                self.table(kind)


_TOGETHER = 256


def counted(segments: pa.Table) -> tuple[int, int]:
    """How many steps rows of the segments table have, and of how many episodes they are."""
    import pyarrow.compute as pc

    if not segments.num_rows:
        return 0, 0
    return int(pc.sum(segments["length"]).as_py()), int(pc.count_distinct(segments["episode_id"]).as_py())


def first_of(found: Sequence[Gathering], name: str) -> Any:
    """What the first of them has that has it."""
    return next((value for one in found if (value := getattr(one, name)) is not None), None)
