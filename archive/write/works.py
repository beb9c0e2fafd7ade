"""The works that a writer hands in, the objects that they become, and how these get into the store."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from archive import tables
from archive.base import layout
from archive.log import tablefiles
from archive.shard import Member, ShardWriter
from archive.write.blocks import Block, Slab, assemble

if TYPE_CHECKING:
    import pyarrow as pa

_NONCE_STEP = 0x9E3779B1  # odd, so that no name of a shard comes twice before all have; neighbours lie far apart

Describe = Callable[[Slab, str], "pa.Table"]  # the segments of a slab that goes to the object of this name
Tables = Mapping[str, "pa.Table | None"]  # rows by table: segments, ledger


class RankRows(NamedTuple):
    """Table rows one rank adds in a commit; segments and ledger share one sequence."""

    segments: pa.Table
    chunks: pa.Table
    ledger: pa.Table

    @classmethod
    def of(cls, **some: Iterable[pa.Table]) -> RankRows:
        """The rows of some tables of each kind."""
        return cls(*(tables.concat(kind, some.get(kind, ())) for kind in cls._fields))

    @classmethod
    def joined(cls, some: Sequence[RankRows]) -> RankRows:
        """The rows of all, end to end."""
        return cls.of(**{kind: [getattr(one, kind) for one in some] for kind in cls._fields})

    @property
    def next_sequence(self) -> int:
        """The number after the last one of its rows; 0 if there are none."""
        import pyarrow.compute as pc

        greatest = [pc.max(rows["sequence"]).as_py() for rows in (self.segments, self.ledger) if rows.num_rows]
        return 1 + max(greatest, default=-1)

    @property
    def size(self) -> int:
        """The number of its segments and changes of ledgers."""
        return int(self.segments.num_rows + self.ledger.num_rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the steps as they are stored."""
        return int(self.chunks["size"].to_numpy().sum())


class Written(NamedTuple):
    """The rows that one upload adds to the tables. `journal`: the number after that of its journal object."""

    rows: RankRows
    journal: int | None = None

    @classmethod
    def joined(cls, parts: Sequence[Written]) -> Written:
        """The same as one, with one table of each kind."""
        rows = RankRows.joined([one.rows for one in parts])
        numbers = [one.journal for one in parts if one.journal is not None]
        return cls(RankRows(*(table.combine_chunks() for table in rows)), max(numbers, default=None))


class Upload:
    """An object on its way to the store: works are added to it; once it is complete it is packed and stored, tried
    again after an error, and done once. `number`: the number of objects completed before it."""

    def __init__(self, number: int = 0, key: str = "", written: Written | None = None) -> None:
        """written: its result, if it is in the store."""
        self.number = number
        self.key = key
        self.works: list[Work] = []
        self.slab: Slab | None = None
        self._tables: dict[str, list[pa.Table]] = {}
        self._pack: Callable[[], Any] | None = None
        self._put: Callable[[Any], Written] | None = None
        self._packed: Any = None
        self._running = threading.Lock()
        self.standing: BaseException | None = None  # its last error, while it is being tried again
        self.written = written
        self.future: Future[Written] | None = None

    def add(self, work: Work, slab: Slab | None, rows: Tables) -> None:
        """Add one more work."""
        self.works.append(work)
        self.slab = slab or self.slab
        for kind, table in rows.items():
            if table is not None:
                self._tables.setdefault(kind, []).append(table)

    @property
    def rows(self) -> RankRows:
        """The rows that its works add, without those of chunks."""
        return RankRows.of(**self._tables)

    def complete(self, pack: Callable[[], Any], put: Callable[[Any], Written]) -> None:
        """Complete it: it no longer grows. pack: makes the input of `put`, which is kept until it is in the store."""
        self._pack, self._put, self.slab, self._tables = pack, put, None, {}

    def run(self) -> Written:
        """Store it."""
        with self._running:
            try:
                if self._pack is not None:
                    self._packed, self._pack = self._pack(), None
                if self.written is None:
                    assert self._put is not None
                    self.written = self._put(self._packed)
            except BaseException as error:
                self.standing = error
                raise
            self.standing = self._packed = self._put = None
            return self.written

    @property
    def under_way(self) -> bool:
        """True if it may still end by itself."""
        return self.future is not None and not self.future.done()

    def error(self) -> BaseException | None:
        """The error of its last try, so far."""
        if self.future is None or not self.future.done() or self.future.cancelled():  # cancelled by closing: no failure
            return self.standing
        return self.future.exception()


