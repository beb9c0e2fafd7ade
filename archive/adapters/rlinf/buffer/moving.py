"""Engine: trajectories between memory and archives, some at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import Any

import torch

from archive.adapters.rlinf import NUMBER, trajectory
from archive.adapters.rlinf.buffer import flatten, mapping
from archive.adapters.rlinf.buffer.contents import Contents, Entry
from archive.adapters.rlinf.buffer.home import ArchiveHome
from archive.adapters.rlinf.buffer.sink import Sink

BATCH_BYTES = 64 * 1024 * 1024  # of trajectories that are read together
Tree = dict[str, Any]


def read(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Tree]]:
    """Trajectories that lie in archives, whole, in order; in batches of about `BATCH_BYTES`, as the first ones tell."""
    at, samples, nbytes, limit = 0, 0, 0, 1
    while at < len(entries):
        some = _first(entries[at:], limit)
        for entry, tree in zip(some, _trees(some), strict=True):
            samples += entry.samples
            nbytes += sum(t.nbytes for _, t in trajectory.leaves(tree) if isinstance(t, torch.Tensor))
            yield entry, tree
        at += len(some)
        limit = BATCH_BYTES * samples // max(1, nbytes)


def _first(entries: Sequence[Entry], samples: int) -> Sequence[Entry]:
    """The first of them, with at most so many transitions, but at least one."""
    ends = itertools.accumulate(e.samples for e in entries)
    return entries[: max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= samples, ends)))]


def _trees(entries: Sequence[Entry]) -> list[Tree]:
    found: dict[Entry, Tree] = {}
    for home in dict.fromkeys(e.home for e in entries):
        mine = [e for e in entries if e.home is home]
        assert isinstance(home, ArchiveHome)
        found |= zip(mine, home.trees([e.name for e in mine]), strict=True)
    return [found[e] for e in entries]


def fill(contents: Contents, entries: Sequence[Entry], in_memory: int | None) -> Contents:
    """Put trajectories that lie in archives into `contents`, the newest of them (None: all) in memory too."""
    for entry in entries:
        contents.add(entry)
    newest = entries if in_memory is None else entries[max(0, len(entries) - in_memory) :]
    for entry, tree in read(newest):
        contents.remember(entry, flatten.flatten(tree, entry.steps, entry.envs))
    return contents


def bring(contents: Contents, lock: RLock, sink: Sink) -> None:
    """Append to an archive what it lacks of a buffer, and let go there of what left the buffer."""
    with lock:
        entries = list(contents.entries.values())
    sink.keep_only(e.trajectory_id for e in entries)
    lacking = [e for e in entries if e.trajectory_id not in sink.owned]
    elsewhere = read([e for e in lacking if not e.in_memory])
    ahead = next(elsewhere, None)
    for entry in lacking:
        if ahead is not None and ahead[0] is entry:
            tree, ahead = ahead[1], next(elsewhere, None)
        else:
            tree = _held(contents, lock, entry)
        taken = mapping.take(tree)
        assert taken is not None
        append(sink, entry, taken.made_by(entry.weights))


def _held(contents: Contents, lock: RLock, entry: Entry) -> Tree:
    """The tree of a trajectory that is, or was a moment ago, in memory."""
    with lock:
        if entry.in_memory:
            return contents.tree(entry)
    return _trees([entry])[0]


def append(sink: Sink, entry: Entry, taken: mapping.Taken) -> None:
    """Append one trajectory to an archive, as an episode."""
    steps, about = taken.episode(entry.trajectory_id)
    sink.add(entry, steps, sum(t.nbytes for t in taken.flat.rows.values()), **about)


def renumbered(contents: Contents, sink: Sink) -> dict[str, dict[str, int]]:
    """The attribute that says under which ids trajectories are known now, where that is not what their episodes say."""
    found = {sink.owned[i]: i for i, entry in contents.entries.items() if entry.renumbered}
    return {NUMBER: found} if found else {}
