"""M ranks save, N ranks resume: every step, priority and id where it belongs, around the circle,
by threads and processes."""

from __future__ import annotations

import itertools
import os
import uuid
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.checkpoint.checkpoints import Checkpoint
from tests.support.backends import Backend, make_backend
from tests.support.processes import answers_in_processes
from tests.support.ranks import (
    SCHEMA,
    Rank,
    assert_sound,
    checkpoint,
    close,
    fields_of,
    job,
    numbers,
    priority,
    resumed,
)
from tests.support.sampling import few_of

SOURCES, TARGETS = (1, 2, 3, 8), (1, 2, 3, 5, 8)


def fresh() -> str:
    return archive.create(f"memory://{uuid.uuid4().hex}").url


def rings(
    url: str, world_size: int, *, steps: int = 40, evicted: float = 0.3, envs: int = 3, **options: Any
) -> list[Rank]:
    """A job whose ring buffers are partly overwritten, each rank's by another length."""
    ranks = job(url, world_size, "first", envs=envs, **options)
    for rank in ranks:
        rank.run(steps + 3 * rank.writer.rank)
        rank.evict(evicted)
    return ranks


@pytest.fixture(scope="module")
def saved() -> dict[int, tuple[str, np.ndarray[Any, Any]]]:
    """World size -> an archive with one checkpoint, and the numbers of its live steps in canonical order."""
    out = {}
    for m in SOURCES:
        url = fresh()
        ranks = rings(url, m)
        checkpoint(ranks, 1)
        out[m] = url, np.concatenate([r.live for r in ranks])
        close(ranks)
    return out


@pytest.mark.parametrize("policy", ["balanced", "interleaved", "by_trajectory"])
@pytest.mark.parametrize("n", TARGETS)
@pytest.mark.parametrize("m", SOURCES)
def test_every_step_lands_once_with_its_priority(saved: Any, m: int, n: int, policy: str) -> None:
    url, want = saved[m]
    ck = archive.open(url).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=n, policy=policy)
    got = [numbers(plan.share(rank)) for rank in range(n)]
    assert sorted(np.concatenate(got).tolist()) == sorted(want.tolist())
    assert plan.steps == [len(t) for t in got]
    assert plan.dropped == {}
    if policy == "balanced":
        np.testing.assert_array_equal(np.concatenate(got), want)  # canonical order: contiguous runs
        longest = int(ck.episodes.table["length"].to_numpy().max())
        assert max(abs(len(t) - len(want) / n) for t in got) <= longest or m == n


@pytest.mark.parametrize("n", TARGETS)
@pytest.mark.parametrize("m", SOURCES)
def test_ids_are_renumbered_in_every_field_and_unique(saved: Any, m: int, n: int) -> None:
    if m == n:
        return
    ck = archive.open(saved[m][0]).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=n)
    old = {e.id: e for e in ck.episodes}
    for share in map(plan.share, range(n)):
        trajectories = []
        for ep, data in share.stream():
            for name, want in (("env", ep.env), ("traj", ep.place)):
                assert set(data[name].tolist()) == {want} == set(data["ids"][name].tolist())
            assert [data["env"].dtype, data["ids"]["env"].dtype] == [np.int32, np.uint8]
            assert [data["traj"].dtype, data["ids"]["traj"].dtype] == [np.int64, np.float64]
            trajectories.append(ep.place)
            before = old[ep.id].read(["env", "t"])
            assert ep.lineage["episode_id"] == ep.id
            assert {ep.lineage["env_id"]} == set(before["env"].tolist())
            assert ep.lineage["rank"] == old[ep.id].rank
            np.testing.assert_array_equal(before["t"][ep.lineage["start"] : ep.lineage["stop"]], data["t"])
        assert trajectories == list(range(len(share)))
        assert set(share.layout.env_id.tolist()) <= set(range(3))


def test_attributes_follow_their_episodes(saved: Any) -> None:
    ck = archive.open(saved[3][0]).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=5)
    seen: dict[str, Any] = {}
    for share in map(plan.share, range(5)):
        ids = {ep.id for ep in share}
        assert set(share.attributes["staleness"]) == ids
        assert all(ep.attributes == {"staleness": share.attributes["staleness"][ep.id]} for ep in share)
        seen |= share.attributes["staleness"]
    assert seen == ck.values["staleness"] == {e.id: len(e.id) + 1 for e in ck.episodes}


