"""Reading: steps and names of fields come in; arrays go out, each chunk read once and compared with its
checksum."""

from __future__ import annotations

from archive.read import deriving, notes, sizes
from archive.read.batchplan import Empty
from archive.read.chunks import fetching
from archive.read.deriving import Bounds
from archive.read.destination import Destination
from archive.read.episode import Episode
from archive.read.episodes import Episodes
from archive.read.gathering import Gather, IOStats
from archive.read.latesteps import Shown
from archive.read.reader import Reader
from archive.read.selection import Selection
from archive.read.spans import Spans

__all__ = [
    "Bounds",
    "Destination",
    "Empty",
    "Episode",
    "Episodes",
    "Gather",
    "IOStats",
    "Reader",
    "Selection",
    "Shown",
    "Spans",
    "deriving",
    "fetching",
    "notes",
    "sizes",
]
