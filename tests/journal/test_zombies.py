"""Processes of a session that was recovered, or replaced, and that go on: what they write is taken in once, or never;
and ranks that are late for a session."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.journal import ticker
from tests.support.archives import fresh, stored_objects
from tests.support.processes import FORKSERVER, end, until
from tests.support.prompt_checks import check_end, check_recovered
from tests.support.prompt_deaths import Fates, Life
from tests.support.prompt_job import NEVER_S, Job, Rank, expected, last

FIRST = Job("first", 4, 2)


def lived(url: str, job: Job) -> Life:
    """A session whose processes still run."""
    life = Life(url, job, Fates(None))
    life.live()
    assert not life.errors
    return life


def go_on(rank: Rank, told: list[Any] | None = None) -> list[Any]:
    """One more prompt, as far as it goes, and what is durable of it by its own saying."""
    told = [] if told is None else told
    rank._tell = told.extend
    for key in rank.draw():
        rank.make(key, 0)
    rank.sync()
    return told


def test_what_comes_after_a_recovery_is_taken_in_by_the_next_one() -> None:
    arc = fresh()
    life = lived(arc.url, FIRST)
    before = check_recovered(arc.url, life.told)
    told = [fact for rank in life.ranks[:2] for fact in go_on(rank)]
    made = {fact[1] for fact in told if fact[0] == "episode"}
    assert made
    after = check_recovered(arc.url, [*life.told, *told])
    assert after.number > before.number
    assert made <= set(after.episodes.table["episode_id"].to_pylist())
    life.bury()
    final = Life(arc.url, last(FIRST, "second", 3), Fates(None))
    final.run()
    assert not final.errors
    assert check_end(arc.url, together=True) == 0


def test_what_comes_after_the_next_session_began_is_never_called_durable_and_cannot_be_committed() -> None:
    arc = fresh()
    zombies = lived(arc.url, FIRST)
    second = lived(arc.url, replace(FIRST, session="second", world_size=3, batches=1))
    known = {*arc.refresh().episodes.table["episode_id"].to_pylist()}
    for rank in zombies.ranks:
        told: list[Any] = []
        with pytest.raises(archive.SupersededError, match="replaced by session 'second'"):
            go_on(rank, told)
        assert not told
        with pytest.raises(archive.SupersededError):
            rank.commit()
        with pytest.raises(archive.SupersededError):
            rank.checkpoint()
    second.bury()
    check_recovered(arc.url, [*zombies.told, *second.told])
    third = Life(arc.url, last(FIRST, "third", 2), Fates(None))
    third.run()
    assert not third.errors
    for rank in zombies.ranks:
        with pytest.raises(archive.SupersededError):
            rank.commit()
    zombies.bury()
    assert check_end(arc.url, together=True) == 0
    assert known <= {*arc.refresh().episodes.table["episode_id"].to_pylist()}


def test_a_rank_that_plans_when_the_session_is_under_way_is_told() -> None:
    """Its plan would be one of what the others have journaled since, so that steps would be held twice."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for at in range(6):
        w.add_episode(expected(f"p0-{at}", 0))
    w.checkpoint(1, wait=True)
    w.add_episode(expected("p1-0", 0))
    w.sync()
    plan = resharding.plan(arc.checkpoints.latest, world_size=3)
    first = archive.open(arc.url).writer(resume=plan.share(0), session="next", journal_s=NEVER_S)
    first.add_episode(expected("p1-1", 0))
    first.sync()
    late = archive.open(arc.url)
    share = resharding.plan(late.checkpoints.latest, world_size=3).share(1)
    with pytest.raises(archive.UsageError, match="have all ranks plan before any of them opens its writer"):
        late.writer(resume=share, session="next", journal_s=NEVER_S)
    second = archive.open(arc.url).writer(resume=plan.share(1), session="next", journal_s=NEVER_S)
    assert second.live.num_rows == plan.episodes[1]
    for writer in (w, first, second):
        writer._end()


STARTS = ("plan", "text of a plan", "pickled share", "checkpoint", "nothing", "fork")


