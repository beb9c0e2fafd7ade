"""Pure, no I/O: rows, or one value, that belong to the episode and not to its steps."""

from __future__ import annotations

from collections.abc import Mapping

from archive.fields import Array, ShardSchema
from archive.fields.axes.axis import Cuts, Located, WholeRows, own_runs


class FreeAxis(WholeRows):
    """Any number of rows, kept whole."""

    kind = "free"
    of_steps = False
    scalars = True

    def cut(self, value: Array, lo: int, hi: int, steps: int) -> Array:
        """All rows go with the first step."""
        return value if lo == 0 else value[:0]

    def before_more(self, value: Array, steps: int) -> Array:
        return value

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """All rows of each segment, once, whichever of its steps are wanted."""
        again = (cuts.segment[1:] == cuts.segment[:-1]) & (cuts.episode[1:] == cuts.episode[:-1])
        start, rows = cuts.extent.start, cuts.extent.rows.copy()
        rows[1:][again] = 0
        return own_runs(self.spec, start, start + rows)
