"""The algebra of stretches against sets of (stream, step), and keys of rows against tuples."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.arrays import Steps, ascending, codes, places, row_codes
from tests.support.sampling import examples

FAR = 2**62 - 100  # streams with such positions do not fit on one line of 64 bits
Set = set[tuple[int, int]]
ROW = st.tuples(st.integers(-1, 2), st.integers(0, 12), st.integers(0, 5))


def tables(rows: st.SearchStrategy[tuple[int, int, int]] = ROW) -> st.SearchStrategy[Steps]:
    """Rows of any order, that may overlap, at small positions or very large ones; `at` counts with them."""
    return st.builds(_table, st.lists(rows, max_size=8))


def _table(rows: list[tuple[int, int, int]]) -> Steps:
    stream, lo, length = np.array(rows, np.int64).reshape(-1, 3).T
    return Steps(stream, lo, lo + length, follows=("at",), at=lo + 100 * stream, number=np.arange(len(rows)))


def moved(some: Steps, by: int) -> Steps:
    """The same further on in one of the streams."""
    shift = by * (some.stream == 1)
    return Steps(some.stream, some.lo + shift, some.hi + shift, follows=some.follows, **some.columns)


def steps_of(some: Steps) -> list[Set]:
    """The steps of each row."""
    rows = zip(some.stream.tolist(), some.lo.tolist(), some.hi.tolist(), strict=True)
    return [{(stream, t) for t in range(lo, hi)} for stream, lo, hi in rows]


def every(some: Steps) -> Set:
    return set().union(*steps_of(some))


def check_columns(some: Steps) -> None:
    """What counts steps says of each row's first one what it said of it before."""
    np.testing.assert_array_equal(some["at"], some.lo + 100 * some.stream)


@settings(max_examples=examples(300), deadline=None)
@given(tables(), tables(), st.sampled_from([0, FAR]))
def test_rows_meet_where_both_have_the_step(one: Steps, other: Steps, by: int) -> None:
    found = moved(one, by).meet(moved(other, by))
    met = [
        ((left, right), {(stream, t - by * (stream == 1)) for t in range(lo, hi)})
        for left, right, lo, hi in zip(*(column.tolist() for column in found), strict=True)
        for stream in [int(one.stream[left])]
    ]
    wanted = {(i, j): a & b for i, a in enumerate(steps_of(one)) for j, b in enumerate(steps_of(other)) if a & b}
    assert len(met) == len(wanted)
    assert dict(met) == wanted
    order = list(zip(found.left.tolist(), found.lo.tolist(), strict=True))
    assert [left for left, _ in order] == sorted(left for left, _ in order)


@settings(max_examples=examples(300), deadline=None)
@given(tables(), tables(), st.sampled_from([0, FAR]))
def test_minus_leaves_the_steps_of_each_row_that_are_not_gone(one: Steps, gone: Steps, by: int) -> None:
    left = moved(moved(one, by).minus(moved(gone, by)), -by)
    check_columns(left)
    away = every(gone)
    for number, had in enumerate(steps_of(one)):
        mine = left.pick(left["number"] == number)
        if had:
            assert every(mine) == had - away
            assert sum(mine.length.tolist()) == len(had - away)
            assert (mine.lo[1:] > mine.hi[:-1]).all()
        else:
            place = int(one.stream[number]), int(one.lo[number])
            assert len(mine) == (place not in away)
            assert not mine.length.any()
    assert (np.diff(left["number"]) >= 0).all()


@settings(max_examples=examples(200), deadline=None)
@given(tables(), st.sampled_from([0, FAR]))
def test_a_union_has_each_step_once_in_few_rows(one: Steps, by: int) -> None:
    found = moved(moved(one, by).union(), -by)
    assert every(found) == every(one)
    keys = list(zip(found.stream.tolist(), found.lo.tolist(), found.hi.tolist(), strict=True))
    assert keys == sorted(keys)
    assert all(a != c or b < d for (a, _, b), (c, d, _) in pairwise(keys)), "some touch"


