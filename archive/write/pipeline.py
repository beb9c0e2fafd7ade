"""The background work of a writer: blocks are laid out, encoded, packed and uploaded off the caller's thread.

One thread lays out, in order, because an episode's segments follow each other; encoding and uploading run beside it.
Works become objects: each a shard, or as many to an object of a journal as a tick has. Memory is bounded: `hand_in`
waits while too many bytes are in flight. A failed upload keeps its data, and the next waiter tries it again; until it
succeeds every call raises the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import takewhile

from archive.arrays import reuse_freed_memory
from archive.base import thread_pool
from archive.log import tablefiles
from archive.shard import ShardWriter
from archive.write.works import Folded, ObjectKind, RankRows, Seal, Upload, Work, Written

MAX_UNDER_WAY_BYTES = 100 * 1024 * 1024
FOLD_FROM = 64  # works: several to a tick
_LOOK_S = 0.2  # while waiting for room
_MOMENT_S = 0.01  # the time of a call, or between two calls


class Pipeline:
    """The uploads of one writer, for all its buffers: rows are numbered in the order in which work is handed in.

    A work stays listed until it is forgotten, which is after the commit. The list is what counts: each waiter
    makes sure that all of it is begun, so an interrupt between two lines leaves no work that is never finished.
    """

    def __init__(self, writer: ShardWriter, objects: ObjectKind) -> None:
        reuse_freed_memory()
        self._writer = writer
        self._objects = objects
        self.memory = writer.memory
        self._ordered = thread_pool(1, "archive-layout")
        self._uploads = thread_pool(2, "archive-upload")
        self._moved = threading.Event()  # an upload ended
        self._wanted = threading.Event()  # a thread waits for the works
        self._pressed = threading.Event()  # a thread waits for room
        self._gathering = False  # the ordered thread has not seen the newest works yet
        self._works: list[Work] = []  # changed by single calls only: the caller's thread takes no lock that others need
        self._open: dict[Work, None] = {}  # works that are begun and have not succeeded
        self._shown: Work | None = None  # the last work that was given out to be committed
        self.seals: deque[Seal] = deque()  # those that may not be durable yet
        self.failed: Callable[[], None] = lambda: None  # called in the background after an error
        self.number = 0  # of the next object
        self._draft: Upload | None = None  # the object that may still grow
        self._unsealed: list[Upload] = []  # complete objects without a seal
        self._broken: BaseException | None = None  # a work could not be laid out: nothing may follow it

    def hand_in(self, work: Work, *, wait: bool = True) -> None:
        """Begin this work after all earlier ones. It waits for room first, unless told not to. The newest work may be
        handed in again without effect."""
        if wait or isinstance(work, Seal):  # the maker of a seal has waited for a moment already
            self._wanted.set()
        if wait:
            self._begin()
        while wait and not self._has_room(work.nbytes):
            if self._objects.sealed:
                self._pressed.set()
                self._ordered.submit(self._lay_out_all)
            self._pause(_LOOK_S)
        if work not in self._works[-1:]:
            self._works.append(work)
        self._begin()
        if isinstance(work, Seal) and work not in self.seals:
            self.seals.append(work)

    def uncommitted(self) -> list[Work]:
        """The works that were handed in so far and are not forgotten; later ones are not part of it."""
        found = list(self._works)
        self._shown = found[-1] if found else None
        return found

    def wait(self, works: Sequence[Work]) -> list[Written]:
        """Wait for these works; the result of each of their objects. Failed uploads are tried again the next time."""
        if not all(work.begun for work in works):  # else later works may wait: their caller is still at work
            self._wanted.set()
            self._begin()
        return [self._written(upload) for upload in dict.fromkeys(work.laid_out.result() for work in works)]

    def forget(self, works: Sequence[Work]) -> None:
        """Drop works that are committed."""
        for work in works:
            self._open.pop(work, None)
            with suppress(ValueError):
                self._works.remove(work)

    def fold(self) -> None:
        """Join the rows of many works in one table, as each takes tens of kilobytes; with the writer's lock held.

        Only works that were not given out are joined: works that are committed apart must stay apart.
        """
        works = self._works
        first = works.index(self._shown) + 1 if self._shown in works else 0
        folded = list(takewhile(lambda work: isinstance(work, Folded), works[first:]))
        new = list(takewhile(lambda work: work.stored, works[first + len(folded) :]))
        if len(new) < FOLD_FROM:
            return
        sizes, more = ([one.rows.size for one in self.wait(some)] for some in (folded, new))
        stop = first + len(folded) + len(new)
        first += tablefiles.files_to_keep(sizes, [0] * len(sizes), sum(more))
        works[first:stop] = [Folded(works[first:stop], self.wait(works[first:stop]))]

    def failure(self) -> BaseException | None:
        """The error of a failed upload, if any."""
        for work in self._open.copy():
            if error := work.error():
                return error
        return None

    @property
    def waiting(self) -> bool:
        """True if there are works that no seal has sent off."""
        return bool(self._works) and not self._works[-1].begun and not isinstance(self._works[-1], Seal)

    @property
    def pending_bytes(self) -> int:
        """Bytes of steps that were handed in and are not in the store."""
        return sum(work.nbytes for work in [*self._open, *self._not_begun()])

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no upload is in flight; failed ones are not."""
        self._wanted.set()
        self._begin()
        stop = time.monotonic() + timeout_s
        while self._under_way() and (left := stop - time.monotonic()) > 0:
            self._pause(min(left, _LOOK_S))

    def _written(self, upload: Upload) -> Written:
        """Wait for an object. A failed upload is tried once more; if that fails too, its error is raised."""
        if upload.written is not None:
            return upload.written
        future = upload.future
        if future is None or (future.done() and future.exception() is not None):
            future = self._retry(upload)
        try:
            return future.result()
        except Exception:
            return self._retry(upload).result()

    def _retry(self, upload: Upload) -> Future[Written]:
        upload.future = future = self._uploads.submit(upload.run)
        future.add_done_callback(lambda _: self._finished(upload.works))
        return future

    def retry_failed(self) -> None:
        """Try failed uploads once more."""
        for work in list(self._open):
            if work.error() and not work.under_way and work.upload is not None:
                self._retry(work.upload)

    def close(self) -> None:
        self._ordered.shutdown(wait=True, cancel_futures=True)
        self._uploads.shutdown(wait=True, cancel_futures=True)
        self._writer.close()

    def _pause(self, seconds: float) -> None:
        """Wait until an upload ends; one may have just before, so no longer than this time."""
        self._moved.wait(seconds)
        self._moved.clear()

    def _under_way(self) -> list[Work]:
        return [work for work in [*self._open, *self._not_begun()] if work.under_way]

    def _not_begun(self) -> list[Work]:
        """The newest works, in order, as they are begun in order."""
        return list(takewhile(lambda work: not work.begun, reversed(self._works.copy())))[::-1]

    def _has_room(self, nbytes: int) -> bool:
        under_way = sum(work.nbytes for work in self._under_way())
        return not under_way or under_way + nbytes <= MAX_UNDER_WAY_BYTES

    # -- on the ordered thread -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make sure that all works are begun: an interrupted call may have left some."""
        if not self._gathering and self._to_begin():
            self._ordered.submit(self._lay_out_all)

    def _to_begin(self) -> list[Work]:
        """The works to begin now: up to the last seal, where objects end with one."""
        works = self._not_begun()
        if not self._objects.sealed or self._pressed.is_set():
            return works
        last = max((i for i, work in enumerate(works) if isinstance(work, Seal)), default=-1)
        return works[: last + 1]

    def _lay_out_all(self) -> None:
        """Lay out all works, after a moment: a caller that goes on appending would share the interpreter with this."""
        if self._to_begin():
            self._gathering = True
            self._wanted.wait(_MOMENT_S)
            self._gathering = False
            while works := self._to_begin():
                self._open[works[0]] = None
                works[0].begun = True
                self._lay_out(works[0])
            self._wanted.clear()  # last, or the next work would begin while its caller is at work
            self.memory.prepare()
        if self._pressed.is_set():
            self._pressed.clear()
            self._complete(None)

    def _lay_out(self, work: Work) -> None:
        """Lay out a work. No other thread begins it, and no signal comes in between."""
        try:
            if self._broken is not None:
                raise self._broken
            self._put_into_draft(work)
            if isinstance(work, Seal):
                work.said = None  # it stays until it is committed, and what was said may be large
        except BaseException as error:
            self._broken, draft, self._draft = error, self._draft, None
            for one in [work, *(draft.works if draft else [])]:
                if not one.laid_out.done():
                    one.laid_out.set_exception(error)
            self._finished([work])

    def _put_into_draft(self, work: Work) -> None:
        if isinstance(work, Seal) and not (self._draft or self._unsealed or work.said.says):
            work.laid_out.set_result(Upload(written=Written(RankRows.of(), self.number)))
            self._finished([work])
            return
        if work.is_shard and self._draft is not None and self._draft.slab is not None:
            self._complete(None)
        if self._draft is None:
            self._draft = Upload(self.number, self._objects.key(self.number))
        self._draft.add(work, *work.lay_out(self._draft.key))
        if isinstance(work, Seal):
            work.uploads, self._unsealed = self._unsealed, []
        if isinstance(work, Seal) or not self._objects.sealed:
            self._complete(work if isinstance(work, Seal) else None)

    def _complete(self, seal: Seal | None) -> None:
        """Complete the object: it no longer grows."""
        if self._draft is None:
            return
        self._objects.complete(self._draft, seal)
        made, self._draft = self._draft, None
        self.number += 1
        if made.written is None:
            if self._objects.sealed:
                (self._unsealed if seal is None else seal.uploads).append(made)
            self._retry(made)
        for work in made.works:
            work.laid_out.set_result(made)
        self._finished(made.works)

    def _finished(self, works: Sequence[Work]) -> None:
        """Take note, on a background thread, that an upload ended."""
        for work in works:
            if work.error() is not None:
                self.failed()
            elif not work.under_way:
                self._open.pop(work, None)
        self._moved.set()
