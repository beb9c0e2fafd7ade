"""Pure, no I/O: one row a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from archive.arrays import end_to_end
from archive.fields import Array, ShardSchema
from archive.fields.axes.axis import Cuts, Layout, Located, Rows, Stored, own_runs


class StepAxis(Rows):
    """Row t is step t's. Row i of a segment is the same row of its shard in all such fields, so they need no extent."""

    kind = "step"

    def steps(self, value: Array) -> int:
        return len(value)

    def cut(self, value: Array, lo: int, hi: int, steps: int) -> Array:
        return value[lo:hi]

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        rows = end_to_end(parts)
        return Stored({self.spec.name: rows if layout.order is None else rows[layout.order]})

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        return own_runs(self.spec, cuts.start + cuts.lo, cuts.start + cuts.hi)
