"""Maintenance of an archive. An archive comes in; findings, plans and tags go out, damaged commits are moved aside, and
what no reader needs is forgotten and deleted."""

from __future__ import annotations

from archive.maintain import forget, prune, relocation, tags
from archive.maintain.evidence import check_newest, damaged_commit, missing_commits, repair
from archive.maintain.forget import restore, to_undo, undo
from archive.maintain.objects import retained_reach
from archive.maintain.plans import ForgetPlan, Progress, PrunePlan, UpkeepPlan
from archive.maintain.redaction import Redaction
from archive.maintain.retention import asked
from archive.maintain.tags import Tag, Tags
from archive.maintain.usage import ArchiveInfo, Usage, usage
from archive.maintain.verify import Report, verify

__all__ = [
    "ArchiveInfo",
    "ForgetPlan",
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
    "damaged_commit",
    "forget",
    "missing_commits",
    "prune",
    "relocation",
    "repair",
    "restore",
    "retained_reach",
    "tags",
    "to_undo",
    "undo",
    "usage",
    "verify",
]
