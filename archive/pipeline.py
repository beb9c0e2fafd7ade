"""Background work of a writer: blocks are laid out, encoded, packed and uploaded off the caller's thread.

One thread lays out, in order, because an episode's segments follow each other; encoding and uploading run beside it.
Memory is bounded: `submit` waits while too many bytes are under way. A failed upload keeps its data and is tried
again by the next `drain`; until then every call raises the failure.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from archive import layout, packing, shards, tables
from archive.blocks import Block, Slab, assemble
from archive.memory import Memory, Shelf
from archive.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_BYTES = 48 * 1024 * 1024  # of steps; four of them, compressed or not, are in memory at once
_SHELF_FROM_BYTES = 8 * 1024 * 1024  # of steps that are compressed: for fewer, a shard's memory is too much
MAX_UNDER_WAY_BYTES = 100 * 1024 * 1024

Describe = Callable[[Slab, str], "pa.Table"]


class Written(NamedTuple):
    """What one upload adds to the manifest."""

    segments: pa.Table | None
    chunks: pa.Table | None
    data_bytes: int


class _Job:
    """A laid-out slab on its way to the store; run again if it failed."""

    def __init__(self, pipeline: Pipeline, slab: Slab, key: str, segments: pa.Table, nbytes: int) -> None:
        self.pipeline, self.key, self.segments, self.nbytes = pipeline, key, segments, nbytes
        self._slab: Slab | None = slab
        self._members: list[packing.Member] | None = None  # kept until they are in the store
        self.future: Future[Written] | None = None

    def run(self) -> Written:
        if self._slab is not None:
            self._members = self.pipeline.encode(self._slab)
            self._slab = None
        chunks = self.pipeline.upload(self._members or [], self.key)
        self._members = None
        return Written(self.segments, chunks, self.nbytes)


class Batch:
    """Some of a pipeline's work, in order."""

    def __init__(self, pipeline: Pipeline, rest: list[Future[_Job | Written]]) -> None:
        self._pipeline, self.rest = pipeline, rest

    def wait(self) -> list[Written]:
        """Wait for all; what was written. What failed is tried once more; if that fails too, its error is raised,
        and the work that is not done goes back to the pipeline."""
        try:
            return [self._finished(w) if isinstance(w := laid_out.result(), _Job) else w for laid_out in self.rest]
        except BaseException:
            self._pipeline.put_back(self)
            raise

    def _finished(self, job: _Job) -> Written:
        if job.future is None or (job.future.done() and job.future.exception() is not None):
            job.future = self._pipeline.retry(job)
        try:
            return job.future.result()
        except Exception:
            job.future = self._pipeline.retry(job)
            return job.future.result()


