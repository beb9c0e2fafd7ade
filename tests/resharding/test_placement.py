"""Plans without storage: everything lands once, balanced, the same everywhere; byte ranges against brute force."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from archive import tables
from archive.arrays import Steps
from archive.arrays.ranges import MAX_GAP_BYTES, MIN_GAP_BYTES, coalesce, covered, merge_runs
from archive.base.errors import UsageError
from archive.index.chunkindex import METADATA, ArrayChunks, ShardIndex
from archive.tables import locate
from resharding.placement import NO_ENV, POLICIES, UNIT, Placement, Rules, identity, place, split_evenly
from tests.support.places import ROOT
from tests.support.sampling import examples


def units_of(rank: Any, env: Any, steps: Any, *columns: Any) -> Steps:
    """Units of so many steps, with the columns UNIT."""
    return Steps(np.arange(len(steps)), steps * 0, steps, **dict(zip(UNIT, (rank, env, *columns), strict=True)))


plans = settings(max_examples=examples(150), deadline=None)


@st.composite
def some_units(draw: st.DrawFn, *, env_rows: bool | None = None) -> Steps:
    """Live episodes of a few ranks in canonical order; some without steps."""
    has_rows = draw(st.booleans()) if env_rows is None else env_rows
    rows = [
        (rank, env)
        for rank in range(draw(st.integers(1, 4)))
        for env in range(draw(st.integers(0, 3)))
        for _ in range(draw(st.integers(0, 5)))
    ]
    numbers = st.lists(st.integers(0, 12), min_size=len(rows), max_size=len(rows))
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    steps = np.array(draw(numbers), np.int64)
    weight = steps if draw(st.booleans()) else np.array(draw(numbers), np.int64)
    headless, tailless, going_on = (np.array(draw(flags), bool) for _ in range(3))
    rank, env = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    return units_of(
        rank, env if has_rows else np.full(len(rows), NO_ENV), steps, weight, np.array(draw(numbers), np.int64),
        headless, tailless, tailless & going_on,
    )  # fmt: skip


some_rules = st.builds(
    Rules,
    world_size=st.integers(1, 9),
    num_envs=st.none() | st.integers(1, 4),
    max_length=st.none() | st.integers(0, 20),
    capacity=st.none() | st.integers(0, 40),
    max_episodes=st.none() | st.integers(0, 8),
    incomplete=st.sampled_from(["keep", "drop"]),
    unfinished=st.sampled_from(["close", "continue", "drop"]),
    policy=st.sampled_from(POLICIES),
    divisible=st.booleans(),
)
plain_rules = st.builds(
    Rules,
    world_size=st.integers(1, 9),
    num_envs=st.none() | st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    divisible=st.booleans(),
)


def columns_of(parts: Steps) -> list[list[int]]:
    columns = (parts["target"], parts.stream, parts.lo, parts.hi, parts["env"], parts["position"])
    return [column.tolist() for column in columns]


def all_of(units: Steps) -> Any:
    return np.ones(len(units), bool)


def pieces(placement: Placement) -> Iterator[tuple[int, int, int, str]]:
    """(unit, lo, hi, where it went) of everything, kept or dropped."""
    parts, dropped = placement.parts, placement.dropped
    yield from zip(
        parts.stream.tolist(), parts.lo.tolist(), parts.hi.tolist(), ["kept"] * len(parts.stream), strict=True
    )
    yield from zip(dropped.stream.tolist(), dropped.lo.tolist(), dropped.hi.tolist(), dropped["reason"], strict=True)


def assert_everything_once(units: Steps, placement: Placement) -> None:
    seen: dict[int, list[tuple[int, int]]] = {unit: [] for unit in range(len(units))}
    for unit, lo, hi, _ in pieces(placement):
        seen[unit].append((lo, hi))
    for unit, spans in seen.items():
        assert spans, f"unit {unit} is neither kept nor dropped"
        spans.sort()
        assert spans[0][0] == 0
        assert spans[-1][1] == units.length[unit]
        assert all(a[1] == b[0] for a, b in pairwise(spans)), "a step is lost, or placed twice"
        assert len(spans) == 1 or all(b > a for a, b in spans)


def per_target(units: Steps, placement: Placement, rules: Rules, of: Any) -> list[int]:
    out = [0] * rules.world_size
    for target, unit, n in zip(
        placement.parts["target"].tolist(),
        placement.parts.stream.tolist(),
        placement.parts.length.tolist(),
        strict=True,
    ):
        out[target] += of(unit, n)
    return out


@plans
@given(some_units(), some_rules, st.data())
def test_everything_is_placed_or_dropped_once(units: Steps, rules: Rules, data: st.DataObject) -> None:
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(units), max_size=len(units))), bool)
    placement = place(units, rules, wanted)
    assert_everything_once(units, placement)
    assert set(placement.dropped.stream[placement.dropped["reason"] == "filter"].tolist()) == set(
        np.flatnonzero(~wanted)
    )
    assert ((placement.parts["target"] >= 0) & (placement.parts["target"] < rules.world_size)).all()


@plans
@given(some_units(), plain_rules)
def test_a_plan_without_limits_drops_nothing(units: Steps, rules: Rules) -> None:
    assert len(place(units, rules, all_of(units)).dropped.stream) == 0


@plans
@given(some_units(), st.integers(1, 9))
def test_balanced_by_weight_within_one_episode(units: Steps, world_size: int) -> None:
    rules = Rules(world_size)
    placement = place(units, rules, all_of(units))
    weight = units["weight"] if units["weight"].sum() else np.ones(len(units), np.int64)
    sums = per_target(units, placement, rules, lambda unit, n: int(weight[unit]))
    share = Fraction(int(weight.sum()), world_size)
    assert all(abs(total - share) <= int(weight.max(initial=0)) for total in sums)


def cut_by_fractions(weight: list[int], parts: int) -> list[int]:
    """Where the middle of each item lies, in exact arithmetic, one item at a time."""
    weight = weight if sum(weight) else [1] * len(weight)
    out, before = [], 0
    for w in weight:
        middle = (Fraction(before) + Fraction(w, 2)) / Fraction(sum(weight))
        out.append(min(parts - 1, int(middle * parts)))
        before += w
    return out


@plans
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 12), st.sampled_from([1, 2**40]))
def test_contiguous_parts_against_exact_arithmetic(weight: list[int], parts: int, scale: int) -> None:
    scaled = [w * scale for w in weight]
    assert split_evenly(np.array(scaled, np.int64), parts).tolist() == cut_by_fractions(scaled, parts)


@plans
@given(some_units(), st.integers(1, 9), st.sampled_from(POLICIES), st.none() | st.integers(1, 3))
def test_whole_episodes_against_a_brute_force(units: Steps, world_size: int, policy: str, rows: int | None) -> None:
    """Targets, env rows and positions, dealt out one episode at a time."""
    ordinal = [int((units["rank"][:i] == units["rank"][i]).sum()) for i in range(len(units))]
    order = list(range(len(units)))
    if policy == "interleaved":
        order.sort(key=lambda i: (ordinal[i], int(units["rank"][i])))
    if policy == "by_trajectory":
        sizes = [len(order) // world_size + (r < len(order) % world_size) for r in range(world_size)]
        target = [r for r, size in enumerate(sizes) for _ in range(size)]
    else:
        target = cut_by_fractions([int(units["weight"][i]) for i in order], world_size)
    num_envs = rows
    if rows is None and (units["env"] != NO_ENV).any():
        num_envs = max(len(set(units["env"][units["rank"] == r].tolist())) for r in set(units["rank"].tolist()))
    want = []
    for rank in range(world_size):
        mine = [u for u, t in zip(order, target, strict=True) if t == rank]
        envs = (
            [NO_ENV] * len(mine)
            if num_envs is None
            else cut_by_fractions([int(units.length[u]) for u in mine], num_envs)
        )
        taken: dict[int, int] = {}
        for unit, env in zip(mine, envs, strict=True):
            want.append((rank, unit, 0, int(units.length[unit]), env, taken.get(env, 0)))
            taken[env] = taken.get(env, 0) + max(1, int(units.length[unit]))
    got = place(units, Rules(world_size, num_envs=rows, policy=policy), all_of(units)).parts
    assert list(zip(*columns_of(got), strict=True)) == want


@plans
@given(some_units(), st.integers(1, 12))
def test_independent_steps_are_cut_exactly(units: Steps, world_size: int) -> None:
    rules = Rules(world_size, divisible=True)
    placement = place(units, rules, all_of(units))
    total = int(units.length.sum())
    want = [total * (k + 1) // world_size - total * k // world_size for k in range(world_size)]
    assert per_target(units, placement, rules, lambda unit, n: n) == want
    assert_everything_once(units, placement)


def leaving(
    ages: list[int], steps: list[int], capacity: int | None, max_episodes: int | None, *, cut: bool
) -> list[int]:
    """Steps that each part keeps if the oldest leave one by one; -1 for a part that is gone."""
    kept = list(steps)
    gone: set[int] = set()
    for i in sorted(range(len(ages)), key=lambda i: (ages[i], i)):
        crowded = max_episodes is not None and len(ages) - len(gone) > max_episodes
        over = sum(kept) - capacity if capacity is not None else 0
        if not crowded and over <= 0:
            break
        if cut and not crowded and over < kept[i]:
            kept[i] -= over
        else:
            kept[i] = 0
            gone.add(i)
    return [-1 if i in gone else k for i, k in enumerate(kept)]


@plans
@given(
    some_units(), st.integers(1, 4), st.none() | st.integers(0, 40), st.none() | st.integers(0, 8), st.booleans(),
)  # fmt: skip
def test_the_oldest_leave_and_no_more_than_must(
    units: Steps, world_size: int, capacity: int | None, max_episodes: int | None, divisible: bool
) -> None:
    rules = Rules(world_size, capacity=capacity, max_episodes=max_episodes, divisible=divisible)
    free = place(units, Rules(world_size, divisible=divisible), all_of(units)).parts
    got = place(units, rules, all_of(units))
    cut = divisible or bool((units["env"] != NO_ENV).any())
    want = []
    for rank in range(world_size):
        mine = np.flatnonzero(free["target"] == rank)
        mine = mine[np.lexsort((free.lo[mine], free.stream[mine]))]  # as dealt, before the env rows
        ages = units["age"][free.stream[mine]].tolist()
        kept = leaving(ages, free.length[mine].tolist(), capacity, max_episodes, cut=cut)
        want += [
            (rank, int(free.stream[i]), int(free.hi[i]) - k, int(free.hi[i]))
            for i, k in zip(mine, kept, strict=True)
            if k >= 0
        ]
    columns = (got.parts["target"], got.parts.stream, got.parts.lo, got.parts.hi)
    assert sorted(zip(*(c.tolist() for c in columns), strict=True)) == sorted(want)
    assert_everything_once(units, got)
    totals = per_target(units, got, rules, lambda unit, n: n)
    assert capacity is None or max(totals) <= capacity
    counts = per_target(units, got, rules, lambda unit, n: 1)
    assert max_episodes is None or max(counts) <= max_episodes


def test_fewer_steps_than_targets_leave_no_empty_parts() -> None:
    one, no = np.array([2]), np.array([False])
    units = units_of(one * 0, one * 0 - 1, one, one * 0, one * 0, no, no, no)
    got = place(units, Rules(4, divisible=True), all_of(units)).parts
    assert (got.lo.tolist(), got.hi.tolist(), got["target"].tolist()) == ([0, 1], [1, 2], [1, 3])
    gone = place(units, Rules(4, divisible=True, max_episodes=0), all_of(units)).dropped
    assert (gone.lo.tolist(), gone.hi.tolist()) == ([0, 1], [1, 2])


@plans
@given(some_units(env_rows=True), st.integers(1, 4), st.none() | st.integers(1, 3), st.integers(0, 20))
def test_each_row_keeps_its_newest_steps(units: Steps, world_size: int, rows: int | None, max_length: int) -> None:
    free = place(units, Rules(world_size, num_envs=rows), all_of(units)).parts
    got = place(units, Rules(world_size, num_envs=rows, max_length=max_length), all_of(units))
    want = {}
    for row in {*zip(free["target"].tolist(), free["env"].tolist(), strict=True)}:
        mine = [i for i in range(len(free.stream)) if (int(free["target"][i]), int(free["env"][i])) == row]
        room = max_length
        for i in sorted(mine, key=lambda i: (-int(units["age"][free.stream[i]]), -i)):
            kept = min(room, int(free.length[i]))
            room -= kept
            if kept or free.length[i] == 0:
                want[int(free.stream[i])] = (*row, int(free.hi[i]) - kept, int(free.hi[i]))
    columns = (got.parts.stream, got.parts["target"], got.parts["env"], got.parts.lo, got.parts.hi)
    assert {u: tuple(rest) for u, *rest in zip(*(c.tolist() for c in columns), strict=True)} == want
    assert_everything_once(units, got)


@plans
@given(some_units(), some_rules)
def test_rows_are_dense_and_in_order(units: Steps, rules: Rules) -> None:
    parts = place(units, rules, all_of(units)).parts
    end: dict[tuple[int, int], int] = {}
    rows = list(zip(parts["target"].tolist(), parts["env"].tolist(), strict=True))
    assert rows == sorted(rows)
    for row, position, steps in zip(rows, parts["position"].tolist(), parts.length.tolist(), strict=True):
        assert position == end.get(row, 0)
        end[row] = position + max(1, steps)


@plans
@given(some_units(), st.booleans())
def test_incomplete_episodes_leave_by_policy_only(units: Steps, drop: bool) -> None:
    kept = place(units, Rules(3, incomplete="drop" if drop else "keep"), all_of(units)).parts.stream.tolist()
    want = [u for u in range(len(units)) if not (drop and (units["headless"][u] or units["tailless"][u]))]
    assert sorted(kept) == want
    kept = place(units, Rules(3, unfinished="drop"), all_of(units)).parts.stream.tolist()
    assert sorted(kept) == np.flatnonzero(~units["open"]).tolist()


def as_units(parts: Any, units: Steps) -> Steps:
    """What was placed, as the next checkpoint has it."""
    taken = (column[parts.stream] for column in (units["age"], units["headless"], units["tailless"], units["open"]))
    return units_of(parts["target"], parts["env"], parts.length, parts.length, *taken)


@plans
@given(some_units(), st.integers(1, 8), st.integers(1, 8), st.sampled_from(POLICIES), st.booleans())
def test_there_and_back_loses_nothing(units: Steps, n: int, m: int, policy: str, divisible: bool) -> None:
    """Each step by its name (unit, number), from M ranks to N and back to M."""
    there = place(units, Rules(n, policy=policy, divisible=divisible), all_of(units)).parts
    back = place(
        as_units(there, units), Rules(m, policy=policy, divisible=divisible), np.ones(len(there.stream), bool)
    ).parts
    steps = [
        (int(there.stream[u]), int(there.lo[u]) + i)
        for u, lo, hi in zip(back.stream.tolist(), back.lo.tolist(), back.hi.tolist(), strict=True)
        for i in range(lo, hi)
    ]
    assert sorted(steps) == [(u, i) for u in range(len(units)) for i in range(int(units.length[u]))]
    assert {int(there.stream[u]) for u in back.stream} == set(range(len(units)))


@plans
@given(some_units())
def test_identity_leaves_all_where_it_is(units: Steps) -> None:
    placement = identity(units, Rules(3), units["age"])
    assert len(placement.dropped) == 0
    parts = placement.parts
    assert [parts["target"].tolist(), parts["env"].tolist()] == [units["rank"].tolist(), units["env"].tolist()]
    assert [parts["position"].tolist(), parts.length.tolist()] == [units["age"].tolist(), units.length.tolist()]


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "best"}, {"incomplete": "x"}, {"unfinished": "x"}, {"capacity": -1}, {"num_envs": 0},
     {"max_length": -2}],
)  # fmt: skip
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Rules(2, **wrong)
    with pytest.raises(UsageError, match="world_size"):
        Rules(0)


def digest_of_plans() -> str:
    """One number for many placements of one made-up buffer."""
    rng = np.random.default_rng(7)
    rank = np.repeat(np.arange(5), 40)
    env = np.tile(np.repeat(np.arange(8), 5), 5)
    steps, age = rng.integers(0, 50, 200), rng.integers(0, 9, 200)
    flags = [rng.random(200) < 0.2 for _ in range(3)]
    units = units_of(rank, env, steps, steps * 3, age, *flags)
    out = hashlib.sha256()
    for policy in POLICIES:
        for n in (1, 3, 8):
            rules = Rules(n, num_envs=3, max_length=200, capacity=700, max_episodes=30, policy=policy)
            found = place(units, rules, steps % 7 > 0).to_json()
            out.update(repr([*found["parts"], *found["dropped"]]).encode())
    return out.hexdigest()


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_same_plan_under_any_hash_seed(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    code = "from tests.resharding import test_placement as t; print(t.digest_of_plans())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest_of_plans()


def test_a_million_episodes_are_dealt_out_in_no_time() -> None:
    count, rng = 1_000_000, np.random.default_rng(1)
    rank = np.repeat(np.arange(8), count // 8)
    env = np.tile(np.repeat(np.arange(100), count // 800), 8)
    steps, flags = rng.integers(0, 300, count), np.zeros(count, bool)
    units = units_of(rank, env, steps, steps, np.arange(count), flags, flags, flags)
    begin = time.process_time()
    placed = place(units, Rules(5, capacity=20_000_000, max_length=200_000, policy="interleaved"), all_of(units))
    assert time.process_time() - begin < 5  # a second, where nobody else works
    assert int(placed.parts.length.sum() + placed.dropped.length.sum()) == int(steps.sum())


# -- where live steps lie ----------------------------------------------------------------------------------------------


@plans
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=12), st.randoms(), st.data())
def test_live_steps_are_found_in_any_order_of_segments(
    rows: list[tuple[int, int]], random: Any, data: st.DataObject
) -> None:
    """The segments table lists files as they were folded; the live set says the order."""
    end: dict[int, int] = {}
    table = []
    for env, length in rows:
        table.append((env, end.get(env, 0), length))
        end[env] = end.get(env, 0) + max(1, length)
    live = [(env, data.draw(st.integers(0, stop - 1)), stop) for env, stop in sorted(end.items())]
    live = [(e, lo, hi) for e, lo, hi in live if not any(e == env and n == 0 and lo <= p < hi for env, p, n in table)]
    assume(live)
    shuffled = random.sample(range(len(table)), len(table))
    found = locate(_live(live), _segments([table[i] for i in shuffled]))
    pieces = zip(found["run"], found.stream, found.lo, found.hi, strict=True)
    got = [(int(r), shuffled[int(row)], int(a), int(b)) for r, row, a, b in pieces]
    want = [
        (r, i, max(lo - p, 0), min(hi - p, n))
        for r, (env, lo, hi) in enumerate(live)
        for i, (e, p, n) in enumerate(table)
        if e == env and p < hi and p + n > lo
    ]
    assert got == want


def _live(rows: list[tuple[int, int, int]]) -> Any:
    env, lo, hi = (list(column) for column in zip(*rows, strict=True))
    columns = {"rank": 0, "buffer": "replay", "env_id": env, "position": lo, "session": "s", "stream_rank": 0}
    return tables.from_columns("live", {"lo": lo, "hi": hi, "stream_env": env, **columns})


def _segments(rows: list[tuple[int, int, int]]) -> Any:
    env, position, length = (list(column) for column in zip(*rows, strict=True))
    columns = {
        "session": "s",
        "buffer": "replay",
        "rank": 0,
        "env_id": env,
        "position": position,
        "shard": "shards/x.zip",
    }
    return tables.from_columns("segments", {"length": length, **columns})


# -- byte ranges -------------------------------------------------------------------------------------------------------


ranges = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=10).map(sorted)


def fewest_blocks(spans: list[tuple[int, int]], max_gap: int, max_block: int) -> int:
    """By trying all ways to cut the list."""
    best = [0] + [len(spans)] * len(spans)
    for stop in range(1, len(spans) + 1):
        for start in range(stop):
            part = spans[start:stop]
            reach = [max(b for _, b in part[: i + 1]) for i in range(len(part))]
            near = all(a - r <= max_gap for (a, _), r in zip(part[1:], reach, strict=False))
            if len(part) == 1 or (near and reach[-1] - part[0][0] <= max_block):
                best[stop] = min(best[stop], best[start] + 1)
    return best[-1]


@plans
@given(ranges, st.integers(0, 40), st.integers(10, 200))
def test_few_blocks_cover_the_ranges(pairs: list[tuple[int, int]], max_gap: int, max_block: int) -> None:
    spans, at = [], 0
    for gap, size in pairs:  # members of one object never overlap
        at += gap % 80
        spans.append((at, at + size))
        at += size
    starts, stops = (np.array([s[i] for s in spans], np.int64) for i in (0, 1))
    a, b, owner = coalesce(starts, stops, max_gap=max_gap, max_block=max_block)
    assert ((a[owner] <= starts) & (stops <= b[owner])).all()
    assert len(a) == fewest_blocks(spans, max_gap, max_block)
    waste = int((b - a).sum()) - sum(hi - lo for lo, hi in spans)
    assert waste == sum(
        y[0] - x[1] for x, y, p, q in zip(spans, spans[1:], owner, owner[1:], strict=False) if p == q
    )  # fmt: skip


@plans
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_runs_of_rows_are_joined_and_covered(pairs: list[tuple[int, int]]) -> None:
    starts, stops = (np.array(c, np.int64) for c in ([a for a, _ in pairs], [a + n for a, n in pairs]))
    a, b = merge_runs(starts, stops)
    want = {row for lo, n in pairs for row in range(lo, lo + n)}
    assert [row for lo, hi in zip(a, b, strict=True) for row in range(lo, hi)] == sorted(want)
    assert (a[1:] > b[:-1]).all()
    full = stops > starts
    assert set(np.flatnonzero(covered(starts[full], stops[full], 100)).tolist()) == want


@st.composite
def some_shards(draw: st.DrawFn) -> tuple[ShardIndex, int]:
    """A shard of a few arrays of one length, chunks end to end, and that length."""
    length, at, arrays = draw(st.integers(1, 40)), 100, {}
    arrays[METADATA] = ArrayChunks(1, np.array([10]), np.array([80]), np.array([0]), ["zarr.json"])
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        rows = draw(st.integers(1, 10))
        size = np.array([draw(st.integers(1, 5000)) for _ in range(-(-length // rows))], np.int64)
        header = draw(st.integers(30, 60))
        offset = at + np.cumsum(size + header) - size
        at = int(offset[-1] + size[-1])
        arrays[name] = ArrayChunks(rows, offset, size, size, [f"{name}/c/{i}" for i in range(len(size))])
    return ShardIndex("shards/x.zip", True, arrays), length


@plans
@given(some_shards(), st.data(), st.integers(0, 3000))
def test_reads_of_a_shard_against_a_brute_force(
    shard: tuple[ShardIndex, int], data: st.DataObject, max_gap: int
) -> None:
    index, length = shard
    pairs = st.lists(st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted), max_size=4)
    wanted = {name: data.draw(pairs) for name in index.arrays if name != METADATA}
    runs = {n: tuple(np.array(p, np.int64).reshape(-1, 2).T) for n, p in wanted.items()}
    got = index.plan(runs, max_gap=max_gap)  # type: ignore[arg-type]
    need = {
        (name, row // index.arrays[name].rows)
        for name, spans in wanted.items()
        for a, b in spans
        for row in range(a, b)
    }
    need.add((METADATA, 0))
    assert {(p.array, p.chunk) for p in got.pieces} == need
    places = sorted((int(index.arrays[n].offset[c]), int(index.arrays[n].size[c])) for n, c in need)
    assert got.needed_bytes == sum(size for _, size in places)
    gaps = [b - (a + size) for (a, size), (b, _) in pairwise(places)]
    first = min(((int(index.arrays[n].offset[c]), n) for n, c in need if n != METADATA), default=(0, METADATA))[1]
    a_chunk = int(index.arrays[first].size.max()) + MIN_GAP_BYTES  # may lie between the metadata and what follows it
    allowed = [max(max_gap, min(MAX_GAP_BYTES, a_chunk)), *[max_gap] * len(gaps)]
    joined = [gap for gap, most in zip(gaps, allowed, strict=False) if gap <= most]
    assert len(got.requests) == 1 + len(gaps) - len(joined)
    assert got.fetched_bytes == got.needed_bytes + sum(joined)
    for piece in got.pieces:
        array = index.arrays[piece.array]
        assert got.requests[piece.request].start + piece.start == array.offset[piece.chunk]
        assert piece.size == array.size[piece.chunk]