@pytest.mark.parametrize("m", SOURCES)
def test_the_same_number_of_ranks_is_the_identity(saved: Any, m: int) -> None:
    ck = archive.open(saved[m][0]).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=m)
    assert plan.is_identity
    at = 0
    for rank in range(m):
        share = plan.share(rank)
        mine = ck.episodes.filter(rank=rank)
        assert [e.id for e in share] == [e.id for e in mine]
        for ep, data, want in zip(share, share.read(), mine.read(), strict=True):
            assert {k: v.tobytes() for k, v in flat(data).items()} == {k: v.tobytes() for k, v in flat(want).items()}
            assert ep.read(["env"])["env"].tolist() == want["env"].tolist()  # not renumbered
        assert share.columns["priority"].tobytes() == ck.column("priority", rank).tobytes()
        assert share.state == {"rank": rank, "step": 1}
        at += share.steps
    assert at == len(saved[m][1])


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return out


def test_where_nothing_moves_random_numbers_go_on() -> None:
    arc = archive.open(fresh())
    w = arc.writer(0, 1, session="a", schema=SCHEMA)
    w.append(fields_of(np.arange(5)), env_ids=0)
    generator = np.random.default_rng(5)
    generator.normal(size=7)
    w.checkpoint(1, state={"rng": generator, "cursor": 4}).result()
    share = resharding.plan(archive.open(arc.url).checkpoints["step-1"], world_size=1).share(0)
    assert share.state["cursor"] == 4
    assert share.state["rng"].normal(size=100).tolist() == generator.normal(size=100).tolist()


def test_where_ranks_change_all_states_are_given_and_seeds_differ(saved: Any) -> None:
    ck = archive.open(saved[3][0]).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=2)
    assert plan.share(1).state is None
    assert plan.share(1).source_states == {r: {"rank": r, "step": 1} for r in range(3)}
    seeds = [resharding.plan(ck, world_size=n).share(r).seed for n in (2, 3, 5) for r in range(n)]
    assert len(set(seeds)) == 10
    assert seeds[:2] == [plan.share(0).seed, plan.share(1).seed]


@pytest.mark.parametrize("empty", ["few episodes", "skipped replay"])
def test_empty_shares_are_read_resumed_and_checkpointed(empty: str) -> None:
    url = fresh()
    ranks = job(url, 2, "first", envs=1)
    skipped = empty == "skipped replay"
    for rank in ranks:
        rank.writer.append(fields_of(np.arange(4) + 10 * rank.writer.rank), env_ids=0, last=not skipped)
        rank.rows[0] += (np.arange(4) + 10 * rank.writer.rank).tolist()
    ck = checkpoint(ranks, 1, save_replay=not skipped, unconsumed=[ranks[0].writer.rank])
    plan = resharding.plan(ck, world_size=5)
    shares = [plan.share(r) for r in range(5)]
    assert sorted(plan.steps) == ([0] * 5 if skipped else [0, 0, 0, 4, 4])
    for share in shares:
        assert [share.step, share.unconsumed] == [1, [0, 0]]
        assert share.progress is not None
        assert share, "also one without episodes is a place to go on from"
    some = next(s for s in shares if s.steps == 0)
    assert [list(some), some.read(), some.attributes, list(some.stream())] == [[], [], {}, []]
    if not skipped:
        assert (some.columns["priority"].dtype, some.columns["priority"].shape) == (np.float32, (0,))
    again = resumed(url, plan, "second", itertools.count(100))
    after = checkpoint(again, 2)
    assert after.buffers["replay"]["steps"] == (0 if skipped else 8)
    for rank in again:  # those that were empty take up steps like any other
        rank.rows = rank.rows or {0: []}
        rank.run(3)
    assert checkpoint(again, 3).buffers["replay"]["steps"] == (15 if skipped else 8 + 15)
    close(again)


def test_skipped_replay_of_the_same_world_size_resumes_empty() -> None:
    url = fresh()
    ranks = rings(url, 2, steps=5, evicted=0)
    ck = checkpoint(ranks, 1, save_replay=False)
    plan = resharding.plan(ck, world_size=2)
    assert plan.is_identity
    assert plan.share(1).state == {"rank": 1, "step": 1}
    again = resumed(url, plan, "second", itertools.count(1000))
    assert [r.writer.live.num_rows for r in again] == [0, 0]
    assert checkpoint(again, 2).buffers["replay"]["steps"] == 0


# -- the circle --------------------------------------------------------------------------------------------------------


def live_of(ck: Checkpoint) -> list[int]:
    parts = ck.episodes.read()
    for data in parts:
        assert_sound(data)
    return sorted(t for data in parts for t in data["t"].tolist())


def once(url: str) -> list[int]:
    """Numbers of all steps ever archived; each only once."""
    arc = archive.open(url)
    table = arc.episodes.table["episode_id"].to_pylist()
    assert len(set(table)) == len(table)
    every = [t for data in arc.episodes.read(["t"]) for t in data["t"].tolist()]
    assert len(set(every)) == len(every)
    return sorted(every)


