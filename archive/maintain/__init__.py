"""Looking after an archive: an archive comes in; findings go out, damaged commits are put aside,
tags are given."""

from __future__ import annotations

from archive.maintain import maintenance, repairing, tags
from archive.maintain.maintenance import verify
from archive.maintain.repairing import damaged_commit, repair
from archive.maintain.retained import retained, retained_reach
from archive.maintain.tags import Tag, Tags
from archive.maintain.upgrading import upgrade

__all__ = [
    "Tag",
    "Tags",
    "damaged_commit",
    "maintenance",
    "repair",
    "repairing",
    "retained",
    "retained_reach",
    "tags",
    "upgrade",
    "verify",
]
