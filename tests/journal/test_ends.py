"""A session that takes the place of another one ends its journal first: who is replaced says of nothing more that it is
durable, and what it had said that of before is adopted, or told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import journal
from archive.base import layout
from archive.journal import ends
from archive.log import Place, sessions
from archive.maintain import verify
from archive.store import Storage
from tests.support.archives import fresh
from tests.support.journals import NEVER_S, die
from tests.support.processes import until
from tests.support.pruning import before_its_commit


def alive(arc: archive.Archive, *, ranks: int = 1, saved: bool = True, session: str = "old") -> list[archive.Writer]:
    """Writers that go on, with a checkpoint and something journaled beyond, or with no checkpoint."""
    made = [archive.open(arc.url).writer(rank, ranks, session=session, journal_s=NEVER_S) for rank in range(ranks)]
    for w in made:
        w.add_episode({"x": np.arange(3)}, episode_id=f"first-{w.rank}")
    if saved:
        pending = [w.checkpoint(1) for w in made]
        for one in pending:
            one.result(60)
    for w in made:
        acknowledged(w, f"second-{w.rank}")
    return made


def acknowledged(w: archive.Writer, name: str) -> str:
    """Add an episode that is durable, by the writer's saying."""
    w.add_episode({"x": np.arange(3)}, episode_id=name)
    w.sync()
    return name


def refused(w: archive.Writer) -> None:
    """It can make nothing durable any more, nor commit it."""
    for again in range(2):
        with pytest.raises(archive.SupersededError, match="open a new writer to take over"):
            acknowledged(w, f"late-{w.rank}-{again}")
    with pytest.raises(archive.SupersededError):
        w.commit()


@pytest.mark.parametrize("begun", ["recovered", "newest", "nothing"])
def test_who_is_replaced_says_of_nothing_more_that_it_is_durable(begun: str) -> None:
    """Without a look at the commits: the next object of its journal is there already."""
    arc = fresh()
    old = alive(arc, ranks=2)
    looked = archive.open(arc.url)
    how = {"recovered": looked.recover, "newest": lambda: looked.checkpoints.latest, "nothing": lambda: None}[begun]()
    share = None if how is None else resharding.plan(how, world_size=1).share(0)
    new = looked.writer(resume=share, journal_s=NEVER_S)
    for w in old:
        before = w._storage.stats.snapshot()
        refused(w)
        assert (w._storage.stats.snapshot() - before).list == 0
    acknowledged(new, "third")
    die(new)
    names = {*arc.refresh().recover().episodes.table["episode_id"].to_pylist()}
    assert "third" in names
    assert ("second-0" in names) == (begun != "nothing")
    assert not {name for name in names if name.startswith("late")}
    assert verify(archive.open(arc.url), deep=True).sound
    die(*old)


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[Any]:
    """Act once, when a session is about to end the journals of the one whose place it takes."""
    out: list[Any] = []
    whole = journal.take_over

    def take_over(*args: Any) -> None:
        if not out:
            out.append(None)
            out[0] = act()
        whole(*args)

    monkeypatch.setattr(journal, "take_over", take_over)
    return out


