"""Does I/O: all objects below a folder, and the time by the store's own clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from archive.base import StorageError
from archive.store.connecting import Connection
from archive.store.drivers import Found
from archive.store.retry import Attempt
from archive.store.root import check_key, check_listed


def pages(connection: Connection, prefix: str) -> Iterator[Sequence[Found]]:
    """What lies below a folder ("" for the root), a request a page; one that fails goes on where the last one ended."""
    folder = check_key(prefix.rstrip("/")) if prefix else ""
    scanning, after = connection.driver.scanning, ""
    if scanning is None:
        raise StorageError(
            f"scan {connection.full_url(folder)}: this store's driver cannot say what lies below a folder"
        )
    found = scanning.scan(folder, after, connection.deadline_s)

    def attempt(this: Attempt) -> Sequence[Found]:
        nonlocal found
        if this.number > 1:
            found = scanning.scan(folder, after, this.timeout_s)
        return next(found, [])

    while page := connection.request("list", folder, attempt):
        for one in page:
            check_listed(one.key, connection.full_url(folder))
        yield page
        after = page[-1].key


def clock(connection: Connection, prefix: str) -> datetime:
    """What time the store says it is; of one that does not say it, when the newest object below a folder was made."""
    folder, telling = check_key(prefix), connection.driver.telling
    now = telling and connection.request("list", folder, lambda this: telling.now(folder, this.timeout_s))
    made = [] if now else [one.modified for page in pages(connection, folder) for one in page]
    if not (now or made):
        raise StorageError(f"clock of {connection.full_url(folder)}: this store says no time, and nothing is there")
    return now or max(made)


def versioned(connection: Connection) -> bool | None:
    """Whether deletes leave versions that still take space; None if the store does not say."""
    try:
        versioning = connection.driver.versioning
    except ImportError:
        return None
    if versioning is None:
        return None
    try:
        return connection.request("head", "", lambda this: versioning.versioned(this.timeout_s))
    except StorageError:  # refused, or not known to this store
        return None
