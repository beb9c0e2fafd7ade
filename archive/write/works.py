"""Works that a writer hands in, the objects that grow of them, and how these get into the store."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from archive import tables
from archive.base import layout
from archive.log import tablefiles
from archive.shard import Member, ShardWriter
from archive.write.blocks import Block, Slab, assemble

if TYPE_CHECKING:
    import pyarrow as pa

Describe = Callable[[Slab, str], "pa.Table"]  # the segments of a slab that goes to the object of this name
Rows = Mapping[str, "pa.Table | None"]  # by table: segments, ledger


class Written(NamedTuple):
    """The rows that one upload adds to the manifest. `journal`: the number after that of its object of the journal."""

    segments: pa.Table | None
    chunks: pa.Table | None
    data_bytes: int
    ledger: pa.Table | None = None
    journal: int | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of its steps as they are stored."""
        return 0 if self.chunks is None else int(self.chunks["size"].to_numpy().sum())

    @property
    def rows(self) -> int:
        """The number of its segments and changes of ledgers."""
        return sum(table.num_rows for table in (self.segments, self.ledger) if table is not None)

    @classmethod
    def joined(cls, parts: Sequence[Written]) -> Written:
        """The same as one, with one table of each kind."""
        found = {kind: _joined(kind, parts) for kind in ("segments", "chunks", "ledger")}
        numbers = [one.journal for one in parts if one.journal is not None]
        return cls(**found, data_bytes=sum(one.data_bytes for one in parts), journal=max(numbers, default=None))


def _joined(kind: str, parts: Sequence[Written]) -> pa.Table | None:
    found = [table for one in parts if (table := getattr(one, kind)) is not None]
    return tables.concat(kind, found).combine_chunks() if found else None


class Upload:
    """An object on its way to the store; run again if it failed, and done once."""

    def __init__(self, pack: Callable[[], Any], put: Callable[[Any], Written]) -> None:
        """pack: makes what `put` stores, which is kept until it is in the store."""
        self._pack: Callable[[], Any] | None = pack
        self._put: Callable[[Any], Written] | None = put
        self._packed: Any = None
        self._running = threading.Lock()
        self.standing: BaseException | None = None  # what it failed with, though it is being tried again
        self.written: Written | None = None  # once it is in the store
        self.future: Future[Written] | None = None

    def run(self) -> Written:
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


class Work:
    """Blocks that become a shard, or rows without data; in its pipeline until it is committed.

    slab: lays the blocks out.  rows: gives the rows of tables, by the slab and the name of its object.
    """

    def __init__(
        self, slab: Callable[[], Slab] | None, rows: Callable[[Slab | None, str], Rows], nbytes: int = 0, steps: int = 0
    ) -> None:
        self.slab = slab
        self.rows = rows
        self.nbytes = nbytes
        self.steps = steps
        self.begun = False
        self.laid_out: Future[Upload | Written] = Future()

    @property
    def under_way(self) -> bool:
        """True if it may still come to an end by itself."""
        if not self.laid_out.done():
            return True
        made = None if self.laid_out.exception() else self.laid_out.result()
        return isinstance(made, Upload) and made.future is not None and not made.future.done()

    @property
    def stored(self) -> bool:
        """True if all of it is in the store."""
        if not self.laid_out.done() or self.laid_out.exception() is not None:
            return False
        made = self.laid_out.result()
        return made.written is not None if isinstance(made, Upload) else True

    def error(self) -> BaseException | None:
        """The error that it failed with, so far."""
        if not self.laid_out.done():
            return None
        if failed := self.laid_out.exception():
            return failed
        made = self.laid_out.result()
        if isinstance(made, Written):
            return None
        if made.future is None or not made.future.done() or made.future.cancelled():  # by closing: that is no failure
            return made.standing
        return made.future.exception()


class Seal(Work):
    """The end of what becomes durable together: all that was handed in before it, and what is `said` with it."""

    def __init__(self, said: Any) -> None:
        super().__init__(None, lambda slab, key: {})
        self.said = said
        self.uploads: list[Upload] = []  # complete once it is laid out
        self.made = time.monotonic()

    @property
    def durable(self) -> bool:
        """True if all of its objects are in the store."""
        laid_out = self.laid_out.done() and self.laid_out.exception() is None
        return laid_out and all(upload.written is not None for upload in self.uploads)


