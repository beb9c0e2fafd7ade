"""Pure, no I/O: one row a step that repeats the next row of another field; what repeats is not stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, offsets_of
from archive.base import CorruptManifestError, show
from archive.fields.axis import Cuts, Extent, Fetched, Layout, Located, Slices, Stored, empty_rows, end_to_end
from archive.fields.nests import Array
from archive.fields.rows import StepAxis
from archive.fields.schema import PLACES, ShardSchema

_KEPT = "kept"


class NextOfAxis(StepAxis):
    """Row t is row t + 1 of the field followed, `spec.next_of`, but for the rows that are kept.

    Of each segment the last row is kept, and those whose bits differ. The companion `PLACES` has the step of each.
    """

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        name = self.spec.name
        rows = super().lay_out(parts, layout, arrays)[0][name]
        start, stop = layout.start, layout.start + layout.length
        keep = _differ_from_next(rows, arrays[self.spec.next_of])
        keep[(stop - 1)[layout.length > 0]] = True
        kept = np.flatnonzero(keep)
        before = offsets_of(keep)
        first, count = before[start], before[stop] - before[start]
        return {name: rows[kept], name + PLACES: kept - np.repeat(start, count)}, Extent(first, count)

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The next rows of the field followed; of each segment all rows that were kept, and their places."""
        if known is not None:
            return self._of_steps(cuts, schema, known[PLACES])
        first, rows = cuts.extent
        rows = np.where(cuts.hi > cuts.lo, rows, 0)
        every, nowhere = np.arange(len(cuts.lo)), np.zeros(len(cuts.lo), np.int64)
        stop = np.minimum(cuts.hi + 1, cuts.length) if self._is_like(schema) else cuts.lo
        following = np.maximum(0, stop - cuts.lo - 1)
        begin = cuts.start + cuts.lo + 1
        like = empty_rows(self.spec)
        kept = Slices(self.spec.name, like, _KEPT, every, first, first + rows, nowhere)
        places = kept._replace(array=self.spec.name + PLACES, like=np.zeros(0, np.int64), into=PLACES)
        next_rows = Slices(self.spec.next_of, like, "", every, begin, begin + following, nowhere)
        return Located(cuts.hi - cuts.lo, [next_rows, end_to_end(kept), end_to_end(places)])

    def companions(self, cuts: Cuts) -> Sequence[Slices]:
        """The places of the rows kept, of all segments touched."""
        _, head = np.unique(cuts.segment, return_index=True)
        first, rows = cuts.extent.start[head], cuts.extent.rows[head]
        name = self.spec.name + PLACES
        return [end_to_end(Slices(name, np.zeros(0, np.int64), PLACES, head, first, first + rows, first))]

    def _of_steps(self, cuts: Cuts, schema: ShardSchema, places: Array) -> Located:
        """The row kept of each step, or else the next row of the field followed."""
        _, head, owner = np.unique(cuts.segment, return_index=True, return_inverse=True)
        first, rows = cuts.extent.start[head], cuts.extent.rows[head]
        span = int(cuts.length.max(initial=0)) + 1
        keys = np.repeat(np.arange(len(head)), rows) * span + places
        wanted = owner * span + cuts.lo
        found = np.searchsorted(keys, wanted)
        kept = keys[np.minimum(found, len(keys) - 1)] == wanted if len(keys) else np.zeros(len(wanted), bool)
        held = cuts.lo + 1 < cuts.length
        if not (kept | held).all() or not (kept.all() or self._is_like(schema)):
            raise self._lacking()
        own = first[owner] + found - (np.cumsum(rows) - rows)[owner]
        runs = [
            self._single(self.spec.name, np.flatnonzero(kept), own),
            self._single(self.spec.next_of, np.flatnonzero(~kept), cuts.start + cuts.lo + 1),
        ]
        return Located(np.ones(len(wanted), np.int64), runs)

    def _single(self, array: str, cut: Ints, row: Ints) -> Slices:
        """One row of an array for each of these cuts."""
        return Slices(array, empty_rows(self.spec), "", cut, row[cut], row[cut] + 1, np.zeros(len(cut), np.int64))

    def _is_like(self, schema: ShardSchema) -> bool:
        """True if rows of the field followed can stand for this one's; where they can't, all rows were kept."""
        own, followed = empty_rows(self.spec), empty_rows(schema.by_name[self.spec.next_of])
        return bool(own.dtype == followed.dtype and own.shape == followed.shape)

    def _lacking(self) -> CorruptManifestError:
        return CorruptManifestError(
            f"field {show(self.spec.path)!r} lacks rows that the field it follows does not hold; run `archive verify`"
        )

    def complete(self, fetched: Fetched) -> None:
        """Put the rows kept where they belong, over those that follow."""
        cuts = fetched.cuts
        if _KEPT not in fetched.rows:
            return
        next_rows, kept, _ = fetched.located.runs
        places = fetched.rows[PLACES].joined()
        cut = np.repeat(kept.cut, kept.stop - kept.start)
        inside = np.flatnonzero((places >= cuts.lo[cut]) & (places < cuts.hi[cut]))
        within = places[inside] - cuts.lo[cut[inside]]
        self._check_complete(fetched, next_rows, cut[inside], within)
        fetched.rows[""].put(fetched.at[cut[inside]] + within, fetched.rows[_KEPT].joined()[inside])

    def _check_complete(self, fetched: Fetched, next_rows: Slices, cut: Ints, within: Ints) -> None:
        """CorruptManifestError if a row comes neither from the field followed nor from those kept."""
        following = next_rows.stop - next_rows.start
        beyond = within >= following[cut]
        found = following + np.bincount(cut[beyond], minlength=len(following))
        if (found < fetched.located.rows).any():
            raise self._lacking()


def _differ_from_next(rows: Array, followed: Array) -> Any:
    """The mask of the rows that are not the next row of the field followed."""
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