def test_what_was_acknowledged_since_the_recovery_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `recover()` and the opening the old job, which was taken for dead, says "durable" once more."""
    arc = fresh()
    (old,) = alive(arc)
    looked = archive.open(arc.url)
    share = resharding.plan(looked.recover(), world_size=2).share(0)
    said = between(monkeypatch, lambda: acknowledged(old, "in between"))
    words = r"(?s)went on after its journal was recovered.*\(rank 0, in 1 objects\).*arc.recover\('main'\) again"
    with pytest.raises(archive.ConflictError, match=words):
        looked.writer(resume=share, session="new", journal_s=NEVER_S)
    assert said == ["in between"]
    refused(old)
    again = archive.open(arc.url)
    plan = resharding.plan(again.recover(), world_size=2)
    new = [archive.open(arc.url).writer(resume=plan.share(r), session="newer", journal_s=NEVER_S) for r in range(2)]
    held = {name for w in new for name in w.live["episode_id"].to_pylist()}
    assert held == {"first-0", "second-0", "in between"}
    die(old, *new)


def test_a_session_that_begins_from_nothing_recovers_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    (old,) = alive(arc, saved=False)
    whole = ends.end

    def end(*args: Any) -> dict[int, int]:
        acknowledged(old, "after the recovery")
        return whole(*args)

    monkeypatch.setattr(ends, "end", end)
    archive.open(arc.url).writer().close()
    assert {"second-0", "after the recovery"} <= {*arc.refresh().episodes.table["episode_id"].to_pylist()}
    made = arc.checkpoints[0]
    assert made.record.recovered is not None
    assert (made.record.recovered.base, made.record.ordinal, made.step) == (None, 0, 0)
    refused(old)
    die(old)


@pytest.mark.parametrize("session", ["late", "newer"])
def test_nobody_ends_the_journal_of_a_newer_session_than_he_saw(session: str) -> None:
    """A start that stalled, and a rank whose session another one has opened meanwhile."""
    arc = fresh()
    (old,) = alive(arc, saved=False)
    newer = archive.open(arc.url).writer(session="newer", journal_s=NEVER_S)
    assert ends.end(archive.open(arc.url)._log(), Place(0, 1, "main", session), old.session) == {}
    acknowledged(newer, "goes on")
    refused(old)
    die(old, newer)


def test_a_checkpoint_that_was_chosen_leaves_behind_what_came_after_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arc = fresh()
    old = alive(arc, ranks=2)
    acknowledged(old[1], "third-1")
    with caplog.at_level(logging.WARNING):
        archive.open(arc.url).writer(resume=arc.refresh().checkpoints.latest, rank=0, session="new")
    (told,) = [one for one in caplog.messages if "leaves these" in one]
    assert "(ranks 0, 1)" in told
    assert "these 3 objects" in told
    assert "begin from arc.recover('main')" in told
    die(*old)


def test_a_start_that_died_over_it_keeps_nobody_from_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the journals were ended and its session was not opened: the old one can journal no more, all that it
    said is durable is there, and the next start goes on."""
    arc = fresh()
    old = alive(arc, ranks=3)
    looked = archive.open(arc.url)
    found = looked.recover()
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_say", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            looked.writer(resume=resharding.plan(found, world_size=1).share(0))
    for w in old:
        refused(w)
    again = archive.open(arc.url)
    assert [(one.objects, one.ended) for one in again.tails().ranks] == [(0, "ended")] * 3
    assert again.recover().number == found.number
    with again.writer(resume=resharding.plan(again.checkpoints.latest, world_size=1).share(0)) as w:
        assert {f"{which}-{rank}" for which in ("first", "second") for rank in range(3)} == {
            *w.live["episode_id"].to_pylist()
        }
    die(*old)