class Folded(Work):
    """The rows of many works, as one."""

    def __init__(self, parts: Sequence[Written]) -> None:
        super().__init__(None, lambda slab, key: {})
        self.begun = True
        self.whole = Written.joined(parts)
        self.laid_out.set_result(self.whole)


def shard(blocks: Sequence[Block], reward: str | None, describe: Describe) -> Work:
    """Blocks of one schema as one shard. `describe(slab, key)` gives its rows of the segments table."""
    own, nbytes = list(blocks), sum(b.nbytes for b in blocks)

    def laid_out() -> Slab:
        slab = assemble(own, reward)
        own.clear()
        return slab

    def rows(slab: Slab | None, key: str) -> Rows:
        assert slab is not None
        return {"segments": describe(slab, key)}

    return Work(laid_out, rows, nbytes, sum(b.length for b in blocks))


def rows_alone(kind: str, of: Callable[[], pa.Table | None]) -> Work:
    """Rows of the segments or the ledger table without data; asked for after all that was handed in before, as they
    are numbered together."""
    return Work(None, lambda slab, key: {kind: of()})


class ObjectDraft:
    """An object to which more may come. `number`: how many were complete before it."""

    def __init__(self, number: int, key: str) -> None:
        self.number = number
        self.key = key
        self.works: list[Work] = []
        self.carrier: Work | None = None  # of its works the one that has the slab, or else any: it stands for all
        self.slab: Slab | None = None
        self._tables: dict[str, list[pa.Table]] = {"segments": [], "ledger": []}

    def add(self, work: Work, slab: Slab | None, rows: Rows) -> None:
        """Put one more work into it."""
        self.works.append(work)
        if slab is not None or self.carrier is None:
            self.carrier = work
        self.slab = slab or self.slab
        for kind, table in rows.items():
            if table is not None:
                self._tables[kind].append(table)

    @property
    def nbytes(self) -> int:
        """Bytes of its steps."""
        return 0 if self.carrier is None else self.carrier.nbytes

    @property
    def rows(self) -> dict[str, pa.Table]:
        """Its rows, by table, of those that have any."""
        joined = {kind: tables.concat(kind, parts) for kind, parts in self._tables.items() if parts}
        return {kind: table for kind, table in joined.items() if table.num_rows}


class ObjectKind(Protocol):
    """The objects that a pipeline makes of works. `sealed`: they end with a Seal, or where memory is short; else each
    work is one."""

    sealed: bool

    def key(self, number: int) -> str:
        """The name of an object."""

    def complete(self, draft: ObjectDraft, seal: Seal | None) -> Upload | Written:
        """Nothing more comes to an object. seal: that it ends with; None if more objects come before that."""


class ShardObjects:
    """Shards, one for each slab; rows without a slab need no object."""

    sealed = False

    def __init__(self, writer: ShardWriter, session: str, rank: int) -> None:
        self._writer = writer
        self._session = session
        self._rank = rank

    def key(self, number: int) -> str:
        return layout.shard_key(uuid.uuid4().hex[:8], self._session, self._rank, self._writer.archive_layout)

    def complete(self, draft: ObjectDraft, seal: Seal | None) -> Upload | Written:
        rows, slab, key, nbytes = draft.rows, draft.slab, draft.key, draft.nbytes
        if slab is None:
            return Written(rows.get("segments"), None, 0, rows.get("ledger"))

        def put(members: Any) -> Written:
            return Written(rows.get("segments"), tablefiles.chunk_rows(key, self._writer.write(key, members)), nbytes)

        return Upload(lambda: encoded(self._writer, slab), put)


def encoded(writer: ShardWriter, slab: Slab, more: Mapping[str, Any] | None = None) -> list[Member]:
    """The members of the shard that a slab is; `more`: arrays that are no fields, by path."""
    return writer.encode(slab.schema.dumps(), slab.arrays, runs=slab.runs, more=more)
