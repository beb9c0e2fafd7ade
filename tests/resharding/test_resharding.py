"""Resharding end to end: all kinds of fields, several buffers, filters, weights, policies; plans as values."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import archive
import resharding
from archive import Schema
from archive.base.errors import FieldError, NotFoundError, PartialCheckpointError, UsageError
from archive.checkpoint.checkpoints import Checkpoint
from tests.support.archives import fresh, identical, looked_up_again
from tests.support.ranks import SCHEMA, checkpoint, close, fields_of, job, numbers


def save(
    writers: Sequence[Any], step: int = 1, *, options: Sequence[dict[str, Any]] | None = None, **same: Any
) -> Checkpoint:
    pending = [w.checkpoint(step, **same, **(options[i] if options else {})) for i, w in enumerate(writers)]
    made: list[Checkpoint] = [p.result(60) for p in pending]
    return made[0]


def writers_of(arc: archive.Archive, world_size: int, schema: Schema = SCHEMA, session: str = "first") -> list[Any]:
    return [archive.open(arc.url).writer(r, world_size, session=session, schema=schema) for r in range(world_size)]


def shares(plan: resharding.Plan) -> list[resharding.Share]:
    return [plan.share(rank) for rank in range(plan.world_size)]


def steps_of(plan: resharding.Plan) -> list[list[int]]:
    return [[t for data in share.read(["t"]) for t in data["t"].tolist()] for share in shares(plan)]


# -- fields ------------------------------------------------------------------------------------------------------------


AXES = Schema(
    env_id=["env"], episode_id=["traj", "name"], axes={"frames": "offset:1", "tokens": "ragged", "goal": "free"},
    next_of={"next/obs": "obs"}, json=["note"],
)  # fmt: skip


def trajectory(rng: np.random.Generator, steps: int, number: int) -> dict[str, Any]:
    obs = rng.normal(size=(steps + 1, 2))
    return {
        "obs": obs[:-1], "next": {"obs": obs[1:]}, "frames": rng.integers(0, 255, (steps + 1, 3), np.uint8),
        "tokens": [rng.integers(0, 99, rng.integers(0, 4)) for _ in range(steps)], "goal": rng.normal(size=5),
        "note": [{"at": i} for i in range(steps)], "deep": {"er": {"flag": rng.random(steps) < 0.5}},
        "env": np.full(steps, number), "traj": np.full(steps, number, np.int16),
        "name": np.array([f"t{number}"] * steps), "reward": np.ones(steps),
    }  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 5])
def test_fields_on_all_axes_arrive_to_the_bit(n: int) -> None:
    arc, rng = fresh(), np.random.default_rng(3)
    given: dict[str, dict[str, Any]] = {}
    writers = writers_of(arc, 2, AXES)
    for w in writers:
        for number in range(6):
            nest = trajectory(rng, int(rng.integers(1, 9)), number)
            given[w.add_episode(nest, env_id=number % 2)] = nest
    plan = resharding.plan(save(writers), world_size=n)
    seen = []
    for share in shares(plan):
        for (ep, data), alone in zip(share.stream(max_bytes=1), share, strict=True):
            want = dict(given[ep.id])
            steps = len(want["reward"])
            want["env"], want["traj"] = np.full(steps, ep.env), np.full(steps, ep.place, np.int16)
            assert identical(data["name"].tolist(), [ep.id] * steps)
            assert all(identical(data[name], want[name]) for name in want if name != "name")
            assert identical(alone.read(), data)
            part = alone.read(["frames", "tokens", "env"], 1, 3)
            assert identical(part["frames"], want["frames"][1 : min(3, steps) + 1])
            assert identical(part["tokens"], want["tokens"][1:3])
            assert part["env"].tolist() == [ep.env] * len(part["tokens"])
            seen.append(ep.id)
    assert sorted(seen) == sorted(given)


def test_open_episodes_that_cross_checkpoints_come_whole() -> None:
    """Offset fields have their extra row once, wherever the episode was cut by a commit."""
    arc = fresh()
    schema = Schema(axes={"frames": "offset:1"})
    (w,) = writers_of(arc, 1, schema)
    w.append({"frames": np.arange(4), "reward": np.ones(3)}, env_ids=0)
    save([w], 1)
    w.append({"frames": np.arange(3, 6), "reward": np.ones(2)}, env_ids=0, last=True)
    ck = save([w], 2)
    parts = [data for share in shares(resharding.plan(ck, world_size=2)) for data in share.read()]
    assert [data["frames"].tolist() for data in parts] == [[0, 1, 2, 3, 4, 5]]


def test_an_id_field_too_narrow_for_the_new_ids_is_an_error() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1, Schema(episode_id=["traj"]))
    w.append({"traj": np.zeros(300, np.uint8), "t": np.arange(300)}, env_ids=0, last=np.ones(300, bool))
    share = resharding.plan(save([w]), world_size=1, policy="by_trajectory").share(0)
    assert [d["traj"].tolist() for d in share.episodes[255:256].read()] == [[0]]
    with pytest.raises(FieldError, match=r"traj.*uint8.*256.*wider dtype"):
        share.read()
    assert len(share.read(["t"])) == 300


def test_text_ids_are_not_cut_to_the_old_width() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1, Schema(env_id=["env"], episode_id=["traj"]))
    for i in range(2):
        w.add_episode({"env": np.array(["e"] * 3), "traj": np.array([str(i)] * 3, "<U1")}, env_id=0)
    share = resharding.plan(save([w]), world_size=1, num_envs=2).share(0)
    for ep, data in share.stream():
        assert set(data["traj"].tolist()) == {ep.id}
        assert set(data["env"].tolist()) == {str(ep.env)}
    assert [ep.env for ep in share] == [0, 1]


# -- several buffers, weights, filters ---------------------------------------------------------------------------------


def test_buffers_are_dealt_out_each_for_itself() -> None:
    arc = fresh()
    writers = writers_of(arc, 2)
    for w in writers:
        base = 1000 * w.rank
        w.append(fields_of(np.arange(base, base + 30)), env_ids=0, last=np.arange(30) % 5 == 4)
        if w.rank == 0:
            w.buffer("demo").append(fields_of(np.arange(500, 520)), env_ids=0, last=np.arange(20) % 4 == 3)
    options = [
        {"columns": {"priority": np.arange(30) + 100.0 * w.rank}}
        | ({"buffers": {"demo": {"columns": {"age": np.arange(20)}, "state": {"demo": 1}}}} if w.rank == 0 else {})
        for w in writers
    ]
    ck = save(writers, options=options)
    plan = resharding.plan(ck, world_size=3, weights="priority")  # a column that only one buffer has
    assert [s.buffers for s in shares(plan)] == [["demo", "replay"]] * 3 or plan.share(0).buffers == ["replay", "demo"]
    demo = [s.buffer("demo") for s in shares(plan)]
    assert sorted(t for d in demo for data in d.read(["t"]) for t in data["t"].tolist()) == list(range(500, 520))
    assert np.concatenate([d.columns["age"] for d in demo]).tolist() == list(range(20))
    assert sorted(t for part in steps_of(plan) for t in part) == [*range(30), *range(1000, 1030)]
    assert demo[0].source_states == {0: {"demo": 1}, 1: None}
    same = resharding.plan(ck, world_size=2)
    assert same.share(0).buffer("demo").state == {"demo": 1}
    again = [archive.open(arc.url).writer(resume=s, session="second") for s in shares(plan)]
    assert sum(w.buffer("demo").live["length"].to_numpy().sum() for w in again) == 20
    with pytest.raises(NotFoundError, match=r"no buffer 'other'.*demo"):
        plan.share(0).buffer("other")


def test_weights_balance_by_a_column_or_by_bytes() -> None:
    arc = fresh()
    writers = writers_of(arc, 2, Schema())
    for w in writers:
        for number in range(8):
            wide = number < 4 and w.rank == 0
            w.add_episode({"t": np.arange(4), "x": np.zeros((4, 100 if wide else 1))}, env_id=0)
    column = [np.repeat(np.where(np.arange(8) == 0, 7.0, 1.0), 4), np.ones(32)]
    ck = save(writers, options=[{"columns": {"cost": c}} for c in column])
    assert resharding.plan(ck, world_size=2).episodes == [8, 8]
    assert resharding.plan(ck, world_size=2, weights="cost").episodes == [5, 11]
    assert resharding.plan(ck, world_size=2, weights="bytes").episodes == [2, 14]
    with pytest.raises(NotFoundError, match=r"weights='costs'.*cost"):
        resharding.plan(ck, world_size=2, weights="costs")


def test_weights_in_bytes_count_tokens_and_what_belongs_to_whole_episodes() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1, Schema(axes={"prompt": "free"}))
    for tokens, prompt in [(1000, 1), (1, 4000), *[(1, 1)] * 6]:
        w.add_episode(
            {"t": np.arange(4), "tokens": [np.zeros(tokens, np.int32)] * 4, "prompt": np.zeros(prompt, np.int32)}
        )
    ck = save([w])
    plan = resharding.plan(ck, world_size=2, weights="bytes")
    assert plan.episodes == [1, 7]
    held = [sum(_nbytes(data) for data in share.read()) for share in shares(plan)]
    assert [cost["needed_bytes"] for cost in plan.cost()] == held


def _nbytes(nest: dict[str, Any]) -> int:
    tokens = nest["tokens"]
    return int(nest["t"].nbytes + nest["prompt"].nbytes + sum(turn.nbytes for turn in tokens) + 8 * len(tokens))


def test_filters_are_those_of_episodes() -> None:
    arc = fresh()
    writers = writers_of(arc, 2)
    for w in writers:
        for number in range(6):
            t = np.arange(number + 1) + 100 * w.rank + 10 * number
            w.add_episode(
                fields_of(t), env_id=0, model_weights_uuid=f"w{number % 2}", update_count=number, first=number != 3
            )
    ck = save(writers)
    for given in (
        {"model_weights_uuid": "w1"}, {"update_count": (2, 5)}, {"complete": True}, {"complete": False}, {"rank": 1},
        {"where": "length > 3"}, {"update_count": (0, 4), "where": "return < 2 and complete"},
        {"env_id": 0, "buffer": "replay"},
    ):  # fmt: skip
        want = sorted(e.id for e in ck.episodes.filter(**given))
        plan = resharding.plan(ck, world_size=3, filter=given)
        assert sorted(e.id for s in shares(plan) for e in s) == want, given
        dropped = {e["episode_id"] for e in plan.dropped_episodes()}
        assert dropped == {e.id for e in ck.episodes} - set(want)
        assert plan.dropped.get("filter", {"episodes": 0})["episodes"] == 12 - len(want)
    assert resharding.plan(ck, world_size=1, filter="length = 6").steps == [12]


def test_a_plan_takes_each_condition_that_a_filter_takes() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    for number in range(6):
        w.add_episode(fields_of(np.arange(number + 1)), env_id=number, episode_id=f"e{number}", metadata={"n": number})
    ck = save([w])
    arc.label({f"e{number}": {"good": number > 3, "mixed": 1 if number else "one"} for number in range(6)})
    ck = archive.open(arc.url).checkpoints[-1]
    label, length = pc.field("label.good"), pc.field("length")
    for given in (label, {"where": label == True}, ~label & (length < 3), "label.good and metadata.n < 5", {}):  # noqa: E712
        want = ck.episodes.filter(**given) if isinstance(given, dict) else ck.episodes.filter(where=given)
        assert [e.id for e in resharding.plan(ck, 1, filter=given).share(0)] == [e.id for e in want]
    for wrong in ("label.mixed = 1", 5, pc.field("nothing") > 1):
        said = [
            refused(partial(resharding.plan, ck, 1, filter=wrong)),
            refused(partial(ck.episodes.filter, where=wrong)),
        ]
        assert said[0] == said[1]
    assert "'nothing'" in refused(partial(resharding.plan, ck, 1, filter={"nothing": 1}))


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as found:
        call()
    return str(found.value)


# -- what is cut, incomplete or dropped --------------------------------------------------------------------------------


def test_independent_steps_are_cut_anywhere_and_exactly() -> None:
    arc = fresh()
    writers = writers_of(arc, 2, Schema(unit="step", env_id=["env"]))
    for w in writers:
        w.add_episode({**fields_of(np.arange(50) + 100 * w.rank), "env": np.zeros(50)}, env_id=0)
        w.add_episode(fields_of(np.zeros(0, np.int64)), env_id=0)
    live = [*range(50), *range(100, 150)]
    ck = save(writers, options=[{"columns": {"p": np.arange(50) + 100 * w.rank}} for w in writers])
    for n in (1, 3, 7):
        plan = resharding.plan(looked_up_again(ck), world_size=n)
        assert plan.steps == [100 * (k + 1) // n - 100 * k // n for k in range(n)]
        parts = steps_of(plan)
        assert [t for part in parts for t in part] == live
        assert [s.columns["p"].tolist() for s in shares(plan)] == parts
        assert sum(len(s) for s in shares(plan)) >= 4  # episodes without steps are somewhere too
        again = [archive.open(arc.url).writer(resume=s, session=f"n{n}") for s in shares(plan)]
        after = save(again, 10 + n)
        assert sorted(t for data in after.episodes.read(["t"]) for t in data["t"].tolist()) == live
    plan = resharding.plan(ck, world_size=2, capacity=30)
    assert [p[-30:] for p in steps_of(plan)] == [list(range(20, 50)), list(range(120, 150))]
    assert plan.dropped == {"capacity": {"episodes": 2, "steps": 40}}


def ragged_ring() -> tuple[archive.Archive, Checkpoint]:
    """Two ranks of two env rows: a headless episode, two whole ones and an open one in each row."""
    arc = fresh()
    writers = writers_of(arc, 2)
    for w in writers:
        for i in range(20):
            t = np.array([i, 50 + i]) + 100 * w.rank
            w.append(fields_of(t, [0, 1]), env_ids=[0, 1], last=np.full(2, i % 6 == 5))
        for env in range(2):
            w.evict(env, before=2)
    return arc, save(writers, options=[{"columns": {"n": np.arange(36) + 100 * w.rank}} for w in writers])


def test_headless_and_open_episodes_by_policy_with_counts() -> None:
    arc, ck = ragged_ring()
    plan = resharding.plan(ck, world_size=3)
    every = [i for s in shares(plan) for i in zip(s.layout.headless, s.layout.open, s.layout.length, strict=True)]
    assert sorted(every) == sorted(4 * [(True, False, 4), (False, False, 6), (False, False, 6), (False, True, 2)])
    whole = resharding.plan(ck, world_size=3, incomplete="drop")
    assert whole.dropped == {"headless": {"episodes": 4, "steps": 16}, "open": {"episodes": 4, "steps": 8}}
    assert all(ep.complete and ep.length == 6 for s in shares(whole) for ep in s)
    assert sum(whole.steps) == 4 * 12
    ended = resharding.plan(ck, world_size=3, unfinished="drop")
    assert ended.dropped == {"open": {"episodes": 4, "steps": 8}}
    listed = ended.dropped_episodes()
    assert sorted((e["reason"], e["start"], e["stop"]) for e in listed) == [("open", 0, 2)] * 4
    assert {e["episode_id"] for e in listed} == {e.id for e in ck.episodes if e.length == 2}
    assert len(archive.open(arc.url).episodes) == 16  # the archive keeps what a plan drops


def test_rings_keep_the_newest_steps_of_each_row() -> None:
    _, ck = ragged_ring()
    plan = resharding.plan(ck, world_size=1, num_envs=2, max_length=18)
    rows = {0: list(range(12, 20)) + list(range(62, 70)), 1: list(range(112, 120)) + list(range(162, 170))}
    share = plan.share(0)
    got: dict[int, list[int]] = {}
    for env, data in zip(share.layout.env_id.tolist(), share.read(["t"]), strict=True):
        got.setdefault(env, []).extend(data["t"].tolist())
    assert {env: len(row) for env, row in got.items()} == {0: 18, 1: 18}
    assert all(set(want) <= set(got[env]) for env, want in rows.items()), "newer steps left before older ones"
    assert plan.dropped["max_length"]["steps"] == 72 - 36
    assert share.columns["n"].tolist() == [column_of(t) for env in (0, 1) for t in got[env]]
    assert share.next_positions == {0: 18, 1: 18}


def column_of(t: int) -> int:
    rank, rest = divmod(t, 100)
    env, i = divmod(rest, 50)
    return 100 * rank + 18 * env + i - 2


def test_capacity_in_steps_or_episodes_drops_the_oldest() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    for number in range(10):
        w.add_episode(fields_of(np.arange(5) + 10 * number))
        if number == 4:
            w.commit()
    ck = save([w])
    plan = resharding.plan(ck, world_size=2, capacity=12)
    assert steps_of(plan) == [[*range(30, 35), *range(40, 45)], [*range(80, 85), *range(90, 95)]]
    assert plan.dropped == {"capacity": {"episodes": 6, "steps": 30}}
    plan = resharding.plan(ck, world_size=1, max_episodes=3)
    assert steps_of(plan) == [[*range(70, 75), *range(80, 85), *range(90, 95)]]
    assert [e["reason"] for e in plan.dropped_episodes()] == ["max_episodes"] * 7


@pytest.mark.parametrize("open_ended", [True, False])
def test_capacity_cuts_an_endless_episode_of_an_env_row_at_steps(open_ended: bool) -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    w.append(fields_of(np.arange(100)), env_ids=np.zeros(100, int), last=np.arange(100) == (-1 if open_ended else 99))
    ck = save([w], options=[{"columns": {"n": np.arange(100)}}])
    plan = resharding.plan(ck, world_size=1, capacity=99)
    assert steps_of(plan) == [[*range(1, 100)]]
    assert plan.share(0).columns["n"].tolist() == [*range(1, 100)]
    assert plan.dropped == {"capacity": {"episodes": 1, "steps": 1}}
    whole = resharding.plan(ck, world_size=1, capacity=99, incomplete="drop")
    assert steps_of(whole) == [[]], "only whole ones were wanted"


def test_capacity_in_a_ring_drops_by_time_not_by_row() -> None:
    _, ck = ragged_ring()
    (kept,) = steps_of(resharding.plan(ck, world_size=1, capacity=4 * 8))
    assert sorted(kept) == sorted(base + i for base in (0, 50, 100, 150) for i in range(12, 20))


def test_holes_make_parts_of_which_only_the_newest_is_open() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    w.append(fields_of(np.arange(10)), env_ids=0)
    w.evict(0, positions=[4, 5])
    ck = save([w], columns={"p": np.r_[0:4, 6:10]})
    plan = resharding.plan(ck, world_size=1, unfinished="close", num_envs=1)
    share = plan.share(0)
    assert share.layout.length.tolist() == [4, 4]
    assert share.layout.open.tolist() == [False, True]
    assert share.layout.headless.tolist() == [False, True]
    resume = share.to_resume().buffers["replay"]
    assert (len(resume.to_close), dict(resume.open_episodes)) == (1, {})
    assert resharding.plan(ck, world_size=1, incomplete="drop").steps == [0]
    two = resharding.plan(ck, world_size=2)
    again = [archive.open(arc.url).writer(resume=s, session="second") for s in shares(two)]
    after = save(again, 2)
    assert [d["t"].tolist() for d in after.episodes.read(["t"])] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert [c.tolist() for c in (s.columns["p"] for s in shares(two))] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    (ep,) = archive.open(arc.url).episodes
    assert (ep.length, ep.reason, ep.read(["t"])["t"].tolist()) == (10, "resumed", list(range(10)))


def test_broken_off_episodes_count_as_incomplete() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    w.append(fields_of(np.arange(4)), env_ids=0)
    w.append(fields_of(np.arange(4, 8)), env_ids=0, first=True, last=True)
    ck = save([w])
    plan = resharding.plan(ck, world_size=1, incomplete="drop")
    assert (steps_of(plan), plan.dropped) == ([[4, 5, 6, 7]], {"open": {"episodes": 1, "steps": 4}})
    assert resharding.plan(ck, world_size=2, unfinished="drop").dropped == {}  # nothing of it is under way


def test_an_episode_that_lost_its_end_is_incomplete() -> None:
    arc = fresh()
    (w,) = writers_of(arc, 1)
    w.append(fields_of(np.arange(6)), env_ids=0, last=True)
    w.append(fields_of(np.arange(6, 9)), env_ids=0, last=True)
    w.evict(0, positions=[4, 5])
    ck = save([w])
    assert steps_of(resharding.plan(ck, world_size=1, incomplete="drop")) == [[6, 7, 8]]
    assert steps_of(resharding.plan(ck, world_size=1, filter={"complete": True})) == [[6, 7, 8]]
    share = resharding.plan(ck, world_size=2, unfinished="drop").share(0)
    assert [ep.read(["t"])["t"].tolist() for ep in share] == [[0, 1, 2, 3]]
    assert share.layout.open.tolist() == [False]  # it has ended, and does not go on


def test_episodes_without_steps_go_somewhere_once() -> None:
    arc = fresh()
    writers = writers_of(arc, 2)
    ids = [w.add_episode(fields_of(np.arange(n)), env_id=0) for w in writers for n in (0, 3, 0, 0)]
    ck = save(writers)
    for n in (1, 3, 8):
        plan = resharding.plan(looked_up_again(ck), world_size=n)
        assert sorted(e.id for s in shares(plan) for e in s) == sorted(ids)
        again = [archive.open(arc.url).writer(resume=s, session=f"n{n}") for s in shares(plan)]
        assert sorted(e.id for e in save(again, 10 + n).episodes) == sorted(ids)
        for share in shares(plan):
            assert [d["t"].shape for d in share.read()] == [(ep.length,) for ep in share]


BEGUN = Schema(axes={"frames": "offset:1"})


def begun(holes: Sequence[int] = ()) -> tuple[archive.Archive, Checkpoint, str]:
    """An episode of four steps that was begun without any, between two others; holes: its steps that left since."""
    arc = fresh()
    (w,) = writers_of(arc, 1, BEGUN)
    w.append({"frames": np.arange(50, 53), "t": np.arange(50, 52)}, env_ids=0, last=np.array([False, True]))
    name = w.add_episode({"frames": np.arange(1), "t": np.arange(0)}, env_id=0, last=False)
    w.commit()
    w.append({"frames": np.arange(5), "t": np.arange(4)}, env_ids=0, last=np.arange(4) == 3)
    w.append({"frames": np.arange(60, 63), "t": np.arange(60, 62)}, env_ids=1, last=np.array([False, True]))
    w.evict(0, positions=[3 + at for at in holes])
    return arc, save([w], columns={"p": np.array([t for t in (50, 51, 0, 1, 2, 3, 60, 61) if t not in holes])}), name


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_beginning_without_steps_goes_with_the_steps_that_follow(n: int) -> None:
    arc, ck, name = begun()
    for round_ in range(2):  # from where it was written, and from where it was moved to
        parts = shares(resharding.plan(ck, world_size=n, num_envs=1))
        assert sorted(e.id for s in parts for e in s) == sorted(e.id for e in ck.episodes)
        (share,) = [s for s in parts if name in [e.id for e in s]]
        at = [e.id for e in share].index(name)
        assert share.read()[at]["frames"].tolist() == [0, 1, 2, 3, 4]
        assert (share.layout.length[at], share.layout.headless[at]) == (4, False)
        assert [t for s in parts for t in s.columns["p"].tolist()] == [50, 51, 0, 1, 2, 3, 60, 61]
        for s in parts:  # as a ring has them
            taken = np.append(0, np.cumsum(s.layout.length))
            assert s.layout.position.tolist() == taken[:-1].tolist()
            assert not len(s) or s.next_positions == {0: taken[-1]}
        again = [archive.open(arc.url).writer(resume=s, session=f"again-{round_}") for s in parts]
        ck = save(again, 10 + round_, options=[{"columns": s.columns} for s in parts])
        assert [data["t"].tolist() for data in ck.episodes.read(["t"])] == [[50, 51], [0, 1, 2, 3], [60, 61]]


def test_the_identity_leaves_a_beginning_without_steps_where_it_is() -> None:
    arc, ck, _ = begun()
    share = resharding.plan(ck, world_size=1).share(0)
    assert (share.plan.is_identity, share.layout.position.tolist()) == (True, [0, 3, 0])
    assert save([archive.open(arc.url).writer(resume=share, session="again")], 2).live.equals(ck.live)


def test_a_beginning_without_steps_goes_with_what_is_left_of_those_that_follow() -> None:
    _, ck, name = begun(holes=[0, 2])
    (share,) = shares(resharding.plan(ck, world_size=1, num_envs=2, max_length=100))
    own = [i for i, ep in enumerate(share) if ep.id == name]
    assert [share.read()[i]["t"].tolist() for i in own] == [[1], [3]]
    assert share.layout.headless[own].tolist() == [True, True]
    cut = resharding.plan(begun()[1], world_size=1, num_envs=1, max_length=2).share(0)
    assert [data["t"].tolist() for data in cut.read()] == [[2, 3]]
    assert cut.read()[0]["frames"].tolist() == [2, 3, 4]


def test_partial_checkpoints_only_when_asked() -> None:
    arc = fresh()
    writers = writers_of(arc, 3)
    for w in writers:
        w.append(fields_of(np.arange(6) + 10 * w.rank), env_ids=0, last=np.arange(6) % 3 == 2)
    writers[1].checkpoint(1, partial=True, state={"rank": 1}, columns={"p": np.arange(6)}).result()
    ck = archive.open(arc.url).checkpoints["step-1"]
    assert ck.missing_ranks == [0, 2]
    with pytest.raises(PartialCheckpointError, match=r"ranks \[0, 2\].*allow_missing"):
        resharding.plan(ck, world_size=2)
    plan = resharding.plan(ck, world_size=2, allow_missing=True)
    assert steps_of(plan) == [[10, 11, 12], [13, 14, 15]]
    assert [s.columns["p"].tolist() for s in shares(plan)] == [[0, 1, 2], [3, 4, 5]]
    assert plan.share(0).source_states == {1: {"rank": 1}}
    again = [archive.open(arc.url).writer(resume=s, session="second") for s in shares(plan)]
    assert save(again, 2).buffers["replay"]["steps"] == 6


# -- plans as values ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring_of_three() -> Checkpoint:
    url = archive.create(f"memory://{uuid.uuid4().hex}").url
    ranks = job(url, 3, "first")
    for rank in ranks:
        rank.run(30)
        rank.evict(0.2)
    ck = checkpoint(ranks, 1)
    close(ranks)
    return ck


def test_a_plan_prints_as_its_dry_run(ring_of_three: Checkpoint) -> None:
    plan = resharding.plan(ring_of_three, world_size=2, max_length=20)
    lines = str(plan).splitlines()
    assert lines[0] == "'step-1': 3 ranks -> 2"
    assert lines[1].split() == ["rank", "episodes", "steps", "MB", "requests"]
    for rank, line in enumerate(lines[2:4]):
        cost = plan.share(rank).cost()
        want = [rank, plan.episodes[rank], plan.steps[rank], f"{cost['bytes'] / 1e6:.2f}", cost["requests"]]
        assert line.split() == [str(value) for value in want]
    gone = plan.dropped["max_length"]
    assert f"dropped (max_length): {gone['episodes']} episodes, {gone['steps']} steps" in lines
    assert "(as it was)" in str(resharding.plan(ring_of_three, world_size=3))
    assert repr(plan) == f"<Plan 'step-1' 3 -> 2 ranks, steps {plan.steps}>"


def test_a_plan_prints_the_same_whatever_was_read_before() -> None:
    writers = writers_of(fresh(), 2)
    for rank, w in enumerate(writers):
        w.add_episode({"t": np.arange(50) + rank, "obs": np.ones((50, 100))})
    plan = resharding.plan(save(writers), 1)
    before = (str(plan), plan.cost())
    plan.share(0).read(["t"])
    assert (str(plan), plan.cost()) == before
    for w in writers:
        w.close()


def test_a_plan_survives_json_and_pickle_and_compares(ring_of_three: Checkpoint) -> None:
    plan = resharding.plan(ring_of_three, world_size=4, capacity=40, filter="length > 2")
    again = resharding.Plan.from_json(plan.to_json(), ring_of_three)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.dropped_episodes() == plan.dropped_episodes()
    assert json.loads(plan.to_json())["world_size"] == 4
    copies = pickle.loads(pickle.dumps((plan, plan.share(1))))
    assert copies[0] == plan
    np.testing.assert_array_equal(numbers(copies[1]), numbers(plan.share(1)))
    np.testing.assert_array_equal(numbers(again.share(2)), numbers(plan.share(2)))
    assert plan == resharding.plan(
        archive.open(_url(ring_of_three)).checkpoints["step-1"], 4, capacity=40, filter="length > 2"
    )
    assert plan != resharding.plan(ring_of_three, world_size=4, capacity=41, filter="length > 2")


def _url(ck: Checkpoint) -> str:
    return ck.reader.snapshot.storage.url


def test_a_plan_is_frozen(ring_of_three: Checkpoint) -> None:
    plan = resharding.plan(ring_of_three, world_size=4)
    for copy in (plan, resharding.Plan.from_json(plan.to_json(), ring_of_three), pickle.loads(pickle.dumps(plan))):
        with pytest.raises(FrozenInstanceError):
            copy.world_size = 3  # type: ignore[misc]
        with pytest.raises(ValueError, match="read-only"):
            copy.placements["replay"].parts["target"][0] = 3
        with pytest.raises(TypeError):
            copy.placements["replay"] = None  # type: ignore[index]


def test_plans_of_another_checkpoint_or_rank_are_refused(ring_of_three: Checkpoint) -> None:
    plan = resharding.plan(ring_of_three, world_size=2)
    for rank in (-1, 2):
        with pytest.raises(UsageError, match=f"rank {rank} is not one of the plan's 2"):
            plan.share(rank)
    arc, other = ragged_ring()
    with pytest.raises(UsageError, match="was made for commit"):
        resharding.Plan.from_json(plan.to_json(), other)
    with pytest.raises(UsageError, match="no plan of format"):
        resharding.Plan.from_json("{}", other)
    assert len(arc.commits) >= 0


def test_shares_stream_in_bounded_batches(ring_of_three: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    share = resharding.plan(ring_of_three, world_size=2).share(0)
    whole = share.read()
    sizes: list[int] = []
    reader = ring_of_three.reader
    read = type(reader).read

    def counted(self: Any, parts: Any, *more: Any) -> Any:
        sizes.append(len(parts))
        return read(self, parts, *more)

    monkeypatch.setattr(type(reader), "read", counted)
    streamed = [data for _, data in share.stream(max_bytes=4000)]
    assert all(identical(a, b) for a, b in zip(streamed, whole, strict=True))
    assert len(sizes) > 3
    assert sum(sizes) == len(share)


def test_the_rank_comes_from_the_environment(ring_of_three: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = resharding.plan(ring_of_three)
    assert (plan.world_size, plan.share().rank) == (2, 1)
