"""Engine: trajectories between memory and archives, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import RLock
from typing import Any

from archive.adapters._rlinf_numbers import NUMBER
from archive.buffers import flatten, mapping
from archive.buffers.contents import Contents, Entry
from archive.buffers.home import ArchiveHome
from archive.buffers.sink import Sink

BATCH_SAMPLES = 4096  # transitions of trajectories that are read together
Tree = dict[str, Any]


def batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Some trajectories at a time, of bounded size."""
    some: list[Entry] = []
    size = 0
    for entry in entries:
        if some and size + entry.samples > BATCH_SAMPLES:
            yield some
            some, size = [], 0
        some.append(entry)
        size += entry.samples
    if some:
        yield some


def read(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Tree]]:
    """Trajectories that lie in archives, whole, in order."""
    for some in batches(entries):
        found: dict[Entry, Tree] = {}
        for home in dict.fromkeys(e.home for e in some):
            mine = [e for e in some if e.home is home]
            assert isinstance(home, ArchiveHome)
            found |= zip(mine, home.trees([e.name for e in mine]), strict=True)
        yield from ((e, found[e]) for e in some)


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
    for some in batches([e for e in entries if e.trajectory_id not in sink.owned]):
        with lock:
            held = {e: contents.tree(e) for e in some if e.in_memory}
        held |= read([e for e in some if e not in held])
        for entry in some:
            taken = mapping.take(held[entry])
            assert taken is not None
            append(sink, entry, taken)


def append(sink: Sink, entry: Entry, taken: mapping.Taken) -> None:
    """Append one trajectory to an archive, as an episode."""
    steps, about = taken.episode(entry.trajectory_id)
    sink.add(entry, steps, sum(t.nbytes for t in taken.flat.rows.values()), **about)


def renumbered(contents: Contents, sink: Sink) -> dict[str, dict[str, int]]:
    """The attribute that says under which ids trajectories are known now, where that is not what their episodes say."""
    found = {sink.owned[i]: i for i, entry in contents.entries.items() if entry.renumbered}
    return {NUMBER: found} if found else {}
