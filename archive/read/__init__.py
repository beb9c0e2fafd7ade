"""Reading: steps and names of fields come in; arrays go out, each chunk read once and compared with its
checksum."""

from __future__ import annotations

from archive.read import deriving, fetching
from archive.read.deriving import Bounds
from archive.read.episode import Episode
from archive.read.episodes import Episodes
from archive.read.fieldparts import Selection, empty_rows, episode_job
from archive.read.gathering import Gather, IOStats
from archive.read.liveparts import LiveParts
from archive.read.reader import Reader
from archive.read.segments import Part, Slice

__all__ = [
    "Bounds",
    "Episode",
    "Episodes",
    "Gather",
    "IOStats",
    "LiveParts",
    "Part",
    "Reader",
    "Selection",
    "Slice",
    "deriving",
    "empty_rows",
    "episode_job",
    "fetching",
]
