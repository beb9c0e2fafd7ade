"""Who gets what: live episodes and rules come in; placements, and what reading them takes, go out. Reads no
data."""

from __future__ import annotations

from resharding.placing.assignment import identity, place, within_bounds
from resharding.placing.cost import read_cost
from resharding.placing.pieces import cut_pieces, gather, joined, piece_positions
from resharding.placing.records import FILTERED, Dropped, Parts, Placement, Rules
from resharding.placing.source import Source, SourceBuffer, filtered

__all__ = [
    "FILTERED",
    "Dropped",
    "Parts",
    "Placement",
    "Rules",
    "Source",
    "SourceBuffer",
    "cut_pieces",
    "filtered",
    "gather",
    "identity",
    "joined",
    "piece_positions",
    "place",
    "read_cost",
    "within_bounds",
]
