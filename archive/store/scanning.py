"""Does I/O: all objects below a folder, and the time by the store's own clock."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime

from archive.base import StorageError
from archive.store.connecting import Connection
from archive.store.deleting import delete_one
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


def clock(connection: Connection) -> datetime:
    """What the store says of an object that was just put; it is removed again."""
    key = f"clock/{secrets.token_hex(8)}"
    driver = connection.driver
    connection.request("put", key, lambda this: driver.put(key, [b"now"], this.timeout_s))
    try:
        info = connection.request("head", key, lambda this: driver.head(key, this.timeout_s))
    finally:
        delete_one(connection, key, threading.Event())
    if info.modified is None:
        raise StorageError(f"{connection.url}: this store does not say when an object was made")
    return info.modified


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
