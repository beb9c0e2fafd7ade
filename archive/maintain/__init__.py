"""Looking after an archive: an archive comes in; findings go out, damaged commits are put aside,
tags are given."""

from __future__ import annotations

from archive.maintain import drafting, forgetting, maintenance, moving, repairing, standing, tags
from archive.maintain.asking import Asked, asked
from archive.maintain.drafting import Decided, Draft
from archive.maintain.journaled import Journaled
from archive.maintain.keeping import read_tags
from archive.maintain.letting import CHECKPOINT_COLUMNS, EPISODE_COLUMNS, ForgetPlan, Redacted
from archive.maintain.maintenance import verify
from archive.maintain.missing import check_newest
from archive.maintain.moving import Moved, Piece
from archive.maintain.objects import check_made, read_pins
from archive.maintain.repairing import damaged_commit, missing_commits, repair, upgrade
from archive.maintain.restoring import restore, to_undo, undo
from archive.maintain.retained import borrowed, retained, retained_reach, walk
from archive.maintain.standing import Mask
from archive.maintain.tags import Tag, Tags
from archive.maintain.usage import Held, Info, Usage, usage

__all__ = [
    "CHECKPOINT_COLUMNS",
    "EPISODE_COLUMNS",
    "Asked",
    "Decided",
    "Draft",
    "ForgetPlan",
    "Held",
    "Info",
    "Journaled",
    "Mask",
    "Moved",
    "Piece",
    "Redacted",
    "Tag",
    "Tags",
    "Usage",
    "asked",
    "borrowed",
    "check_made",
    "check_newest",
    "damaged_commit",
    "drafting",
    "forgetting",
    "maintenance",
    "missing_commits",
    "moving",
    "read_pins",
    "read_tags",
    "repair",
    "repairing",
    "restore",
    "retained",
    "retained_reach",
    "standing",
    "tags",
    "to_undo",
    "undo",
    "upgrade",
    "usage",
    "verify",
    "walk",
]
