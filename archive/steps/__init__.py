"""Pure, no I/O: stretches of steps and keys of rows, as tables. Arrays and columns come in, arrays go out."""

from __future__ import annotations

from archive.steps.keys import codes, places, row_codes
from archive.steps.steps import Meeting, Steps

__all__ = ["Meeting", "Steps", "codes", "places", "row_codes"]
