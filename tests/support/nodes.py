"""Ranks of several machines on this one: which node they are of is said as torchrun says it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import archive
from tests.support.ticks import NEVER_S

_lock = threading.RLock()


@contextmanager
def on_node(rank: int, world_size: int, nodes: int) -> Iterator[None]:
    """A writer that is opened within is of a rank of one of so many nodes, each of which has as many ranks."""
    with _lock:
        before = dict(os.environ)
        node = rank * nodes // world_size
        local = rank - min(r for r in range(world_size) if r * nodes // world_size == node)
        os.environ |= {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes), "LOCAL_RANK": str(local)}
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def writer(arc: archive.Archive, rank: int, world_size: int, nodes: int, **options: Any) -> archive.Writer:
    """A rank that keeps the journal of its node, which ticks when it is told to."""
    options = {"journal_s": NEVER_S, "journal": "node", "session": "s", **options}
    given = {} if "resume" in options else {"rank": rank, "world_size": world_size}
    with on_node(rank, world_size, nodes):
        return archive.open(arc.url).writer(**given, **options)


def world(arc: archive.Archive, ranks: int, nodes: int, **options: Any) -> list[archive.Writer]:
    """Writers of all ranks, which have met."""
    out = []
    for rank in range(ranks):
        out.append(writer(arc, rank, ranks, nodes, **options))
        met(out[-1])
    return out


def met(w: archive.Writer) -> None:
    """Wait until it has found the others of its node, or knows that it does not."""
    assert w._node is not None
    assert w._node._met.wait(10)


def carries(w: archive.Writer) -> bool:
    """Whether it makes the objects of its node."""
    return w._node is not None and w._node._carrier is not None


def add(w: archive.Writer, name: str, steps: int = 3) -> str:
    """Add an episode of this rank; its id."""
    w.add_episode({"x": np.arange(steps) + 100 * w.rank}, episode_id=f"{name}-{w.rank}")
    return f"{name}-{w.rank}"


def add_all(ws: Sequence[archive.Writer], name: str) -> None:
    """Add an episode of each rank, and have all of them acknowledged."""
    for w in ws:
        add(w, name)
    for w in ws:
        w.sync()


def lines(arc: archive.Archive, session: str = "s") -> dict[str, int]:
    """Who made objects of a session's journals -> how many."""
    keys = [one.key.split("/") for one in arc.storage.scan("journal")]
    out: dict[str, int] = {}
    for _, of, line, _ in keys:
        if of == session:
            out[line] = out.get(line, 0) + 1
    return out
