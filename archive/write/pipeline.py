"""Background work of a writer: blocks are laid out, encoded, packed and uploaded off the caller's thread.

One thread lays out, in order, because an episode's segments follow each other; encoding and uploading run beside it.
Memory is bounded: `hand_in` waits while too many bytes are under way. A failed upload keeps its data and is tried
again by whoever waits for it next; until then every call raises the failure.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.arrays import Memory, Shelf, reuse_freed_memory
from archive.base import layout, thread_pool, usable_cores
from archive.manifest import tablefiles
from archive.shard import groups, packing
from archive.store import Storage
from archive.write.blocks import Block, Slab, assemble

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_BYTES = 48 * 1024 * 1024  # of steps; four of them, compressed or not, are in memory at once
_SHELF_FROM_BYTES = 8 * 1024 * 1024  # of steps that are compressed: for fewer, a shard's memory is too much
MAX_UNDER_WAY_BYTES = 100 * 1024 * 1024
_LOOK_S = 0.2  # while waiting for room
_MOMENT_S = 0.01  # that a call takes, or two that follow each other

Describe = Callable[[Slab, str], "pa.Table"]


class Written(NamedTuple):
    """What one upload adds to the manifest. `journal`: the number after that of the journal's object that it is in."""

    segments: pa.Table | None
    chunks: pa.Table | None
    data_bytes: int
    ledger: pa.Table | None = None
    journal: int | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of its steps as they are stored."""
        return 0 if self.chunks is None else int(self.chunks["size"].to_numpy().sum())


class Job:
    """A laid-out slab on its way to the store; run again if it failed, and done once."""

    standing: BaseException | None = None  # what it failed with, though it is being tried again

    def __init__(self, pipeline: Pipeline, slab: Slab | None, key: str, segments: pa.Table | None, nbytes: int) -> None:
        self.pipeline = pipeline
        self.key = key
        self.segments = segments
        self.nbytes = nbytes
        self._slab = slab
        self._members: list[packing.Member] | None = None  # kept until they are in the store
        self._written: Written | None = None
        self._running = threading.Lock()
        self.future: Future[Written] | None = None

    def run(self) -> Written:
        with self._running:
            if self._written is None:
                if self._slab is not None:
                    self._members = self.pipeline.encode(self._slab)
                    self._slab = None
                chunks = self.pipeline.upload(self._members or [], self.key)
                self._members = None
                self._written = Written(self.segments, chunks, self.nbytes)
            return self._written


class Work:
    """Blocks that become a shard, or rows without data; in its pipeline until it is committed."""

    def __init__(
        self, lay_out: Callable[[Work, Pipeline], Job | Written | None], nbytes: int, steps: int = 0
    ) -> None:  # fmt: skip
        self._lay_out: Callable[[Work, Pipeline], Job | Written | None] | None = lay_out
        self.nbytes = nbytes
        self.steps = steps
        self.begun = False
        self.laid_out: Future[Job | Written] = Future()

    def lay_out(self, pipeline: Pipeline) -> None:
        """On the ordered thread: nobody else begins it, and no signal comes in between."""
        work, self._lay_out = self._lay_out, None
        try:
            assert work is not None
            pipeline.place(self, work(self, pipeline))
        except BaseException as error:
            self.laid_out.set_exception(error)
        pipeline.finished(self)

    @property
    def under_way(self) -> bool:
        """Whether it may still come to an end by itself."""
        if not self.laid_out.done():
            return True
        job = None if self.laid_out.exception() else self.laid_out.result()
        return isinstance(job, Job) and job.future is not None and not job.future.done()

    def error(self) -> BaseException | None:
        """What it failed with, so far."""
        if not self.laid_out.done():
            return None
        if failed := self.laid_out.exception():
            return failed
        job = self.laid_out.result()
        upload = job.future if isinstance(job, Job) else None
        if upload is None or not upload.done() or upload.cancelled():  # closing cancels what has not begun: no failure
            return job.standing if isinstance(job, Job) else None
        return upload.exception()

    def written(self, pipeline: Pipeline) -> Written:
        """Wait for it. What failed is tried once more; if that fails too, its error is raised."""
        job = self.laid_out.result()
        if isinstance(job, Written):
            return job
        if job.future is None or (job.future.done() and job.future.exception() is not None):
            job.future = pipeline.retry(self, job)
        try:
            return job.future.result()
        except Exception:
            job.future = pipeline.retry(self, job)
            return job.future.result()


def shard(blocks: Sequence[Block], reward: str | None, describe: Describe) -> Work:
    """Blocks of one schema as one shard. `describe(slab, key)` gives its rows of the segments table."""
    own, nbytes = list(blocks), sum(b.nbytes for b in blocks)
    steps = sum(b.length for b in blocks)
    return Work(lambda work, pipeline: pipeline.lay_out(work, own, reward, describe, nbytes), nbytes, steps)


def rows_alone(of: Callable[[], pa.Table | None]) -> Work:
    """Rows of the segments table without data (episodes that were closed)."""
    return Work(lambda work, pipeline: Written(of(), None, 0), 0)


def ledger_rows(of: Callable[[], pa.Table]) -> Work:
    """Rows of the ledger table; asked for after all that was handed in before, as they are numbered with segments."""
    return Work(lambda work, pipeline: Written(None, None, 0, of()), 0)


class Pipeline:
    """Uploads of one writer, for all its buffers: rows are numbered in the order in which work is handed in.

    What is handed in stays listed until it is forgotten, which is after the commit. The list is what counts: whoever
    waits sees to it that all of it is begun, so an interrupt between two lines leaves nothing that nobody will finish.
    """

    def __init__(
        self, storage: Storage, session: str, rank: int, archive_layout: str, compression: str | None,
        chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        reuse_freed_memory()
        self._storage = storage
        self._session = session
        self._rank = rank
        self._layout = archive_layout
        self._compression = compression
        self._chunk_bytes = chunk_bytes
        self.memory = Memory(SHARD_BYTES + 64 * 1024, keep=4)
        self._ordered = thread_pool(1, "archive-layout")
        self._uploads = thread_pool(2, "archive-upload")
        self._encoders = thread_pool(usable_cores(), "archive-encode")  # chunks of one shard, side by side
        self._encoding = threading.Lock()
        self._moved = threading.Event()  # something came to an end
        self._wanted = threading.Event()  # somebody waits for what was handed in
        self._gathering = False  # the ordered thread has not looked yet at what was handed in
        self._works: list[Work] = []  # changed by single calls only: the caller's thread takes no lock that others need
        self._open: dict[Work, None] = {}  # those that are begun and have not come to a good end

    def hand_in(self, work: Work, *, wait: bool = True) -> None:
        """Begin this work after all that came before; waits for room first, unless told not to. Handed in again, the
        newest work stays as it is."""
        if wait:
            self._wanted.set()
            self._begin()
        while wait and not self._has_room(work.nbytes):
            self.press()
            self._pause(_LOOK_S)
        if work not in self._works[-1:]:
            self._works.append(work)
        self._begin()

    def uncommitted(self) -> list[Work]:
        """What was handed in so far and is not forgotten; what comes later is not part of it."""
        return list(self._works)

    def wait(self, works: Sequence[Work]) -> list[Written]:
        """Wait for these; what was written. What failed stays, and is tried again the next time."""
        if not all(work.begun for work in works):  # else what came later may wait: its caller is still at it
            self._wanted.set()
            self._begin()
        return [work.written(self) for work in works]

    def forget(self, works: Sequence[Work]) -> None:
        """These are committed."""
        for work in works:
            self._open.pop(work, None)
            with suppress(ValueError):
                self._works.remove(work)

    def failure(self) -> BaseException | None:
        """The error of what failed so far, if any."""
        return next((error for work in list(self._open) if (error := work.error())), None)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until nothing is on its way to the store; what failed is not."""
        self._wanted.set()
        self._begin()
        stop = time.monotonic() + timeout_s
        while self._under_way() and (left := stop - time.monotonic()) > 0:
            self._pause(min(left, _LOOK_S))

    def retry(self, work: Work, job: Job) -> Future[Written]:
        future = self._uploads.submit(job.run)
        future.add_done_callback(lambda _: self.finished(work))
        return future

    def close(self) -> None:
        self._ordered.shutdown(wait=True, cancel_futures=True)
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._encoders.shutdown(wait=True)

    def _pause(self, seconds: float) -> None:
        """Until something comes to an end; it may have just before, so no longer than that."""
        self._moved.wait(seconds)
        self._moved.clear()

    def _under_way(self) -> list[Work]:
        return [work for work in [*self._open, *self._not_begun()] if work.under_way]

    def _not_begun(self) -> list[Work]:
        """The newest works, in order: they are begun in order."""
        return list(takewhile(lambda work: not work.begun, reversed(self._works.copy())))[::-1]

    def _has_room(self, nbytes: int) -> bool:
        under_way = sum(work.nbytes for work in self._under_way())
        return not under_way or under_way + nbytes <= MAX_UNDER_WAY_BYTES

    def _begin(self) -> None:
        """See to it that all work is begun: a call that was interrupted may have left some that is not."""
        if not self._gathering and self.to_begin():
            self._ordered.submit(self._lay_out_all)

    def _lay_out_all(self) -> None:
        """After a moment: who does not wait for room appends and goes on, and would share the interpreter with this."""
        if not self.to_begin():
            return
        self._gathering = True
        self._wanted.wait(_MOMENT_S)
        self._gathering = False
        while works := self.to_begin():
            self._open[works[0]] = None
            works[0].begun = True
            works[0].lay_out(self)
        self._wanted.clear()  # last, lest what comes next begins while its caller is at it
        self.memory.prepare()

    def to_begin(self) -> list[Work]:
        """Those that are to be begun now."""
        return self._not_begun()

    def press(self) -> None:
        """Somebody waits for room."""

    def lay_out(
        self, work: Work, blocks: list[Block], reward: str | None, describe: Describe, nbytes: int
    ) -> Job | None:
        """Lay blocks out, and send them off; on the ordered thread."""
        slab = assemble(blocks, reward)
        blocks.clear()
        return self.send_off(work, slab, describe, nbytes)

    def place(self, work: Work, made: Job | Written | None) -> None:
        """On the ordered thread: this became of a work."""
        assert made is not None
        work.laid_out.set_result(made)

    def send_off(self, work: Work, slab: Slab, describe: Describe, nbytes: int) -> Job | None:
        """Begin to upload a slab; on the ordered thread."""
        key = layout.shard_key(uuid.uuid4().hex[:8], self._session, self._rank, self._layout)
        job = Job(self, slab, key, describe(slab, key), nbytes)
        job.future = self.retry(work, job)
        return job

    def finished(self, work: Work) -> None:
        """On a background thread: something came to an end."""
        if not work.under_way and work.error() is None:
            self._open.pop(work, None)
        self._moved.set()

    def encode(self, slab: Slab, more: Mapping[str, Any] | None = None) -> list[packing.Member]:
        """The members of a shard; `more`: arrays that are no fields, by path."""
        attributes: dict[str, Any] = {
            "trajectory-archive": {"schema": slab.schema.dumps(), "format": layout.PART_VERSION}
        }
        with self._encoding if self._compression else nullcontext():
            large = self._compression is not None and _stored_bytes(slab) >= _SHELF_FROM_BYTES
            hold = Shelf(self.memory.take()).hold if large else None
            return groups.encode(
                {**slab.arrays, **(more or {})}, attributes=attributes, compression=self._compression,
                chunk_bytes=self._chunk_bytes, runs=slab.runs, copy=False, hold=hold, each=self._encoders.map,
            )  # fmt: skip

    def upload(self, members: list[packing.Member], key: str) -> pa.Table:
        """Write one encoded shard; its rows of the chunk table."""
        return tablefiles.write_shard(self._storage, key, members, self._layout)


def _stored_bytes(slab: Slab) -> int:
    return sum(array.nbytes for array in slab.arrays.values())