def test_one_rank_of_a_start_ends_the_journals_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object for each rank of the session before, however many ranks begin at once."""
    arc = fresh()
    old = alive(arc, ranks=6)
    plan = resharding.plan(arc.refresh().recover(), world_size=4)
    tried: list[str] = []
    whole = Storage.create_once

    def create_once(self: Storage, key: str, *args: Any, **more: Any) -> None:
        if key.startswith("journal/old/"):
            tried.append(key)
        whole(self, key, *args, **more)

    monkeypatch.setattr(Storage, "create_once", create_once)

    def begin(rank: int) -> archive.Writer:
        return archive.open(arc.url).writer(resume=plan.share(rank), session="new", journal_s=NEVER_S)

    with ThreadPoolExecutor(4) as pool:
        new = list(pool.map(begin, range(4)))
    assert len(tried) <= 6 + 3
    assert len({*tried}) == 6
    die(*old, *new)


def test_another_rank_does_it_where_the_first_one_died_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    old = alive(arc, ranks=3)
    looked = archive.open(arc.url)
    plan = resharding.plan(looked.recover(), world_size=2)
    monkeypatch.setattr(ends, "OTHER_RANK_S", 0.2)
    entry = looked.head.runs["main"]
    died = Place(0, 2, "main", "new")
    assert ends._Successor(looked._log(), died, "old").rank((0, entry.journal[0])) == (0, True)
    new = looked.writer(resume=plan.share(1), session="new", journal_s=NEVER_S)
    for w in old:
        refused(w)
    die(*old, new)


@pytest.mark.parametrize("ticks", [0, 1, 15, 16, 17, 40])
def test_the_end_comes_after_all_that_is_there(ticks: int) -> None:
    arc = fresh()
    (old,) = alive(arc)
    for at in range(ticks):
        acknowledged(old, f"more-{at}")
    looked = archive.open(arc.url)
    looked.writer(resume=looked.checkpoints.latest, journal_s=NEVER_S)
    refused(old)
    folder = "journal/old/rank-00000"
    made = [ends.ended_by(looked.storage, f"{folder}/{name}") for name in looked.storage.list(folder)]
    assert len(made) >= ticks + 2
    assert not any(made[:-1])
    assert made[-1]
    die(old)


@pytest.mark.parametrize("act", ["journals", "checkpoints", "both", "checkpoints without buffers"])
@pytest.mark.parametrize("tails", [None, "archive", "ignore"])
def test_a_plan_that_takes_all_is_refused_where_the_old_job_went_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, act: str, tails: str | None
) -> None:
    """Nothing was journaled beyond the checkpoint when it was planned, so nobody chose to leave anything behind."""
    arc = fresh()
    (old,) = alive(arc)
    old.checkpoint(2, wait=True)
    looked = archive.open(arc.url)
    share = resharding.plan(looked.checkpoints.latest, world_size=2, tails=tails).share(0)

    def goes_on() -> None:
        if act != "journals":
            old.checkpoint(3, save_replay=act != "checkpoints without buffers", wait=True)
        if act in ("journals", "both"):
            acknowledged(old, "in between")

    between(monkeypatch, goes_on)
    if tails == "ignore":
        with caplog.at_level(logging.WARNING):
            die(looked.writer(resume=share, session="new", journal_s=NEVER_S))
        assert ("left behind" in caplog.text or "objects behind" in caplog.text) == (
            act != "checkpoints without buffers"
        )
    else:
        with pytest.raises(archive.ConflictError, match=r"planned.*no session was opened.*arc.recover\('main'\)"):
            looked.writer(resume=share, session="new", journal_s=NEVER_S)
        again = archive.open(arc.url)
        plan = resharding.plan(again.recover(), world_size=1)
        new = again.writer(resume=plan.share(0), session="newer", journal_s=NEVER_S)
        wanted = {"first-0", "second-0"} | ({"in between"} if act in ("journals", "both") else set())
        assert {*new.live["episode_id"].to_pylist()} == wanted
        die(new)
    refused(old)
    die(old)


def test_a_fork_from_a_plan_is_made_again_after_it_died() -> None:
    """The plan takes all that its own run has; the fork's run is another one."""
    arc = fresh()
    (old,) = alive(arc)
    old.checkpoint(2, wait=True)
    for n in range(3):
        share = resharding.plan(archive.open(arc.url).checkpoints.of("main").latest, world_size=1).share(0)
        fork = archive.open(arc.url).writer(run="fork", fork_from=share, session=f"fork-{n}", journal_s=NEVER_S)
        acknowledged(fork, f"fork-{n}")
        die(fork)
    die(old)


def test_objects_of_a_tick_that_is_not_complete_count_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for whole in (False, True):
        arc = fresh()
        (old,) = alive(arc, saved=False)
        old.checkpoint(1, wait=True)
        first = old._pipeline.number
        if whole:
            acknowledged(old, "whole")
        with old.together():
            old.add_episode({"x": np.arange(3)}, episode_id="a")
            old.add_episode({"text": np.array(["x", "y"])}, episode_id="b")
        old.sync()
        arc.storage.delete([f"journal/old/rank-00000/{old._pipeline.number - 1:09d}.zip"])
        assert old._pipeline.number - first == 2 + whole
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            die(archive.open(arc.url).writer(resume=arc.refresh().checkpoints.latest, session="new"))
        assert ("leaves these 1 objects behind" in caplog.text) == whole
        assert ("behind" in caplog.text) == whole
        die(old)