@pytest.mark.parametrize("unfinished", ["close", "continue"])
@pytest.mark.parametrize("sizes", [(4, 3, 5), (2, 2, 3), (1, 8, 1)])
def test_the_circle_closes(sizes: tuple[int, ...], unfinished: str) -> None:
    url, clock = fresh(), itertools.count()
    ranks = rings(url, sizes[0], steps=100, clock=clock)
    ck = checkpoint(ranks, 1)
    every = len(once(url))
    for stage, size in enumerate(sizes[1:], 2):
        plan = resharding.plan(ck, world_size=size, unfinished=unfinished)
        wanted = sorted(t for r in ranks for t in r.live.tolist())
        opened = set(ck_open(ck))
        ranks = resumed(url, plan, f"s{stage}", clock)
        assert sorted(t for r in ranks for t in r.live.tolist()) == wanted
        for rank in ranks:
            rank.run(5)
        ck = checkpoint(ranks, stage)
        assert live_of(ck) == sorted(wanted + [t for r in ranks for row in r.rows.values() for t in row[-5:]])
        every += sum(5 * len(r.rows) for r in ranks)
        assert len(once(url)) == every
        check_open(url, plan, opened)
        same = resharding.plan(ck, world_size=size)
        for r in range(size):
            np.testing.assert_array_equal(numbers(same.share(r)), ranks[r].live)
    close(ranks)


def test_a_resumed_job_uploads_only_what_is_new() -> None:
    url, rng = fresh(), np.random.default_rng(0)

    def blob(n: int) -> dict[str, Any]:
        return {"blob": rng.integers(0, 256, (n, 4096), np.uint8), "reward": np.ones(n, np.float32)}

    ranks = job(url, 2, "first", envs=2)
    for rank in ranks:
        for env in range(2):
            rank.writer.append(blob(400), env_ids=env, last=np.arange(400) % 50 == 49)
    pending = [r.writer.checkpoint(1, columns={"priority": np.ones(800)}) for r in ranks]
    ck = [p.result() for p in pending][0]  # noqa: RUF015 (both are waited for)
    for stage, size in enumerate((3, 5), 2):
        plan = resharding.plan(ck, world_size=size)
        archives = [archive.open(url) for _ in range(size)]
        writers = [a.writer(resume=plan.share(r), session=f"s{stage}", schema=SCHEMA) for r, a in enumerate(archives)]
        before = [a.io_stats() for a in archives]
        for w in writers:
            w.append(blob(30), env_ids=0, last=True)
        steps = [int(w.live["length"].to_numpy().sum()) for w in writers]
        pending = [w.checkpoint(stage, columns={"priority": np.ones(n)}) for w, n in zip(writers, steps, strict=True)]
        ck = [p.result() for p in pending][0]  # noqa: RUF015
        uploaded = sum((a.io_stats() - b).bytes_out for a, b in zip(archives, before, strict=True))
        new = size * 30 * 4100
        assert new < uploaded <= 1.05 * new + 8 * sum(steps) + 64 * 1024 * size
        assert sum(steps) == 1600 + 90 + (150 if stage == 3 else 0)


def ck_open(ck: Checkpoint) -> list[str]:
    return [episode for r in ck.ranks for episode in ck.staged(r).index.buffers["replay"].open_episodes.values()]


def check_open(url: str, plan: Any, opened: set[str]) -> None:
    """What was open when it was saved went on under its id, or was closed by a row without steps."""
    table = {row["episode_id"]: row for row in archive.open(url).episodes.table.to_pylist()}
    went_on = set()
    for rank in range(plan.world_size):
        resume = plan.share(rank).to_resume().buffers["replay"]
        went_on |= {resume.episodes[i].id for i in resume.open_episodes.values()}
        assert {resume.episodes[i].id for i in resume.to_close} & went_on == set()
    assert went_on <= opened
    for name in opened - went_on:
        assert (table[name]["reason"], table[name]["truncated"]) == ("resumed", True), table[name]
    if plan.placements["replay"].rules.unfinished == "close":
        assert went_on == set()
    longer = [table[name]["length"] for name in went_on]
    assert all(n > 0 for n in longer)


def test_an_episode_goes_on_under_its_id_at_the_end_of_its_row() -> None:
    url, clock = fresh(), itertools.count()
    ranks = job(url, 2, "first", envs=1, clock=clock)
    for rank in ranks:
        rank.writer.append(fields_of(np.array([next(clock), next(clock)])), env_ids=0, last=False)
    save = [r.writer.checkpoint(1) for r in ranks]
    ck = next(p.result() for p in save)
    ids = [e.id for e in ck.episodes]
    share = resharding.plan(ck, world_size=1, num_envs=1, unfinished="continue").share(0)
    w = archive.open(url).writer(resume=share, session="second", schema=SCHEMA)
    w.append(fields_of(np.array([50, 51])), env_ids=0, last=True)
    after = w.checkpoint(2).result()
    lengths = {e.id: (e.length, e.complete, e.reason) for e in after.episodes}
    assert lengths == {ids[0]: (2, True, "resumed"), ids[1]: (4, True, None)}
    assert archive.open(url).episodes[ids[1]].read(["t"])["t"].tolist() == [2, 3, 50, 51]


