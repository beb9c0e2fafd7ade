"""Pure, no I/O: the curves of a field as a page draws them, with their values at each step,
of which it may tell fewer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from archive.views import charts, frames
from archive.views.budget import FIELD_BYTES, Shown
from archive.views.markup import section, shown, tag

EXACT_FLOAT32 = 2**24  # integers beyond have no float32 of their own
POINT_BYTES, VALUE_BYTES = 13, 16 / 3  # of a point of a line, and of a value beside it
MIN_SHARE = 0.002  # of a curve's points; one of fewer is left out


class Curves:
    """The components of a field as lines over the steps, as a part of a page. `components`: how many there are."""

    kind = place = "curves"

    def __init__(self, path: str, lines: Mapping[str, frames.Array], components: int) -> None:
        self.path = path
        self.lines = lines
        self.components = components
        self.length = len(next(iter(lines.values())))
        each = POINT_BYTES * min(self.length, charts.MAX_POINTS) + VALUE_BYTES * self.length
        self.need = int(len(lines) * each) + FIELD_BYTES

    def shown(self, most: int) -> Shown:
        """Above the lines the values at the step shown, below from where to where they go."""
        share = min(1.0, (most - FIELD_BYTES) / max(1, self.need - FIELD_BYTES))
        if share < MIN_SHARE:
            return Shown(left_out=f"{self.path}: its curves")
        every = int(np.ceil(1 / share))
        thinned = f"one value in {every}" if every > 1 else ""
        left_out = f"{self.path}: {thinned}" if thinned else ""
        if not self.length:
            return Shown(played=self._values(every), left_out=left_out)
        drawn = charts.lines(self.lines, width=960, height=90, points=max(2, int(charts.MAX_POINTS * share)))
        known = np.concatenate([v[np.isfinite(v)] for v in self.lines.values()])
        span = f"{shown(float(known.min()))} … {shown(float(known.max()))}" if len(known) else "no finite value"
        more = self.components > len(self.lines)
        some = f"the first {len(self.lines)} of {self.components} are shown" if more else ""
        keys = [tag("span", charts.swatch(i), name, tag("b"), class_="key") for i, name in enumerate(self.lines)]
        box = tag("div", drawn, tag("div", class_="cursor"), class_="curve", data_field=self.path)
        caption = tag("figcaption", "; ".join(filter(None, (span, some, thinned))))
        markup = section(self.path, tag("div", *keys, class_="keys"), box, caption)
        return Shown(markup, self._values(every), left_out)

    def _values(self, every: int) -> dict[str, Any]:
        """The numbers of all lines, one after the other, as float32 where that has the digits that are shown."""
        values = np.stack([line[::every] for line in self.lines.values()])
        wide = np.abs(values[np.isfinite(values)]).max(initial=0) > EXACT_FLOAT32
        packed = values.astype("<f8" if wide else "<f4")
        text = base64.b64encode(packed.tobytes()).decode()
        width = packed.dtype.itemsize
        return {"length": values.shape[1], "of": self.length, "every": every, "width": width, "values": text}
