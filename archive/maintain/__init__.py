"""Looking after an archive: an archive comes in; findings go out, and damaged commits are put aside."""

from __future__ import annotations

from archive.maintain import maintenance
from archive.maintain.maintenance import damaged_commit, repair, verify
from archive.maintain.upgrading import upgrade

__all__ = [
    "damaged_commit",
    "maintenance",
    "repair",
    "upgrade",
    "verify",
]
