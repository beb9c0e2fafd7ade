"""Trajectories between memory and archives, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import RLock
from typing import Any

from archive.adapters.rlinf import NUMBER
from archive.adapters.rlinf.buffer import flatten, mapping
from archive.adapters.rlinf.buffer.contents import Contents
from archive.adapters.rlinf.buffer.sink import Sink
from archive.adapters.rlinf.buffer.window import Entry

Tree = dict[str, Any]


def read(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Tree]]:
    """Trajectories that lie in archives, whole, in order; read ahead in bounded memory."""
    homes = {home: [e.name for e in entries if e.home is home] for home in dict.fromkeys(e.home for e in entries)}
    trees = {home: home.trees(names) for home, names in homes.items() if home is not None}
    for entry in entries:
        assert entry.home is not None
        yield entry, next(trees[entry.home])


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
    return next(read([entry]))[1]


def append(sink: Sink, entry: Entry, taken: mapping.Taken, leaving: Sequence[int] = ()) -> None:
    """Append one trajectory to an archive, as an episode. leaving: see `Sink.add`."""
    nbytes = sum(t.nbytes for t in taken.flat.rows.values())
    sink.add(entry, taken.as_episode(entry.trajectory_id), nbytes, leaving)


def renumbered(contents: Contents, sink: Sink) -> dict[str, dict[str, int]]:
    """The attribute that says under which ids trajectories are known now, where that is not what their episodes say."""
    found = {sink.owned[i]: i for i, entry in contents.entries.items() if entry.renumbered}
    return {NUMBER: found} if found else {}
