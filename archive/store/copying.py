"""Does I/O: copies that a store makes by itself, checked by what it says of both objects."""

from __future__ import annotations

from archive.base import CorruptChunkError, UsageError
from archive.store.connecting import Connection
from archive.store.drivers import Info
from archive.store.retry import Attempt
from archive.store.root import check_key


def can_copy(source: Connection, target: Connection) -> bool:
    """Whether both lie in the same store, which can copy by itself."""
    same = (source.root.protocol, source.root.options) == (target.root.protocol, target.root.options)
    return same and target.driver.copying is not None


def copy(source: Connection, source_key: str, target: Connection, key: str, least_bytes: int) -> Info:
    """Have the store copy an object; give what it says of the source.

    CorruptChunkError, and nothing is copied, if it is shorter than `least_bytes`; UsageError where the store can't.
    """
    before = look(source, source_key)
    if before.size < least_bytes:
        raise CorruptChunkError(
            f"{source.full_url(source_key)} has {before.size} bytes of {least_bytes}: it was not copied; run `archive "
            "verify` there"
        )
    check_key(key)
    here, there = target.driver.copying, source.driver.copying
    if here is None or there is None:
        raise UsageError(f"{target.full_url(key)}: its store does not copy objects by itself")

    def attempt(this: Attempt) -> None:
        target.stats.add(head=1)
        here.copy(there.locate(source_key), key, this.timeout_s)

    target.request("copy", key, attempt)
    return before


def look(connection: Connection, key: str) -> Info:
    """Ask the store for an object's size and ETag."""
    check_key(key)
    return connection.request("head", key, lambda this: connection.driver.head(key, this.timeout_s))


def alike(before: Info, after: Info) -> bool:
    """Whether two are of the same bytes: ETags of uploads in parts (they have a "-") depend on the parts."""
    plain = all(etag and "-" not in etag for etag in (before.etag, after.etag))
    return before.size == after.size and (before.etag == after.etag or not plain)
