"""Pure, no I/O: lengths of time as people write them."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from archive.base.errors import UsageError

MOST_S = 1000 * 365 * 86_400  # beyond what anybody waits, and within what times can be added to
UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_WRITTEN = re.compile(r"([0-9]{1,19})([wdhms])")


def seconds_of(given: Any, what: str) -> float:
    """Seconds of "24h", "7d", "90m" (w, d, h, m or s), or of a timedelta; UsageError for anything else."""
    if isinstance(given, timedelta) and given >= timedelta(0):
        return given.total_seconds()
    written = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    found = None if written is None else int(written[1]) * UNITS[written[2]]
    if found is None or found > MOST_S:
        raise UsageError(
            f"{what}={given!r}: give a time such as '24h' or '7d' (w, d, h, m or s), of 1000 years at most"
        )
    return found


def written(seconds: float) -> str:
    """A length of time in the largest unit that makes it a whole number."""
    fits = (f"{int(seconds) // size}{unit}" for unit, size in UNITS.items() if seconds and seconds % size == 0)
    return next(fits, f"{seconds:g}s")
