"""Pure, no I/O: the choice of the next of `count` things. Each strategy draws with the generator it is given.

A strategy is any object with the methods of `Strategy`; its state is numbers and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from archive.arrays import ascending
from archive.base import UsageError

_EPSILON = 1e-8  # so that a priority of 0 is drawn at times


class Draw(NamedTuple):
    """Places from 0 to the strategy's count, and their importance weights if they are not equally likely."""

    places: torch.Tensor
    weights: torch.Tensor | None = None


class Strategy(Protocol):
    """A strategy that draws places below a count that it was made for."""

    def draw(self, size: int, generator: torch.Generator) -> Draw: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Uniform:
    """Uniform draws. With `replace` each is independent, otherwise a batch has none twice."""

    def __init__(self, count: int, *, replace: bool = False) -> None:
        self.count = count
        self.replace = replace

    def draw(self, size: int, generator: torch.Generator) -> Draw:
        check_size(size, self.count, replace=self.replace)
        if self.replace:
            return Draw(torch.randint(self.count, (size,), generator=generator))
        return Draw(distinct(size, self.count, generator))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise UsageError(f"a uniform strategy has no state, and was given {sorted(state)}")


class WithoutReplacement:
    """Draws of each in random order, then of all again in another; no batch has one twice, at the seam either."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.position = 0
        self._seed = 0
        self._late = torch.zeros(0, dtype=torch.int64)
        self._order: torch.Tensor | None = None

    def draw(self, size: int, generator: torch.Generator) -> Draw:
        check_size(size, self.count)
        if self._order is None:
            self._shuffle(generator, self._late)
        places = self._next(size)
        if len(places) < size:
            self._shuffle(generator, places)
            places = torch.cat([places, self._next(size - len(places))])
        return Draw(places)

    def _next(self, size: int) -> torch.Tensor:
        assert self._order is not None
        places = self._order[self.position : self.position + size]
        self.position += len(places)
        return places

    def _shuffle(self, generator: torch.Generator, late: torch.Tensor) -> None:
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._late = late
        self.position = 0
        self._order = self._ordered()

    def _ordered(self) -> torch.Tensor:
        """A random order in which those that the batch at the seam has already come last."""
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self._seed))
        held = torch.isin(order, self._late)
        return torch.cat([order[~held], order[held]]) if len(self._late) else order

    def state_dict(self) -> dict[str, Any]:
        begun = self._order is not None
        return {"seed": self._seed, "late": self._late.clone(), "position": self.position, "begun": begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed = int(state["seed"])
        self._late = torch.as_tensor(state["late"], dtype=torch.int64)
        self.position = int(state["position"])
        self._order = self._ordered() if state["begun"] else None


class Prioritized:
    """Draws in proportion to priority ** alpha, each independent; weights (count * probability) ** -beta, the batch's
    greatest being 1."""

    def __init__(self, priorities: Any, *, alpha: float = 0.6, beta: float = 0.4) -> None:
        if alpha < 0 or not 0 <= beta <= 1:
            raise UsageError(f"alpha={alpha} must be 0 or more, and beta={beta} between 0 and 1")
        self.alpha = alpha
        self.beta = beta
        self.priorities = _checked(priorities).copy()
        self.count = len(self.priorities)
        self._tree = _Sums(self._mass(self.priorities))

    def draw(self, size: int, generator: torch.Generator) -> Draw:
        check_size(size, self.count, replace=True)
        at = torch.rand(size, generator=generator, dtype=torch.float64).numpy()
        places = self._tree.find(at * self._tree.total)
        chance = self._tree.values(places) / self._tree.total
        weights = (self.count * chance) ** -self.beta
        return Draw(torch.from_numpy(places), torch.from_numpy(weights / weights.max(initial=1e-300)).float())

    def update(self, places: Any, priorities: Any) -> None:
        """Set priorities; if a place is named twice the last one counts."""
        values, places = _checked(priorities), np.asarray(places, np.int64)
        if values.shape != places.shape:
            raise UsageError(f"{len(values)} priorities were given for {len(places)} places; give one for each")
        self.priorities[places] = values
        self._tree.put(places, self._mass(self.priorities[places]))

    def _mass(self, priorities: Any) -> Any:
        return (priorities + _EPSILON) ** self.alpha

    def state_dict(self) -> dict[str, Any]:
        return {"priorities": self.priorities.copy(), "alpha": self.alpha, "beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        priorities = _checked(state["priorities"])
        if len(priorities) != self.count:
            raise UsageError(
                f"the state has {len(priorities)} priorities and there are {self.count} things to draw; restore it "
                "over the same episodes"
            )
        self.__init__(priorities, alpha=state["alpha"], beta=state["beta"])  # type: ignore[misc]


class _Sums:
    """A binary tree of sums over values: finding and changing k of n takes k * log2(n)."""

    def __init__(self, values: Any) -> None:
        self._size = 1 << max(0, len(values) - 1).bit_length()
        self._count = len(values)
        self._nodes = np.zeros(2 * self._size)
        self._nodes[self._size : self._size + len(values)] = values
        level = self._size
        while level > 1:
            self._nodes[level // 2 : level] = self._nodes[level : 2 * level].reshape(-1, 2).sum(1)
            level //= 2

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def values(self, places: Any) -> Any:
        return self._nodes[self._size + places]

    def put(self, places: Any, values: Any) -> None:
        nodes = self._size + places
        self._nodes[nodes] = values
        while self._size > 1 and nodes.size and nodes[0] > 1:
            nodes = ascending(nodes // 2)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, at: Any) -> Any:
        """The place whose range of the running sum has each of `at`."""
        nodes = np.ones(len(at), np.int64)
        while self._size > 1 and nodes.size and nodes[0] < self._size:
            nodes *= 2
            left = self._nodes[nodes]
            right = (at >= left) & (self._nodes[nodes + 1] > 0)
            at, nodes = np.where(right, at - left, at), nodes + right
        return np.minimum(nodes - self._size, self._count - 1)


def check_size(size: int, count: int, *, replace: bool = False) -> None:
    """UsageError for an empty batch, an empty source, or a batch of more than there is."""
    if size < 1 or count < 1:
        raise UsageError(f"a batch of {size} from {count} cannot be drawn; there must be at least one of both")
    if size > count and not replace:
        raise UsageError(
            f"a batch of {size} was asked for and there are only {count}; ask for fewer, or pass replace=True to have "
            "some of them twice"
        )


def distinct(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`size` different places below `count`, each set as likely, in random order."""
    if size * 4 > count:
        return torch.randperm(count, generator=generator)[:size]
    drawn = torch.randint(count, (size,), generator=generator)
    while True:
        values, first = np.unique(drawn.numpy(), return_index=True)
        if len(values) == size:
            return drawn
        kept = drawn[torch.from_numpy(np.sort(first))]
        drawn = torch.cat([kept, torch.randint(count, (size - len(kept),), generator=generator)])


def as_numpy(value: Any) -> Any:
    """An array, of a tensor on any device too."""
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def _checked(priorities: Any) -> Any:
    values = as_numpy(priorities).astype(np.float64)
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise UsageError("priorities must be one number each, finite and not below 0")
    return values
