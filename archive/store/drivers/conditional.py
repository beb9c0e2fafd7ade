"""Does I/O: object stores whose fsspec filesystem sends a create as a conditional request (gcsfs, adlfs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from archive.store.drivers.plain import FsspecDriver, join
from archive.store.drivers.protocols import Buffer, Place


class ConditionalDriver(FsspecDriver):
    """Objects of a bucket. The store itself checks the condition of `create`."""

    exclusive = True
    lists_at_once = True  # S3, GCS and Azure all say so

    @staticmethod
    def defaults(options: Mapping[str, Any], place: Place) -> dict[str, Any]:
        return {"use_listings_cache": False, "skip_instance_cache": True, **options}

    @property
    def creating(self) -> ConditionalDriver:
        return self

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._call("pipe_file", self._path(key), join(parts), mode="create", timeout_s=timeout_s)