def _begun(arc: archive.Archive, how: str) -> Callable[[], archive.Writer]:
    """A start that has decided what it begins from, and opens its writer when it is called."""
    known = arc.checkpoints.latest
    if how == "nothing":
        return arc.writer
    if how == "fork":
        return partial(arc.writer, run="side", fork_from=known)
    if how == "checkpoint":
        return partial(arc.writer, resume=known)
    plan = resharding.plan(known, world_size=1)
    if how == "text of a plan":
        text = plan.to_json()
        return lambda: arc.refresh().writer(resume=resharding.Plan.from_json(text, arc.checkpoints.latest).share(0))
    share = plan.share(0)
    return partial(arc.writer, resume=pickle.loads(pickle.dumps(share)) if how == "pickled share" else share)


@pytest.mark.parametrize("how", STARTS)
def test_a_start_that_opens_late_does_not_end_the_newer_one(how: str) -> None:
    """It planned, and stalled; what the newer start has said is durable since stays."""
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(expected("p0-0", 0))
        w.checkpoint(1, wait=True)
    run = "side" if how == "fork" else "main"
    late = _begun(archive.open(arc.url), how)
    newer = archive.open(arc.url)
    begun = {"fork_from": newer.checkpoints.latest} if how == "fork" else {"resume": newer.checkpoints.latest}
    second = newer.writer(run=run, journal_s=NEVER_S, **begun)
    second.add_episode(expected("p1-0", 0), episode_id="acknowledged")
    second.sync()
    before = stored_objects(arc)
    with pytest.raises(archive.SupersededError, match=rf"(?s){second.session}.*look again: arc.refresh\(\)"):
        late()
    assert stored_objects(arc) == before
    second.sync()
    second.add_episode(expected("p1-1", 0), episode_id="later")
    second.commit()
    second._end()
    looked = archive.open(arc.url)
    again = {"fork_from": looked.checkpoints.of("main").latest} if how == "fork" else {"resume": looked.recover(run)}
    with looked.writer(run=run, **again) as third:
        assert how == "fork" or {"acknowledged", "later"} <= set(third.live["episode_id"].to_pylist())


def _syncs(url: str, pipe: Any) -> None:
    """Run as a process: adds an episode and syncs each time it is told to, and says what came of it."""
    w = archive.open(url).writer(journal_s=0.2)
    while (name := pipe.recv()) is not None:
        try:
            w.add_episode(expected("p0-0", 0), episode_id=name)
            pipe.send(repr(w.sync()))
        except archive.SupersededError as error:
            pipe.send(str(error))


def test_a_process_that_was_stopped_says_of_nothing_more_that_it_is_durable(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    pipe, theirs = FORKSERVER.Pipe()
    child = FORKSERVER.Process(target=_syncs, args=(arc.url, theirs))
    child.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    try:
        pipe.send("before")
        assert pipe.recv().startswith("<durable: all")
        os.kill(child.pid, signal.SIGSTOP)
        successor = arc.refresh().writer(resume=arc.recover(), journal_s=0.2)
        pipe.send("after")
        time.sleep(1.1)
        os.kill(child.pid, signal.SIGCONT)
        assert f"replaced by session {successor.session!r}" in pipe.recv()
        assert successor.live["episode_id"].to_pylist() == ["before"]
        successor.close()
        pipe.send(None)
        child.join(30)
    finally:
        end(child)


def test_a_journal_finds_out_by_itself_and_by_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    monkeypatch.setattr(ticker, "LOOK_S", 0.2)
    w = arc.writer(journal_s=NEVER_S)
    before, began = arc.io_stats(), time.monotonic()
    time.sleep(1.0)
    w.sync()
    assert 2 <= (arc.io_stats() - before).requests <= (time.monotonic() - began) / ticker.LOOK_S + 1
    archive.open(arc.url).writer(journal_s=NEVER_S).close()
    until(lambda: w._journal is not None and w._journal.superseded)
    for _ in range(2):
        with pytest.raises(archive.SupersededError, match="open a new writer to take over"):
            w.add_episode(expected("p0-0", 0))
        for says in (w.sync, lambda: w.durable_until):
            with pytest.raises(archive.SupersededError):
                says()
    before = arc.io_stats()
    time.sleep(0.5)
    assert (arc.io_stats() - before).requests == 0
    w._end()
