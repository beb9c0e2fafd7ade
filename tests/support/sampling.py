"""Sweeps that take minutes: the default run tests a sample of the cases, `make soak` all of them with the same code."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import pytest

SEED = 0
ALL = 1
WHOLE = bool(os.environ.get("WHOLE"))  # `make soak` says so for tests that run in any case
T = TypeVar("T")


def one_in(count: int) -> list[Any]:
    """Parameters of a test: take one in `count` cases by default, and all of them as a soak."""
    return [pytest.param(count, id=f"one in {count}"), pytest.param(ALL, marks=pytest.mark.soak, id="all")]


def few_of(cases: Sequence[Any], count: int) -> list[Any]:
    """Parameters of a test: the first `count` cases by default, the others as a soak; a tuple is several arguments."""
    others = (case if isinstance(case, tuple) else (case,) for case in cases[count:])
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.soak) for case in others)]


def examples(count: int) -> int:
    """How many examples hypothesis makes of a test: a third by default, so many as a soak."""
    return count if WHOLE else max(10, count // 3)


def fresh_seed(bits: int = 40) -> int:
    """A seed drawn anew. Where SEEDS_OF names something, as CI names the commit, it is that name's and this test's, so
    that the same run can be had again."""
    if name := os.environ.get("SEEDS_OF"):
        text = f"{name} {os.environ.get('PYTEST_CURRENT_TEST', '')}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()) >> (256 - bits)
    return secrets.randbits(bits)


def sampled(cases: Iterable[T], count: int) -> Iterator[T]:
    """One case, chosen by SEED, of each `count` that follow each other, so that no part of a sweep is left out."""
    print(f"one in {count} cases, seed {SEED}")
    chosen, rest = random.Random(SEED), iter(cases)
    while block := list(islice(rest, count)):
        yield chosen.choice(block)
