"""Trajectory archive: reinforcement-learning trajectories on any object store, and a training job brought back from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive.errors import *  # noqa: F403 (the error tree is part of the public face)
from archive.logs import make_visible as _make_visible
from archive.version import __version__ as __version__

if TYPE_CHECKING:
    from archive.buffer import Buffer as Buffer
    from archive.checkpoints import Checkpoint as Checkpoint
    from archive.commits import Commit as Commit
    from archive.episodes import Episode as Episode
    from archive.episodes import Episodes as Episodes
    from archive.facade import Archive as Archive
    from archive.facade import create as create
    from archive.facade import open as open
    from archive.schema import Schema as Schema
    from archive.tree import Ragged as Ragged
    from archive.writer import Writer as Writer

_LAZY = {
    "Archive": "facade", "create": "facade", "open": "facade", "Commit": "commits", "Episode": "episodes",
    "Episodes": "episodes", "Schema": "schema", "Ragged": "tree", "Buffer": "buffer", "Writer": "writer",
    "Checkpoint": "checkpoints",
}  # fmt: skip


_make_visible()


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
