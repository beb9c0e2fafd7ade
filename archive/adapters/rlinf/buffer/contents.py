"""Pure, no I/O: which trajectories a buffer has, in order; which of them are in memory; and drawing transitions of the newest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from archive.adapters.rlinf.buffer import flatten
from archive.adapters.rlinf.buffer.flatten import Flat, Part, Signature
from archive.adapters.rlinf.buffer.mapping import Weights
from archive.adapters.rlinf.buffer.slab import Slab
from archive.base import EmptyBufferError, UsageError


class Home(Protocol):
    """An archive that trajectories can be read from."""

    def take(self, names: Sequence[str], which: torch.Tensor, step: torch.Tensor, env: torch.Tensor) -> list[Part]:
        """Transition (step[i], env[i]) of the episode names[which[i]], for each i; in parts of the same fields."""
        ...


@dataclass(eq=False)
class Entry:
    """One trajectory of the buffer."""

    trajectory_id: int
    steps: int  # T
    envs: int  # B
    weights: Weights
    home: Home | None = None  # where it can be read, once that is committed
    name: str = ""  # its episode's id there
    signature: Signature | None = None  # of its rows in memory
    rest: dict[str, Any] | None = None  # what the rows in memory do not have
    renumbered: bool = False  # its episode was written under another trajectory id

    @property
    def samples(self) -> int:
        return self.steps * self.envs

    @property
    def in_memory(self) -> bool:
        return self.signature is not None


class Window(NamedTuple):
    """The trajectories that are sampled, and where the rows of those in memory lie."""

    entries: list[Entry]
    ends: torch.Tensor  # running number of transitions
    starts: torch.Tensor
    slab: torch.Tensor  # which slab; -1 for those that are not in memory
    base: torch.Tensor  # first row there
    total: int


class Miss(NamedTuple):
    """Drawn transitions that have to be read."""

    places: torch.Tensor  # in the batch
    home: Home
    names: list[str]
    which: torch.Tensor
    step: torch.Tensor
    env: torch.Tensor

    def read(self) -> list[Part]:
        found = self.home.take(self.names, self.which, self.step, self.env)
        return [(self.places[mine], rows) for mine, rows in found]


class Contents:
    """The trajectories of a buffer. Not safe for several threads.

    expected: how many are in memory at once, if known.  missing: see `flatten.joined`.
    """

    def __init__(self, missing: Any, expected: int = 0) -> None:
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.total_samples = 0
        self._missing, self._expected = missing, expected
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
        slab = self._slabs.setdefault(made, Slab(self._expected))
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
        self.total_samples -= entry.samples
        self._window = None

    def trim(self, in_memory: int | None, most: int | None) -> None:
        """Let go of what there is no room for: the oldest beyond `most` leave, the oldest beyond `in_memory` of those
        that can be read from an archive are forgotten. None: no limit."""
        while most is not None and len(self.entries) > most:
            self.drop(next(iter(self.entries.values())))
        if in_memory is not None:
            for entry in self.cached[: max(0, len(self._in_memory) - in_memory)]:
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
        return parts, _misses(window, torch.nonzero(of < 0).reshape(-1), which, local)


def drawn_from(window: Window, count: int, *, replace: bool) -> int:
    """How many transitions to draw where `count` are asked for: no more than there are, unless that is wanted."""
    if count < 1:
        raise UsageError(f"num_chunks={count}: ask for at least 1")
    if not window.total:
        raise EmptyBufferError("the buffer is empty, so there is nothing to sample; add trajectories, or load some")
    return count if replace else min(count, window.total)


def _misses(window: Window, places: torch.Tensor, which: torch.Tensor, local: torch.Tensor) -> list[Miss]:
    """What has to be read, by the archive that it lies in."""
    distinct, place = torch.unique(which[places], return_inverse=True)
    entries = [window.entries[i] for i in distinct.tolist()]
    out = []
    for home in dict.fromkeys(e.home for e in entries):
        assert home is not None
        here = torch.tensor([e.home is home for e in entries])
        mine = torch.nonzero(here[place]).reshape(-1)
        among = (torch.cumsum(here, 0) - 1)[place[mine]]  # which of those that lie here
        envs = torch.tensor([e.envs for e in entries])[place[mine]]
        rows = local[places[mine]]
        names = [e.name for e in entries if e.home is home]
        out.append(Miss(places[mine], home, names, among, rows // envs, rows % envs))
    return out
