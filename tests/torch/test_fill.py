"""Shares into ring tensors: every step in its slot, nothing dropped, open episodes cut where they don't go on."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
import resharding
from archive.base.errors import CapacityError, ColumnError, FieldError, NotFoundError, UsageError
from archive.torch import ring
from tests.support.rings import RankShare, Ring
from tests.support.sampling import examples


@dataclass
class Planned:
    """A share of episodes (env row, position, length, open), whose steps tell which they are."""

    episodes: list[tuple[int, int, int, bool]]
    columns: dict[str, Any] = field(default_factory=dict)
    next_positions: dict[int, int] = field(default_factory=dict)
    change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda _, steps: steps

    def __post_init__(self) -> None:
        for env, position, length, _ in self.episodes:
            self.next_positions.setdefault(env, 0)
            self.next_positions[env] = max(self.next_positions[env], position + length)
        steps = sum(e[2] for e in self.episodes)
        self.columns.setdefault("priority", np.arange(1, steps + 1, dtype=np.float32))

    @property
    def layout(self) -> Any:
        env, position, length, opened = (
            np.array([e[i] for e in self.episodes], bool if i == 3 else np.int64) for i in range(4)
        )
        return SimpleNamespace(env_id=env, position=position, length=length, open=opened, headless=~opened)

    def read(self) -> list[dict[str, Any]]:
        return [self.change(i, self._steps(*e[:3])) for i, e in enumerate(self.episodes)]

    def _steps(self, env: int, position: int, length: int) -> dict[str, Any]:
        place = np.stack([np.full(length, env), np.arange(position, position + length)], 1)
        return {"place": place, "nested": {"t": place[:, 1].astype(np.int32), "none": None, "nothing": {}}}


class Streamed(Planned):
    """The same, read ahead of nobody; it counts the episodes that somebody holds."""

    started = most_held = 0

    def stream(self) -> Iterator[tuple[None, dict[str, Any]]]:
        given: list[weakref.ref[Any]] = []
        for env, position, length, _ in self.episodes:
            self.started += 1
            steps = self._steps(env, position, length)
            given.append(weakref.ref(steps["place"]))
            yield None, steps
            del steps
            self.most_held = max(self.most_held, sum(one() is not None for one in given))

    def read(self) -> list[dict[str, Any]]:
        raise AssertionError("a share that streams is not read as a whole")


def assert_in_place(filled: ring.Filled, share: Planned) -> None:
    """Every step stands in slot position % L, nothing else does, and the column goes with it."""
    rows, slots = filled.cut.shape
    expected = torch.zeros(rows, slots, 2, dtype=torch.int64)
    priority = torch.zeros(rows, slots)
    values = iter(share.columns["priority"].tolist())
    for env, position, length, _ in share.episodes:
        for p in range(position, position + length):
            expected[env, p % slots] = torch.tensor([env, p])
            priority[env, p % slots] = next(values)
    if filled.buffers:
        assert torch.equal(filled.buffers["place"], expected)
        assert torch.equal(filled.buffers["nested"]["t"], expected[..., 1].int())
        assert filled.buffers["nested"]["none"] is None
        assert filled.buffers["nested"]["nothing"] == {}
    assert torch.equal(filled.columns["priority"], priority)
    assert torch.equal(filled.live, priority > 0)
    assert filled.pos.tolist() == [share.next_positions.get(e, 0) for e in range(rows)]


@st.composite
def shares(draw: Any) -> Planned:
    episodes = []
    for env in range(draw(st.integers(0, 4))):
        position = draw(st.integers(0, 20))
        for length in draw(st.lists(st.integers(0, 6), max_size=4)):
            episodes.append((env, position, length, draw(st.booleans())))
            position += length
    return Planned(episodes)


@settings(max_examples=examples(150), deadline=None)
@given(share=shares(), more=st.integers(0, 3))
def test_every_step_in_its_slot(share: Planned, more: int) -> None:
    rows: dict[int, int] = {}
    for env, _, length, _ in share.episodes:
        rows[env] = rows.get(env, 0) + length
    filled = ring.fill(share, num_envs=4, max_length=max(1, *rows.values(), 0) + more)
    assert_in_place(filled, share)
    assert filled.report["steps"] == int(filled.size.sum()) == sum(rows.values())
    assert filled.report["empty_rows"] == 4 - sum(n > 0 for n in rows.values())
    assert bool(filled.buffers) == any(rows.values())


def test_a_share_that_streams_is_read_in_bounded_memory() -> None:
    """An episode is in its place, and held by nobody, before the next one but one is asked for."""
    share = Streamed([(0, 4 * i, 4, False) for i in range(50)])
    filled = ring.fill(share, num_envs=1, max_length=200)
    assert share.started == 50
    assert share.most_held <= 2
    assert_in_place(filled, share)


# -- open episodes -----------------------------------------------------------------------------------------------------

OPEN = [(0, 0, 3, True), (0, 3, 2, True), (1, 5, 2, True), (1, 7, 3, False), (2, 0, 0, True), (3, 9, 1, True)]


@pytest.mark.parametrize(
    ("unfinished", "expected"),
    [("close", [(0, 2), (0, 4), (1, 6), (3, 9)]), ("continue", [(0, 2), (1, 6)])],
)
def test_open_episodes_are_cut_where_they_do_not_go_on(unfinished: str, expected: list[tuple[int, int]]) -> None:
    filled = ring.fill(Planned(OPEN), num_envs=4, max_length=8, unfinished=unfinished)
    assert [tuple(c) for c in filled.cut.nonzero().tolist()] == sorted((e, p % 8) for e, p in expected)
    assert filled.report["cut"] == len(expected)
    assert filled.report["open"] == 4


def test_dropping_is_for_plans() -> None:
    with pytest.raises(UsageError, match=r"4 open episodes, and only a plan drops"):
        ring.fill(Planned(OPEN), num_envs=4, max_length=8, unfinished="drop")
    dropped = Planned([(1, 7, 3, False)])
    assert_in_place(ring.fill(dropped, num_envs=4, max_length=8, unfinished="drop"), dropped)


# -- other sizes, other devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_envs", "max_length"), [(3, 16), (3, 11), (5, 40)])
def test_a_checkpoint_into_a_ring_of_another_size(num_envs: int, max_length: int) -> None:
    source = Ring(3, 16).run([40, 11, 3])
    source.size = source.size.clamp(max=11)  # as if older steps had been removed
    with archive.create(f"memory://{uuid.uuid4().hex}").writer() as w:
        columns = ring.append(w, source.buffers, **source.how())
        ck = w.checkpoint(step=1, columns=columns).result()
    filled = ring.fill(RankShare(ck), num_envs=num_envs, max_length=max_length)
    assert filled.size.tolist() == [11, 11, 3] + [0] * (num_envs - 3)
    for e in range(3):
        for p in range(int(source.pos[e] - source.size[e]), int(source.pos[e])):
            for name in ("t", "reward"):
                assert filled.buffers[name][e, p % max_length] == source.buffers[name][e, p % 16]
            assert filled.columns["priority"][e, p % max_length] == source.priority[e, p % 16]
    assert filled.report["empty_rows"] == num_envs - 3


def test_tensors_are_on_the_device_asked_for() -> None:
    filled = ring.fill(Planned(OPEN), num_envs=4, max_length=8, device="meta")
    tensors = [filled.pos, filled.size, filled.cut, filled.buffers["place"], filled.columns["priority"]]
    assert {t.device.type for t in tensors} == {"meta"}


# -- what is refused ---------------------------------------------------------------------------------------------------


def ragged(i: int, steps: dict[str, Any]) -> dict[str, Any]:
    return {**steps, "tokens": [np.zeros(2)] * len(steps["place"])}


def longer(i: int, steps: dict[str, Any]) -> dict[str, Any]:
    return {**steps, "obs": np.zeros(len(steps["place"]) + 1)}


def another(i: int, steps: dict[str, Any]) -> dict[str, Any]:
    return {**steps, f"field {i}": steps["place"]}


def doubles(i: int, steps: dict[str, Any]) -> dict[str, Any]:
    return {**steps, "place": steps["place"].astype(np.int64 if i else np.float64)}


TWO = [(0, 0, 3, False), (0, 3, 2, False), (1, 0, 2, False)]


@pytest.mark.parametrize(
    ("kind", "match", "share", "how"),
    [
        (CapacityError, r"steps in env row 1, the ring has 1 rows; plan with num_envs=1", Planned(TWO),
         {"num_envs": 1}),
        (CapacityError,
         r"env row 0 of the share has 5 steps, the ring 4 slots.*1 steps too many in 1 rows.*max_length=4",
         Planned(TWO), {"max_length": 4}),
        (UsageError, "without an env row", Planned([(-1, 0, 3, False)]), {}),
        (UsageError, "hole before position 4", Planned([(0, 0, 3, False), (0, 4, 2, False)]), {}),
        (UsageError, "hole before position 9", Planned([(0, 0, 3, False)], next_positions={0: 9}), {}),
        (UsageError, "no order", Planned([(0, 0, 3, False), (1, 0, 2, False), (0, 1, 2, False)]), {}),
        (UsageError, "give 'close', 'continue' or 'drop'", Planned(TWO), {"unfinished": "keep"}),
        (UsageError, "one or more of both", Planned(TWO), {"max_length": 0}),
        (FieldError, "'tokens' is not one row a step", Planned(TWO, change=ragged), {}),
        (FieldError, "'obs' is not one row a step", Planned(TWO, change=longer), {}),
        (FieldError, "some episodes of the share have a field", Planned(TWO, change=another), {}),
        (FieldError, "'place' differs between episodes", Planned(TWO, change=doubles), {}),
        (ColumnError, "'priority' of the share has 6 values for 7 live steps",
         Planned(TWO, columns={"priority": np.zeros(6)}), {}),
    ],
)  # fmt: skip
def test_what_is_no_ring_is_refused(kind: type[Exception], match: str, share: Planned, how: dict[str, Any]) -> None:
    with pytest.raises(kind, match=match):
        ring.fill(share, **{"num_envs": 2, "max_length": 5, **how})


@pytest.mark.parametrize(("read", "match"), [(1, "reading it gave 1"), (4, "reading it gave more")])
def test_a_layout_that_is_not_what_is_read_is_refused(read: int, match: str) -> None:
    share = Planned(TWO)
    nests = (share.read() + share.read())[:read]
    share.read = lambda: nests  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=match):
        ring.fill(share, num_envs=2, max_length=5)


# -- priority trees ----------------------------------------------------------------------------------------------------


def test_leaves_without_a_step_are_set_too() -> None:
    filled = ring.fill(Planned(TWO), num_envs=2, max_length=6)
    sums, minima = torch.full((12,), 99.0), torch.zeros(12)
    leaves = ring.rebuild(sums, filled, "priority")
    assert leaves == (7, 7.0)
    assert sums.tolist() == [1, 2, 3, 4, 5, 0, 6, 7, 0, 0, 0, 0]
    ring.rebuild(minima.__setitem__, filled, "priority", elsewhere=float("inf"))
    assert minima.isinf().tolist() == (sums == 0).tolist()


def test_priorities_of_zero_count_as_no_leaf() -> None:
    share = Planned(TWO, columns={"priority": np.array([0, 2, 0, 1, 1, 0, 0.5])})
    assert ring.rebuild(
        torch.zeros(12, dtype=torch.float64), ring.fill(share, num_envs=2, max_length=6), "priority"
    ) == (
        4,
        2.0,
    )
    empty = ring.fill(Planned([]), num_envs=2, max_length=6)
    assert ring.rebuild(torch.zeros(12), empty, "priority") == (0, 0.0)


def test_a_column_that_is_no_priority_is_refused() -> None:
    filled = ring.fill(Planned(TWO, columns={"pair": np.zeros((7, 2))}), num_envs=2, max_length=6)
    with pytest.raises(ColumnError, match=r"shape \[2, 6, 2\]; a leaf takes one number"):
        ring.rebuild(torch.zeros(12), filled, "pair")
    with pytest.raises(NotFoundError, match="no column 'loss'; it has: pair, priority"):
        ring.rebuild(torch.zeros(12), filled, "loss")


# -- the circle: saved on 3 ranks, filled and gone on with on 2 --------------------------------------------------------


def steps_of(buffers: dict[str, Any], priority: torch.Tensor, live: torch.Tensor) -> dict[bytes, float]:
    """Step, recognised by its observation -> priority."""
    states = buffers["obs"]["state"][live].numpy()
    return {s.tobytes(): float(p) for s, p in zip(states, priority[live], strict=True)}


def checkpoint(writers: list[archive.Writer], rings: list[Ring], step: int) -> Any:
    pending = [
        w.checkpoint(step=step, columns=ring.append(w, r.buffers, **r.how()))
        for w, r in zip(writers, rings, strict=True)
    ]
    return [p.result() for p in pending].pop()


@pytest.mark.parametrize("unfinished", ["close", "continue"])
def test_rings_go_on_in_a_world_of_another_size(unfinished: str) -> None:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    rings = [Ring(3, 16, seed=rank).run([40, 11, 16]) for rank in range(3)]
    writers = [arc.writer(rank=rank, world_size=3, session="a") for rank in range(3)]
    ck = checkpoint(writers, rings, 1)
    before: dict[bytes, float] = {}
    for source, w in zip(rings, writers, strict=True):
        before |= steps_of(source.buffers, source.priority, source.live)
        w.close()

    plan = resharding.plan(ck, world_size=2, num_envs=4, max_length=40, unfinished=unfinished)
    after: dict[bytes, float] = {}
    resumed = []
    for rank in range(2):
        filled = ring.fill(plan.share(rank), num_envs=4, max_length=40, unfinished=unfinished)
        after |= steps_of(filled.buffers, filled.columns["priority"], filled.live)
        assert int(filled.live.sum()) == int(filled.size.sum()) == filled.report["steps"]
        resumed.append(going_on(filled, seed=10 + rank))
    assert after == before
    written = int(arc.refresh().snapshot.columns(["length"])["length"].to_numpy().sum())

    writers = [arc.writer(resume=plan.share(rank), session="b") for rank in range(2)]
    new = [[3, 0, 30, 1], [0, 0, 2, 50]]
    for source, steps in zip(resumed, new, strict=True):
        source.run(steps)
    ck = checkpoint(writers, resumed, 2)
    for rank, source in enumerate(resumed):
        again = ring.fill(RankShare(ck, rank), num_envs=4, max_length=40)
        assert torch.equal(again.pos, source.pos)
        assert torch.equal(again.size, source.size)
        kept = steps_of(again.buffers, again.columns["priority"], again.live)
        assert kept == steps_of(source.buffers, source.priority, source.live)
        writers[rank].close()
    stored = int(arc.refresh().snapshot.columns(["length"])["length"].to_numpy().sum())
    assert stored - written == 3 + 30 + 1 + 2 + min(50, 40)


def going_on(filled: ring.Filled, seed: int) -> Ring:
    """The ring of a job that resumes; every env starts a new episode, as after a reset."""
    source = Ring(*filled.cut.shape, seed=seed)
    source.buffers, source.pos, source.size = filled.buffers, filled.pos, filled.size
    source.priority = filled.columns["priority"]
    return source
