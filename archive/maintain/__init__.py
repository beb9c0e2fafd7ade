"""Looking after an archive: an archive comes in; findings go out, and damaged commits are put aside."""

from __future__ import annotations

from archive.maintain import maintenance, repairing
from archive.maintain.maintenance import verify
from archive.maintain.repairing import damaged_commit, repair
from archive.maintain.retained import retained, retained_reach
from archive.maintain.upgrading import upgrade

__all__ = [
    "damaged_commit",
    "maintenance",
    "repair",
    "repairing",
    "retained",
    "retained_reach",
    "upgrade",
    "verify",
]
