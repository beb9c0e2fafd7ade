"""Writers that meet: each commits in few requests, lists of files stay short, and no id is committed twice, whoever
else commits between any two requests."""

from __future__ import annotations

from typing import Any

import pytest

import archive
from archive import tables
from archive.base.errors import DuplicateEpisodeError, ExpiredError
from archive.log import CommitLog, tablefiles
from archive.store import Storage
from archive.testing import steps
from tests.support.archives import by_hand, fresh, reopened
from tests.support.transfers import before_commit, others_within

MOST_REQUESTS, MOST_FILES = 20, 13


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost a race tries again at once."""
    monkeypatch.setattr("archive.log.log._MOST_WAIT_S", 0.0)


def lengths(arc: archive.Archive) -> dict[str, int]:
    """How many steps each episode has."""
    return {one.id: one.length for one in reopened(arc).episodes}


@pytest.mark.parametrize("many", [1, 300])
def test_commits_of_others_within_ones_own(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """Each first try is lost, to four others; one checkpoint in three is among what is committed."""
    arc = fresh()
    one, others = arc.writer(run="one", session="mine"), [reopened(arc).writer(run=f"other-{k}") for k in range(4)]
    made = 0

    def others_commit() -> None:
        nonlocal made
        for w in others:
            w.add_episode(steps(1, made), episode_id=f"other-{made}")
            made += 1
            w.checkpoint(made).result() if made % 3 == 0 else w.commit()

    def mine(i: int) -> None:
        for k in range(many):
            one.add_episode(steps(1, i), episode_id=f"mine-{i}-{k}")
        one.checkpoint(i).result() if i % 3 == 0 else one.commit()

    rounds = 12
    mine(0)
    before = arc.io_stats()
    with others_within(monkeypatch, "mine/", others_commit):
        for i in range(1, rounds):
            mine(i)
    spent = arc.io_stats() - before
    assert spent.requests / (rounds - 1) <= MOST_REQUESTS
    assert made == 4 * (rounds - 1)
    head = reopened(arc).head
    assert {kind: len(head.files(kind)) <= MOST_FILES for kind in ("segments", "checkpoints")} == {
        "segments": True, "checkpoints": True,
    }  # fmt: skip
    ids = [f"mine-{i}-{k}" for i in range(rounds) for k in range(many)] + [f"other-{k}" for k in range(made)]
    assert sorted(reopened(arc).episodes.table["episode_id"].to_pylist()) == sorted(ids)
    for w in (one, *others):
        w.close()


def test_small_commits_shrink_a_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with arc.writer() as w, monkeypatch.context() as patch:
        patch.setattr(tablefiles, "fold", lambda rows, sizes, new, **_: (0, 0, len(rows)))
        for n in range(60):
            w.add_episode(steps(1, n), episode_id=f"e{n}")
            w.commit()
    assert len(reopened(arc).head.files("segments")) == 60
    with reopened(arc).writer() as w:
        for n in range(60, 68):
            w.add_episode(steps(1, n), episode_id=f"e{n}")
            w.commit()
    assert len(reopened(arc).head.files("segments")) <= MOST_FILES
    assert reopened(arc).episodes.table["episode_id"].to_pylist() == [f"e{n}" for n in range(68)]


def test_what_older_files_were_joined_into_is_used_by_a_later_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining is read and written once, however often the commit that brings it is tried."""
    arc = fresh()
    w = arc.writer()
    with monkeypatch.context() as patch:
        patch.setattr(tablefiles, "fold", lambda rows, sizes, new, **_: (0, 0, len(rows)))
        for n in range(40):
            w.add_episode(steps(1, n))
            w.commit()
    joined: list[int] = []
    load = tablefiles.load

    def counted(storage: Storage, kind: str, refs: Any, columns: Any = None) -> Any:
        joined.append(len(refs))
        return load(storage, kind, refs, columns)

    monkeypatch.setattr(tablefiles, "load", counted)
    w.add_episode(steps(1))
    with before_commit(monkeypatch, lambda: reopened(arc).tag("between", 1)):
        w.commit()
    assert len([count for count in joined if count > 2]) == 1
    assert len(reopened(arc).head.files("segments")) < 30
    assert len(reopened(arc).episodes) == 41
    w.close()


# -- ids that users give -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["commit", "checkpoint"])
def test_ids_of_ones_own_cost_a_lone_writer_no_look_at_what_is_there(verb: str) -> None:
    arc = fresh()
    with arc.writer() as w:
        for n in range(1500):
            w.add_episode(steps(1, n), episode_id=f"a long name of an episode {n}")
    read = []
    for own in (True, False):
        arc = reopened(arc)
        with arc.writer() as w:
            for n in range(12):
                added = w.add_episode(steps(1, n), episode_id=f"new-{n}" if own else None)
                if n == 1:
                    before = arc.io_stats()
                w.commit() if verb == "commit" else w.checkpoint(n).result()
                w.remove([added])
            read.append((arc.io_stats() - before).bytes_in)
    assert read[0] <= 1.1 * read[1]


