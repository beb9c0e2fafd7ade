"""Pure, no I/O: a row a step and some more at the end, as T + 1 observations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archive.arrays import Ints, offsets_of, run_heads, since_head
from archive.base import FieldError, show
from archive.fields import Array, ShardSchema
from archive.fields.axes.axis import Cuts, Located, WholeRows, own_runs


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
        """How many of the extra rows each cut has, of those after which no step is wanted: as many as it can."""
        first, rows = cuts.extent
        followed = _later_in_episode(cuts, rows * cuts.more) > 0
        limit = np.where(followed, np.minimum(rows, cuts.length), rows)
        there = np.maximum(0, first + limit - stop) * cuts.more
        before = np.cumsum(there) - there
        before = since_head(before, run_heads(cuts.episode))
        taken: Ints = np.minimum(before + there, self.spec.extra) - np.minimum(before, self.spec.extra)
        return taken


def _later_in_episode(cuts: Cuts, values: Ints) -> Ints:
    """Of each cut the sum of the values of those that follow it in its episode."""
    total = offsets_of(values)
    later: Ints = total[np.cumsum(np.bincount(cuts.episode))[cuts.episode]] - total[1:]
    return later