def test_resuming_from_an_older_checkpoint_supersedes_the_tail() -> None:
    url, clock = fresh(), itertools.count()
    ranks = rings(url, 2, steps=30, clock=clock)
    checkpoint(ranks, 1)
    old = [r.live for r in ranks]
    for rank in ranks:
        rank.run(10)
    checkpoint(ranks, 2)
    ck = archive.open(url).checkpoints["step-1"]
    plan = resharding.plan(ck, world_size=3, unfinished="continue")
    again = resumed(url, plan, "second", itertools.count(5000))
    assert sorted(np.concatenate([r.live for r in again]).tolist()) == sorted(np.concatenate(old).tolist())
    for rank in again:
        rank.run(4)
    newest = checkpoint(again, 3)
    assert live_of(newest) == sorted(np.concatenate([r.live for r in again]).tolist())
    tail = {t for r in ranks for t in r.live.tolist()} - {t for mine in old for t in mine.tolist()}
    arc = archive.open(url)
    for name in ck_open(ck):  # went on or was closed: either way without what followed in the other life
        assert not tail & set(arc.episodes[name].read(["t"])["t"].tolist())
    once(url)
    for r in range(3):
        np.testing.assert_array_equal(numbers(resharding.plan(newest, world_size=3).share(r)), again[r].live)
    assert sorted(live_of(archive.open(url).checkpoints["step-1"])) == sorted(np.concatenate(old).tolist())


# -- real processes ----------------------------------------------------------------------------------------------------


SIZES = [(1, 8, 3), (8, 5, 1), (3, 2, 4), (1, 4, 2), (2, 7, 6), (6, 4, 8)]
QUICK = [("seaweedfs", (3, 2, 4)), ("moto", (1, 4, 2))]
OTHERS = [one for one in product(("moto", "seaweedfs"), SIZES) if one not in QUICK]
WORLDS = few_of([*QUICK, *OTHERS], len(QUICK))


@pytest.mark.parametrize(("server", "worlds"), WORLDS, ids=str)
def test_processes_save_and_resume(
    request: pytest.FixtureRequest, tmp_path: Path, server: str, worlds: tuple[int, int, int]
) -> None:
    """Processes save; others resume what a plan gives them, add steps and save; others again look at it."""
    s3_backend = make_backend(request, server, tmp_path)
    archive.create(s3_backend.url, storage_options=s3_backend.storage_options)
    first = _processes(s3_backend, worlds[0], "save")
    second = _processes(s3_backend, worlds[1], "resume")
    assert sorted(t for p in second for t in p["resumed"]) == sorted(t for p in first for t in p["live"])
    third = _processes(s3_backend, worlds[2], "look")
    assert sorted(t for p in third for t in p["live"]) == sorted(t for p in second for t in p["live"])
    assert len({t for p in third for t in p["live"]}) == sum(len(p["live"]) for p in third)


def _processes(backend: Backend, world_size: int, what: str) -> list[dict[str, Any]]:
    calls = [(what, rank, world_size, backend.url, backend.storage_options) for rank in range(world_size)]
    return answers_in_processes(as_one_rank, calls)


def as_one_rank(what: str, rank: int, world_size: int, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """One rank of a job, as its process has it; which it is stands in the environment."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    arc = archive.open(url, storage_options=options)
    if what == "save":
        writer = arc.writer(session="first", schema=SCHEMA)
        me = Rank(arc, writer, {e: [] for e in range(3)}, itertools.count(rank * 10000))
        me.run(60)
        me.evict(0.25)
    else:
        share = resharding.plan(arc.checkpoints[-1]).share()
        assert (share.rank, share.world_size) == (rank, world_size)
        found = numbers(share)
        if what == "look":
            return {"live": found.tolist()}
        rows: dict[int, list[int]] = {}
        for env, data in zip(share.layout.env_id.tolist(), share.read(["t"]), strict=True):
            rows.setdefault(env, []).extend(data["t"].tolist())
        writer = arc.writer(resume=share, session="second", schema=SCHEMA)
        me = Rank(arc, writer, rows, itertools.count(100000 + rank * 10000))
        me.run(3)
    live = me.live
    writer.checkpoint(1 if what == "save" else 2, columns={"priority": priority(live)}).result(60)
    writer.close()
    return {"live": live.tolist(), "resumed": [] if what == "save" else found.tolist()}
