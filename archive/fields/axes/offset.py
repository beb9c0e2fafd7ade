"""Pure, no I/O: a row a step and some more at the end, as T + 1 observations."""

from __future__ import annotations

from archive.base import FieldError, show
from archive.fields import Array
from archive.fields.axes.axis import WholeRows


class OffsetAxis(WholeRows):
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
        """Extra rows go with the last step."""
        return value[lo:] if hi == steps else value[lo:hi]

    def before_more(self, value: Array, steps: int) -> Array:
        return value[:steps]
