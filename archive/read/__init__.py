"""Reading. Steps and names of fields come in; arrays go out, each chunk read once and compared with its
checksum."""

from __future__ import annotations

from archive.read import derivations, lateshards, notes, sizes
from archive.read.chunks import indexes_of, members_of
from archive.read.derivations import Bounds
from archive.read.episode import Episode
from archive.read.episodes import Episodes
from archive.read.gather import Empty, Gather, GatherStats
from archive.read.lateshards import Gathered, LateRows, StoredFields
from archive.read.reader import Destination, Reader
from archive.read.selection import Selection, Windows
from archive.read.spans import Shown, Spans

__all__ = [
    "Bounds",
    "Destination",
    "Empty",
    "Episode",
    "Episodes",
    "Gather",
    "GatherStats",
    "Gathered",
    "LateRows",
    "Reader",
    "Selection",
    "Shown",
    "Spans",
    "StoredFields",
    "Windows",
    "derivations",
    "indexes_of",
    "lateshards",
    "members_of",
    "notes",
    "sizes",
]
