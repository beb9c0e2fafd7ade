"""State trees: any nest of arrays, numbers, texts and generators comes in; JSON and arrays go out, and back.
Never pickle, no I/O."""

from __future__ import annotations

from archive.fields.state import trees

__all__ = [
    "trees",
]
