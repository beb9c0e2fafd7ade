"""Pure, no I/O: what the next tick says beside steps: what is gone, values of columns and attributes, progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import ColumnError, escape, jsontree
from archive.saved import Stretch, TickColumn, Values
from archive.write import Buffer, cut

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
    """What was said since the last tick. Calls are serialised by the writer's lock."""

    def __init__(self) -> None:
        self._columns: dict[Name, dict[str, Values]] = {}
        self._attributes: dict[Name, dict[str, Any]] = {}
        self._progress: str | None = None
        self._live: pa.Table | None = None

    def mark(self) -> Any:
        """All that a call may change, as it is: values that are replaced, and never changed."""
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
        """What a resumed rank began with."""
        self._live = rows

    def take(self, gone: Mapping[str, tuple[Stretch, ...]]) -> Said:
        """All of it, and what is gone; the next tick begins anew."""
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
    """Those of one tick lie in one array."""
    kinds = {(one.column.dtype, one.column.array.shape[1:]) for one in values.values() if len(one.column.array)}
    if len(kinds) > 1:
        raise ColumnError(f"column {name[1]!r} of buffer {name[0]!r} has values of several dtypes or shapes: {kinds}")
