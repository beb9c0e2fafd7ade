"""Resharding: what M ranks saved, N ranks resume; each byte is read once, and a plan says beforehand what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resharding.compaction import Compacted, compact
    from resharding.exporting import export
    from resharding.planning import Plan, plan
    from resharding.resaving import reshard
    from resharding.share import Share, ShareBuffer
    from resharding.transfer import filter, merge, split

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

_LAZY = (
    {"plan": "planning", "Plan": "planning", "Share": "share", "ShareBuffer": "share"}
    | dict.fromkeys(("merge", "split", "filter"), "transfer")
    | dict.fromkeys(("compact", "Compacted"), "compaction")
    | {"export": "exporting", "reshard": "resaving"}
)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f"resharding.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'resharding' has no attribute {name!r}")
