"""Deleting what an archive no longer needs: the commits of an archive come in; a plan goes out, and carries itself
out."""

from __future__ import annotations

from archive.maintain.pruning.carrying import LEAST_S, plan
from archive.maintain.pruning.plans import Going, Group, Progress, PrunePlan

__all__ = ["LEAST_S", "Going", "Group", "Progress", "PrunePlan", "plan"]
