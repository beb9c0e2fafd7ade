"""Objects below one root; the only room that reaches the network. Keys, ranges and bytes come in; bytes, or the
library's errors, go out."""

from __future__ import annotations

from archive.store import smallfiles
from archive.store.bases import Roots, as_allowed, join_key, split_key
from archive.store.connection import around
from archive.store.counts import VERBS, IOStats
from archive.store.drivers import Buffer
from archive.store.policies import policy
from archive.store.prices import GB, PRICES, Prices, prices_of
from archive.store.proof import create_known, prove
from archive.store.reads import Filling
from archive.store.root import local_path
from archive.store.smallfiles import file_exists, read_file, write_file
from archive.store.storage import Storage
from archive.store.writes import under_fresh_name

__all__ = [
    "GB",
    "PRICES",
    "VERBS",
    "Buffer",
    "Filling",
    "IOStats",
    "Prices",
    "Roots",
    "Storage",
    "around",
    "as_allowed",
    "create_known",
    "file_exists",
    "join_key",
    "local_path",
    "policy",
    "prices_of",
    "prove",
    "read_file",
    "smallfiles",
    "split_key",
    "under_fresh_name",
    "write_file",
]
