"""Archives with a field of each kind for datasets of Ray's, and the rows that must come of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from archive import Ragged, Schema

SCHEMA = Schema(axes={"state": "offset", "goal": "free", "level": "free"}, json=["info"])


def steps_of(number: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    counts = rng.integers(0, 4, length)
    return {
        "obs": {"image": rng.integers(0, 255, (length, 3, 2), dtype=np.uint8), "pos": rng.random((length, 2))},
        "reward": rng.random(length, dtype=np.float32),
        "done": np.arange(length) == length - 1,
        "text": [f"{number}.{step}" for step in range(length)],
        "info": [{"step": step} for step in range(length)],
        "tokens": Ragged(rng.integers(0, 99, int(counts.sum()), dtype=np.int32), counts),
        "state": rng.random((length + 1, 2)),
        "goal": rng.random(3),
        "level": np.array(number),
    }


def made(url: Any, lengths: Any, *, commits: int = 1, **options: Any) -> archive.Archive:
    """An archive of episodes e0, e1, ... of these lengths; some are labelled, have metadata, or lack a return."""
    arc = archive.create(url, **options)
    with arc.writer(schema=SCHEMA) as w:
        for i, length in enumerate(lengths):
            steps = steps_of(i, int(length))
            if i % 5 == 4:
                del steps["reward"]
            metadata = {"task": ("push", "pull")[i % 2]} if i % 3 else None
            w.add_episode(steps, episode_id=f"e{i}", update_count=i if i % 4 else None, metadata=metadata)
            if (i + 1) % -(-len(lengths) // commits) == 0:
                w.commit()
    arc.label({f"e{i}": {"success": i % 2 == 0} for i in range(0, len(lengths), 3)})
    return arc.refresh()


def same(ours: Any, theirs: Any) -> None:
    """The values are the same, bit for bit, and so are their dtypes."""
    if isinstance(theirs, Ragged):
        theirs = theirs.split()
    if isinstance(theirs, list) and theirs and isinstance(theirs[0], np.ndarray):
        assert [list(one) for one in ours] == [one.tolist() for one in theirs]
    elif isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    else:
        assert list(ours) == list(theirs)
