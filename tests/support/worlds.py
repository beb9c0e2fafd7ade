"""Worlds of buffers in one process: M of them saved as the ranks of a job, N restored from a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import archive
import resharding
from archive.checkpoint.checkpoints import Checkpoint

WORLDS = ((4, 3), (2, 5))
STORES = ("memory", "local", "moto")


def save_world(
    url: str,
    objects: Sequence[Any],
    save: Callable[..., Any],
    step: int = 1,
    *,
    session: str = "first",
    storage_options: Any = None,
    schema: Any = None,
    **options: Any,
) -> Checkpoint:
    """`save(object, writer, step=step)` on each rank, each with an archive of its own; the checkpoint they make."""

    def one(rank: int) -> int:
        arc = archive.open(url, create=True, storage_options=storage_options)
        with arc.writer(rank, len(objects), session=session, schema=schema) as w:
            return int(save(objects[rank], w, step=step, **options).result(60).number)

    with ThreadPoolExecutor(len(objects)) as pool:
        (number,) = set(pool.map(one, range(len(objects))))
    arc = archive.open(url, storage_options=storage_options)
    found = arc.checkpoints.latest
    assert found is not None
    assert found.number == number
    return found


def shares(checkpoint: Checkpoint, world_size: int, **plan: Any) -> list[Any]:
    """What each target rank gets."""
    made = resharding.plan(checkpoint, world_size=world_size, **plan)
    return [made.share(rank) for rank in range(world_size)]
