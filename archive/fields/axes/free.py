"""Pure, no I/O: rows, or one value, that belong to the episode and not to its steps."""

from __future__ import annotations

from archive.fields import Array
from archive.fields.axes.axis import WholeRows


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
