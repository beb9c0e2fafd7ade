"""Does I/O: the proof that a store refuses to create an object that is there, before anything else is created.

A store may pass over the condition of a create; a client, or a proxy on the way, may drop it. Two writers would then
replace each other's commits, and nobody would be told. So each process creates once more an object that is there, with
the bytes that it has: that must be refused, and changes nothing where it is not. It does so once for each root, and for
each client and kind of request that creates there: one may heed what another drops.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    ArchiveError,
    NotExclusiveError,
    NothingThereError,
    StorageError,
)
from archive.store.drivers import answered

if TYPE_CHECKING:
    from archive.store.writes import ObjectWriter

_TRIES = 3  # each has the deadline of a request
_SEE = "`archive/docs/how-to/stores.md` has the stores that do"
_proven: set[tuple[str, int, str, bool]] = set()  # of all connections


def prove(storage: ObjectWriter, *, in_parts: bool = False, again: bool = False) -> None:
    """Check that a create of an object that is there is refused: one request, or one upload in parts; none where this
    process knows it, unless `again`, or where a single writer has no need of it.

    NotExclusiveError if it is not refused, or the store does not know such a request. NothingThereError if the object
    is gone.
    """
    if storage.known is None or storage.single_writer:
        return
    if again or not _is_proven(storage, in_parts):
        _try(storage, *storage.known, in_parts)
        storage.proven.add(_client(storage, in_parts))  # by now, as a client may leave it to another one
        _proven.add((_root(storage), *_client(storage, in_parts)))


def _is_proven(storage: ObjectWriter, in_parts: bool) -> bool:
    client = _client(storage, in_parts)
    if client not in storage.proven and (_root(storage), *client) in _proven:
        storage.proven.add(client)
    return client in storage.proven


def _client(storage: ObjectWriter, in_parts: bool) -> tuple[int, str, bool]:
    """The process, the client and the kind of request."""
    return os.getpid(), storage.driver.transport, in_parts


def _root(storage: ObjectWriter) -> str:
    """A digest of the URL, its options, which may hold credentials, and the object that is known there."""
    place = (storage.url, sorted(storage.root.options.items()), storage.known)
    return hashlib.sha256(repr(place).encode()).hexdigest()


def create_known(storage: ObjectWriter, key: str, data: bytes) -> None:
    """Create the object by which all other creates are proven. AlreadyExistsError if there is one.

    It stays where the store fails: somebody else may have found it by now, through a client that is heeded.
    """
    try:
        storage.create_once(key, data)
    except StorageError as error:
        _check_plain(storage, key, error)
        raise
    storage.known = key, data
    try:
        prove(storage)
    except NotExclusiveError as error:
        raise NotExclusiveError(f"{error}. Nothing but {storage.full_url(key)} was made") from error


def _try(storage: ObjectWriter, key: str, data: bytes, in_parts: bool) -> None:
    made, unclear = 0, None
    for _ in range(_TRIES):
        try:
            storage.create_unproven(key, data, in_parts=in_parts)
        except AlreadyExistsError as error:
            if made:
                raise _gone(storage, key) from error
            return
        except AmbiguousWriteError as error:  # which proves nothing
            unclear = error
            continue
        except StorageError as error:
            _check_plain(storage, key, error)
            raise
        made += 1
        if made > 1:
            raise _replaces(storage, key, in_parts)
    raise unclear or _replaces(storage, key, in_parts)


# -- in words ----------------------------------------------------------------------------------------------------------


def _through(storage: ObjectWriter) -> str:
    return f" through {storage.driver.transport}" if storage.driver.transport else ""


def _instead(storage: ObjectWriter) -> str:
    other = {"obstore": "s3fs", "s3fs": "obstore"}.get(storage.driver.transport)
    client = (
        f", or another client (storage option transport={other})" if other and storage.root.protocol == "s3" else ""
    )
    return f"use another store{client}, or open with single_writer=True if there is only one writer; {_SEE}"


def _replaces(storage: ObjectWriter, key: str, in_parts: bool) -> NotExclusiveError:
    how = "was uploaded in parts, to be completed" if in_parts else "was sent"
    return NotExclusiveError(
        f"the store at {storage.url} let an existing object be created again: {key} {how}{_through(storage)} on "
        "condition that nothing is there, and the store answered that it is done. So two writers would overwrite each "
        f"other's commits; {_instead(storage)}"
    )


def _check_plain(storage: ObjectWriter, key: str, error: StorageError) -> None:
    """NotExclusiveError for a create that failed in a way that may be due to its condition."""
    if type(error) is StorageError:
        raise NotExclusiveError(
            f"the store at {storage.url} does not say that it can refuse to overwrite an object: {key} was sent"
            f"{_through(storage)} on condition that nothing is there (If-None-Match), and the answer was "
            f"{answered(error) or 'another'} ({error}). If it does not know the condition, {_instead(storage)}"
        ) from error


def _gone(storage: ObjectWriter, key: str) -> ArchiveError:
    return NothingThereError(
        f"{storage.full_url(key)} was gone; it is back now, as it was. Find out what deletes objects of the archive, "
        "and run `archive verify`"
    )
