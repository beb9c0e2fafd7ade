"""Kinds of axis, a class each: how rows of a field relate to steps. Nests and values come in; fields in stored form,
parts of them and the arrays of a shard go out, and what reading takes. No I/O."""

from __future__ import annotations

from archive.fields.axes.axis import Axis, Cuts, Extent, Fetched, Layout, Located, Slices, empty_rows
from archive.fields.axes.kinds import axis_of, normalise
from archive.fields.axes.rows import StepAxis

__all__ = [
    "Axis",
    "Cuts",
    "Extent",
    "Fetched",
    "Layout",
    "Located",
    "Slices",
    "StepAxis",
    "axis_of",
    "empty_rows",
    "normalise",
]
