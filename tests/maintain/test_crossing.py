"""Prunes that meet other commits, other prunes, other clocks and their own death."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep, tables
from archive.errors import ExpiredError, SupersededError
from archive.log import Change, Commit, CommitLog
from archive.maintain import PrunePlan, prune
from archive.store import Storage
from tests.support.backends import Backend
from tests.support.letting_go import Ring, all_told
from tests.support.pruning import NOW, aged, before_its_commit, keys_of, killed_at, left_behind, sound


def forgetful(where: Any, **how: Any) -> archive.Archive:
    """An archive of which some was forgotten and some left behind."""
    arc = archive.create(where, **how)
    ring = Ring(arc)
    ring.turns(5)
    ring.w.close()
    left_behind(arc)
    arc.refresh().forget(Keep(last=2), episodes="unreferenced", dry_run=False)
    return arc


# -- writers that were stalled -----------------------------------------------------------------------------------------


def test_a_writer_that_was_stalled_for_longer_than_the_wait_has_lost_nothing(tmp_path: Path) -> None:
    arc = forgetful(tmp_path)
    w = arc.writer(run="other")
    w.add_episode({"x": np.arange(5)}, episode_id="mine")
    w.flush()
    aged(tmp_path, 1000)
    assert archive.open(tmp_path).prune(dry_run=False).deleted > 0
    w.commit()
    w.close()
    assert archive.open(tmp_path).episodes["mine"].read()["x"].tolist() == [0, 1, 2, 3, 4]
    assert sound(arc)


def test_a_writer_that_was_replaced_meanwhile_is_told_so(tmp_path: Path) -> None:
    arc = forgetful(tmp_path)
    w = arc.writer(run="other")
    w.add_episode({"x": np.arange(5)}, episode_id="mine")
    w.flush()
    archive.open(tmp_path).writer(run="other").close()
    aged(tmp_path, 1000)
    archive.open(tmp_path).prune(dry_run=False)
    with pytest.raises(SupersededError):
        w.commit()
    assert sound(arc)


@pytest.mark.parametrize("moment", ["before it drafts", "before it commits"])
def test_a_merge_that_was_stalled_for_longer_than_the_wait_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    source, arc = forgetful(tmp_path / "source"), forgetful(tmp_path / "target")

    def prune() -> None:
        aged(tmp_path / "target", 1000)
        assert archive.open(tmp_path / "target").prune(dry_run=False).deleted > 0

    if moment == "before it commits":
        before_its_commit(monkeypatch, "merge", prune)
    else:
        commit, done = CommitLog.commit, [False]

        def commit_after(self: CommitLog, *what: Any) -> Commit:
            if not done[0]:
                done[0] = True
                prune()
            return commit(self, *what)

        monkeypatch.setattr(CommitLog, "commit", commit_after)
    before = len(arc.refresh().episodes)
    with pytest.raises(ExpiredError, match=r"were pruned by commit \d+.*nothing was committed"):
        resharding.merge([source], to=arc, copy=True)
    assert len(archive.open(tmp_path / "target").episodes) == before
    assert sound(archive.open(tmp_path / "target"))


# -- what comes between plan and prune ---------------------------------------------------------------------------------


def tag_by_hand(arc: archive.Archive, target: int) -> None:
    """A tag for any commit, as another library may make it."""
    rows = tables.from_columns(
        "tags", {"name": ["paper"], "target": [target], "created_at": [datetime.now().astimezone()]}
    )

    arc._log().commit("tag/by hand", Change("tag", lambda parent, attempt: ({"tags": rows}, {})))


@pytest.mark.parametrize("between", ["plan and commit", "draft and commit"])
def test_a_tag_made_between_plan_and_prune_keeps_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    arc = forgetful(tmp_path)
    earlier = (arc.refresh().head.let_go or 0) - 1
    told = archive.open(tmp_path, commit=earlier).episodes.read()
    plan = arc.prune(**NOW)
    if between == "plan and commit":
        tag_by_hand(archive.open(tmp_path), earlier)
    else:
        before_its_commit(monkeypatch, "prune", lambda: tag_by_hand(archive.open(tmp_path), earlier))
    done = plan.commit()
    assert 0 < done.deleted < plan.objects
    np.testing.assert_equal(archive.open(tmp_path, commit="paper").episodes.read(), told)
    assert sound(arc)


@pytest.mark.parametrize("between", ["plan and commit", "draft and commit", "commit and delete"])
def test_a_merge_by_reference_between_plan_and_prune_keeps_what_it_refers_to_or_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    arc = forgetful(tmp_path / "source")
    earlier = archive.open(tmp_path / "source", commit=(arc.refresh().head.let_go or 0) - 1)
    target = archive.create(tmp_path / "target")
    failed: list[str] = []

    def merge() -> None:
        try:
            resharding.merge([earlier], to=target, copy=False)
        except ExpiredError as e:
            failed.append(str(e))

    plan = arc.prune(**NOW)
    if between == "plan and commit":
        merge()
    elif between == "draft and commit":
        before_its_commit(monkeypatch, "prune", merge)
    else:
        delete_many = Storage.delete_many

        def delete_after(self: Storage, *args: Any, **how: Any) -> Any:
            merge()
            return delete_many(self, *args, **how)

        monkeypatch.setattr(Storage, "delete_many", delete_after)
    plan.commit()
    assert len(failed) == (between == "commit and delete")
    other = archive.open(tmp_path / "target", allow_bases=True)
    assert len(other.episodes.read()) == (0 if failed else len(earlier.episodes))


def test_what_is_committed_between_plan_and_prune_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = forgetful(tmp_path)
    plan = arc.prune(**NOW)

    def restore() -> None:
        archive.open(tmp_path).undo()

    before_its_commit(monkeypatch, "prune", restore)
    done = plan.commit()
    assert {one.key for one in plan.going if one.why == prune.LET_GO} <= keys_of(arc)
    assert done.deleted == 3
    assert len(all_told(arc)[1]) == 5
    assert sound(arc)


# -- several prunes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
def test_two_prunes_at_once(backend: Backend) -> None:
    arc = forgetful(backend.url, storage_options=backend.storage_options)
    planned = arc.prune(**NOW)
    kept = keys_of(arc) - {one.key for one in planned.going}
    gate, done, failed = threading.Barrier(4), list[PrunePlan](), list[BaseException]()

    def prune() -> None:
        other = archive.open(backend.url, storage_options=backend.storage_options)
        gate.wait()
        try:
            done.append(other.prune(dry_run=False, **NOW))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=prune) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert failed == []
    made = [one.made for one in done if one.made is not None]
    assert sum(one.removed["objects"] for one in made) == planned.objects
    left = keys_of(arc)
    assert left >= kept
    assert left.isdisjoint(one.key for one in planned.going)
    assert sound(arc)


def test_a_plan_that_another_prune_has_carried_out_commits_nothing(tmp_path: Path) -> None:
    arc = forgetful(tmp_path)
    plan, same = arc.prune(**NOW), archive.open(tmp_path).prune(**NOW)
    assert plan.going == same.going
    head = plan.commit().made
    assert head is not None
    assert same.commit().made is None
    assert archive.open(tmp_path).head.number == head.number


# -- kills -------------------------------------------------------------------------------------------------------------


def test_a_prune_that_is_killed_leaves_an_archive_that_verifies_and_the_next_one_goes_on(tmp_path: Path) -> None:
    check_kills(tmp_path, every=4)


@pytest.mark.soak
def test_a_prune_that_is_killed_at_any_operation(tmp_path: Path) -> None:
    check_kills(tmp_path, every=1)


def check_kills(tmp_path: Path, every: int) -> None:
    arc = forgetful(tmp_path / "archive")
    told = all_told(arc)
    plan = arc.prune(**NOW)
    for k in range(0, 1000, every):
        where = tmp_path / f"killed-{k}"
        shutil.copytree(tmp_path / "archive", where)
        killed = killed_at(str(where), k)
        other = archive.open(where)
        np.testing.assert_equal(all_told(other), told)
        assert sound(other)
        head = other.head
        again = other.prune(dry_run=False, **NOW)
        assert (again.made is None) == (head.kind == "prune")
        assert keys_of(other).isdisjoint(one.key for one in plan.going)
        assert sound(archive.open(where))
        assert other.prune(**NOW).empty or head.kind != "prune"
        shutil.rmtree(where)
        if not killed:
            break
    assert not killed
    assert k > 10


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
@pytest.mark.parametrize("days", [-1, 1])
def test_the_clock_of_this_machine_does_not_matter(
    backend: Backend, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc = forgetful(backend.url, storage_options=backend.storage_options)
    wanted = {"older_than": "12h", "force": True}
    before = [arc.prune(**wanted), arc.prune(**NOW)]
    shift = timedelta(days=days)

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + shift

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift.total_seconds())
    for name, module in list(sys.modules.items()):
        drivers = name.startswith("archive.store.drivers")  # which pass on what the store says
        if name.startswith("archive.") and not drivers and getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", Shifted)
    after = [arc.prune(**wanted), arc.prune(**NOW)]
    assert [plan.going for plan in after] == [plan.going for plan in before]
    assert [plan.empty for plan in after] == [True, False]
    assert all(abs(one.clock - other.clock) < timedelta(minutes=5) for one, other in zip(before, after, strict=True))
