"""Pure, no I/O: which trajectories a buffer has, in order; which of them are in memory;
and drawing transitions of the newest."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from archive.adapters.rlinf.buffer import flatten
from archive.adapters.rlinf.buffer.flatten import Flat, Part, Rows, Signature, gathered
from archive.adapters.rlinf.buffer.window import Entry, Miss, Window, misses

_SLACK = 1.5  # room taken when more is needed, in proportion to what is


class Slab:
    """Rows of trajectories of one signature. Not safe for several threads.

    expected: how many trajectories it will hold at once, if known: then room for as many of the first one's size is
    reserved (and touched only as it is filled).
    """

    def __init__(self, expected: int = 0) -> None:
        self._expected = expected
        self._tensors: Rows = {}
        self._capacity = 0
        self._spans: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: int) -> bool:
        return key in self._spans

    def start(self, key: int) -> int:
        """Row at which a trajectory begins."""
        return self._spans[key][0]

    def put(self, key: int, rows: Rows, count: int) -> None:
        """Copy a trajectory's rows in."""
        start = self._place(count)
        if start is None:
            self._make_room(rows, count)
            start = self._place(count)
            assert start is not None
        for path, value in rows.items():
            self._tensors[path][start : start + count] = value
        self._spans[key] = (start, start + count)

    def drop(self, key: int) -> None:
        """Forget a trajectory."""
        del self._spans[key]

    def view(self, key: int) -> Rows:
        """A trajectory's rows, not copied."""
        start, stop = self._spans[key]
        return {path: tensor[start:stop] for path, tensor in self._tensors.items()}

    def take(self, index: torch.Tensor) -> Rows:
        """Copies of these rows."""
        return {path: gathered(tensor, index) for path, tensor in self._tensors.items()}

    def _place(self, count: int) -> int | None:
        """Where that many rows are free."""
        at = 0
        for start, stop in sorted(self._spans.values()):
            if start - at >= count:
                return at
            at = stop
        return at if self._capacity - at >= count and self._tensors else None

    def _make_room(self, rows: Rows, count: int) -> None:
        """Close the gaps, in larger tensors where those would be left nearly full."""
        needed = count + sum(stop - start for start, stop in self._spans.values())
        if not self._tensors:
            self._capacity = count * max(1, self._expected)
        elif needed * _SLACK > self._capacity:
            self._capacity = int(needed * _SLACK) + 1
        old, spans = self._tensors, sorted(self._spans.items(), key=lambda item: item[1])
        self._tensors = {p: torch.empty((self._capacity, *t.shape[1:]), dtype=t.dtype) for p, t in rows.items()}
        at = 0
        for key, (start, stop) in spans:
            for path, tensor in self._tensors.items():
                tensor[at : at + stop - start] = old[path][start:stop]
            self._spans[key] = (at, at + stop - start)
            at += stop - start


@dataclass(frozen=True)
class Limits:
    """How many trajectories stay; None for all."""

    in_memory: int | None = None  # of those that can be read from an archive
    window: int | None = None  # in a buffer that keeps no more than its window, or than it has loaded
    most: int | None = None


