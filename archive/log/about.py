"""archive.json: the record that identifies an archive, written once, when it is created."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

from archive.base import (
    AlreadyExistsError,
    CorruptCommitError,
    MissingObjectError,
    NothingThereError,
    UsageError,
    layout,
)
from archive.log.records import About
from archive.store import Storage, create_known, smallfiles


def find(storage: Storage) -> tuple[About, bytes] | None:
    """The record in archive.json, and its bytes; None if there is no such object.

    NothingThereError if it is another program's, UpgradeError if a later version made it.
    """
    where = storage.full_url(layout.ARCHIVE_KEY)
    try:
        raw = smallfiles.read_bytes(storage, layout.ARCHIVE_KEY, CorruptCommitError)
    except MissingObjectError:
        return None
    value = smallfiles.parse(raw, where, CorruptCommitError)
    if not isinstance(value, dict) or value.get("magic") != layout.MAGIC:
        raise NothingThereError(f"{where} does not belong to a trajectory archive; check the URL")
    layout.check_format(value.get("format"), where=where)
    return About.from_json(value, what=where, error=CorruptCommitError, remedy="put it back from a copy"), raw


def new(archive_layout: str) -> tuple[About, bytes]:
    """A new archive's archive.json, and its bytes."""
    if archive_layout not in layout.LAYOUTS:
        raise UsageError(f"layout={archive_layout!r}: give one of {', '.join(layout.LAYOUTS)}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = About(layout.MAGIC, uuid.uuid4().hex, layout.format_block(), archive_layout, now)  # type: ignore[arg-type]
    return about, json.dumps(about.to_json(), indent=1).encode() + b"\n"


def is_there(storage: Storage) -> bool:
    try:
        storage.get_head(layout.ARCHIVE_KEY, 1)
    except MissingObjectError:
        return False
    return True


def create(storage: Storage, raw: bytes) -> bool:
    """Write archive.json; True if these bytes are there now, whoever wrote them. NotExclusiveError if the store
    replaces objects that are to be created."""
    try:
        create_known(storage, layout.ARCHIVE_KEY, raw)
    except AlreadyExistsError:
        return False
    return True
