"""Episodes, found where earlier versions pickled them."""

from __future__ import annotations

from archive.read.episodes import *  # noqa: F403
