"""Sweeps that take minutes: the default run tests a sample of the cases, `make soak` all of them with the same code."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import pytest

SEED = 0
ALL = 1
T = TypeVar("T")


def one_in(count: int) -> list[Any]:
    """Parameters of a test: take one in `count` cases by default, and all of them as a soak."""
    return [pytest.param(count, id=f"one in {count}"), pytest.param(ALL, marks=pytest.mark.soak, id="all")]


def sampled(cases: Iterable[T], count: int) -> Iterator[T]:
    """One case, chosen by SEED, of each `count` that follow each other, so that no part of a sweep is left out."""
    print(f"one in {count} cases, seed {SEED}")
    chosen, rest = random.Random(SEED), iter(cases)
    while block := list(islice(rest, count)):
        yield chosen.choice(block)