class Work:
    """Blocks that become a shard, or rows without data; in its pipeline until it is committed.

    lay_out: gives its slab, if it `is_shard`, and its rows, for the name of its object.
    """

    def __init__(
        self,
        lay_out: Callable[[str], tuple[Slab | None, Tables]],
        nbytes: int = 0,
        steps: int = 0,
        *,
        is_shard: bool = False,
    ) -> None:
        self.lay_out = lay_out
        self.nbytes = nbytes
        self.steps = steps
        self.is_shard = is_shard
        self.begun = False
        self.laid_out: Future[Upload] = Future()  # its object, once that is complete

    @property
    def upload(self) -> Upload | None:
        """The object that it is in, once that is complete; None if it could not be laid out."""
        return self.laid_out.result() if self.laid_out.done() and self.laid_out.exception() is None else None

    @property
    def under_way(self) -> bool:
        """True if it may still end by itself."""
        return not self.laid_out.done() or (self.upload is not None and self.upload.under_way)

    @property
    def stored(self) -> bool:
        """True if all of it is in the store."""
        return self.upload is not None and self.upload.written is not None

    def error(self) -> BaseException | None:
        """The error of its last try, so far."""
        if not self.laid_out.done():
            return None
        return self.laid_out.exception() or self.laid_out.result().error()


class Seal(Work):
    """The end of a group that becomes durable together: all that was handed in before it, and its `said` records.

    `positions`: the next offset of each buffer and env row, when it was made. `oldest`: the time of its first addition.
    """

    def __init__(self, said: Any, positions: Mapping[tuple[str, int], int], oldest: float | None) -> None:
        super().__init__(lambda key: (None, {}))
        self.said = said
        self.positions = positions
        self.oldest = oldest
        self.uploads: list[Upload] = []  # complete once it is laid out
        self.made = time.monotonic()

    @property
    def durable(self) -> bool:
        """True if all of its objects are in the store."""
        return self.upload is not None and all(upload.written is not None for upload in self.uploads)


class Folded(Work):
    """The rows of many works, as one work."""

    def __init__(self, works: Sequence[Work], parts: Sequence[Written]) -> None:
        super().__init__(lambda key: (None, {}), sum(work.nbytes for work in works))
        self.begun = True
        self.laid_out.set_result(Upload(written=Written.joined(parts)))


def shard(blocks: Sequence[Block], reward: str | None, describe: Describe) -> Work:
    """Blocks of one schema as one shard. `describe(slab, key)` gives its rows of the segments table."""
    own, nbytes = list(blocks), sum(b.nbytes for b in blocks)

    def lay_out(key: str) -> tuple[Slab, Tables]:
        slab = assemble(own, reward)
        own.clear()
        return slab, {"segments": describe(slab, key)}

    return Work(lay_out, nbytes, sum(b.length for b in blocks), is_shard=True)


def rows_alone(kind: str, of: Callable[[], pa.Table | None]) -> Work:
    """Rows of the segments or the ledger table without data; they are made after all earlier works, as they share one
    sequence."""
    return Work(lambda key: (None, {kind: of()}))


class ObjectKind(Protocol):
    """The objects that a pipeline makes of works. `sealed`: they end with a Seal, or where memory is short; else each
    work is one."""

    sealed: bool

    def key(self, number: int) -> str:
        """The name of an object."""

    def complete(self, upload: Upload, seal: Seal | None) -> None:
        """Complete an object. seal: the one that it ends with; None if more objects come before that."""


class ShardObjects:
    """Shards, one for each slab; rows without a slab need no object."""

    sealed = False

    def __init__(self, writer: ShardWriter, session: str, rank: int) -> None:
        self._writer = writer
        self._session = session
        self._rank = rank
        self._nonces = itertools.count(uuid.uuid4().int, _NONCE_STEP)

    def key(self, number: int) -> str:
        nonce = f"{next(self._nonces) % 2**32:08x}"
        return layout.shard_key(nonce, self._session, self._rank, self._writer.archive_layout)

    def complete(self, upload: Upload, seal: Seal | None) -> None:
        rows, slab, key = upload.rows, upload.slab, upload.key
        if slab is None:
            upload.written = Written(rows)
            return

        def put(members: Any) -> Written:
            return Written(rows._replace(chunks=tablefiles.chunk_rows(key, self._writer.write(key, members))))

        upload.complete(lambda: encoded(self._writer, slab), put)


def encoded(writer: ShardWriter, slab: Slab, more: Mapping[str, Any] | None = None) -> list[Member]:
    """The members of a slab's shard; `more`: arrays that are not fields, by path."""
    return writer.encode(slab.schema.dumps(), slab.arrays, runs=slab.env_rows, more=more)
