"""The objects that ranks save. Snapshots of buffers, and rows, come in; one object goes out, and can be read back: a
part of a checkpoint, which is whole, a tick of a journal, which has what is new, or the ticks of a node together."""

from __future__ import annotations

from archive.saved.columns import Values, changed, common, described, in_order, newest
from archive.saved.fold import FOLDED, Before, Delta, Saved, SessionFold, counted
from archive.saved.index import (
    UNCONSUMED,
    AttributeRef,
    ColumnRef,
    NodeIndex,
    PartIndex,
    SavedIndex,
    StateRef,
    TickColumn,
    TickIndex,
    load,
)
from archive.saved.node import Named, NodeObject, pack_node, ticks_of
from archive.saved.object import Part, TickObject, WholeObject, lying, pack
from archive.saved.part import Request, keeps_rows, name_taken, stage

__all__ = [
    "FOLDED",
    "UNCONSUMED",
    "AttributeRef",
    "Before",
    "ColumnRef",
    "Delta",
    "Named",
    "NodeIndex",
    "NodeObject",
    "Part",
    "PartIndex",
    "Request",
    "Saved",
    "SavedIndex",
    "SessionFold",
    "StateRef",
    "TickColumn",
    "TickIndex",
    "TickObject",
    "Values",
    "WholeObject",
    "changed",
    "common",
    "counted",
    "described",
    "in_order",
    "keeps_rows",
    "load",
    "lying",
    "name_taken",
    "newest",
    "pack",
    "pack_node",
    "stage",
    "ticks_of",
]
