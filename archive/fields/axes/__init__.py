"""Kinds of axis, a class each: how rows of a field relate to steps. Nests and values come in; fields in stored form,
parts of them and the arrays of a shard go out, and what reading takes. No I/O."""

from __future__ import annotations

from archive.fields.axes.axis import Axis, Cuts, Extent, Fetched, Layout, Located, Runs, Stored, Value, empty_rows
from archive.fields.axes.kinds import KINDS, axis_of
from archive.fields.axes.normalising import normalise
from archive.fields.axes.step import StepAxis

__all__ = [
    "KINDS",
    "Axis",
    "Cuts",
    "Extent",
    "Fetched",
    "Layout",
    "Located",
    "Runs",
    "StepAxis",
    "Stored",
    "Value",
    "axis_of",
    "empty_rows",
    "normalise",
]