class Contents:
    """The trajectories of a buffer. Not safe for several threads.

    missing: see `flatten.joined`.  loaded: how many of them were there from the start.
    """

    def __init__(self, missing: Any, limits: Limits, loaded: int = 0) -> None:
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.total_samples = 0
        self._missing = missing
        self._limits = limits
        self._loaded = loaded
        self.left: list[int] = []  # ids of those that left since somebody was last told
        self._slabs: dict[Signature, Slab] = {}
        self._in_memory: OrderedDict[int, Entry] = OrderedDict()
        self._window: tuple[int, Window] | None = None

    @property
    def ids(self) -> list[int]:
        return list(self.entries)

    @property
    def cached(self) -> list[Entry]:
        """Those in memory, in the order in which they came there."""
        return list(self._in_memory.values())

    def check(self, flats: Iterable[Flat]) -> None:
        """Refuse trajectories whose fields don't go with those there are."""
        have = next(iter(self._slabs), None)
        for flat in flats:
            have = have or flat.signature
            flatten.check_signature(have, flat.signature, self._missing)

    def add(self, entry: Entry, flat: Flat | None = None) -> None:
        """A trajectory more, the newest; in memory, if its rows are given."""
        self.entries[entry.trajectory_id] = entry
        self.total_samples += entry.samples
        self._window = None
        if flat is not None:
            self.remember(entry, flat)

    def remember(self, entry: Entry, flat: Flat) -> None:
        """Copy a trajectory's rows into memory."""
        made = flat.signature
        slab = self._slabs.setdefault(made, Slab(self._limits.in_memory or 0))
        slab.put(entry.trajectory_id, flat.rows, flat.count)
        entry.signature, entry.rest = made, flat.rest
        self._in_memory[entry.trajectory_id] = entry
        self._window = None

    def forget(self, entry: Entry) -> None:
        """A trajectory's rows need not be in memory any more."""
        if entry.signature is None:
            return
        slab = self._slabs[entry.signature]
        slab.drop(entry.trajectory_id)
        if not len(slab) and len(self._slabs) > 1:
            del self._slabs[entry.signature]
        entry.signature = entry.rest = None
        del self._in_memory[entry.trajectory_id]
        self._window = None

    def drop(self, entry: Entry) -> None:
        """A trajectory leaves the buffer."""
        self.forget(entry)
        del self.entries[entry.trajectory_id]
        self.left.append(entry.trajectory_id)
        self.total_samples -= entry.samples
        self._window = None

    def trim(self) -> None:
        """Let go of what there is no room for: the oldest leave,
        the oldest in memory that can be read are forgotten."""
        while len(self.entries) > self._most:
            self.drop(next(iter(self.entries.values())))
        if self._limits.in_memory is not None:
            self.forget_read(len(self._in_memory) - self._limits.in_memory)

    @property
    def _most(self) -> float:
        own = None if self._limits.window is None else max(self._limits.window, self._loaded)
        return min((n for n in (own, self._limits.most) if n is not None), default=math.inf)

    def leaving(self) -> list[int]:
        """Ids of those that left since somebody was last told, and of those that leave when another is added."""
        beyond = max(0, len(self.entries) + 1 - self._most)
        return [*self.left, *(islice(self.entries, int(beyond)) if beyond else ())]

    def forget_read(self, count: int) -> None:
        """Of the oldest `count` in memory those that can be read from an archive need not be there any more."""
        for entry in self.cached[: max(0, count)]:
            if entry.home is not None:
                self.forget(entry)

    def tree(self, entry: Entry) -> dict[str, Any]:
        """A trajectory in memory, as it was given; its tensors are not copied."""
        assert entry.signature is not None
        assert entry.rest is not None
        rows = self._slabs[entry.signature].view(entry.trajectory_id)
        out: dict[str, Any] = flatten.rebuilt(entry.rest, rows, entry.steps, entry.envs)
        return out

    def window(self, size: int) -> Window:
        """The newest `size` trajectories; 0 for all."""
        if self._window is None or self._window[0] != size:
            every = list(self.entries.values())
            self._window = size, self._made(every[-size:] if size else every)
        return self._window[1]

    def _made(self, entries: list[Entry]) -> Window:
        samples = torch.tensor([e.samples for e in entries], dtype=torch.int64)
        ends = torch.cumsum(samples, 0)
        number = {signature: i for i, signature in enumerate(self._slabs)}
        slab = [-1 if e.signature is None else number[e.signature] for e in entries]
        base = [0 if e.signature is None else self._slabs[e.signature].start(e.trajectory_id) for e in entries]
        total = int(ends[-1]) if entries else 0
        return Window(entries, ends, ends - samples, torch.tensor(slab), torch.tensor(base), total)

    def gather(self, window: Window, drawn: torch.Tensor) -> tuple[list[Part], list[Miss]]:
        """Rows of the transitions drawn (numbers within the window): those in memory, and what has to be read."""
        which = torch.bucketize(drawn, window.ends, right=True)
        local = drawn - window.starts[which]
        slabs = list(self._slabs.values())
        of = window.slab[which]
        used = torch.unique(of).tolist()
        if len(used) == 1 and used[0] >= 0:
            return [(torch.arange(len(drawn)), slabs[used[0]].take(window.base[which] + local))], []
        parts: list[Part] = []
        for number in used:
            if number >= 0:
                places = torch.nonzero(of == number).reshape(-1)
                parts.append((places, slabs[number].take(window.base[which[places]] + local[places])))
        return parts, misses(window, torch.nonzero(of < 0).reshape(-1), which, local)