class Pipeline:
    """Uploads of one writer, for all its buffers: rows are numbered in the order in which work is handed in."""

    def __init__(
        self, storage: Storage, session: str, rank: int, archive_layout: str, compression: str | None,
        chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._storage, self._session, self._rank, self._layout = storage, session, rank, archive_layout
        self._compression, self._chunk_bytes = compression, chunk_bytes
        self.memory = Memory(SHARD_BYTES + 64 * 1024, keep=3 if compression is None else 4)
        self._ordered = ThreadPoolExecutor(1, "archive-layout")
        self._uploads = ThreadPoolExecutor(2, "archive-upload")
        self._lock, self._encoding = threading.Condition(), threading.Lock()
        self._under_way_bytes = 0
        self._laid_out: list[Future[_Job | Written]] = []

    def submit(self, blocks: Sequence[Block], reward: str | None, describe: Describe, *, wait: bool = True) -> None:
        """Write blocks of one schema as one shard; waits for room first, unless told not to.

        `describe(slab, key)` gives the slab's rows of the segments table; it is called in order.
        """
        nbytes = sum(b.nbytes for b in blocks)
        with self._lock:
            if wait:
                self._lock.wait_for(
                    lambda: not self._under_way_bytes or self._under_way_bytes + nbytes <= MAX_UNDER_WAY_BYTES
                )
            self._under_way_bytes += nbytes
        self._laid_out.append(self._ordered.submit(self._lay_out, list(blocks), reward, describe, nbytes))

    def then(self, rows: Callable[[], pa.Table | None]) -> None:
        """Rows of the segments table without data (episodes that were closed), in order with the blocks."""
        self._laid_out.append(self._ordered.submit(lambda: Written(rows(), None, 0)))

    def failure(self) -> BaseException | None:
        """The error of what failed so far, if any."""
        for laid_out in self._laid_out:
            if laid_out.done():
                job = None if laid_out.exception() else laid_out.result()
                upload = job.future if isinstance(job, _Job) else None
                error = laid_out.exception() or (upload.exception() if upload and upload.done() else None)
                if error:
                    return error
        return None

    def take(self) -> Batch:
        """What was handed in so far, to wait for; what comes later is not part of it."""
        batch, self._laid_out = Batch(self, self._laid_out), []
        return batch

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until nothing is on its way to the store; what failed is not."""
        with self._lock:
            self._lock.wait_for(lambda: not self._under_way_bytes, timeout_s)

    def put_back(self, batch: Batch) -> None:
        """What failed belongs to the next batch."""
        self._laid_out[:0] = batch.rest

    def retry(self, job: _Job) -> Future[Written]:
        return self._uploads.submit(job.run)

    def close(self) -> None:
        self._ordered.shutdown(wait=True, cancel_futures=True)
        self._uploads.shutdown(wait=True, cancel_futures=True)

    def _lay_out(self, blocks: list[Block], reward: str | None, describe: Describe, nbytes: int) -> _Job:
        try:
            slab = assemble(blocks, reward)
            blocks.clear()
            key = layout.shard_key(uuid.uuid4().hex[:8], self._session, self._rank, self._layout)
            job = _Job(self, slab, key, describe(slab, key), nbytes)
        except BaseException:
            self._leave(nbytes)
            raise
        job.future = self._uploads.submit(job.run)
        job.future.add_done_callback(lambda _: self._leave(nbytes))
        return job

    def _leave(self, nbytes: int) -> None:
        with self._lock:
            self._under_way_bytes -= nbytes
            self._lock.notify_all()

    def encode(self, slab: Slab) -> list[packing.Member]:
        attributes: dict[str, Any] = {
            "trajectory-archive": {"schema": slab.schema.dumps(), "format": layout.WRITE_VERSION}
        }
        with self._encoding if self._compression else nullcontext():
            large = self._compression is not None and _stored_bytes(slab) >= _SHELF_FROM_BYTES
            hold = Shelf(self.memory.take()).hold if large else None
            return shards.encode(
                slab.arrays, attributes=attributes, compression=self._compression, chunk_bytes=self._chunk_bytes,
                runs=slab.runs, copy=False, hold=hold,
            )  # fmt: skip

    def upload(self, members: list[packing.Member], key: str) -> pa.Table:
        """Write one encoded shard; its rows of the chunk table."""
        if self._layout == "packed":
            buffers, placed = packing.pack(members)
            self._storage.put(key, buffers)
        else:
            objects, placed = packing.loose(members)
            self._storage.put_many((f"{key}/{name}", data) for name, data in objects)
        return chunk_rows(key, members, placed)


def _stored_bytes(slab: Slab) -> int:
    return sum(array.nbytes for array in slab.arrays.values())


def chunk_rows(key: str, members: Sequence[packing.Member], placed: Sequence[packing.Placed]) -> pa.Table:
    """Rows of the chunk table for one shard."""
    columns = {
        name: [getattr(p, name) for p in placed] for name in ("array", "chunk", "rows", "offset", "size", "crc32c")
    }
    return tables.from_columns("chunks", {"shard": key, "member": [p.name for p in placed], **columns})
