"""archive.json: what an archive says of itself, written once, when it is created."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CorruptCommitError,
    MissingObjectError,
    NothingThereError,
    UsageError,
    layout,
    plainjson,
)
from archive.store import Storage


def find(storage: Storage) -> tuple[dict[str, Any], bytes] | None:
    """What archive.json says of the archive, and its bytes; None if there is none."""
    most = plainjson.MAX_SMALL_BYTES
    try:
        raw = storage.get_head(layout.ARCHIVE_KEY, most + 1)
    except MissingObjectError:
        return None
    where = storage.full_url(layout.ARCHIVE_KEY)
    plainjson.check_size(raw, most, what=where, error=CorruptCommitError)
    about = plainjson.parse(raw, what=where, error=CorruptCommitError, max_depth=plainjson.MAX_DEPTH)
    if not isinstance(about, dict) or about.get("magic") != layout.MAGIC:
        raise NothingThereError(f"{where} does not belong to a trajectory archive; check the URL")
    layout.check_format(about.get("format"), where=where)
    if about.get("layout") not in layout.LAYOUTS or not isinstance(about.get("id"), str):
        raise CorruptCommitError(f"{where} is damaged: its layout or id is no archive's; put it back from a copy")
    return about, raw


def new(archive_layout: str) -> tuple[dict[str, Any], bytes]:
    if archive_layout not in layout.LAYOUTS:
        raise UsageError(f"layout={archive_layout!r}: give one of {', '.join(layout.LAYOUTS)}")
    about = {
        "magic": layout.MAGIC, "id": uuid.uuid4().hex, "format": layout.format_block(), "layout": archive_layout,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    return about, json.dumps(about, indent=1).encode() + b"\n"


def is_there(storage: Storage) -> bool:
    try:
        storage.get_head(layout.ARCHIVE_KEY, 1)
    except MissingObjectError:
        return False
    return True


def create(storage: Storage, raw: bytes) -> bool:
    try:
        storage.create(layout.ARCHIVE_KEY, raw)
    except AlreadyExistsError:
        return False
    except AmbiguousWriteError:
        if not storage.exists(layout.ARCHIVE_KEY):
            return create(storage, raw)
        return storage.get_head(layout.ARCHIVE_KEY, len(raw) + 1) == raw
    return True
