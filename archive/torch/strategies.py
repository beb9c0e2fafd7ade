"""On top of the archive, no I/O: which of `count` things come next. Each strategy draws with the generator it is given.

A strategy is any object with the methods of `Strategy`; what they need to go on is numbers and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from archive.errors import UsageError

_EPSILON = 1e-8  # so that a priority of 0 is drawn at times


class Draw(NamedTuple):
    """Places from 0 to the strategy's count, and their importance weights if they are not equally likely."""

    places: torch.Tensor
    weights: torch.Tensor | None = None


class Strategy(Protocol):
    """Draws places below a count that it was made for."""

    def draw(self, size: int, generator: torch.Generator) -> Draw: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Uniform:
    """Each as likely as any other. With `replace` each for itself, otherwise a batch has none twice."""

    def __init__(self, count: int, *, replace: bool = False) -> None:
        self.count, self.replace = count, replace

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
    """Each once in random order, then all again in another."""

    def __init__(self, count: int) -> None:
        self.count, self.position = count, 0
        self._order: torch.Tensor | None = None
        self._seed = 0

    def draw(self, size: int, generator: torch.Generator) -> Draw:
        check_size(size, self.count)
        rest = self._rest(generator)[:size]
        self.position += len(rest)
        while len(rest) < size:
            self._order = None
            more = self._rest(generator)
            more = more[~torch.isin(more, rest)][: size - len(rest)]
            self._order = torch.cat([more, self._order[~torch.isin(self._order, more)]])  # type: ignore[index]
            self._ahead(len(more), len(rest))
            rest = torch.cat([rest, more])
        return Draw(rest)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
