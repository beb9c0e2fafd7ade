"""What the tests of the data model share: fresh archives in memory, and equality to the bit."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

import archive
from archive.fields.nests import Ragged
from archive.log import Change
from archive.testing import steps


def fresh(**options: Any) -> archive.Archive:
    """A new, empty archive in memory."""
    return archive.create(f"memory://{uuid.uuid4().hex}", **options)


def reopened(arc: archive.Archive, **options: Any) -> archive.Archive:
    """The same archive as somebody else sees it."""
    return archive.open(arc.url, **options)


def looked_up_again(ck: archive.Checkpoint) -> archive.Checkpoint:
    """The same checkpoint, as who looks it up now gets it: a start that begins from it ends what was opened since."""
    return archive.open(ck.snapshot.storage.url).checkpoints.at_commit(ck.number)


def round_trip(nest: Any, schema: archive.Schema | None = None, **options: Any) -> dict[str, Any]:
    """One episode, written, and read by somebody else."""
    arc = fresh()
    with arc.writer(schema=schema) as w:
        w.add_episode(nest, **options)
    return reopened(arc).episodes[0].read()


def identical(got: Any, want: Any) -> bool:
    """Equal to the bit, in dtype, shape and structure."""
    if isinstance(want, Ragged):
        return isinstance(got, Ragged) and identical(got.values, want.values) and identical(got.lengths, want.lengths)
    if isinstance(want, dict):
        return isinstance(got, dict) and got.keys() == want.keys() and all(identical(got[k], want[k]) for k in want)
    if isinstance(want, (list, tuple)):
        return type(got) is type(want) and len(got) == len(want) and all(map(identical, got, want))
    if not isinstance(want, np.ndarray):
        return type(got) is type(want) and bool(got == want)
    if not isinstance(got, np.ndarray) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype.names:  # its padding is no value
        return all(identical(got[name], want[name]) for name in want.dtype.names)
    return got.tolist() == want.tolist() if want.dtype.hasobject else got.tobytes() == want.tobytes()


def stored_objects(arc: archive.Archive) -> set[str]:
    """The paths of all objects below an archive in memory."""
    import fsspec

    return set(fsspec.filesystem("memory").find(arc.url.removeprefix("memory:/")))


def contents(arc: archive.Archive) -> dict[str, dict[str, Any]]:
    """Episode id -> its steps."""
    return {e.id: e.read() for e in reopened(arc).episodes}


def segment_rows(arc: archive.Archive) -> list[dict[str, Any]]:
    """The rows of the segments table, read by somebody who knows only Parquet."""
    import fsspec
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for url in reopened(arc).manifest_urls:
        with fsspec.open(url) as f:
            rows += pq.read_table(f).to_pylist()
    return rows


def with_checkpoints(url: Any, **options: Any) -> archive.Archive:
    """A new archive of three checkpoints, in commits 2 to 4, each with one episode more: e0, e1, e2."""
    arc = archive.create(url, **options)
    with arc.writer() as w:
        for i in range(3):
            w.add_episode(steps(3, i), episode_id=f"e{i}")
            w.checkpoint(i, name=f"step-{i}").result()
    return arc


def mixed(steps: int, seed: int) -> dict[str, Any]:
    """Steps with frames, numbers, flags and text."""
    rng = np.random.default_rng(seed)
    return {
        "frame": rng.integers(0, 256, (steps, 40, 40), np.uint8),
        "x": rng.normal(size=(steps, 3)),
        "done": np.arange(steps) % 7 == 0,
        "name": np.array([f"n{i}" for i in range(steps)], object),
    }


def by_hand(kind: str, **says: Any) -> Change:
    """A change that adds no rows; its commit says this."""
    return Change(kind, lambda parent, attempt: ({}, says))
