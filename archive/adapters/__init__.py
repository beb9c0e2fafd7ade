"""Other systems' buffers and files, a room each; here is what they share. A live object comes in and is
archived; a share comes in and is put into one."""

from __future__ import annotations

from archive.adapters import common, digests, live
from archive.adapters.common import (
    UNFINISHED,
    Report,
    Saved,
    as_given,
    check_option,
    check_room,
    checkpoint,
    declare,
    load_torch,
    part_of,
    planned,
    saved_by,
    saved_share,
    several,
    share_buffer,
    share_of,
    system,
)
from archive.adapters.datasets import LEAVE_OUT, Array, about_of, by_role, episodes_of, row
from archive.adapters.digests import Digests
from archive.adapters.live import Item, LiveBuffer, Tracked, appended, kept_items, states_of
from archive.adapters.sources import Imported, Source, archive_dataset, reading

__all__ = [
    "LEAVE_OUT",
    "UNFINISHED",
    "Array",
    "Digests",
    "Imported",
    "Item",
    "LiveBuffer",
    "Report",
    "Saved",
    "Source",
    "Tracked",
    "about_of",
    "appended",
    "archive_dataset",
    "as_given",
    "by_role",
    "check_option",
    "check_room",
    "checkpoint",
    "common",
    "declare",
    "digests",
    "episodes_of",
    "kept_items",
    "live",
    "load_torch",
    "part_of",
    "planned",
    "reading",
    "row",
    "saved_by",
    "saved_share",
    "several",
    "share_buffer",
    "share_of",
    "states_of",
    "system",
]