def test_a_reader_that_does_not_know_that_journals_end_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    (old,) = alive(arc)
    entry = arc.refresh().head.runs["main"]
    assert ends._Successor(arc._log(), Place(0, 1, "main", "new"), "old").rank((0, entry.journal[0])) == (1, True)
    monkeypatch.setattr(layout, "FEATURES", layout.FEATURES - {"ended journals"})
    with pytest.raises(archive.UpgradeError, match="features ended journals"):
        arc.tails()
    die(old)


def test_a_checkpoint_that_comes_in_between_moves_the_end_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old job commits one, and what was journaled before it is pruned, while the new one stands still."""
    arc = fresh()
    (old,) = alive(arc)
    looked = archive.open(arc.url)
    checkpoint = looked.checkpoints.latest

    def act() -> None:
        old.checkpoint(2, wait=True)
        acknowledged(old, "after it")
        entry = arc.refresh().head.runs["main"]
        arc.storage.delete([f"journal/old/rank-00000/{at:09d}.zip" for at in range(entry.journal[0])])

    between(monkeypatch, act)
    with caplog.at_level(logging.WARNING):
        looked.writer(resume=checkpoint, journal_s=NEVER_S)
    assert "is newer than the one the session" in caplog.text
    refused(old)
    die(old)


def test_a_journal_that_another_rank_begins_in_between_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a job are given different `journal_s`, and one of them comes late."""
    arc = fresh()
    late: list[archive.Writer] = []
    plain = archive.open(arc.url).writer(0, 2, session="old")
    whole = journal.take_over

    def take_over(*args: Any) -> None:
        whole(*args)
        if not late:
            late.append(archive.open(arc.url).writer(1, 2, session="old", journal_s=NEVER_S))
            acknowledged(late[0], "in between")

    monkeypatch.setattr(journal, "take_over", take_over)
    new = archive.open(arc.url).writer(session="new", journal_s=NEVER_S)
    refused(late[0])
    assert "in between" in arc.refresh().episodes.table["episode_id"].to_pylist()
    die(plain, *late, new)


def test_who_was_ended_puts_nothing_again_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where nobody calls it: its thread gives up."""
    arc = fresh()
    old = archive.open(arc.url).writer(journal_s=0.1)
    old.add_episode({"x": np.arange(3)})
    old.sync()
    looked = archive.open(arc.url)
    looked.writer(resume=looked.recover())
    with caplog.at_level(logging.WARNING):
        old.add_episode({"x": np.arange(3)})
        until(lambda: old._journal is not None and old._journal.superseded)
        time.sleep(0.3)
        before = old._storage.stats.snapshot()
        time.sleep(0.5)
    assert (old._storage.stats.snapshot() - before).requests == 0
    assert len([one for one in caplog.messages if "the journal ends here" in one]) == 1
    die(old)


@pytest.mark.parametrize("chosen", ["recovered", "planned"])
def test_a_checkpoint_that_is_made_while_the_next_session_opens_is_not_left_behind(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old job commits one without new steps between the look at what it has and the commit that replaces it."""
    arc = fresh()
    (old,) = alive(arc)
    point = arc.refresh().recover() if chosen == "recovered" else arc.refresh().checkpoints.latest
    plan = resharding.plan(point, 1)
    made: list[Any] = []
    before_its_commit(monkeypatch, "session", lambda: made.append(old.checkpoint(2).result(60)))
    monkeypatch.setattr(ends, "OTHER_RANK_S", 0.2)  # its own end of the journal looks like another rank's
    with pytest.raises(archive.ConflictError, match="after the new session was planned"):
        archive.open(arc.url).writer(resume=plan.share(0), session="new", journal_s=NEVER_S)
    again = archive.open(arc.url).writer(resume=arc.refresh().recover(), session="newer", journal_s=NEVER_S)
    assert arc.refresh().head.runs["main"].resumed_from.commit >= made[0].number
    refused(old)
    die(old, again)
