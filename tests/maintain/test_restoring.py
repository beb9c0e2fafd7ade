"""An earlier state made the newest again: what was forgotten comes back, and what came since stays or goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.errors import ConflictError, NotFoundError, SupersededError, UsageError
from archive.maintain import retained_reach, verify
from archive.store import Storage
from tests.support.archives import fresh
from tests.support.checkpoints import steps
from tests.support.letting_go import Ring, all_told, forgotten, remove_forgotten
from tests.support.pruning import NOW


def _has_all_of(now: tuple[Any, Any], before: tuple[Any, Any]) -> None:
    for part, earlier in zip(now, before, strict=True):
        np.testing.assert_equal({key: part[key] for key in earlier}, earlier)


def test_undo_brings_all_back_and_keeps_what_came_since() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(6)
    before, reached = all_told(arc), retained_reach(arc.storage, arc.refresh().head).keys
    arc.forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    ring.turn()
    since = all_told(arc)
    arc.refresh().undo()
    assert (arc.head.kind, arc.head.undoes) == ("undo", 8)
    now = all_told(arc)
    _has_all_of(now, before)
    _has_all_of(now, since)
    assert not forgotten(arc) & reached, "nothing that is led to again is left to be pruned"
    remove_forgotten(arc)
    np.testing.assert_equal(all_told(arc), now)
    assert verify(archive.open(arc.url), deep=True).sound
    with pytest.raises(UsageError, match="nothing was forgotten"):
        arc.refresh().undo()


def test_two_forgettings_are_undone_one_after_the_other() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(6)
    first = all_told(arc)
    arc.refresh().forget(Keep(last=3), episodes="unreferenced", dry_run=False)
    ring.turn()
    second = all_told(arc)
    arc.refresh().forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    ring.turn()
    arc.refresh().undo()
    _has_all_of(all_told(arc), second)
    arc.undo()
    _has_all_of(all_told(arc), first)
    _has_all_of(all_told(arc), second)


@pytest.mark.parametrize("delete", [True, False])
def test_nothing_comes_back_once_something_of_it_was_pruned(delete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(4)
    arc.refresh().forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    with monkeypatch.context() as patch:
        if not delete:  # it was killed once it had committed its list
            patch.setattr(Storage, "delete_many", lambda *_, **how: {})
        assert archive.open(arc.url).prune(dry_run=False, **NOW).made
    ring.turn()
    before = all_told(arc)
    for goes_back in (arc.refresh().undo, lambda: arc.restore(5)):
        with pytest.raises(ConflictError, match=r"commit [56] cannot be .*pruned"):
            goes_back()
    np.testing.assert_equal(all_told(arc), before)


@pytest.mark.parametrize("between", ["compact", "restore"])
def test_undo_does_not_go_back_behind_what_moved_or_replaced_rows(between: str) -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(6)
    forget = arc.refresh().forget(Keep(last=1), episodes="unreferenced", dry_run=False).made
    assert forget is not None
    if between == "compact":
        ring.w.evict(0, positions=np.arange(31, 59))
        ring.w.checkpoint(9).result()
        assert resharding.compact(arc.refresh()).commit
    else:
        ring.turn()
        arc.refresh().restore(forget.number)
    with pytest.raises(ConflictError, match=r"arc\.restore\(commit="):
        arc.refresh().undo()


def test_restore_goes_back_to_a_commit_and_fences_off_who_writes() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(3)
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(900, 905)), episode_id="other")
    then, number = all_told(arc), arc.refresh().head.number
    ring.turns(2)
    with arc.writer(run="late") as w:
        w.add_episode(steps(range(905, 910)), episode_id="late")
        w.checkpoint(1).result()
    late = all_told(arc)
    arc.refresh().restore(number)
    assert (arc.head.kind, arc.head.undoes, arc.head.let_go) == ("restore", number, arc.head.number)
    np.testing.assert_equal(all_told(arc), then)
    with pytest.raises(SupersededError):
        ring.turn()
    remove_forgotten(arc)
    np.testing.assert_equal(all_told(arc), then)
    latest = archive.open(arc.url).checkpoints.of("main").latest
    assert latest is not None
    again = Ring(arc, begin=50, resume=latest)
    again.turn()
    _has_all_of(all_told(arc), then)
    assert len(late[1]) > len(then[1])


def test_a_restore_is_taken_back_by_another() -> None:
    arc = fresh()
    Ring(arc).turns(4)
    newest, number = all_told(arc), arc.refresh().head.number
    arc.restore(number - 2)
    assert len(arc.checkpoints) == 2
    arc.restore(number)
    np.testing.assert_equal(all_told(arc), newest)


def test_only_an_earlier_commit_is_restored() -> None:
    arc = fresh()
    Ring(arc).turns(2)
    for number in (0, 99, arc.refresh().head.number):
        with pytest.raises((UsageError, NotFoundError), match="before the newest"):
            arc.restore(number)
    with pytest.raises(UsageError, match="nothing was forgotten"):
        arc.undo()


def test_labels_go_and_come_back_with_their_episodes() -> None:
    arc = fresh()
    with arc.writer() as w:
        for name in ("stays", "goes"):
            w.add_episode(steps(range(5)), episode_id=name)
        w.remove(["goes"])
        w.checkpoint(1).result()
    arc.refresh().label({"stays": {"good": True}, "goes": {"good": False}})
    assert arc.forget(where="label.good = true").empty, "a checkpoint holds it"
    arc.forget(where="label.good = false", dry_run=False)
    assert arc.refresh().labels["episode_id"].to_pylist() == ["stays"]
    arc.label({"stays": {"good": None}})
    arc.undo()
    assert arc.labels["episode_id"].to_pylist() == ["stays", "goes", "stays"]
    assert arc.episodes["goes"].labels == {"good": False}
