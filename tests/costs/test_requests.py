"""The requests of a run on paper, against those that the library sends to a store that counts.

Creates, puts, lists and deletes are equal, by folder of the archive. Gets are at most what is said, and not much less:
ranks that wait for one another look a number of times that depends on the machine.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import archive
import resharding
from archive.base import waits
from archive.checkpoint import assembly
from archive.checkpoint import requests as asked
from archive.costs import Workload
from archive.costs import requests as of
from archive.costs.causes import causes
from archive.costs.requests import together
from archive.maintain.objects import FOLDERS
from archive.read import Gather
from archive.shard import SHARD_BYTES
from archive.shard.indexed import HEAD_BYTES
from archive.store import proof
from archive.testing import Trace, trace
from tests.support.nodes import world
from tests.support.ticks import NEVER_S

EXACT = ("create", "put", "list", "delete", "head")
WIDTH = 50


@pytest.fixture(autouse=True)
def _as_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank checks the store for itself, and none steps in for another that is slow."""

    class Nothing(set[Any]):
        def __contains__(self, key: object) -> bool:
            return False

    monkeypatch.setattr(proof, "_proven", Nothing())
    monkeypatch.setattr(assembly, "STEP_IN_S", 600.0)


def counted(t: Trace, *folders: str) -> Counter[str]:
    """The requests of a trace by verb, below some folders or all."""
    return Counter(row.verb for row in t.rows if not folders or row.key.split("/")[0] in folders)


def check(t: Trace, told: Mapping[str, float], *folders: str, most: float = 6.0) -> None:
    """Compare what was counted with what was told. most: by how much the gets told may exceed those counted."""
    sent = counted(t, *folders)
    exact = {verb: told.get(verb, 0) for verb in EXACT}
    assert {verb: sent[verb] for verb in EXACT} == {verb: int(count) for verb, count in exact.items()}
    assert sent["get"] <= told.get("get", 0) <= most * sent["get"] + 6, (sent, told)


class Job:
    """Ranks of one process, whose journals tick when they are told to."""

    def __init__(self, url: str, ranks: int, journal: bool, *, resume: Any = None, session: str = "first") -> None:
        self.archives = [archive.open(url, create=True) for _ in range(ranks)]
        journal_s = NEVER_S if journal else None
        self.writers = [
            arc.writer(rank, ranks, session=session, journal_s=journal_s, resume=resume and resume.share(rank))
            for rank, arc in enumerate(self.archives)
        ]
        self.journal, self.step = journal, 0

    def add(self, steps: int = 5, episodes: int = 1) -> None:
        """Steps of each rank; in its journal, if it has one."""
        for w in self.writers:
            for _ in range(episodes):
                w.add_episode({"obs": np.random.default_rng(0).random((steps, WIDTH))}, env_id=0)
            if self.journal:
                w.sync()

    def checkpoint(self, priority: float | None = None) -> None:
        """A checkpoint of all ranks, with a column that has changed, or none."""
        self.step += 1
        live = [sum(w.live["length"].to_pylist()) for w in self.writers]
        columns = [{} if priority is None else {"priority": np.full(n, priority)} for n in live]
        saves = [w.checkpoint(self.step, columns=c, state={"a": 1}) for w, c in zip(self.writers, columns, strict=True)]
        for one in saves:
            one.result()

    def close(self) -> None:
        for w in self.writers:
            w.close()


SETS = [(1, True), (1, False), (3, True), (3, False)]


@pytest.mark.parametrize(("ranks", "journal"), SETS)
def test_what_writes(ranks: int, journal: bool) -> None:
    url = f"memory://costs/write-{ranks}-{journal}"
    archive.create(url)
    with trace(url) as t:
        job = Job(url, ranks, journal)
    begun = together(of.opened(ranks), {"list": ranks}, of.session(ranks, journal=journal, resumed=False))
    check(t, begun)  # of an archive without a commit, a second list looks for other folders
    for ticks in (1, 4):
        with trace(url) as t:
            for _ in range(ticks):
                job.add()
        check(t, of.ticks(ranks * ticks) if journal else {})
        changed = bool(ticks % 2)
        with trace(url) as t:
            job.checkpoint(priority=float(ticks) if changed else None)
        with_steps = together(of.parts(ranks, waited(t)), without_joins(of.commit(ranks)))
        check(t, with_steps if journal else together(with_steps, of.shards(ranks)))
    with trace(url) as t:
        job.checkpoint()
    check(t, together(of.parts(ranks, waited(t)), of.commit(ranks, adds=False)))
    job.close()


