"""Does I/O: small archives to try things out, also those that a crash left behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.testing import faults

if TYPE_CHECKING:
    from archive import Archive, Writer

NEVER_S = 3600.0  # a journal that ticks when it is told to


def steps(length: int, seed: int = 0) -> dict[str, Any]:
    """An episode of fields of several kinds, with other values for each seed; `reward` is the seed."""
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.standard_normal((length, 3)).astype(np.float32),
        "action": rng.integers(0, 9, length),
        "reward": np.ones(length, np.float32) * seed,
        "text": [f"{seed}:{i}" for i in range(length)],
    }


def small_archive(
    url: Any,
    episodes: int = 3,
    *,
    commits: int = 1,
    checkpoints: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Archive:
    """Create an archive of episodes e0, e1, ...: number i is `steps(4 + i, i)`, by weights "wi" at update count i.

    commits: in about so many.  checkpoints: after each episode one, named step-i.  options: of `archive.create`.
    """
    import archive

    arc = archive.create(url, storage_options=storage_options, **options)
    with arc.writer() as w:
        for i in range(episodes):
            w.add_episode(steps(4 + i, i), episode_id=f"e{i}", model_weights_uuid=f"w{i}", update_count=i)
            if checkpoints:
                w.checkpoint(i, name=f"step-{i}").result()
            elif (i + 1) % max(1, episodes // commits) == 0:
                w.commit()
    return arc


def crashed_job(
    url: Any, ranks: int = 2, *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> Archive:
    """Create the leftovers of a job of several ranks that died: each rank R has episode "R-saved" in the checkpoint
    step-1, "R-journaled" in its journal, so that `arc.recover()` brings it back, and "R-lost" nowhere."""
    import archive

    arc = archive.create(url, storage_options=storage_options, **options)
    writers = [arc.writer(rank, ranks, session="crashed", journal_s=NEVER_S) for rank in range(ranks)]
    _add(writers, "saved")
    for pending in [w.checkpoint(1) for w in writers]:
        pending.result()
    _add(writers, "journaled")
    for w in writers:
        w.sync()
    _add(writers, "lost")
    with faults.at(arc, what="fail", times=None):
        for w in writers:
            _die(w)
    return archive.open(url, storage_options=storage_options)


def _add(writers: list[Writer], what: str) -> None:
    for w in writers:
        w.add_episode(steps(4, w.rank), episode_id=f"{w.rank}-{what}")


def _die(w: Writer) -> None:
    """End a writer without its store, like a process that dies."""
    import contextlib

    from archive.base import ArchiveError

    with contextlib.suppress(ArchiveError):
        w.close()
