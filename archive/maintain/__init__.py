"""Looking after an archive: an archive comes in; findings go out, damaged commits are put aside,
tags are given."""

from __future__ import annotations

from archive.maintain import forgetting, maintenance, repairing, tags
from archive.maintain.asking import Asked, asked
from archive.maintain.letting import CHECKPOINT_COLUMNS, EPISODE_COLUMNS, ForgetPlan
from archive.maintain.maintenance import verify
from archive.maintain.objects import check_made
from archive.maintain.pins import read_pins
from archive.maintain.repairing import damaged_commit, repair
from archive.maintain.restoring import restore, undo
from archive.maintain.retained import retained, retained_reach, walk
from archive.maintain.tags import Tag, Tags
from archive.maintain.upgrading import upgrade
from archive.maintain.usage import Held, Info, Usage, usage

__all__ = [
    "CHECKPOINT_COLUMNS",
    "EPISODE_COLUMNS",
    "Asked",
    "ForgetPlan",
    "Held",
    "Info",
    "Tag",
    "Tags",
    "Usage",
    "asked",
    "check_made",
    "damaged_commit",
    "forgetting",
    "maintenance",
    "read_pins",
    "repair",
    "repairing",
    "restore",
    "retained",
    "retained_reach",
    "tags",
    "undo",
    "upgrade",
    "usage",
    "verify",
    "walk",
]
