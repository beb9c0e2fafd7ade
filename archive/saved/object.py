"""The objects that a rank saves, packed and read: the index first, then only the members that are asked for. A tick's
object is read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self

import numpy as np

from archive import tables
from archive.base import (
    ByteRange,
    CorruptChunkError,
    CorruptStateError,
    FieldError,
    IntegrityError,
    MissingObjectError,
    UsageError,
    cached_property,
)
from archive.fields import dtypes, trees
from archive.index import METADATA, ArrayChunks, ShardIndex, chunkindex
from archive.log import tablefiles
from archive.read import members_of
from archive.saved.columns import Values, stretches_of
from archive.saved.index import (
    LEDGER,
    LEFT_OUT,
    ColumnRef,
    I,
    PartIndex,
    StateRef,
    TickColumn,
    TickIndex,
    load,
)
from archive.shard import Member, Placed, ShardView, file_member, indexed, inflate
from archive.store import Storage
from archive.write import Column, RankRows

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
_METADATA = "zarr.json"
_END, _END_BYTES = b"PK\x05\x06", 22  # of a ZIP: its last record


def check_end(data: bytes, where: str, remedy: str) -> None:
    """CorruptStateError if an object does not end as it was written."""
    if data[-_END_BYTES:][:4] != _END:
        raise CorruptStateError(f"{where} is cut short, as by a torn write; {remedy}")


def pack(index: I, rows: Mapping[str, pa.Table], members: Sequence[Member]) -> tuple[list[Any], list[Placed]]:
    """The buffers of an object with these rows of tables and these members, and the places of its members."""
    files: list[Member] = [file_member(f"{name}.parquet", tables.dumps(table)) for name, table in rows.items()]
    buffers, placed = indexed.pack(index, [*files, *members])
    return buffers, placed[len(files) :]


class SavedObject(Generic[I]):
    """An object of the archive, at `key`."""

    index: I
    damage: str  # the remedy in errors

    def __init__(self, key: str, where: str) -> None:
        self.key = key
        self.where = where

    @property
    def _head(self) -> bytes:
        """The object's first bytes, at least to the end of its index."""
        raise NotImplementedError

    def _get(self, ranges: Sequence[ByteRange]) -> Sequence[bytes]:
        """Bytes of the object."""
        raise NotImplementedError

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Add to errors within how to go on without what is damaged or gone."""
        yield

    @cached_property
    def _base(self) -> int:
        return indexed.index_span(self._head, self.where)[1]

    @cached_property
    def _places(self) -> dict[str, Placed]:
        return {member.name: member for member in self.index.members}

    def has(self, name: str) -> bool:
        """True if it has a member of this name."""
        return name in self._places

    def files(self, names: Sequence[str]) -> list[bytes]:
        """Members that are not part of the Zarr group, by name."""
        if absent := [n for n in names if not self.has(n)]:
            raise CorruptStateError(f"{self.where} has no member {absent[0]!r:.80}; {self.damage}")
        wanted = [self._places[name] for name in names]
        with self._told():
            out = list(self._get([self._range(member) for member in wanted]))
            for member, data in zip(wanted, out, strict=True):
                self._check(member, data)
        return out

    def _range(self, member: Placed) -> ByteRange:
        start = self._base + member.offset
        return ByteRange(self.key, start, start + member.size)

    def _check(self, member: Placed, data: bytes) -> None:
        """CorruptStateError unless a member is as it was written."""
        is_chunk = member.chunk >= 0 and bool(member.array)
        if len(data) != member.size or not chunkindex.is_sound(memoryview(data), member.crc32c, is_chunk=is_chunk):
            raise CorruptStateError(f"{member.name!r:.80} in {self.where} does not match its checksum; {self.damage}")

    def tables(self, *kinds: str) -> list[pa.Table]:
        """Its rows of tables of the archive, from the members <table>.parquet."""
        files = self.files([f"{kind}.parquet" for kind in kinds])
        return [self._rows(data, kind, kind) for data, kind in zip(files, kinds, strict=True)]

    def _rows(self, data: bytes, kind: str, what: str) -> pa.Table:
        return tables.loads(data, kind, where=f"{what} rows in {self.where}", committed=False)


class Part(SavedObject[PartIndex]):
    """One rank's part of a checkpoint: all that its buffers hold. `nonce`: of the expected object, if the reference has
    it."""

    damage = "the state is damaged"

    def __init__(
        self, storage: Storage, key: str, nonce: str | None = None, remedy: Callable[[], str] | None = None
    ) -> None:
        """remedy: the sentence in errors on how to go on without it."""
        super().__init__(key, storage.full_url(key))
        self.storage = storage
        self._nonce = nonce
        self._remedy = remedy

    @classmethod
    def written(cls, storage: Storage, index: PartIndex, adds: RankRows, live: pa.Table) -> Self:
        """The part that this process has just written; what is given here is not read back."""
        out = cls(storage, index.key, index.nonce)
        out.index, out.rows_held = index, (adds, live)
        return out

    @cached_property
    def _head(self) -> bytes:
        head = self.storage.get_head(self.key, indexed.HEAD_BYTES)
        _, stop = indexed.index_span(head, self.where)
        return head if stop <= len(head) else head + self.storage.get(self.key, len(head), stop)

    def _get(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Bytes of the object; those that came with its index are not fetched again."""
        head = self._head
        fetched = iter(self.storage.get_ranges([one for one in ranges if one.stop > len(head)]))
        return [head[one.start : one.stop] if one.stop <= len(head) else next(fetched) for one in ranges]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, MissingObjectError) as e:
            if self._remedy is None:
                raise
            raise type(e)(f"{e}. {self._remedy()}") from e

    @cached_property
    def index(self) -> PartIndex:
        """Its index; CorruptStateError if that is damaged, or is of another object."""
        with self._told():
            start, stop = indexed.index_span(self._head, self.where)
            return load(PartIndex, self._head[start:stop], self.key, self.where, self._nonce)

    @cached_property
    def rows_held(self) -> tuple[RankRows, pa.Table]:
        """The rows that its rank adds to the tables of the archive, and its rows of the live table."""
        ledger = ["ledger"] if self.has(LEDGER) else []
        segments, chunks, live, *found = self.tables("segments", "chunks", "live", *ledger)
        return RankRows(segments, chunks, tables.concat("ledger", found)), live

    def left_out(self) -> pa.Table:
        """Rows as of the live table: steps that are live in its writer, and not in the checkpoint."""
        found = self.files([LEFT_OUT]) if self.index.rows is not None and self.index.rows.left_out else []
        return tables.concat("live", [self._rows(data, "live", LEFT_OUT) for data in found])

    @cached_property
    def arrays_index(self) -> ShardIndex:
        """The places of the chunks of the Zarr group."""
        groups: dict[str, list[Placed]] = {}
        for member in self.index.members:
            if member.array or member.name == _METADATA:
                groups.setdefault(member.array, []).append(member)
        return ShardIndex(self.key, True, {name: self._array_chunks(members) for name, members in groups.items()})

    def _array_chunks(self, members: list[Placed]) -> ArrayChunks:
        members.sort(key=lambda member: member.chunk)
        offset = np.array([member.offset for member in members], np.int64) + self._base
        size = np.array([member.size for member in members], np.int64)
        crc = np.array([member.crc32c for member in members], np.int64)
        return ArrayChunks(max(1, members[0].rows), offset, size, crc, [member.name for member in members])

    def rows(self, wanted: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[Array]]:
        """Rows of arrays of the Zarr group."""
        if not wanted:
            return {}
        arrays = self.arrays_index.arrays
        found = {name: np.array(pairs, np.int64).reshape(-1, 2) for name, pairs in wanted.items() if name in arrays}
        try:
            self.arrays_index.array(METADATA)
            reads = self.arrays_index.plan({name: (pairs[:, 0], pairs[:, 1]) for name, pairs in found.items()})
            blocks = self._get(reads.requests)
            chunks = members_of(self.key, reads, blocks, lambda shard: "this rank's state")
            view = ShardView(bytes(chunks.pop(_METADATA)))
            for name in wanted.keys() - found.keys():
                _check_empty(view, name, wanted[name])
            return {name: view.read_many(name, pairs, chunks) for name, pairs in wanted.items()}
        except (IntegrityError, UsageError) as e:  # or its index has more rows than there are
            with self._told():
                raise CorruptStateError(f"the state in {self.where} is damaged: {e}") from e

    def check(self) -> None:
        """Read every byte; CorruptStateError if one is not as it was written."""
        names = [m.name for m in self.index.members if not m.array]
        self.files([n for n in names if n.endswith((".parquet", ".json")) and not n.endswith(_METADATA)])
        lengths = self.index.lengths
        if unknown := [name for name in self.arrays_index.arrays if name and name not in lengths]:
            raise CorruptStateError(f"nothing refers to the array {unknown[0]!r} in {self.where}; {self.damage}")
        self.rows({name: [(0, rows)] for name, rows in lengths.items()})

    def state(self, buffer: str) -> Any:
        """The state tree of one buffer; None if it has none."""
        entry = self.index.states.get(buffer)
        if entry is None:
            return None
        if entry.object not in (None, self.key):
            return Part(self.storage, str(entry.object), entry.nonce, self._remedy).tree(entry, buffer)
        return self.tree(entry, buffer)

    def tree(self, entry: StateRef, buffer: str) -> Any:
        """A tree of state with arrays in this object."""
        self.index  # noqa: B018  # is it the object that is meant?
        arrays = self.rows({path: [(0, n)] for path, n in entry.arrays.items()})
        plain = {path.removeprefix(entry.prefix): a[0] for path, a in arrays.items()}
        for key in entry.scalars:
            plain[key] = plain[key].reshape(())
        return trees.unflatten(dict(entry.skeleton), plain, where=f"state of buffer {buffer!r} in {self.where}")

    def column_rows(self, column: ColumnRef, runs: list[tuple[int, int]]) -> list[Array]:
        """Rows of one column."""
        parts = self.rows({column.array: runs})[column.array] if runs else []
        return [dtypes.from_stored(part, column.dtype) for part in parts]


