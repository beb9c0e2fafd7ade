"""Deleting what an archive no longer needs: the commits of an archive come in; a plan goes out, and carries itself
out."""

from __future__ import annotations

from archive.maintain.pruning.carrying import plan
from archive.maintain.pruning.plans import Progress, PrunePlan

__all__ = ["Progress", "PrunePlan", "plan"]
