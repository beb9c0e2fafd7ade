"""Engine: when commits were made, by the clock of the store: a host's own may be off by days."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from archive.store import Storage

_COMMIT = re.compile(r"commits/[0-9]{6}/([0-9]{9,})\.json")


@dataclass(frozen=True)
class Clock:
    """What the store says: its time now, and when it got each commit. Empty: nobody asked."""

    now: datetime | None = None
    made: Mapping[int, datetime] = field(default_factory=dict)


def read_clock(storage: Storage) -> Clock:
    """Ask the store: a small object is put and removed, and the commits are listed."""
    found = ((_COMMIT.fullmatch(one.key), one.modified) for one in storage.scan("commits"))
    made = {int(match[1]): modified for match, modified in found if match}
    return Clock(storage.clock(), made)