@settings(max_examples=examples(200), deadline=None)
@given(tables(), st.sampled_from([0, FAR]))
def test_of_rows_that_lie_over_each_other_the_last_is_on_top(one: Steps, by: int) -> None:
    found = moved(moved(one, by).topmost(), -by)
    check_columns(found)
    top = {step: number for number, steps in enumerate(steps_of(one)) for step in steps}
    below = zip(found["number"].tolist(), steps_of(found), strict=True)
    rows = [(step, number) for number, steps in below for step in sorted(steps)]
    assert rows == sorted(rows)
    assert dict(rows) == top
    assert len(rows) == len(top)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=8))
def test_merging_joins_what_goes_on_and_nothing_else(parts: list[tuple[int, int, int, int]]) -> None:
    """Parts of a stream: each of some steps, after a hole or none, of an episode, after a hole elsewhere or none."""
    rows, lo, at = [], 0, 7
    for length, hole, episode, leap in parts:
        rows.append((lo + hole, lo + hole + length, episode, at + hole + leap))
        lo, at = lo + hole + length, at + hole + leap + length
    begin, end, episodes, places = np.array(rows, np.int64).reshape(-1, 4).T
    some = Steps(np.zeros_like(begin), begin, end, follows=("at",), at=places, episode=episodes)
    found = some.merged()
    assert _said(found) == _said(some)
    goes_on = [found.lo[1:] == found.hi[:-1], found["episode"][1:] == found["episode"][:-1]]
    assert not np.all([*goes_on, found["at"][1:] - found["at"][:-1] == found.length[:-1]], axis=0).any()


def _said(some: Steps) -> dict[int, tuple[int, int]]:
    """What is said of each step."""
    rows = zip(some.lo.tolist(), some.hi.tolist(), some["episode"].tolist(), some["at"].tolist(), strict=True)
    return {t: (episode, at + t - lo) for lo, hi, episode, at in rows for t in range(lo, hi)}


@pytest.mark.parametrize("width", [1, 2**40], ids=["near", "far"])
@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_codes_are_equal_where_keys_are_and_in_their_order(width: int, keys: list[tuple[int, int, int]]) -> None:
    columns = [np.array([key[i] for key in keys], np.int64) * width for i in range(3)]
    distinct = sorted(set(keys))
    assert codes(*columns).tolist() == [distinct.index(key) for key in keys]


@settings(max_examples=examples(100), deadline=None)
@given(*[st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(-2, 2)), max_size=6)] * 2)
def test_rows_of_two_tables_have_the_same_code_where_all_is_the_same(
    one: list[tuple[str | None, int]], other: list[tuple[str | None, int]]
) -> None:
    """Text as it is and as dictionaries, that number the same text otherwise in each table; none is like none."""
    texts = [pa.array([text for text, _ in rows], pa.string()) for rows in (one, other)]
    numbers = [pa.array([n for _, n in rows], pa.int32()) for rows in (one, other)]
    left, right = row_codes(
        pa.table({"text": texts[0].dictionary_encode(), "n": numbers[0]}), pa.table({"a": texts[1], "b": numbers[1]})
    )
    keys = [*one, *other]
    found = [*left.tolist(), *right.tolist()]
    assert (len(left), len(right)) == (len(one), len(other))
    assert all((found[i] == found[j]) == (keys[i] == keys[j]) for i in range(len(keys)) for j in range(len(keys)))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_places_are_the_first_ones(wanted: list[int], among: list[int]) -> None:
    found = places(np.array(wanted, np.int64), np.array(among, np.int64)).tolist()
    assert found == [among.index(one) if one in among else -1 for one in wanted]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(-3, 3)))
def test_distinct_numbers_come_in_order(given: list[int]) -> None:
    assert ascending(np.array(given, np.int64)).tolist() == sorted({*given})
