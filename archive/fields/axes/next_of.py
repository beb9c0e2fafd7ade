"""Pure, no I/O: one row a step that repeats the next row of another field; what repeats is not stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from archive.fields import PLACES, Array
from archive.fields.axes.axis import Extent, Layout, Stored
from archive.fields.axes.step import StepAxis


class NextOfAxis(StepAxis):
    """Row t is row t + 1 of the field followed, `spec.next_of`, but for the rows that are kept.

    Of each segment the last row is kept, and those whose bits differ. The companion `PLACES` has the step of each.
    """

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        name = self.spec.name
        rows = super().lay_out(parts, layout, arrays).arrays[name]
        start, stop = layout.start, layout.start + layout.length
        keep = _differ_from_next(rows, arrays[self.spec.next_of])
        keep[(stop - 1)[layout.length > 0]] = True
        kept = np.flatnonzero(keep)
        first = np.searchsorted(kept, start)
        count = np.searchsorted(kept, stop) - first
        return Stored({name: rows[kept], name + PLACES: kept - np.repeat(start, count)}, Extent(first, count))


def _differ_from_next(rows: Array, followed: Array) -> Any:
    """Which rows are not the next row of the field followed."""
    differ = np.ones(len(rows), bool)
    if len(rows) > 1 and rows.dtype == followed.dtype and rows.shape == followed.shape:
        differ[:-1] = _bits_differ(rows[:-1], followed[1:])
    return differ


def _bits_differ(a: Array, b: Array) -> Any:
    """Per row: whether the bits differ (so that NaN equals itself and -0.0 is not 0.0)."""
    if a.dtype == object:
        return (a != b).reshape(len(a), -1).any(axis=1)
    if a[0:1].nbytes == 0:
        return np.zeros(len(a), bool)
    bits = [np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b)]
    return (bits[0] != bits[1]).any(axis=1)