def test_an_id_that_comes_back_by_an_undo_is_not_free() -> None:
    arc = fresh()
    with arc.writer() as w:
        for name in ("x", "y"):
            w.add_episode(steps(1), episode_id=name)
    arc.writer().close()  # what the newest session has written stays
    reopened(arc).forget(ids=["x"], dry_run=False)
    w = reopened(arc).writer(run="other")
    w.add_episode(steps(2), episode_id="x")
    reopened(arc).undo()
    with pytest.raises(DuplicateEpisodeError, match="'x'"):
        w.commit()
    w._end()
    assert lengths(arc) == {"x": 1, "y": 1}


def test_an_id_given_before_a_look_and_committed_after_it_is_looked_at() -> None:
    """The look that a checkpoint takes does not vouch for what is added while it is under way."""
    arc = fresh()
    w, other = arc.writer(run="one"), reopened(arc).writer(run="other")
    w.add_episode(steps(1), episode_id="first")
    pending = w.checkpoint(1)
    w.add_episode(steps(1), episode_id="x")
    other.add_episode(steps(2), episode_id="x")
    other.commit()
    pending.result()
    with pytest.raises(DuplicateEpisodeError, match="'x'"):
        w.checkpoint(2).result()
    w._end()
    other.close()


def test_an_episode_that_replaces_whatever_is_there_meets_nobody() -> None:
    arc = fresh()
    w, other = arc.writer(run="one"), reopened(arc).writer(run="other")
    w.add_episode(steps(1), episode_id="x")
    w.add_episode(steps(3), episode_id="x", replace=True)
    other.add_episode(steps(2), episode_id="x")
    other.close()
    w.close()
    assert lengths(arc) == {"x": 3}


def test_an_id_that_came_into_a_file_with_older_rows_is_taken() -> None:
    """Rows of several commits share a file: who knows the first of them does not know them all."""
    arc = fresh()
    w, other = arc.writer(run="one"), reopened(arc).writer(run="other")
    for number in range(3):
        for one in (w, other):
            one.add_episode(steps(1), episode_id=f"{one.session}.{number}")
            one.commit()
    w.add_episode(steps(1), episode_id="x")
    other.add_episode(steps(2), episode_id="x")
    other.commit()
    assert len(reopened(arc).head.files("segments")) == 1
    with pytest.raises(DuplicateEpisodeError, match="'x'"):
        w.commit()
    w._end()
    other.close()


@pytest.mark.parametrize("verb", ["commit", "checkpoint"])
def test_a_replacement_takes_the_place_of_what_is_committed_meanwhile(verb: str) -> None:
    arc = fresh()
    w, other = arc.writer(run="one"), reopened(arc).writer(run="other")
    w.add_episode(steps(3), episode_id="x", replace=True)
    other.add_episode(steps(2), episode_id="x")
    other.commit()
    w.commit() if verb == "commit" else w.checkpoint(1).result()
    assert lengths(arc) == {"x": 3}
    w.close()
    other.close()


# -- a log that is behind ----------------------------------------------------------------------------------------------


def logs(count: int) -> tuple[archive.Archive, list[CommitLog], list[archive.Archive]]:
    arc = fresh()
    arc.writer().close()
    seen = [reopened(arc) for _ in range(count)]
    return arc, [CommitLog(one.storage, one.id, one.head) for one in seen], seen


def test_who_is_far_behind_reads_few_commits_and_finds_its_own() -> None:
    _, (log, other), (mine, _) = logs(2)
    for n in range(200):
        other.commit("mine \ud800" if n == 20 else f"label/{n}", by_hand("label"))
    before = mine.io_stats()
    assert log.commit("mine \ud800", by_hand("label")).number == other.head.number - 179
    assert (mine.io_stats() - before).requests <= 10
    assert log.commit("new", by_hand("label")).number == other.head.number + 1


def test_what_was_pruned_while_one_was_far_behind_is_known() -> None:
    """Commits that take something away are read, however many came since."""
    arc, (log, other), _ = logs(2)
    rows = {"key": ["shards/gone.zip"], "bytes": [1], "reason": ["left behind"], "commit": [0]}

    pruned = tablefiles.write(arc.storage, "pruner", "pruned", tables.from_columns("pruned", rows))
    for n in range(100):
        other.commit(f"{n}", by_hand("prune", pruned=pruned) if n == 30 else by_hand("label"))
    before = log.head.number
    log.catch_up()
    assert log.head.number == before + 100
    with pytest.raises(ExpiredError, match=r"gone\.zip"):
        log.commit("x", by_hand("label", segments=(_names(arc),)))


def _names(arc: archive.Archive) -> Any:
    """A segments file whose row names a shard that was pruned."""
    with arc.writer(run="names") as w:
        w.add_episode(steps(1))
    table = tablefiles.load(arc.storage, "segments", reopened(arc).head.files("segments"))
    gone = tables.set_column(table, "shard", "shards/gone.zip")
    return tablefiles.write(arc.storage, "s", "segments", gone)
