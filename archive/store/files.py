"""Does I/O: single files of any filesystem, by URL or path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archive.store.root import split_file
from archive.store.storage import Storage


def read_file(url: Any, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """A whole file of any filesystem."""
    storage, name = _folder_of(url, storage_options)
    return storage.get(name)


def write_file(url: Any, data: bytes, storage_options: Mapping[str, Any] | None = None) -> None:
    """A file of any filesystem, whole or not at all."""
    storage, name = _folder_of(url, storage_options)
    storage.put(name, data)


def file_exists(url: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether there is a file of that name now."""
    storage, name = _folder_of(url, storage_options)
    return storage.exists(name)


def _folder_of(url: Any, storage_options: Mapping[str, Any] | None) -> tuple[Storage, str]:
    folder, name = split_file(url)
    options = {**getattr(url, "storage_options", {}), **(storage_options or {})}  # a UPath brings its own
    return Storage.connect(folder, options), name
