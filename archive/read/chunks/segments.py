"""Pure, no I/O: rows of the segments table as numbers: the places of their steps, and their fields.

Rows of the late table, which have derived columns of these steps, are further segments, behind all others. Of several
that give the same field of the same step the last one counts; a dropped one removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, arrow, ascending, group_of, numbers, spans
from archive.base import cached_property, unescape_path
from archive.fields import Extent, Path, ShardSchema, schema
from archive.index import Snapshot
from archive.log import StoredFile, tablefiles

if TYPE_CHECKING:
    import pyarrow as pa

_PLACE = ("shard", "start", "length", "schema")
_NONE = np.zeros(0, np.int64)
_parsed = lru_cache(maxsize=1024)(schema.loads)


class LateFields:
    """The derived columns of all rows of a segments table: the places of each, by path."""

    def __init__(self, table: pa.Table, segments: pa.Table) -> None:
        """table: the rows of the late table; segments: STRETCH of the segments table."""
        self.table = table
        self.where = _found(table, tables.overlaps(table, segments)) if table.num_rows else {}


def _found(table: pa.Table, every: Steps) -> dict[Path, Steps]:
    import pyarrow.compute as pc

    listed = table["fields"].combine_chunks()
    names = pc.list_flatten(listed).dictionary_encode()
    owner = numbers(pc.list_parent_indices(listed))
    dropped = numbers(table["dropped"])
    out = {}
    for code, name in enumerate(names.dictionary.to_pylist()):
        has = np.zeros(table.num_rows, bool)
        has[owner[numbers(names.indices) == code]] = True
        top = every.pick(has[every["late"]]).topmost()
        if len(left := np.flatnonzero(~dropped[top["late"]])):
            out[unescape_path(name)] = top.pick(left)
    return out


class Cover:
    """The places of one derived column: steps [lo, hi) of some segments are those of another one from `step` on.

    segment: numbers of segments, in order, with their steps in order; other: the segment that has the field.
    """

    def __init__(self, segment: Ints, lo: Ints, hi: Ints, other: Ints, step: Ints) -> None:
        self.steps = Steps(segment, lo, hi)
        self._span = int(hi.max(initial=0)) + 2  # so that a step beyond all has a place
        self._begin = segment * self._span + lo
        self._end = segment * self._span + hi
        self._other = other
        self._shift = step - lo

    def find(self, segment: Ints, step: Ints) -> tuple[Ints, Ints]:
        """The segment that has the field of these steps, -1 for none; and the step of it that each is."""
        key = segment * self._span + np.minimum(step, self._span - 1)
        place = group_of(self._begin, key)
        inside = (place >= 0) & (key < self._end[place])
        return np.where(inside, self._other[place], -1), np.where(inside, step + self._shift[place], 0)


class Segments:
    """Some rows of the segments table: shards and schemas by their place in `shards` and `schemas`, -1 for no shard.

    late: by path, the steps that have the field from a further segment.
    """

    def __init__(self, snapshot: Snapshot, rows: Ints, added: LateFields | None = None) -> None:
        self._snapshot = snapshot
        self.late: dict[Path, Cover] = {}
        self.rows = rows  # sorted, each once
        self._extents: dict[str, Extent] = {}
        table = snapshot.take(rows, _PLACE)
        self.shards, self.shard = tables.coded(table["shard"])
        texts, self.schema = tables.coded(table["schema"])
        self.schemas: list[ShardSchema] = [_parsed(text) for text in texts]
        self.start = numbers(table["start"], 0).astype(np.int64, copy=False)
        self.length = numbers(table["length"]).astype(np.int64, copy=False)
        if added is not None:
            self._add(added)

    def _add(self, added: LateFields) -> None:
        """Add segments for derived columns of steps of these."""
        found = {path: _of_rows(where.stream, self.rows) for path, where in added.where.items()}
        givers = [added.where[path]["late"][index] for path, (index, _) in found.items()]
        used = ascending(np.concatenate([_NONE, *givers]))
        if not len(used):
            return
        own = len(self.rows)
        self._late_table, self._late_rows = added.table, used.astype(np.int64)
        self._origin = np.zeros(len(used), np.int64)
        for path, (index, place) in found.items():
            if len(index):
                of = added.where[path].pick(index)
                other = np.searchsorted(used, of["late"])
                self._origin[other] = place
                self.late[path] = Cover(place, of.lo, of.hi, own + other, of["step"])
        table = _taken(added.table, self._late_rows, _PLACE)
        shards, shard = tables.coded(table["shard"])
        texts, code = tables.coded(table["schema"])
        self.shard = np.append(self.shard, shard + len(self.shards))
        self.schema = np.append(self.schema, code + len(self.schemas))
        self.shards = self.shards + shards
        self.schemas += [_parsed(text) for text in texts]
        self.start = np.append(self.start, numbers(table["start"]))
        self.length = np.append(self.length, numbers(table["length"]))

    def places(self, rows: Ints) -> Ints:
        """The places among these of rows of the table, all of which are here."""
        found: Ints = np.searchsorted(self.rows, rows)
        return found

    def extent(self, name: str) -> Extent:
        """First row and number of rows of a field in each segment, for fields that are not one row a step."""
        if name not in self._extents:
            segment, names, field, start, rows = self._entries
            out = Extent(np.zeros(len(self.start), np.int64), np.zeros(len(self.start), np.int64))
            mine = np.flatnonzero(field == names.index(name)) if name in names else _NONE
            out.start[segment[mine]], out.rows[segment[mine]] = start[mine], rows[mine]
            self._extents[name] = out
        return self._extents[name]

    @cached_property
    def _entries(self) -> tuple[Ints, list[str], Ints, Ints, Ints]:
        """The extents of all segments and fields, as of `tables.extents_of`."""
        return tables.extents_of(self._snapshot.take(self.rows, ["extents"])["extents"])

    def episode_id(self, number: int) -> str:
        """The id of a segment's episode; for a derived column, of an episode that has it."""
        if number >= len(self.rows):
            number = int(self._origin[number - len(self.rows)])
        return str(self._snapshot.take([int(self.rows[number])], ["episode_id"])["episode_id"][0].as_py())

    def owner(self, shard: str) -> str:
        """The name of a shard's content in errors: the last episode here that is stored in it."""
        return f"episode {self.episode_id(int(self._last_in[self.shards.index(shard)]))!r}"

    @cached_property
    def _last_in(self) -> Ints:
        """The last segment here that is stored in each shard."""
        out = np.zeros(len(self.shards), np.int64)
        held = np.flatnonzero(self.shard >= 0)
        out[self.shard[held]] = held
        return out

    def chunk_tables(self, shards: list[int]) -> list[StoredFile]:
        """The files with the chunks of these shards, each once."""
        last, own = self._last_in[shards], len(self.rows)
        names = tables.CHUNK_FILE
        found = tablefiles.chunk_files(self._snapshot.take(self.rows[last[last < own]], names))
        if self.late:
            found |= tablefiles.chunk_files(_taken(self._late_table, self._late_rows[last[last >= own] - own], names))
        return list(found.values())


def _of_rows(given: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """The sorted numbers that are among `rows`, each once; and the place there of each."""
    first, last = (np.searchsorted(given, rows, side=side) for side in ("left", "right"))
    return spans(first, last - first), np.repeat(np.arange(len(rows)), last - first)


def _taken(table: pa.Table, rows: Ints, names: Sequence[str]) -> pa.Table:

    return table.select(list(names)).take(arrow(rows))
