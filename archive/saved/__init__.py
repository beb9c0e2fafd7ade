"""The objects that ranks save. Snapshots of buffers, and rows, come in; one object goes out, and can be read back: a
part of a checkpoint, which is whole, or a tick of a journal, which has what is new."""

from __future__ import annotations

from archive.saved.columns import Values, changed, common, described, in_order, newest
from archive.saved.fold import FOLDED, Before, Delta, Saved, SessionFold, counted
from archive.saved.index import (
    UNCONSUMED,
    AttributeRef,
    ColumnRef,
    PartIndex,
    SavedIndex,
    StateRef,
    TickColumn,
    TickIndex,
    load,
)
from archive.saved.object import Part, TickObject, WholeObject, pack
from archive.saved.part import Request, keeps_rows, name_taken, stage

__all__ = [
    "FOLDED",
    "UNCONSUMED",
    "AttributeRef",
    "Before",
    "ColumnRef",
    "Delta",
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
    "name_taken",
    "newest",
    "pack",
    "stage",
]
