"""Resharding: what M ranks saved, N ranks resume; each byte is read once, and a plan says beforehand what it takes.

    plan = resharding.plan(arc.checkpoints.of("main").latest, world_size=3)
    print(plan)                                         # who gets, reads and drops what
    share = plan.share(rank)                            # share.read(), share.stream(), share.columns, share.state
    writer = arc.writer(resume=share)

`merge`, `split`, `filter` and `reshard` make archives of archives, `compact` rewrites what is mostly dead, `export`
makes files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resharding.planning import Plan, Share, ShareBuffer, plan
    from resharding.transfer import Compacted, compact, export, filter, merge, reshard, split

__all__ = [
    "Compacted",
    "Plan",
    "Share",
    "ShareBuffer",
    "compact",
    "export",
    "filter",
    "merge",
    "plan",
    "reshard",
    "split",
]

_LAZY = dict.fromkeys(("Plan", "Share", "ShareBuffer", "plan"), "planning") | dict.fromkeys(
    ("Compacted", "compact", "export", "filter", "merge", "reshard", "split"), "transfer"
)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f"resharding.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'resharding' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
