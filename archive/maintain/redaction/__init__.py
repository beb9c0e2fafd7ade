"""Redacting: ids of episodes come in; a forgetting goes out that takes their bytes out of the shards which they share
with others, and names what stands in its way."""

from __future__ import annotations

from archive.maintain.redaction.redacting import Redaction

__all__ = ["Redaction"]
