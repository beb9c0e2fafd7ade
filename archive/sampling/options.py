"""Pure, no I/O: what a sampler's options mean, and which of them go together."""

from __future__ import annotations

from typing import Any

import torch

from archive.base import UsageError
from archive.datasets import Padded
from archive.sampling import units
from archive.sampling.strategies import Strategy, Uniform, WithoutReplacement

COLLATE = ("dict", "tensordict", "padded")


def check(unit: str, length: int | None, collate: Any, prefetch: int, batch_size: int) -> None:
    """UsageError for options that are none, or do not go together."""
    if unit not in units.KINDS:
        raise UsageError(f"unit={unit!r}: give one of {', '.join(units.KINDS)}")
    if (unit == "window") != (length is not None) or (length is not None and length < 1):
        raise UsageError(
            f"length={length} with unit={unit!r}: windows need a length of at least 1, and nothing else has one"
        )
    if not isinstance(collate, Padded) and collate not in COLLATE:
        raise UsageError(f"collate={collate!r}: give one of {', '.join(COLLATE)}, or a Padded")
    if prefetch < 0 or batch_size < 1:
        raise UsageError(f"prefetch={prefetch} must be 0 or more, and batch_size={batch_size} at least 1")


def check_group(unit: str, group: Any, group_size: int | None) -> None:
    """UsageError for a key of groups where there are none, and the other way round."""
    if (unit == "group") != (group is not None):
        raise UsageError(f"unit={unit!r} with group={group!r}: unit='group' needs group=, such as 'metadata.prompt'")
    if group_size is not None and (unit != "group" or group_size < 1):
        raise UsageError(f"group_size={group_size} is for unit='group', and at least 1")


def check_priorities(strategy: Any, priorities: Any) -> None:
    """UsageError for priorities that nothing draws by, and for a strategy that lacks them."""
    if priorities is not None and strategy != "prioritized":
        raise UsageError("priorities are for strategy='prioritized'; pass that too, or leave them out")
    if priorities is None and strategy == "prioritized":
        raise UsageError("strategy='prioritized' needs priorities=: a column's name, or an array of one a step")


def strategy_of(given: Any, count: int, replace: bool) -> Strategy:
    """The strategy of a name, or that a function of the number of units makes."""
    if given == "uniform":
        return Uniform(count, replace=replace)
    if given == "without_replacement":
        return WithoutReplacement(count)
    if isinstance(given, str) or not callable(given):
        raise UsageError(
            f"strategy={given!r}: give 'uniform', 'without_replacement', 'prioritized', or a function of a count"
        )
    made: Strategy = given(count)
    return made


def generator_of(seed: int | None) -> torch.Generator:
    """One of the seed that a plan gave, or of the system's."""
    made = torch.Generator()
    if seed is None:
        made.seed()
    else:
        made.manual_seed(seed)
    return made
