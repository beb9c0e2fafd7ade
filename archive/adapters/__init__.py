"""Other systems' buffers and files, a room each; here is what they share. A live object comes in and is
archived; a share comes in and is put into one."""

from __future__ import annotations

from archive.adapters import common
from archive.adapters.common import (
    EXISTING,
    UNFINISHED,
    Report,
    Saved,
    as_given,
    check_option,
    check_room,
    checkpoint,
    declare,
    part_of,
    several,
    share_buffer,
    share_of,
    system,
)
from archive.adapters.datasets import (
    LEAVE_OUT,
    Array,
    Imported,
    about_of,
    archive_dataset,
    episodes_of,
    lookup,
    path_of_role,
    role_of,
    row,
)

__all__ = [
    "EXISTING",
    "LEAVE_OUT",
    "UNFINISHED",
    "Array",
    "Imported",
    "Report",
    "Saved",
    "about_of",
    "archive_dataset",
    "as_given",
    "check_option",
    "check_room",
    "checkpoint",
    "common",
    "declare",
    "episodes_of",
    "lookup",
    "part_of",
    "path_of_role",
    "role_of",
    "row",
    "several",
    "share_buffer",
    "share_of",
    "system",
]
