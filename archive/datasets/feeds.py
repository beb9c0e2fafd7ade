"""What batches can be drawn from: episodes, and the columns and new ids that come with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import ColumnError, NotFoundError, UsageError
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.read import Episodes

Renumber = Callable[[dict[str, Any], Ints], dict[str, Any]]


def _as_it_is(batch: dict[str, Any], numbers: Ints) -> dict[str, Any]:
    return batch


@dataclass(frozen=True)
class Feed:
    """Episodes, and what belongs to their steps. `renumbered` gives a batch the ids that it has here."""

    episodes: Episodes
    column: Callable[[str], Any]
    renumbered: Renumber = _as_it_is
    seed: int | None = None
    is_share: bool = False


def feed_of(given: Any, buffer: str | None = None) -> Feed:
    """What is drawn from: Episodes, an archive, a checkpoint, a share of a plan, or one buffer of a share."""
    if isinstance(given, Checkpoint):
        return _of_checkpoint(given, buffer)
    if hasattr(type(given), "layout") and hasattr(type(given), "columns"):  # of the type: they are read when asked for
        own = given if buffer is None else given.buffer(buffer)
        return Feed(own.episodes, lambda name: _named(own.columns, name), own.renumber_rows, given.seed, True)
    episodes = given if isinstance(given, Episodes) else getattr(given, "episodes", None)
    if not isinstance(episodes, Episodes):
        raise UsageError(
            f"batches cannot be drawn from a {type(given).__name__}; give Episodes, an archive, a checkpoint or a share"
        )
    return Feed(episodes if buffer is None else episodes.filter(buffer=buffer), _no_column)


def _of_checkpoint(ck: Checkpoint, buffer: str | None) -> Feed:
    name = buffer or (MAIN_BUFFER if MAIN_BUFFER in ck.buffers else next(iter(ck.buffers), MAIN_BUFFER))
    if buffer is not None and buffer not in ck.buffers:
        raise NotFoundError(
            f"checkpoint {ck.name!r} has no buffer {buffer!r}; it has: {', '.join(ck.buffers) or 'none'}"
        )
    episodes = ck.episodes.filter(buffer=name)

    def column(wanted: str) -> Any:
        parts = [ck.column(wanted, rank, name) for rank in ck.ranks]
        return np.concatenate(parts) if parts else np.zeros(0)

    return Feed(episodes, column)


def _named(columns: Any, name: str) -> Any:
    if name not in columns:
        raise ColumnError(f"there is no column {name!r}; there are: {', '.join(columns) or 'none'}")
    return columns[name]


def _no_column(name: str) -> Any:
    raise ColumnError(
        f"column {name!r} belongs to a checkpoint: draw from the checkpoint or a share of it, or give an array of one "
        "value a step"
    )
