"""Reading what a rank staged: its index first, then only the members that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from archive import tables
from archive.base import ByteRange, CorruptStateError, IntegrityError, MissingObjectError, cached_property, layout
from archive.checkpoint import staging
from archive.checkpoint.stagedindex import LEDGER, LEFT_OUT, ColumnRef, StagedIndex, StateRef
from archive.fields import dtypes
from archive.fields.state import trees
from archive.manifest import ArrayChunks, ShardIndex
from archive.read import fetching
from archive.shard import Placed, ShardView, checksum, indexed
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]


class RankRows(NamedTuple):
    """Rows that one rank adds to tables of a commit. Those of segments and of the ledger are numbered together."""

    segments: pa.Table
    chunks: pa.Table
    ledger: pa.Table

    @property
    def next_sequence(self) -> int:
        """The number after those that its rows have; 0 if there are none."""
        return next_sequence(self.segments, self.ledger)


def next_sequence(*numbered: pa.Table | None) -> int:
    """The number after those of some rows of the segments and ledger tables."""
    import pyarrow.compute as pc

    greatest = [pc.max(rows["sequence"]).as_py() for rows in numbered if rows is not None and rows.num_rows]
    return 1 + max(greatest, default=-1)


class StagedFile:
    """One rank's part of a checkpoint. `nonce`: of the object that is meant, where what refers to it says so."""

    def __init__(
        self, storage: Storage, key: str, nonce: str | None = None, remedy: Callable[[], str] | None = None
    ) -> None:  # fmt: skip
        """remedy: what errors say of going on without it."""
        self._remedy = remedy
        self.storage = storage
        self.key = key
        self._nonce = nonce
        self.where = storage.full_url(key)

    @classmethod
    def written(cls, storage: Storage, index: StagedIndex, adds: RankRows, live: pa.Table) -> Self:
        """The one that this process has just written, which need not be read for what is given here."""
        out = cls(storage, layout.state_key(index.session, index.name, index.rank), index.nonce)
        out.index, out.rows_held = index, (adds, live)
        return out

    @cached_property
    def _head(self) -> bytes:
        """The object's first bytes, at least to the end of its index."""
        head = self.storage.get_head(self.key, indexed.HEAD_BYTES)
        _, stop = indexed.index_span(head, self.where)
        return head if stop <= len(head) else head + self.storage.get(self.key, len(head), stop)

    @cached_property
    def index(self) -> StagedIndex:
        """What it says of itself; CorruptStateError if that is damaged, or if another object should lie here."""
        with self._told():
            start, stop = indexed.index_span(self._head, self.where)
            index = staging.load_index(self._head[start:stop], self.where)
            staging.check_place(index, self.key, self._nonce, self.where)
        return index

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of what is damaged or gone say how to go on without it."""
        try:
            yield
        except (IntegrityError, MissingObjectError) as e:
            if self._remedy is None:
                raise
            raise type(e)(f"{e}. {self._remedy()}") from e

    @cached_property
    def _base(self) -> int:
        return indexed.index_span(self._head, self.where)[1]

    @cached_property
    def _places(self) -> dict[str, Placed]:
        return {member.name: member for member in self.index.members}

    def has(self, name: str) -> bool:
        """Whether it has a member of this name."""
        return name in self._places

    def files(self, names: Sequence[str]) -> list[bytes]:
        """Members that are no part of the Zarr group, by name."""
        if absent := [n for n in names if not self.has(n)]:
            raise CorruptStateError(f"{self.where} has no member {absent[0]!r}; the state is damaged")
        wanted = [self._places[name] for name in names]
        with self._told():
            out = self._ranges([self._range(member) for member in wanted])
            for member, data in zip(wanted, out, strict=True):
                if checksum(data) != member.crc32c:
                    raise CorruptStateError(
                        f"{member.name!r} in {self.where} does not match its checksum; the state is damaged"
                    )
        return out

    def _ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Bytes of the object; what came with its index is not asked for again."""
        head = self._head
        fetched = iter(self.storage.get_ranges([one for one in ranges if one.stop > len(head)]))
        return [head[one.start : one.stop] if one.stop <= len(head) else next(fetched) for one in ranges]

    def _range(self, member: Placed) -> ByteRange:
        start = self._base + member.offset
        return ByteRange(self.key, start, start + member.size)

    def tables(self, *kinds: str) -> list[Any]:
        """Staged rows of manifest tables."""
        files = self.files([f"{kind}.parquet" for kind in kinds])
        return [
            tables.loads(d, kind, where=f"{kind} rows in {self.where}", committed=False)
            for d, kind in zip(files, kinds, strict=True)
        ]

    @cached_property
    def rows_held(self) -> tuple[RankRows, pa.Table]:
        """The rows that its rank adds to the tables of the archive, and its rows of the live table."""
        segments, chunks, live, *ledger = self.tables(
            "segments", "chunks", "live", *(["ledger"] if self.has(LEDGER) else [])
        )
        return RankRows(segments, chunks, tables.concat("ledger", ledger)), live

    def left_out(self) -> Any:
        """Rows as of the live table: what is live in its writer, and not in the checkpoint."""
        found = self.files([LEFT_OUT]) if self.index.rows is not None and self.index.rows.left_out else []
        where = f"{LEFT_OUT} in {self.where}"
        return tables.concat("live", [tables.loads(d, "live", where=where, committed=False) for d in found])

    @cached_property
    def arrays_index(self) -> ShardIndex:
        """Where the chunks of the Zarr group lie."""
        groups: dict[str, list[Placed]] = {}
        for member in self.index.members:
            if member.array or member.name == "zarr.json":
                groups.setdefault(member.array, []).append(member)
        return ShardIndex(self.key, True, {name: self._array_chunks(members) for name, members in groups.items()})

    def _array_chunks(self, members: list[Placed]) -> ArrayChunks:
        members.sort(key=lambda member: member.chunk)
        offset = np.array([member.offset for member in members], np.int64) + self._base
        size = np.array([member.size for member in members], np.int64)
        crc = np.array([member.crc32c for member in members], np.int64)
        return ArrayChunks(max(1, members[0].rows), offset, size, crc, [member.name for member in members])

    def rows(self, wanted: dict[str, list[tuple[int, int]]]) -> dict[str, list[Array]]:
        """Rows of arrays of the Zarr group."""
        if not wanted:
            return {}
        self._check_there(wanted)
        runs = {name: tuple(np.array(pairs, np.int64).reshape(-1, 2).T) for name, pairs in wanted.items()}
        reads = self.arrays_index.plan(runs)  # type: ignore[arg-type]
        try:
            blocks = self._ranges(reads.requests)
            chunks = fetching.members(self.key, reads, blocks, lambda: "this rank's state")
            view = ShardView(bytes(chunks.pop("zarr.json")))
            return {name: view.read_many(name, pairs, chunks) for name, pairs in wanted.items()}
        except IntegrityError as e:
            with self._told():
                raise CorruptStateError(f"the state in {self.where} is damaged: {e}") from e

    def _check_there(self, wanted: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Arrays of which rows are wanted must have chunks; those of no rows have none."""
        needed = ["", *(name for name, runs in wanted.items() if any(start < stop for start, stop in runs))]
        if absent := [name for name in needed if name not in self.arrays_index.arrays]:
            raise CorruptStateError(f"{self.where} has no array {absent[0]!r}; the state is damaged")

    def check(self) -> None:
        """Read every byte; CorruptStateError if one is not as it was written."""
        names = [m.name for m in self.index.members if not m.array]
        self.files([n for n in names if n.endswith((".parquet", ".json")) and not n.endswith("zarr.json")])
        lengths = self.index.lengths
        if unknown := [name for name in self.arrays_index.arrays if name and name not in lengths]:
            raise CorruptStateError(f"nothing refers to the array {unknown[0]!r} in {self.where}; the state is damaged")
        self.rows({name: [(0, lengths[name])] for name in self.arrays_index.arrays if name})

    def state(self, buffer: str) -> Any:
        """The state tree of one buffer; None if it has none."""
        entry = self.index.states.get(buffer)
        if entry is None:
            return None
        if entry.object not in (None, self.key):
            return StagedFile(self.storage, str(entry.object), entry.nonce, remedy=self._remedy).tree(entry, buffer)
        return self.tree(entry, buffer)

    def tree(self, entry: StateRef, buffer: str) -> Any:
        """A tree of state whose arrays lie in this object."""
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
