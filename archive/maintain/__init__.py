"""Looking after an archive: an archive comes in; findings, plans and tags go out, damaged commits are put aside, what
nobody needs is forgotten and deleted."""

from __future__ import annotations

from archive.maintain import forget, maintenance, moving, prune, repairing, tags
from archive.maintain.forget import restore, to_undo, undo
from archive.maintain.maintenance import verify
from archive.maintain.missing import check_newest
from archive.maintain.moving import Moved, Piece
from archive.maintain.objects import retained_reach
from archive.maintain.plans import ForgetPlan, Progress, PrunePlan, UpkeepPlan
from archive.maintain.redaction import Redaction
from archive.maintain.repairing import repair
from archive.maintain.report import Report
from archive.maintain.retention import asked
from archive.maintain.tags import Tag, Tags
from archive.maintain.usage import Info, Usage, usage

__all__ = [
    "ForgetPlan",
    "Info",
    "Moved",
    "Piece",
    "Progress",
    "PrunePlan",
    "Redaction",
    "Report",
    "Tag",
    "Tags",
    "UpkeepPlan",
    "Usage",
    "asked",
    "check_newest",
    "forget",
    "maintenance",
    "moving",
    "prune",
    "repair",
    "repairing",
    "restore",
    "retained_reach",
    "tags",
    "to_undo",
    "undo",
    "usage",
    "verify",
]
