"""What a writer hands in becomes objects of its journal, tick by tick, in place of shards."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from archive import tables
from archive.base import AlreadyExistsError, SessionInUseError, layout
from archive.checkpoint import next_sequence
from archive.journal.entries import Entry, pack, row_members
from archive.journal.saying import Said
from archive.manifest import Place, Sighting, attempts, tablefiles
from archive.shard import Member, groups
from archive.store import Storage
from archive.write import Describe, Job, Pipeline, Slab, Work, Written

if TYPE_CHECKING:
    import pyarrow as pa

FOLD_FROM = 64  # works: several to a tick


class Tick(Work):
    """The end of a tick: all that was handed in before it is made durable together, and what is said with it.

    `positions`: of each buffer and env row the next one, when it was made. `oldest`: when the first of it was added.
    """

    def __init__(self, said: Said, positions: Mapping[tuple[str, int], int], oldest: float | None) -> None:
        super().__init__(lambda work, pipeline: Written(None, None, 0), 0)
        self.said = said
        self.positions = positions
        self.oldest = oldest
        self.jobs: list[ObjectJob] = []  # complete once it is laid out
        self.made = time.monotonic()

    @property
    def durable(self) -> bool:
        """Whether all of its objects are in the store."""
        laid_out = self.laid_out.done() and self.laid_out.exception() is None
        return laid_out and all(job.stored for job in self.jobs)


class Folded(Work):
    """Rows of many works, as one."""

    def __init__(self, parts: Sequence[Written]) -> None:
        found = {kind: _folded(kind, parts) for kind in ("segments", "chunks", "ledger")}
        numbers = [one.journal for one in parts if one.journal is not None]
        written = Written(**found, data_bytes=sum(one.data_bytes for one in parts), journal=max(numbers, default=None))
        super().__init__(lambda work, pipeline: written, 0)
        self.begun = True
        self.laid_out.set_result(written)
        self.rows = _rows_of([written])


def _folded(kind: str, parts: Sequence[Written]) -> pa.Table | None:
    found = [table for one in parts if (table := getattr(one, kind)) is not None]
    return tables.concat(kind, found).combine_chunks() if found else None


def _rows_of(parts: Sequence[Written]) -> int:
    return sum(table.num_rows for one in parts for table in (one.segments, one.ledger) if table is not None)


def _is_stored(work: Work) -> bool:
    """Whether all of it is in the store."""
    if not work.laid_out.done() or work.laid_out.exception() is not None:
        return False
    made = work.laid_out.result()
    return made.stored if isinstance(made, ObjectJob) else not isinstance(made, Job)


@dataclass
class _Growing:
    """An object to which more may come."""

    number: int
    key: str
    works: list[Work] = field(default_factory=list)
    carrier: Work | None = None  # of its works the one that has the shard, or else any: it stands for all
    slab: Slab | None = None
    rows: dict[str, list[pa.Table]] = field(default_factory=lambda: {"segments": [], "ledger": []})
    nbytes: int = 0

    def add(self, kind: str, table: pa.Table | None) -> None:
        if table is not None:
            self.rows[kind].append(table)

    @property
    def tables(self) -> dict[str, pa.Table]:
        """The rows, by table, of those that have any."""
        joined = {kind: tables.concat(kind, parts) for kind, parts in self.rows.items() if parts}
        return {kind: table for kind, table in joined.items() if table.num_rows}


class ObjectJob(Job):
    """One object on its way to the store; run again if it failed, and done once."""

    def __init__(self, pipeline: JournalPipeline, growing: _Growing, said: Said, made: float | None) -> None:
        """made: when the tick that it ends was; None if it goes on."""
        self.rows = growing.tables
        super().__init__(pipeline, growing.slab, growing.key, self.rows.get("segments"), growing.nbytes)
        self.number = growing.number
        self._objects = pipeline
        self._said: Said | None = said
        self._goes_on = made is None
        self._made = made
        self._nonce = secrets.token_hex(8)
        self._sequence = pipeline.sequence
        self._packed: tuple[list[Any], pa.Table | None] | None = None  # kept until it is in the store

    @property
    def stored(self) -> bool:
        """Whether it is in the store."""
        return self._written is not None

    def run(self) -> Written:
        with self._running:
            if self._written is None:
                self._written = self._stored()
                self._packed = self._slab = self._said = None
            return self._written

    def _stored(self) -> Written:
        try:
            if self._packed is None:
                self._packed = self._pack()
                self._objects.packed(self._made)
            buffers, chunks = self._packed
            self._objects.create(self.key, buffers)
        except BaseException as error:
            self.standing = error
            raise
        self.standing = None
        return Written(self.segments, chunks, self.nbytes, self.rows.get("ledger"), self.number + 1)

    def _pack(self) -> tuple[list[Any], pa.Table | None]:
        said = self._said or Said()
        arrays = said.arrays
        shard = self._shard(arrays)
        live = {} if said.live is None else {"live": said.live}
        counts = {kind: table.num_rows for kind, table in {**self.rows, **live}.items()}
        place = self._objects.place_of_rank
        entry = Entry(
            run=place.run, session=place.session, rank=place.rank, number=self.number, nonce=self._nonce,
            sequence=self._sequence, goes_on=self._goes_on, rows=counts, gone=said.gone, columns=said.entries,
            attributes=said.texts, progress=said.progress, resumed_from=self._objects.resumed_from,
            seen=self._objects.seen(),
        )  # fmt: skip
        buffers, placed = pack(entry, row_members({**self.rows, **live}), shard)
        return buffers, None if self._slab is None else tablefiles.chunk_rows(self.key, placed)

    def _shard(self, columns: Mapping[str, Any]) -> list[Member]:
        if self._slab is not None:
            return self.pipeline.encode(self._slab, columns)
        return groups.encode(columns, attributes={}) if columns else []


class JournalPipeline(Pipeline):
    """A pipeline that sends nothing off before a tick, or before somebody waits for room: of the latter it says that
    the tick goes on, so that it counts with the rest of it only."""

    def __init__(
        self, storage: Storage, place: Place, compression: str | None, chunk_bytes: int | None,
        resumed_from: int | None, seen: Callable[[], Sighting | None],
    ) -> None:  # fmt: skip
        """seen: gives the newest commit that the rank knows."""
        super().__init__(storage, place.session, place.rank, "packed", compression, chunk_bytes)
        self.place_of_rank = place
        self.resumed_from = resumed_from
        self.seen = seen
        self.number = 0  # of the next object
        self.sequence = 0  # rows of this rank below it are in the objects so far
        self.ticks: deque[Tick] = deque()  # that may not be durable yet
        self.failed: Callable[[], None] = lambda: None  # called in the background when something failed
        self.took: Callable[[float], None] = lambda seconds: (
            None
        )  # called there with how long the objects of a tick took
        self._growing: _Growing | None = None
        self._jobs: list[ObjectJob] = []  # of the tick that goes on
        self._pressed = threading.Event()
        self._broken: BaseException | None = None
        self._shown: Work | None = None  # the last of those that somebody was given, to be committed

    def hand_in(self, work: Work, *, wait: bool = True) -> None:
        if isinstance(work, Tick):
            self._wanted.set()  # whoever made it has waited for a moment already
        super().hand_in(work, wait=wait)
        if isinstance(work, Tick) and work not in self.ticks:
            self.ticks.append(work)

    def to_begin(self) -> list[Work]:
        works = self._not_begun()
        if self._pressed.is_set():
            return works
        last = max((i for i, work in enumerate(works) if isinstance(work, Tick)), default=-1)
        return works[: last + 1]

    def press(self) -> None:
        self._pressed.set()
        self._ordered.submit(self._lay_out_all)

    def uncommitted(self) -> list[Work]:
        found = super().uncommitted()
        self._shown = found[-1] if found else None
        return found

    def fold(self) -> None:
        """Make the rows of many ticks one table, as each takes tens of kilobytes; with the writer's lock held.

        Only of works that nobody was shown: of those that are to be committed some must not be in what others are.
        """
        works = self._works
        first = works.index(self._shown) + 1 if self._shown in works else 0
        folded = list(takewhile(lambda work: isinstance(work, Folded), works[first:]))
        new = list(takewhile(_is_stored, works[first + len(folded) :]))
        if len(new) < FOLD_FROM:
            return
        rows = [work.rows for work in folded if isinstance(work, Folded)]
        keep = attempts.files_to_keep(rows, [0] * len(rows), _rows_of([work.written(self) for work in new]))
        stop = first + len(folded) + len(new)
        works[first + keep : stop] = [Folded([work.written(self) for work in works[first + keep : stop]])]

    @property
    def waiting(self) -> bool:
        """Whether something was handed in that no tick has sent off."""
        return bool(self._works) and not self._works[-1].begun and not isinstance(self._works[-1], Tick)

    @property
    def pending_bytes(self) -> int:
        """Bytes of steps that were handed in and are not durable."""
        return sum(work.nbytes for work in [*self._open, *self._not_begun()])

    def _lay_out_all(self) -> None:
        super()._lay_out_all()
        if self._pressed.is_set():
            self._pressed.clear()
            if self._growing is not None:
                self._complete(Said(), None)

    def send_off(self, work: Work, slab: Slab, describe: Describe, nbytes: int) -> None:
        self._check_whole()
        if self._growing is not None and self._growing.slab is not None:
            self._complete(Said(), None)
        growing = self._open_object()
        growing.works.append(work)
        growing.carrier, growing.slab, growing.nbytes = work, slab, nbytes
        growing.add("segments", describe(slab, growing.key))

    def place(self, work: Work, made: Job | Written | None) -> None:
        self._check_whole()
        if isinstance(work, Tick):
            self._tick(work)
        elif isinstance(made, Written):
            growing = self._open_object()
            growing.works.append(work)
            growing.add("segments", made.segments)
            growing.add("ledger", made.ledger)

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _tick(self, tick: Tick) -> None:
        if self._growing is None and not self._jobs and not tick.said:
            tick.laid_out.set_result(Written(None, None, 0, journal=self.number))
            return
        self._open_object().works.append(tick)
        tick.jobs = self._jobs
        self._complete(tick.said, tick.made)
        self._jobs = []

    def _open_object(self) -> _Growing:
        if self._growing is None:
            place = self.place_of_rank
            self._growing = _Growing(self.number, layout.journal_key(place.session, place.rank, self.number))
        return self._growing

    def _complete(self, said: Said, made: float | None) -> None:
        """Nothing more comes to the object; its rows are its carrier's."""
        growing = self._open_object()
        self.sequence = max(self.sequence, next_sequence(*growing.rows["segments"], *growing.rows["ledger"]))
        job = ObjectJob(self, growing, said, made)
        self._growing = None
        self.number += 1
        self._jobs.append(job)
        carrier = growing.carrier or growing.works[0]
        job.future = self.retry(carrier, job)
        carrier.laid_out.set_result(job)
        for work in growing.works:
            if work is not carrier:
                work.laid_out.set_result(Written(None, None, 0, journal=self.number))
            self.finished(work)

    def finished(self, work: Work) -> None:
        if (error := work.error()) is not None:
            if work.laid_out.exception() is not None:
                self._break(error)
            self.failed()
        super().finished(work)

    def _break(self, error: BaseException) -> None:
        """What could not be laid out is missing: nothing that comes after it may be stored."""
        self._broken, growing, self._growing = error, self._growing, None
        for work in growing.works if growing else []:
            if not work.laid_out.done():
                work.laid_out.set_exception(error)

    def retry_failed(self) -> None:
        """Try what failed once more."""
        for work in list(self._open):
            if work.error() and not work.under_way and work.laid_out.exception() is None:
                job = work.laid_out.result()
                assert isinstance(job, Job)
                job.future = self.retry(work, job)

    def packed(self, made: float | None) -> None:
        """All that ends a tick which was made then is ready to be stored."""
        if made is not None:
            self.took(time.monotonic() - made)

    def create(self, key: str, buffers: list[Any]) -> None:
        """Store an object, create-only."""
        try:
            self._storage.create_once(key, buffers)
        except AlreadyExistsError as e:
            raise SessionInUseError(
                f"{self._storage.full_url(key)} is there already: another process writes, or wrote, as this rank of "
                "this session; end one of them, and open this one's writer under a session name of its own"
            ) from e
