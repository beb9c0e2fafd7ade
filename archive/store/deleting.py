"""Does I/O: many deletes, in batches where the store takes them, with an error for each object that stays."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from archive.base import AccessDeniedError, DeadlineError, Job, StorageError, UsageError, in_order
from archive.store.connecting import Connection
from archive.store.drivers import PAGE, DeleteMany
from archive.store.retry import Attempt
from archive.store.root import check_key

_BATCHES_AT_ONCE = 4  # of a thousand each: stores take a few thousand deletes a second below one prefix

Told = Callable[[int], None]
Errors = dict[str, StorageError]
Batch = Sequence[str]


def delete_many(connection: Connection, keys: Iterable[str], per_second: float | None, told: Told | None) -> Errors:
    """Remove objects; give the errors of those that are still there. See Storage.delete_many."""
    if per_second is not None and per_second <= 0:
        raise UsageError(f"per_second={per_second} must be above zero, or None for no limit")
    size = PAGE if per_second is None else max(1, min(PAGE, int(per_second)))
    batches = _paced(_batches(keys, size), per_second)
    errors: Errors = {}
    for batch, left, refused in _in_bulk(connection, batches):
        errors |= refused
        errors |= _one_by_one(connection, left)
        if told is not None:
            told(len(batch))
    return errors


def delete_one(connection: Connection, key: str, cancelled: threading.Event) -> None:
    """Remove an object; one that is not there is no error."""
    driver = connection.driver

    def attempt(this: Attempt) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            driver.delete(key, this.timeout_s)

    connection.request("delete", check_key(key), attempt, cancelled)


def _batches(keys: Iterable[str], size: int) -> Iterator[Batch]:
    source = iter(keys)
    while batch := [check_key(key) for key in islice(source, size)]:
        yield batch


def _paced(batches: Iterable[Batch], per_second: float | None) -> Iterator[Batch]:
    """The same, no faster than so many keys a second."""
    due = time.monotonic()
    for batch in batches:
        if per_second is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            due += len(batch) / per_second
        yield batch


def _in_bulk(connection: Connection, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch, Errors]]:
    """Batches, what of each is to be tried one by one, and what the store refused; several at once."""
    deleting = connection.driver.deleting

    def job(batch: Batch) -> Job[tuple[Batch, Batch, Errors]]:
        if deleting is None:
            return Job(lambda cancelled: (batch, batch, {}))
        return Job(lambda cancelled: (batch, *_ask(connection, deleting, batch, cancelled)))

    yield from in_order(connection.engine().pool, map(job, batches), max_ahead=_BATCHES_AT_ONCE, settle=True)


def _ask(
    connection: Connection, deleting: DeleteMany, batch: Batch, cancelled: threading.Event
) -> tuple[Batch, Errors]:
    """Delete a batch; what of it is left, and what was refused. DeadlineError where nothing answers."""
    try:
        found = connection.request(
            "delete", batch[0], lambda this: deleting.delete_many(batch, this.timeout_s), cancelled
        )
    except DeadlineError:
        raise
    except AccessDeniedError as error:
        return (), dict.fromkeys(batch, error)
    except StorageError:  # clients that name one object alone, and stores that do not know such a request
        return batch, {}
    return list(found), {}


def _one_by_one(connection: Connection, keys: Batch) -> Errors:
    """Delete objects side by side; the errors of those that stay. DeadlineError where nothing answers."""

    def job(key: str) -> Job[StorageError | None]:
        return Job(lambda cancelled: _error_of(connection, key, cancelled))

    found = in_order(connection.engine().pool, map(job, keys), max_ahead=2 * connection.concurrency, settle=True)
    return {key: error for key, error in zip(keys, found, strict=True) if error is not None}


def _error_of(connection: Connection, key: str, cancelled: threading.Event) -> StorageError | None:
    try:
        delete_one(connection, key, cancelled)
    except DeadlineError:
        raise
    except StorageError as error:
        return error
    return None
