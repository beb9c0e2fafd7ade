"""Objects that are created once, by one writer, and not overwritten."""

from __future__ import annotations

from typing import Any

from archive.base import AlreadyExistsError, AmbiguousWriteError
from archive.shard import indexed
from archive.store import Storage

CREATE_TRIES = 5  # while the store does not say whether the object is there; each has its own deadline


def create_once(storage: Storage, key: str, buffers: list[Any], nonce: str) -> None:
    """Create-only: a name is used once by one writer. An unclear answer is settled by reading the object back.

    AlreadyExistsError if another object lies there; AmbiguousWriteError if the store does not say.
    """
    unclear = AmbiguousWriteError(f"create {storage.full_url(key)}: no answer whether it is there")
    for _ in range(CREATE_TRIES):
        try:
            storage.create(key, buffers)
            return
        except AmbiguousWriteError as e:
            unclear = e
        except AlreadyExistsError:
            if _is_mine(storage, key, nonce):
                return
            raise
        if storage.exists(key) and _is_mine(storage, key, nonce):
            return
    raise unclear


def _is_mine(storage: Storage, key: str, nonce: str) -> bool:
    return nonce.encode() in storage.get_head(key, indexed.HEAD_BYTES)