def _check_empty(view: ShardView, name: str, runs: Sequence[tuple[int, int]]) -> None:
    """CorruptChunkError if an array that has no chunks must have some: these rows of it have bytes."""
    some = any(start < stop for start, stop in runs)
    if name not in view.paths or (some and 0 not in view.describe(name).shape[1:]):
        raise CorruptChunkError(f"it has no array {name!r:.80}")


class WholeObject(SavedObject[I]):
    """An object, from all its bytes; CorruptStateError if one of them is not as it was written."""

    def __init__(self, kind: type[I], data: bytes, key: str, where: str) -> None:
        super().__init__(key, where)
        self._data = data
        self.damage = f"it is damaged; {kind.REMEDY}"
        self.index = load(kind, data[slice(*indexed.index_span(data, where))], key, where)
        check_end(data, where, kind.REMEDY)
        for member in self.index.members:
            self._check(member, self._get([self._range(member)])[0])

    @property
    def _head(self) -> bytes:
        return self._data

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return len(self._data)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except CorruptStateError:
            raise
        except (IntegrityError, FieldError, MissingObjectError) as e:
            raise CorruptStateError(f"the arrays in {self.where} are damaged: {e}; {self.index.REMEDY}") from e

    def _get(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        return [self._data[one.start : one.stop] for one in ranges]

    def table(self, kind: str) -> pa.Table:
        """Its rows of a table; none where it has no such member."""
        return self.tables(kind)[0] if self.has(f"{kind}.parquet") else tables.schema(kind).empty_table()

    @cached_property
    def _view(self) -> ShardView:
        (packed,) = self.files([_METADATA])
        return ShardView(packed if packed[:1] == b"{" else inflate(packed))

    def array(self, path: str, count: int) -> Array:
        """An array of so many rows; CorruptStateError, before any is read, if it has others."""
        with self._told():
            if path not in self._view.paths or self._view.describe(path).shape[0] != count:
                raise CorruptStateError(
                    f"{self.where} has no array {path!r:.80} of {count} rows, as its index says; {self.damage}"
                )
            own = [one for one in self.index.members if one.array == path]
            chunks = dict(zip((one.name for one in own), self._get([self._range(one) for one in own]), strict=True))
            (values,) = self._view.read_many(path, [(0, count)], chunks)
            return values


class TickObject(WholeObject[TickIndex]):
    """A tick of a rank's journal: an object of its own, or a member of one of its node's. `shard`: its name as one."""

    def __init__(self, data: bytes, key: str, where: str, inside: tuple[str, int] | None = None) -> None:
        """inside: of a member, its name as a shard, and where it begins."""
        super().__init__(TickIndex, data, key, where)
        self.shard, self._at = inside or (key, 0)

    @property
    def rows(self) -> RankRows:
        """The rows that it adds to tables of a commit; CorruptStateError if some are of steps stored elsewhere."""
        segments = self.table("segments")
        if {*tables.distinct(segments["shard"])} - {self.index.key}:
            raise CorruptStateError(f"{self.where} has rows of steps that are not stored in it")
        of_group = (one for one in self.index.members if one.chunk < 0 or one.array)  # not those of tables
        placed = [replace(one, offset=self._base + one.offset) for one in of_group]
        rows = RankRows(segments, tablefiles.chunk_rows(self.index.key, placed), self.table("ledger"))
        return rows if self.shard == self.key else lying(rows, self.key, self.shard, self._at)

    def values(self) -> dict[str, dict[str, Values]]:
        """The values of its columns, by buffer and name."""
        columns = self.index.columns
        with self._told():
            return {b: {name: self._values(one) for name, one in of.items()} for b, of in columns.items()}

    def _values(self, column: TickColumn) -> Values:
        ranges = None
        if column.ranges is not None:
            ranges = self.array(column.ranges, 2 * sum(count for *_, count in column.streams))
        steps, streams = stretches_of(column, ranges, self.where)
        array = self.array(column.array, int(steps.length.sum()))
        dtypes.check_stored(array, column.dtype)
        return Values(Column(array, column.dtype), steps, streams)


def lying(rows: RankRows, key: str, shard: str, offset: int) -> RankRows:
    """The rows of a tick that does not lie under its own key: its shard has this name, and begins at this offset."""
    import pyarrow.compute as pc

    chunks = rows.chunks
    if chunks.num_rows:
        moved = pc.add(chunks["offset"], offset).cast(chunks["offset"].type)
        chunks = chunks.set_column(chunks.schema.get_field_index("offset"), chunks.schema.field("offset"), moved)
    return RankRows(_renamed(rows.segments, key, shard), _renamed(chunks, key, shard), rows.ledger)


def _renamed(table: pa.Table, key: str, shard: str) -> pa.Table:
    """A table with another name of its one shard; rows without one stay so."""
    import pyarrow as pa

    column = table["shard"]
    names = [shard if name == key else name for name in column.to_pylist()]
    values = pa.array(names, pa.string()).dictionary_encode().cast(column.type)
    return table.set_column(table.schema.get_field_index("shard"), table.schema.field("shard"), values)
