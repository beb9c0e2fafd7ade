"""Archives in which every value follows from the number of its step, so that any batch can be checked by itself."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from archive import Schema

Array = np.ndarray[Any, Any]
SCHEMA = Schema(next_of={"next/x": "x"}, json=["info"])


def steps_of(t: Array, *, last: bool = True) -> dict[str, Any]:
    """The steps numbered t of one episode; after its last one comes an observation of its own."""
    x = np.stack([t, 2 * t, -t], 1).astype(np.float32)
    after = np.concatenate([x[1:], x[-1:] + (0.5 if last else 0)])
    return {
        "t": t,
        "x": x,
        "next": {"x": after},
        "image": np.repeat(t[:, None], 600, 1).astype(np.int32),
        "reward": (t % 7).astype(np.float32),
        "name": [f"step {v}" for v in t],
        "info": [{"a": int(v)} for v in t],
        "tokens": [np.arange(v % 5) for v in t],
    }


def made(url: Any, lengths: Any, *, schema: Schema = SCHEMA, commits: int = 4, **options: Any) -> archive.Archive:
    """An archive of episodes of these lengths, in several shards, as a reader sees it."""
    storage = options.pop("storage_options", None)
    arc = archive.create(url, storage_options=storage)
    with arc.writer(schema=schema, **options) as w:
        at = 0
        for i, n in enumerate(lengths):
            w.add_episode(steps_of(np.arange(at, at + n)), update_count=i, model_weights_uuid=f"w{i % 3}")
            at += n
            if i % max(1, len(lengths) // commits) == 0:
                w.commit()
    return archive.open(url, storage_options=storage)


def check(batch: dict[str, Any], t: Array, ends: Array) -> None:
    """All fields of a batch are those of the steps numbered t; `ends` are the numbers of last steps."""
    t = np.asarray(t)
    at_end = np.isin(t, ends)
    np.testing.assert_array_equal(batch["t"], t)
    np.testing.assert_array_equal(batch["x"], np.stack([t, 2 * t, -t], -1).astype(np.float32))
    np.testing.assert_array_equal(batch["next"]["x"][..., 0], np.where(at_end, t + 0.5, t + 1))
    np.testing.assert_array_equal(batch["image"], np.repeat(t[..., None], 600, -1))
    np.testing.assert_array_equal(batch["reward"], t % 7)
