"""Resharding: M ranks saved, N ranks resume. Each byte is read once, and a plan shows the cost beforehand.

    plan = resharding.plan(arc.checkpoints.of("main").latest, world_size=3)
    print(plan)                                         # each rank's episodes, reads and drops
    share = plan.share(rank)                            # share.read(), share.stream(), share.columns, share.state
    writer = arc.writer(resume=share)

`merge`, `split`, `filter` and `reshard` make archives of archives, `compact` rewrites sparse shards, `export`
makes files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resharding.compaction import Compacted, compact, compactable
    from resharding.exports import export
    from resharding.planner import plan
    from resharding.plans import Plan
    from resharding.share import Share, ShareBuffer
    from resharding.shared import SharedPlan, shared_plan
    from resharding.transfer import filter, merge, reshard, split

__all__ = [
    "Compacted",
    "Plan",
    "Share",
    "ShareBuffer",
    "SharedPlan",
    "compact",
    "compactable",
    "export",
    "filter",
    "merge",
    "plan",
    "reshard",
    "shared_plan",
    "split",
]

_LAZY = {
    "compaction": ("Compacted", "compact", "compactable"),
    "exports": ("export",),
    "planner": ("plan",),
    "plans": ("Plan",),
    "share": ("Share", "ShareBuffer"),
    "shared": ("SharedPlan", "shared_plan"),
    "transfer": ("filter", "merge", "reshard", "split"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"resharding.{module}"), name)
    raise AttributeError(f"module 'resharding' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
