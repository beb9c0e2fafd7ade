"""Strategies: how often each thing is drawn, that a seam repeats nothing, and that a tree of sums is one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.base.errors import UsageError

torch = pytest.importorskip("torch", reason="strategies draw with torch")
from archive.torch.strategies import Prioritized, Uniform, WithoutReplacement, distinct  # noqa: E402
from archive.torch.units import EpisodeUnits, StepUnits  # noqa: E402


def seeded(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def frequencies(strategy: Any, size: int, batches: int, seed: int = 0) -> Any:
    generator = seeded(seed)
    places = torch.cat([strategy.draw(size, generator).places for _ in range(batches)])
    return np.bincount(places.numpy(), minlength=strategy.count) / len(places)


def chi_square(found: Any, wanted: Any, total: int) -> float:
    return float((((found - wanted) * total) ** 2 / (wanted * total)).sum())


@pytest.mark.parametrize("replace", [False, True])
def test_uniform_draws_all_alike(replace: bool) -> None:
    found = frequencies(Uniform(50, replace=replace), 20, 2000)
    assert chi_square(found, np.full(50, 1 / 50), 40_000) < 100  # 49 degrees of freedom: 1 in 10^5 is 101


@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 5), (7, 20), (64, 65), (100, 100_000), (400, 1700)])
def test_distinct_places_are_distinct(size: int, count: int) -> None:
    places = distinct(size, count, seeded())
    assert len(set(places.tolist())) == size
    assert 0 <= int(places.min()) <= int(places.max()) < count


def test_distinct_places_are_in_random_order() -> None:
    firsts = Counter(int(distinct(3, 13, seeded(s))[0]) for s in range(3000))
    assert max(firsts.values()) < 1.5 * min(firsts.values())


@pytest.mark.parametrize(("count", "size"), [(10, 3), (10, 10), (7, 5), (100, 64), (1, 1)])
def test_without_replacement_every_round_has_each_once(count: int, size: int) -> None:
    strategy, generator = WithoutReplacement(count), seeded()
    batches = [strategy.draw(size, generator).places.tolist() for _ in range(60)]
    assert all(len(set(batch)) == size for batch in batches)
    drawn = [place for batch in batches for place in batch]
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    assert count < 3 or drawn[:count] != drawn[count : 2 * count]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_prioritized_is_proportional(alpha: float) -> None:
    priorities = np.array([0.0, 1, 2, 3, 4, 10])
    found = frequencies(Prioritized(priorities, alpha=alpha), 100, 1000)
    wanted = (priorities + 1e-8) ** alpha / ((priorities + 1e-8) ** alpha).sum()
    assert chi_square(found[1:], wanted[1:], 100_000) < 25


def test_importance_weights_undo_the_preference() -> None:
    priorities = np.array([1.0, 2, 3, 4])
    full = Prioritized(priorities, alpha=1.0, beta=1.0)
    draw = full.draw(100_000, seeded())
    assert draw.weights is not None
    values = np.array([5.0, -3, 2, 8])[draw.places.numpy()]
    weights = draw.weights.numpy()
    assert abs((weights * values).sum() / weights.sum() - 3.0) < 0.05  # the plain mean
    assert weights.max() == 1.0
    expected = (4 * priorities / 10) ** -0.4
    partial = Prioritized(priorities, alpha=1.0).draw(1000, seeded())
    assert partial.weights is not None
    np.testing.assert_allclose(partial.weights.numpy(), (expected / expected.max())[partial.places.numpy()], rtol=1e-5)


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=70), st.data())
def test_updates_change_what_a_new_tree_would_have(values: list[float], data: Any) -> None:
    strategy = Prioritized(values, alpha=0.7)
    places = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=20))
    new = data.draw(st.lists(st.floats(0, 100), min_size=len(places), max_size=len(places)))
    strategy.update(places, new)
    for place, value in zip(places, new, strict=True):
        values[place] = value
    fresh = Prioritized(values, alpha=0.7)
    np.testing.assert_allclose(strategy._tree._nodes, fresh._tree._nodes)
    assert strategy.draw(50, seeded()).places.tolist() == fresh.draw(50, seeded()).places.tolist()


def test_priorities_that_are_none_are_refused() -> None:
    strategy = Prioritized([1.0, 2.0])
    for bad in ([-1.0], [np.nan], [np.inf], [[1.0, 2.0]]):
        with pytest.raises(UsageError, match="priorities must be"):
            strategy.update([0], bad)
    with pytest.raises(UsageError, match="one for each"):
        strategy.update([0, 1], [1.0])
    with pytest.raises(UsageError, match="2 priorities"):
        Prioritized([1.0]).load_state_dict(strategy.state_dict())


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from(["step", "window", "episode"]),
    st.integers(1, 4), st.data(),
)  # fmt: skip
def test_units_are_those_of_a_plain_list(lengths: list[int], kind: str, length: int, data: Any) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    length = length if kind == "window" else 1
    counts, begin = np.array(lengths), np.zeros(len(lengths), np.int64)
    if kind == "episode":
        units: Any = EpisodeUnits(kind, counts, np.arange(len(lengths)), np.array(kept) & (counts > 0))
    else:
        units = StepUnits(kind, counts, np.array(kept), begin, length)
    first = np.cumsum(lengths) - lengths
    wanted, index, value = [], [], []
    values = np.array(data.draw(st.lists(st.integers(0, 99), min_size=sum(lengths), max_size=sum(lengths))), np.int64)
    for i, n in enumerate(lengths):
        if kept[i] and n:
            starts = [0] if kind == "episode" else range(n - length + 1)
            wanted += [(i, s) for s in starts]
            index += [i if kind == "episode" else int(first[i]) + s for s in starts]
            run = values[first[i] : first[i] + n]
            value += [int(run.max())] if kind == "episode" else [int(run[s]) for s in starts]
    places = np.arange(units.count)
    numbers, steps = units.locate(places)
    assert list(zip(numbers.tolist(), steps.tolist(), strict=True)) == wanted
    assert units.index(places).tolist() == index
    assert units.places(units.index(places)).tolist() == places.tolist()
    assert units.of_steps(values).tolist() == value
    for odd in set(range(-1, sum(lengths) + 2)) - set(index):
        with pytest.raises(UsageError, match="of this sampler"):
            units.places(np.array([odd]))
