"""Pure, no I/O: the contents of a rank's journal objects, checked against their place and their predecessors, and
merged, without the bytes of their shards."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from archive import tables
from archive.base import CorruptStateError, escape, jsontree
from archive.saved.index import TickColumn
from archive.saved.object import TickObject, Values
from archive.tables import distinct
from archive.write import RankRows, Stretch

if TYPE_CHECKING:
    import pyarrow as pa

_TOGETHER = 256


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
        self.gone: dict[str, list[Stretch]] = {}
        self.columns: dict[str, dict[str, list[Values]]] = {}
        self.attributes: dict[str, dict[str, dict[str, Any]]] = {}

    @property
    def says(self) -> bool:
        """True if it adds something beside rows of segments and of the ledger."""
        some = self.gone or self.columns or self.attributes
        return bool(some) or self.progress is not None or self.live is not None

    @property
    def arrays(self) -> dict[str, Any]:
        """Its columns by their paths in the Zarr group of a tick's object, in stored form."""
        return {
            _path(buffer, name): np.concatenate([one.column.array for one in values])
            for buffer, of in self.columns.items()
            for name, values in of.items()
        }

    @property
    def entries(self) -> dict[str, dict[str, TickColumn]]:
        """Its columns as the index of a tick's object has them."""
        out: dict[str, dict[str, TickColumn]] = {}
        for buffer, of in self.columns.items():
            for name, values in of.items():
                steps = tuple(run for one in values for run in one.steps)
                out.setdefault(buffer, {})[name] = TickColumn(_path(buffer, name), values[0].column.dtype, steps)
        return out

    @property
    def texts(self) -> dict[str, dict[str, str]]:
        """Its attributes as the index of a tick's object has them."""
        return {
            buffer: {name: jsontree.dumps(values, where=f"attributes.{name}") for name, values in of.items()}
            for buffer, of in self.attributes.items()
        }

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
        found = {kind: _rows(tick, kind, after) for kind in ("segments", "ledger")} | {"chunks": tick.chunks()}
        out._parts = {kind: [table] if table.num_rows else [] for kind, table in found.items()}
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
        for name in ("sequence", "live", "resumed_from", "progress"):
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
                self.columns.setdefault(buffer, {}).setdefault(name, []).extend(values)
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


def _path(buffer: str, name: str) -> str:
    """The path of a column's array. No field has such a path: `%c` is no escape."""
    return f"%columns/{escape(buffer)}/{escape(name)}"


def _rows(tick: TickObject, kind: str, after: int) -> pa.Table:
    """The object's rows of a table, if they are its rank's own, numbered from `after` on, and stored in it."""
    import pyarrow.compute as pc

    index, table, where = tick.index, tick.table(kind), tick.where
    _check_writer(tick, table, kind)
    if not table.num_rows:
        return table
    numbers = pc.min_max(table["sequence"]).as_py()
    if numbers["min"] is None or numbers["min"] < after or numbers["max"] >= index.sequence:
        raise CorruptStateError(
            f"{where} has {kind} rows {numbers['min']} to {numbers['max']}, not of {after} to {index.sequence}"
        )
    if kind == "segments" and {*distinct(table["shard"])} - {index.key}:
        raise CorruptStateError(f"{where} has rows of steps that are not stored in it")
    return table


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
