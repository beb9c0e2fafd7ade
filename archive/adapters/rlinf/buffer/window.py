"""Pure, no I/O: trajectories of a buffer, and the window of them that transitions are drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from archive.adapters.rlinf.buffer.flatten import Part, Signature
from archive.adapters.rlinf.buffer.mapping import Weights
from archive.base import EmptyBufferError, UsageError


class Home(Protocol):
    """An archive that trajectories can be read from."""

    def take(self, names: Sequence[str], which: torch.Tensor, step: torch.Tensor, env: torch.Tensor) -> list[Part]:
        """Transition (step[i], env[i]) of the episode names[which[i]], for each i; in parts of the same fields."""
        ...

    def trees(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These trajectories, whole, in order; read ahead in bounded memory."""
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


def drawn_from(window: Window, count: int, *, replace: bool) -> int:
    """How many transitions to draw where `count` are asked for: no more than there are, unless that is wanted."""
    if count < 1:
        raise UsageError(f"num_chunks={count}: ask for at least 1")
    if not window.total:
        raise EmptyBufferError("the buffer is empty, so there is nothing to sample; add trajectories, or load some")
    return count if replace else min(count, window.total)


def misses(window: Window, places: torch.Tensor, which: torch.Tensor, local: torch.Tensor) -> list[Miss]:
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
