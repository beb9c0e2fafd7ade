"""Looking after an archive: an archive comes in; findings go out, damaged commits are put aside,
tags are given."""

from __future__ import annotations

from archive.maintain import drafting, forgetting, maintenance, moving, repairing, standing, tags
from archive.maintain.asking import asked
from archive.maintain.drafting import Decided, Draft
from archive.maintain.keeping import read_tags
from archive.maintain.letting import CHECKPOINT_COLUMNS, EPISODE_COLUMNS, ForgetPlan, Redacted
from archive.maintain.maintenance import verify
from archive.maintain.missing import check_newest
from archive.maintain.moving import Moved, Piece
from archive.maintain.objects import check_made, read_pins
from archive.maintain.repairing import repair
from archive.maintain.report import Report
from archive.maintain.restoring import restore, to_undo, undo
from archive.maintain.retained import Journaled, retained, retained_reach
from archive.maintain.standing import Mask
from archive.maintain.tags import Tag, Tags
from archive.maintain.usage import Info, Usage, usage

__all__ = [
    "CHECKPOINT_COLUMNS",
    "EPISODE_COLUMNS",
    "Decided",
    "Draft",
    "ForgetPlan",
    "Info",
    "Journaled",
    "Mask",
    "Moved",
    "Piece",
    "Redacted",
    "Report",
    "Tag",
    "Tags",
    "Usage",
    "asked",
    "check_made",
    "check_newest",
    "drafting",
    "forgetting",
    "maintenance",
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
    "usage",
    "verify",
]
