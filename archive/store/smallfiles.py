"""Does I/O: single files of any filesystem, by URL or path; small JSON objects of the bucket (archive.json, claims,
answers to requests), read within a bound as records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from archive.base import AlreadyExistsError, IntegrityError, Record, UsageError, records
from archive.store.root import split_file
from archive.store.storage import Storage

R = TypeVar("R", bound=Record)


def read_bytes(storage: Storage, key: str, error: type[IntegrityError]) -> bytes:
    """The bytes of a small object; MissingObjectError if it is not there, `error` if it is not small."""
    most = records.MAX_SMALL_BYTES
    return records.check_size(storage.get_head(key, most + 1), most, what=storage.full_url(key), error=error)


def parse(data: bytes, what: str, error: type[IntegrityError]) -> Any:
    """The JSON value of a small object; `error` names `what` if it is none."""
    return records.parse(data, what=what, error=error, max_depth=records.MAX_DEPTH)


def read_small(storage: Storage, key: str, kind: type[R], error: type[IntegrityError]) -> R:
    """A small object as a record; MissingObjectError if it is missing, `error` if it is something else."""
    what = storage.full_url(key)
    return kind.from_json(parse(read_bytes(storage, key, error), what, error), what=what, error=error)


def create_small(storage: Storage, key: str, record: Record) -> bool:
    """Create a small object; True if it is this one that is there now, False if there was another."""
    data = json.dumps(record.to_json()).encode()
    if len(data) > records.MAX_SMALL_BYTES:
        raise UsageError(
            f"{storage.full_url(key)} would have {len(data)} bytes, of {records.MAX_SMALL_BYTES} at most; nothing was "
            "written. Give shorter arguments: fewer names of fields, say, by their common parent"
        )
    try:
        storage.create_once(key, data)
    except AlreadyExistsError:
        return False
    return True


def read_file(url: Any, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """A whole file of any filesystem."""
    storage, name = _folder_of(url, storage_options)
    return storage.get(name)


def write_file(url: Any, data: bytes, storage_options: Mapping[str, Any] | None = None) -> None:
    """A file of any filesystem, whole or not at all."""
    storage, name = _folder_of(url, storage_options)
    storage.put(name, data)


def file_exists(url: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """True if there is a file of that name now."""
    storage, name = _folder_of(url, storage_options)
    return storage.exists(name)


def _folder_of(url: Any, storage_options: Mapping[str, Any] | None) -> tuple[Storage, str]:
    folder, name = split_file(url)
    options = {**getattr(url, "storage_options", {}), **(storage_options or {})}  # a UPath brings its own
    return Storage.connect(folder, options), name
