"""Trajectory archive: reinforcement-learning trajectories on any object store, and a training job brought back from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive.errors import *  # noqa: F403 (the error tree is part of the public face)
from archive.version import __version__

if TYPE_CHECKING:
    from archive.commits import Commit
    from archive.episodes import Episode, Episodes
    from archive.facade import Archive, create, open
    from archive.schema import Schema
    from archive.tree import Ragged
    from archive.writer import Buffer, Writer

_LAZY = {
    "Archive": "facade", "create": "facade", "open": "facade", "Commit": "commits", "Episode": "episodes",
    "Episodes": "episodes", "Schema": "schema", "Ragged": "tree", "Buffer": "writer", "Writer": "writer",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Parts are imported when first used, so that `import archive` is quick."""
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(f"archive.{_LAZY[name]}"), name)
    try:
        return import_module(f"archive.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"archive.{name}":
            raise
        raise AttributeError(f"module 'archive' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
