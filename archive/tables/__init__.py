"""The tables of the manifest as they are declared, and how their rows hang on segments: rows come in, masks and numbers
of rows go out."""

from __future__ import annotations

from archive.tables.declared import (
    ADDRESS,
    CHUNK_FILE,
    COUNT,
    FOLLOWING,
    LISTED,
    LIVE_STREAM,
    MOST_RANKS,
    MOST_SIBLINGS,
    SHARDED,
    STREAM,
    STRETCH,
    TABLES,
    Column,
)
from archive.tables.relations import (
    KEYS,
    Address,
    addresses,
    among,
    coded,
    distinct,
    follow,
    mention,
    news,
    objects_of,
    of_segments,
    overlaps,
    segments_of,
)

__all__ = [
    "ADDRESS",
    "CHUNK_FILE",
    "COUNT",
    "FOLLOWING",
    "KEYS",
    "LISTED",
    "LIVE_STREAM",
    "MOST_RANKS",
    "MOST_SIBLINGS",
    "SHARDED",
    "STREAM",
    "STRETCH",
    "TABLES",
    "Address",
    "Column",
    "addresses",
    "among",
    "coded",
    "distinct",
    "follow",
    "mention",
    "news",
    "objects_of",
    "of_segments",
    "overlaps",
    "segments_of",
]
