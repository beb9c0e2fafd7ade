"""Pure, no I/O: stretches of steps and keys of rows, as tables. Arrays and columns come in, arrays go out."""

from __future__ import annotations

from archive.steps.steps import Steps, codes, places, row_codes

__all__ = ["Steps", "codes", "places", "row_codes"]
