"""Does no I/O of its own: what reading a share took, beside what its plan said, for logs and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from archive.base import ArchiveError, logger, size
from archive.observe import add, operation
from archive.store import IOStats, Storage

if TYPE_CHECKING:
    from resharding.sharing.sharebuffer import ShareBuffer

_TEXT = "rank %d of %d read %d episodes, %d steps of buffer %r of %r, which %d ranks saved: %s in %d requests, %.1f s"


@contextmanager
def read_of(buffer: ShareBuffer, *, whole: bool) -> Iterator[None]:
    """Time and count reading a buffer of a share, within the block. whole: all its fields, so that it can be compared
    with the plan. What else goes over the same connection meanwhile counts, too."""
    ck, share = buffer.checkpoint, buffer.share
    storage = ck.snapshot.storage
    before = storage.stats.snapshot()
    with operation(
        "resume", current=False, run=ck.run, checkpoint=ck.name, buffer=buffer.name, rank=share.rank,
        world_size=share.world_size, saved_by=ck.world_size, episodes=len(buffer), steps=buffer.steps,
    ) as done:  # fmt: skip
        yield
        taken = storage.stats - before
        done.note(bytes=taken.bytes_in, requests=taken.requests)
    logger.info(
        _TEXT, share.rank, share.world_size, len(buffer), buffer.steps, buffer.name, ck.name, ck.world_size,
        size(taken.bytes_in), taken.requests, done.seconds,
    )  # fmt: skip
    if whole:
        with suppress(ArchiveError):  # what was asked for has been read: whatever else is not there is no matter here
            _compare(buffer, storage, taken)


def _compare(buffer: ShareBuffer, storage: Storage, taken: IOStats) -> None:
    cost = buffer.cost()
    store = storage.root.protocol
    add("archive.resume.needed", cost["needed_bytes"], store=store)
    add("archive.resume.received", taken.bytes_in, store=store)
    add("archive.resume.planned", cost["requests"], store=store)
    add("archive.resume.requests", taken.requests, store=store)
