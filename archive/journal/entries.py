"""Pure, no I/O: one object of a rank's journal: what the rank made durable at one tick. archive/FORMAT.md says it all.

An object holds one shard at most. A tick of more shards makes more objects, all but the last of which say that it goes
on: a tail ends with the last object that completes a tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from archive import tables
from archive.base import CorruptStateError, Count, Record, layout, stored
from archive.manifest import Sighting, tablefiles
from archive.shard import Member, Members, Placed, checksum, file_member, indexed

if TYPE_CHECKING:
    import pyarrow as pa

Stretch = tuple[str, Count, int, Count, Count]  # session, rank, env id; steps [lo, hi) of that stream
_END, _END_BYTES = b"PK\x05\x06", 22  # of a ZIP: its last record
_REMEDY = "what this rank journaled from here on is lost"


@dataclass(frozen=True, slots=True)
class JournalColumn(Record):
    """Values of a column: an array of this object, and the steps that they are of, in its order."""

    array: str
    dtype: str
    steps: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """What an object of a journal says of itself.

    `sequence`: the rank's rows below this number are in it or came before. `goes_on`: its tick does, in the next one.
    `rows`: table -> how many it has. `gone`: buffer -> steps that left it since the object before. `live`: it has rows
    of the live table: what a resumed rank held when its journal began. Columns and attributes by buffer and name; an
    attribute is {episode id: JSON value} as text. `progress`: as in a checkpoint; None where nothing new was said.
    `resumed_from`: the commit of the checkpoint that the rank's writer went on from; None if there is none. `seen`: the
    newest commit that it knew.
    """

    run: str
    session: str
    rank: Count
    number: Count
    nonce: str
    sequence: Count
    goes_on: bool = stored(False, always=True)
    rows: Mapping[str, Count] = stored({}, always=True)
    gone: Mapping[str, tuple[Stretch, ...]] = stored({}, always=True)
    columns: Mapping[str, Mapping[str, JournalColumn]] = stored({}, always=True)
    attributes: Mapping[str, Mapping[str, str]] = stored({}, always=True)
    progress: str | None = None
    resumed_from: Count | None = None
    seen: Sighting | None = None
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """Where it lies."""
        return layout.journal_key(self.session, self.rank, self.number)


def row_members(rows: Mapping[str, pa.Table]) -> list[Member]:
    """Members with the rows of these tables."""
    return [file_member(f"{kind}.parquet", tables.dumps(table)) for kind, table in rows.items() if table.num_rows]


def pack(entry: Entry, rows: Sequence[Member], shard: Sequence[Member]) -> tuple[list[Any], list[Placed]]:
    """The buffers of an object, and where the members of its shard lie in it."""
    buffers, placed = indexed.pack(entry, [*rows, *shard])
    return buffers, placed[len(rows) :]


@dataclass(frozen=True, slots=True)
class Read:
    """An object as it was read, whole, and checked."""

    entry: Entry
    data: bytes
    base: int  # where members' offsets count from

    def table(self, kind: str, where: str) -> pa.Table:
        """Its rows of a table, "segments", "ledger" or "live": the member <table>.parquet."""
        if not self.entry.rows.get(kind):
            return tables.schema(kind).empty_table()
        return tables.loads(self.member(f"{kind}.parquet"), kind, where=f"{kind} rows in {where}", committed=False)

    def chunks(self) -> pa.Table:
        """Rows of the chunk table for the shard in it: its index says where all members lie."""
        placed = [replace(one, offset=self.base + one.offset) for one in self.entry.members if is_of_shard(one)]
        return tablefiles.chunk_rows(self.entry.key, placed)

    def member(self, name: str) -> bytes:
        """The bytes of a member."""
        found = next((one for one in self.entry.members if one.name == name), None)
        if found is None:
            raise CorruptStateError(f"{self.entry.key} has no member {name!r:.80}; it is damaged; {_REMEDY}")
        return self.data[self.base + found.offset : self.base + found.offset + found.size]


def parse(data: bytes, key: str, where: str) -> Read:
    """The object that lies at `key`, from all its bytes; CorruptStateError if one of them is not as it was written."""
    start, stop = indexed.index_span(data, where)
    entry = parse_entry(data[start:stop], key, where)
    if data[-_END_BYTES:][:4] != _END:
        raise CorruptStateError(f"{where} ends before its end, as what was torn does; {_REMEDY}")
    for member in entry.members:
        _check(data[stop + member.offset : stop + member.offset + member.size], member, where)
    return Read(entry, data, stop)


def parse_entry(index: bytes, key: str, where: str) -> Entry:
    """What the object at `key` says of itself, from the bytes of its index; CorruptStateError if it is another one."""
    body = indexed.parse_index(index, where)
    entry = Entry.from_json(body, what=f"the index of {where}", error=CorruptStateError, remedy=_REMEDY)
    if entry.key != key:
        raise CorruptStateError(f"{where} says that it is {entry.key}: it does not belong there; {_REMEDY}")
    return entry


def is_of_shard(member: Placed) -> bool:
    """Whether a member is one of the Zarr group, and no table."""
    return member.chunk < 0 or bool(member.array)


def _check(data: bytes, member: Placed, where: str) -> None:
    """A chunk ends in the checksum of what goes before it."""
    chunk = member.chunk >= 0 and bool(member.array)
    own = checksum(data[:-4]) if chunk else checksum(data)
    told = int.from_bytes(data[-4:], "little") if chunk else own
    if len(data) != member.size or own != member.crc32c or told != own:
        raise CorruptStateError(f"{member.name!r:.80} in {where} does not match its checksum; {_REMEDY}")