def waited(t: Trace) -> float:
    """The seconds of a trace: ranks may have waited for so long."""
    return max(row.at_s + row.seconds for row in t.rows) - min(row.at_s for row in t.rows)


def without_joins(told: Mapping[str, float]) -> dict[str, float]:
    """A commit that joins no earlier files of a table."""
    return {**told, "put": float(int(told["put"]))}


def test_a_bucket_gets_the_same(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    url = "s3://bucket/costs"
    archive.create(url)
    with trace(url) as t:
        job = Job(url, 1, journal=True)
        for _ in range(3):
            job.add()
        job.checkpoint(1.0)
        archive.open(url).refresh()
    begun = together(of.opened(2), {"list": 1}, of.session(1, journal=True, resumed=False))
    check(t, together(begun, of.ticks(3), of.parts(1), without_joins(of.commit()), of.following(30, 0)))
    job.close()


def test_no_shard_is_sent_in_parts() -> None:
    s3fs = pytest.importorskip("s3fs")
    part = inspect.signature(s3fs.S3FileSystem._pipe_file).parameters["chunksize"].default
    assert 2 * part > SHARD_BYTES + HEAD_BYTES  # from there on s3fs sends parts; obstore does from 4 GB on


def test_joins_of_tables_are_few() -> None:
    url, commits = "memory://costs/joins", 48
    archive.create(url)
    job = Job(url, 1, journal=False)
    with trace(url) as t:
        for _ in range(commits):
            job.add(2, episodes=40)
            job.writers[0].commit()
    told = of.times(commits, of.commit())["put"] - 2 * commits  # no live steps, no row of a checkpoint
    assert 2 * commits < counted(t, "manifest")["put"] <= told
    assert counted(t, "manifest", "commits")["get"] <= of.times(commits, of.commit())["get"]
    job.close()


def test_a_day_is_the_sum_of_its_causes() -> None:
    """Additions come once an hour, so that a day has so many ticks; a checkpoint comes every six hours."""
    ranks, hours, checkpoints = 2, 24, 4
    url = "memory://costs/day"
    archive.create(url)
    job = Job(url, ranks, journal=True)
    with trace(url) as t:
        for hour in range(hours):
            job.add(5)
            if (hour + 1) % (hours // checkpoints) == 0:
                job.checkpoint(float(hour))
    run = Workload(
        ranks=ranks, steps_s=ranks * 5 / 3600, step_bytes=8 * WIDTH, episode_steps=5, call_steps=5, journal_s=2,
        checkpoint_s=86_400 / checkpoints, live_steps=ranks * 5 * hours / 2, column_bytes=8, wait_s=0,
    )  # fmt: skip
    run = replace(run, wait_s=waited(t) / checkpoints)
    told = {one.cause: one for one in causes(run)}
    assert counted(t, "journal") == Counter(create=ranks * hours) == Counter(create=told["journal"].requests["create"])
    assert counted(t, "states")["create"] == told["checkpoints"].requests["create"] == ranks * checkpoints
    assert counted(t, "commits")["create"] == told["commits"].requests["create"] == checkpoints
    assert checkpoints * 4 <= counted(t, "manifest")["put"] <= told["commits"].requests["put"] <= checkpoints * 4.5
    gets = together(told["checkpoints"].requests, told["commits"].requests)["get"]
    assert counted(t)["get"] <= gets <= 6 * counted(t)["get"]
    assert {verb for verb, count in counted(t).items() if count} == {"create", "put", "get"}
    for cause, folders in (("journal", ["journal"]), ("checkpoints", ["states"]), ("commits", ["commits", "manifest"])):
        sent = sum(row.bytes_out for row in t.rows if row.key.split("/")[0] in folders)
        assert sent / 3 <= told[cause].uploaded <= 3 * sent, cause
    job.close()


@pytest.mark.parametrize(("ranks", "to"), [(1, 1), (3, 3), (2, 3)])
def test_going_on(ranks: int, to: int) -> None:
    url, ticks = f"memory://costs/resume-{ranks}-{to}", 3
    archive.create(url)
    job = Job(url, ranks, journal=True)
    job.add()
    job.checkpoint()
    for _ in range(ticks):
        job.add()
    for w in job.writers:
        w._end()
    arc = archive.open(url)
    arc.check_writable()  # as the session of the process does, where it is counted
    with trace(url) as t:
        arc.recover()
    check(t, without_joins(of.recovery(ranks, ticks * ranks)))
    with trace(url) as t:
        plan = resharding.plan(archive.open(url).checkpoints.latest, to)
        for rank in range(to):
            plan.share(rank).read()
    objects = ranks * (ticks + 1)
    check(t, together(of.opened(), of.reading(objects, 0, 2, to)))
    with trace(url) as t:
        again = Job(url, to, journal=True, resume=plan, session="second")
        for w in again.writers:  # what is live is journaled at once
            w.sync()
    early = {"create": ranks - to}  # the journals that end are those of the ranks before
    check(t, together(of.opened(to), of.session(to, journal=True, resumed=True), early))
    again.close()


@pytest.mark.parametrize("journal", [True, False])
def test_letting_go(journal: bool) -> None:
    url, count = f"memory://costs/prune-{journal}", 5
    archive.create(url)
    job = Job(url, 1, journal)
    for number in range(count):
        job.add()
        job.checkpoint(float(number))
        job.writers[0].evict(env_id=0, before=5 * number + 3)
    job.checkpoint()
    job.close()
    arc = archive.open(url)
    arc.check_writable()  # as the session of the process does, where it is counted
    with trace(url) as t:
        gone = arc.forget(keep=archive.Keep(last=1), episodes="unreferenced", dry_run=False)
    sent, told = counted(t), of.forgetting(count, gone.objects)
    assert {verb: sent[verb] for verb in ("create", "put", "list")} == {v: told[v] for v in ("create", "put", "list")}
    assert sent["head"] <= told["head"] + 4 * count
    assert sent["get"] <= told["get"] <= 4 * sent["get"]
    there = Counter(one.key.split("/")[0] for one in arc.storage.scan(""))
    time.sleep(1.1)
    with trace(url) as t:
        plan = arc.prune("1s", force=True)
        plan.commit()
    told = of.prune({folder: float(there[folder]) for folder in FOLDERS}, there["commits"], len(plan.going))
    check(t, {**told, "put": 1.0}, most=6)


def test_looking() -> None:
    url = "memory://costs/look"
    archive.create(url)
    job = Job(url, 1, journal=False)
    job.add(50, episodes=3)
    job.checkpoint()
    arc = archive.open(url)
    arc.episodes.table  # noqa: B018  # what the viewer shows first
    with trace(url) as t:
        for _ in range(7):  # the viewer's question while nothing happens
            arc.refresh()
    check(t, of.following(7 * of.IDLE_LOOK_S, commits=0))
    job.add(50)
    job.checkpoint()
    with trace(url) as t:
        arc.refresh()
        arc.episodes.table  # noqa: B018
        arc.checkpoints.table  # noqa: B018
    check(t, of.following(0, commits=1))
    job.close()


def test_reading_all() -> None:
    url, objects = "memory://costs/export", 6
    archive.create(url)
    job = Job(url, 1, journal=False)
    for _ in range(objects):
        job.add(200)
        job.checkpoint()
    arc = archive.open(url)
    with trace(url) as t:
        for _ in arc.episodes.stream(max_bytes=2**20):
            pass
    check(t, of.reading(objects, t.bytes_in, commits=objects), "shards", "manifest")
    assert counted(t, "shards")["get"] == objects
    job.close()


def test_random_samples() -> None:
    url = "memory://costs/train"
    archive.create(url)
    job = Job(url, 1, journal=False)
    for _ in range(4):
        job.add(2000)
        job.checkpoint()
    arc, samples = archive.open(url), 64
    gather = Gather(arc.episodes, ["obs"], cache_bytes=0)
    rng = np.random.default_rng(0)
    with trace(url) as t:
        for episode in rng.integers(0, len(arc.episodes), samples):
            gather.rows(np.array([episode]), rng.integers(0, 2000, 1))
    check(t, of.drawing(samples), "shards", most=2)
    job.close()


def test_looks_of_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks in the background, which come by the clock: each of them alone."""
    url, ranks = "memory://costs/watch", 2
    archive.create(url)
    job = Job(url, ranks, journal=True)
    now, minute = [0.0], 60.0
    monkeypatch.setattr(waits, "time", Mock(monotonic=lambda: now[0]))
    poll = asked._Watch._poll
    monkeypatch.setattr(asked._Watch, "_poll", lambda self: None)
    watches = [asked._Watch(w._storage, w._place) for w in job.writers]
    with trace(url) as t:
        for watch in watches:
            now[0] = 0.0
            monkeypatch.setattr(watch, "_stop", Mock(wait=lambda s: now.__setitem__(0, now[0] + s) or now[0] > minute))
            poll(watch)
    check(t, of.watch(minute, ranks, group=False))
    with trace(url) as t:
        for w in job.writers:
            w._journal._heartbeat._look()
    check(t, of.heartbeat(60, ranks))
    assert of.watch(86_400, 1024, group=True)["list"] == 8640
    job.close()


def call_at(moments: list[float], ticker: Any, clock: list[float]) -> Callable[[float], None]:
    """A wait of a ticker whose time is a number: what is added meanwhile is noted."""

    def wait(seconds: float | None) -> None:
        until = clock[0] + (seconds or 0.0)
        if moments and moments[0] <= until:
            clock[0] = moments.pop(0)
            ticker.note()
        else:
            clock[0] = until

    return wait


@pytest.mark.parametrize(("journal_s", "gap_s"), [(2.0, 0.01), (2.0, 0.4), (2.0, 0.5), (2.0, 7.0), (20.0, 3.0)])
def test_the_times_of_ticks(journal_s: float, gap_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from archive.journal import ticker as module

    clock, ticks, adds = [0.0], 0, 2000
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.threading.Thread, "start", lambda self: None)

    class Owner:
        def work(self) -> None: ...

    owner = Owner()
    beat = type("Beat", (), {"every_s": 1e9, "beat": lambda self: None})()
    one = module.Ticker(journal_s, owner.work, beat)  # type: ignore[arg-type]
    moments = [gap_s * n for n in range(1, adds + 1)]
    monkeypatch.setattr(one, "_wait", call_at(moments, one, clock))
    while moments:
        if one.oldest is None:
            one._wait(1e9)
            continue
        if one._await_moment() is not None:
            one.take()
            ticks += 1
    run = Workload(ranks=4, steps_s=4 / gap_s, call_steps=1, journal_s=journal_s)
    told = adds * gap_s / run.tick_s
    assert ticks == pytest.approx(told, rel=0.03)
    assert replace(run, journal_ranks=4).objects_s * 4 >= run.objects_s


@pytest.mark.parametrize("journal", [True, False])
def test_much_at_once(journal: bool) -> None:
    """What is larger than a slab makes several objects."""
    url, steps, calls = f"memory://costs/large-{journal}", 125, 35
    archive.create(url)
    job, rows = Job(url, 1, journal), np.random.default_rng(0).random((2 * steps, 8 * WIDTH))
    with trace(url) as t:
        for w in job.writers:
            for _ in range(calls):
                w.append({"obs": rows}, env_ids=[0] * steps + [1] * steps)
            w.sync() if journal else w.checkpoint(1).result()
    added = 2 * steps * calls
    run = Workload(
        ranks=1, env_rows=2, steps_s=added / 3600, step_bytes=64 * WIDTH, call_steps=added,
        journal_s=2 if journal else None, checkpoint_s=3600,
    )  # fmt: skip
    sent, told = counted(t, "journal", "shards")["create" if journal else "put"], round(run.objects_s * 3600)
    assert told == 7
    assert told <= sent <= (2 * told + 1 if journal else told)  # a full slab is journaled at once, with what came since
    job.close()


def test_a_journal_of_a_node() -> None:
    """The ranks of a node that journal at the same time share an object; one that comes later has its own."""
    url, ranks, nodes, rounds = "memory://costs/nodes", 4, 2, 3
    writers = world(archive.create(url), ranks, nodes)
    with trace(url) as t:
        for _ in range(rounds):
            for w in writers:
                w.add_episode({"obs": np.random.default_rng(0).random((5, WIDTH))}, env_id=0)
            with ThreadPoolExecutor(ranks) as pool:
                list(pool.map(lambda w: w.sync(), writers))
    told = of.ticks(rounds * nodes)["create"]
    assert told <= counted(t, "journal")["create"] <= rounds * ranks
    assert counted(t, "journal") == counted(t) == Counter(create=counted(t)["create"])
    run = Workload(ranks=ranks, steps_s=5 * ranks / 3600, call_steps=5, journal_s=2.0, journal_ranks=ranks // nodes)
    assert round(run.objects_s * 3600) >= nodes
    for w in writers:
        w.close()
