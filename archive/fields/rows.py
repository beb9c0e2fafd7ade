"""Pure, no I/O: axes whose values are one array: a row a step, some more at the end, or the episode's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from archive.arrays import Ints, end_to_end, offsets_of, run_heads, since_head
from archive.base import FieldError, jsontree, show
from archive.fields import nests
from archive.fields.axis import (
    Axis,
    Cuts,
    Extent,
    Fetched,
    Layout,
    Located,
    Stored,
    empty_rows,
    own_runs,
    stored,
)
from archive.fields.nests import Array
from archive.fields.schema import FieldSpec, Path, ShardSchema


class RowsAxis(Axis[Array]):
    """An axis whose values are one array.

    scalars: whether a value may be a number, which is kept as one row.
    """

    scalars: ClassVar[bool] = False

    @classmethod
    def normalised(cls, path: Path, leaf: Any, extra: int) -> tuple[FieldSpec, Array]:
        where = repr(show(path))
        array = nests.as_array(leaf, where)
        scalar = array.ndim == 0
        if scalar and not cls.scalars:
            raise FieldError(
                f"field {where} has no step axis (it is 0-d); give one row a step, or declare "
                f"Schema(axes={{{where}: 'free'}}) for a value that belongs to the whole episode"
            )
        plain, dtype = stored(path, array[None] if scalar else array)
        return FieldSpec(path, cls.kind, dtype, array.shape[1:], extra, scalar), plain

    @classmethod
    def json(cls, path: Path, leaf: Any, extra: int) -> tuple[FieldSpec, Array]:
        where = repr(show(path))
        if not isinstance(leaf, (list, tuple, np.ndarray)):
            raise FieldError(f"field {where} is JSON: give a list of one value a step, not {type(leaf).__name__}")
        rows = np.empty(len(leaf), object)
        for i, value in enumerate(leaf):
            rows[i] = jsontree.dumps(value, where=f"{where}[{i}]")
        return FieldSpec(path, cls.kind, "json", extra=extra), rows

    def nothing(self, steps: int) -> Array:
        return empty_rows(self.spec)

    def build(self, fetched: Fetched, episodes: Ints, convert: Callable[[Array], Array]) -> list[Array]:
        ends = (
            np.append(fetched.at, fetched.at[-1:] + fetched.located.rows[-1:]) if len(fetched.at) else np.zeros(1, int)
        )
        return fetched.rows[""].converted(convert).cut(ends[episodes])


class StepAxis(RowsAxis):
    """Row t is step t's. Row i of a segment is the same row of its shard in all such fields, so they need no extent."""

    kind = "step"

    def steps(self, value: Array) -> int:
        return len(value)

    def cut(self, value: Array, lo: int, hi: int, steps: int) -> Array:
        return value[lo:hi]

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        rows = end_to_end(parts)
        return {self.spec.name: rows if layout.order is None else rows[layout.order]}, None

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        return own_runs(self.spec, cuts.start + cuts.lo, cuts.start + cuts.hi)


class WholeAxis(RowsAxis):
    """An axis whose rows are a segment's and not its steps': they lie segment by segment, each with an extent."""

    whole = True

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        order = np.argsort(layout.block_segment, kind="stable")
        segment = layout.block_segment[order]
        pieces, steps = [parts[i] for i in order.tolist()], layout.block_length[order].tolist()
        for i in np.flatnonzero(segment[1:] == segment[:-1]).tolist():  # steps of another block follow
            pieces[i] = self.cut(pieces[i], 0, steps[i], steps[i] + 1)
        rows = np.zeros(len(layout.start), np.int64)
        np.add.at(rows, segment, [len(piece) for piece in pieces])
        return {self.spec.name: np.concatenate(pieces)}, Extent(np.cumsum(rows) - rows, rows)


class FreeAxis(WholeAxis):
    """Any number of rows, kept whole."""

    kind = "free"
    of_steps = False
    scalars = True

    def cut(self, value: Array, lo: int, hi: int, steps: int) -> Array:
        """The rows, all of them with the first step."""
        return value if lo == 0 else value[:0]

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The rows of each segment, once and whole, whichever of its steps are wanted."""
        again = (cuts.segment[1:] == cuts.segment[:-1]) & (cuts.episode[1:] == cuts.episode[:-1])
        start, rows = cuts.extent.start, cuts.extent.rows.copy()
        rows[1:][again] = 0
        return own_runs(self.spec, start, start + rows)


class OffsetAxis(WholeAxis):
    """Row t is step t's; the `extra` rows come with the episode's last step.

    An extra row of a block is the first row of the block that follows, which has it again.
    """

    kind = "offset"

    def steps_at_a_guess(self, value: Array) -> int:
        return max(0, len(value) - self.spec.extra)

    def check(self, value: Array, steps: int, *, last: bool) -> None:
        full = steps + self.spec.extra
        if len(value) != full and (last or len(value) != steps):
            raise FieldError(
                f"field {show(self.spec.path)!r} has {len(value)} rows for {steps} steps; on axis "
                f"'offset:{self.spec.extra}' it has {full} (the extra ones with the episode's last step)"
            )

    def cut(self, value: Array, lo: int, hi: int, steps: int) -> Array:
        """The rows; extra ones go with the last step."""
        return value[lo:] if hi == steps else value[lo:hi]

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The steps' rows; after the last step the extra ones: the next steps' rows,
        and past these the segment's own."""
        first, rows = cuts.extent
        start = first + cuts.lo
        stop = first + np.maximum(cuts.lo, np.minimum(cuts.hi, rows))
        if cuts.more.any():
            stop = stop + self._extra_rows(cuts, stop)
        return own_runs(self.spec, start, stop)

    def _extra_rows(self, cuts: Cuts, stop: Ints) -> Ints:
        """The number of extra rows of each cut after which no step is wanted: as many as it can have."""
        first, rows = cuts.extent
        followed = _later_in_episode(cuts, rows * cuts.more) > 0
        limit = np.where(followed, np.minimum(rows, cuts.length), rows)
        there = np.maximum(0, first + limit - stop) * cuts.more
        before = np.cumsum(there) - there
        before = since_head(before, run_heads(cuts.episode))
        taken: Ints = np.minimum(before + there, self.spec.extra) - np.minimum(before, self.spec.extra)
        return taken


def _later_in_episode(cuts: Cuts, values: Ints) -> Ints:
    """The sum, for each cut, of the values of those that follow it in its episode."""
    total = offsets_of(values)
    later: Ints = total[np.cumsum(np.bincount(cuts.episode))[cuts.episode]] - total[1:]
    return later
