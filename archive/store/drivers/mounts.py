"""Does I/O: whether a folder is on this machine, whose clock is then that of its files, or mounted from elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = (
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "overlay",
    "vfat", "exfat", "msdos", "ntfs", "ntfs3",
)  # fmt: skip


def of_this_machine(folder: str) -> bool:
    """Whether files below a folder get their times of this machine. True where nobody lists what is mounted."""
    path = os.path.realpath(folder)
    found, best = "", -1
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4]).rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= best:  # the last of several is on top
            found, best = after.split(" ")[0], len(point)
    return found in _OWN
