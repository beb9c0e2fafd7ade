"""Plans: a checkpoint and a number of ranks come in; who gets which steps, what reading them takes, and the share of
each rank go out. A plan reads no data."""

from __future__ import annotations

from resharding.planning.planner import plan
from resharding.planning.plans import Plan
from resharding.planning.share import Share, ShareBuffer

__all__ = [
    "Plan",
    "Share",
    "ShareBuffer",
    "plan",
]
