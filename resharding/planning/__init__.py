"""Plans: a checkpoint and a number of ranks come in; who gets which steps, and what reading them takes, goes
out. Reads no data."""

from __future__ import annotations

from resharding.planning.planning import plan
from resharding.planning.plans import Plan

__all__ = [
    "Plan",
    "plan",
]
