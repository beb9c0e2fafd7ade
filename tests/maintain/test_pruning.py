"""Pruning: what goes and what stays, each with its reason; what stays reads as before."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep, tables
from archive.errors import UsageError
from archive.log import commits, tablefiles
from archive.maintain import PrunePlan, plans, prune
from archive.maintain.plans import ObjectFate
from archive.testing import assert_whole, small_archive
from tests.support.archives import by_hand
from tests.support.backends import Backend
from tests.support.checkpoints import steps
from tests.support.letting_go import Ring, all_told, forgotten
from tests.support.pruning import NOW, aged, keys_of, left_behind, sound, why

stores = pytest.mark.parametrize("backend", ["memory", "local", "moto", "s3fs", "seaweedfs"], indirect=True)


def turned(where: Any, count: int = 6, **how: Any) -> archive.Archive:
    """An archive with so many checkpoints of a ring, whose writer is gone."""
    arc = archive.create(where, **how)
    ring = Ring(arc)
    ring.turns(count)
    ring.w.close()
    return arc.refresh()


def compacted(arc: archive.Archive, ring: Ring) -> None:
    """One more checkpoint, of half a shard, whose steps are written anew."""
    ends = ring.w.live["position"].to_numpy() + ring.w.live["length"].to_numpy()
    ring.w.evict(0, before=int(ends.max()) - 15)
    ring.w.checkpoint(1000).result()
    ring.w.close()
    assert resharding.compact(arc.refresh(), min_alive=1.0).commit is not None
    arc.refresh()


def let_go(arc: archive.Archive) -> archive.Archive:
    arc.forget(Keep(last=2), episodes="unreferenced", dry_run=False)
    return arc


# -- what goes ---------------------------------------------------------------------------------------------------------


@stores
def test_what_was_forgotten_goes_and_what_stays_reads_as_before(backend: Backend) -> None:
    arc = turned(backend.url, storage_options=backend.storage_options)
    let_go(arc)
    gone, before = forgotten(arc), keys_of(arc)
    assert gone
    plan = arc.prune(**NOW)
    assert {one.key for one in plan.going} >= gone
    assert why(plan)[prune.LET_GO] == len(gone)
    assert keys_of(arc) == before  # a plan deletes nothing
    told = archive.open(backend.url, storage_options=backend.storage_options).episodes.read()
    done = plan.commit()
    assert (done.made.kind, done.deleted, done.errors) == ("prune", plan.objects, {})
    assert keys_of(arc) & {one.key for one in plan.going} == set()
    other = archive.open(backend.url, storage_options=backend.storage_options)
    np.testing.assert_equal(other.episodes.read(), told)
    assert len(other.checkpoints) == 2
    assert sound(other)


def test_run_again_it_does_nothing(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    assert arc.prune(dry_run=False, **NOW).made is not None
    head = arc.refresh().head.number
    again = arc.prune(dry_run=False, **NOW)
    assert (again.made, again.deleted, again.empty) == (None, 0, True)
    assert arc.refresh().head.number == head
    assert not forgotten(arc)


def test_all_that_a_ring_once_held_goes_but_what_it_holds(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path, 40))
    arc.prune(dry_run=False, **NOW)
    small = sum(one.bytes for one in arc.storage.scan("") if not one.key.startswith("commits/"))
    only = let_go(turned(tmp_path / "only", 3))
    only.prune(dry_run=False, **NOW)
    assert small < 1.3 * sum(one.bytes for one in only.storage.scan("") if not one.key.startswith("commits/"))


def test_what_a_crash_left_behind_goes_when_it_is_old(tmp_path: Path) -> None:
    arc = turned(tmp_path)
    old = left_behind(arc)
    aged(tmp_path, 25)
    young = left_behind(arc, "later")
    plan = arc.prune(dry_run=False)
    assert {one.key for one in plan.going} == set(old)
    assert {one.reason for one in plan.going} == {"left behind"}
    assert why(plan)[prune.YOUNG] == len(young)
    assert keys_of(arc) >= set(young)
    assert keys_of(arc).isdisjoint(old)
    assert sound(arc)


def test_where_nothing_was_forgotten_every_commit_can_still_be_opened(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    ring = Ring(arc)
    for k in range(20):
        ring.turn(save=k > 10)
        ring.w.commit()
    compacted(arc, ring)
    before = [archive.open(tmp_path, commit=n).episodes.read() for n in range(1, arc.head.number + 1)]
    plan = arc.prune(dry_run=False, **NOW)
    assert plan.empty
    assert why(plan)[prune.EARLIER] > 0
    for number, told in enumerate(before, 1):
        np.testing.assert_equal(archive.open(tmp_path, commit=number).episodes.read(), told)


def test_commits_from_the_last_forgetting_on_can_still_be_opened(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    first = arc.refresh().head.number
    ring = Ring(arc, begin=100)
    for _ in range(6):
        ring.turn(save=False)
        ring.w.commit()
    compacted(arc, ring)
    last = arc.head.number
    before = [archive.open(tmp_path, commit=n).episodes.read() for n in range(first, last + 1)]
    plan = arc.prune(dry_run=False, **NOW)
    assert plan.made is not None
    assert why(plan)[prune.EARLIER] > 0
    for number, told in enumerate(before, first):
        np.testing.assert_equal(archive.open(tmp_path, commit=number).episodes.read(), told)


def test_what_rows_of_such_commits_name_stays_when_others_take_their_place(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    ring = Ring(arc, begin=100)
    ring.turn(save=False)
    ring.w.close()
    earlier = arc.refresh().head.number
    told = archive.open(tmp_path, commit=earlier).episodes.read()

    rows = arc.snapshot.columns(tables.schema("segments").names)
    ref = tablefiles.write(arc.storage, "replacing", "segments", rows.slice(0, rows.num_rows - 1))
    arc._log().commit("compact/by hand", by_hand("compact", segments=(ref,)))
    plan = arc.prune(dry_run=False, **NOW)
    assert any(group.kind == "shards" and group.why == prune.EARLIER for group in plan.groups)
    np.testing.assert_equal(archive.open(tmp_path, commit=earlier).episodes.read(), told)


def test_what_only_earlier_commits_need_goes_too(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    ring = Ring(arc)
    for _ in range(9):
        ring.turn(save=False)
        ring.w.commit()
    ring.turns(2)
    ring.w.close()
    let_go(arc.refresh())
    plan = arc.prune(dry_run=False, **NOW)
    assert why(plan)[prune.SUPERSEDED] > 0
    assert {one.reason for one in plan.going if one.why == prune.SUPERSEDED} == {"forgotten"}
    head = arc.refresh().head
    lead = {
        ref.path
        for number in range(head.let_go, head.number + 1)
        for ref in commits.read(arc.storage, number).all_files
    }
    assert {key for key in keys_of(arc, "manifest") if key.endswith(".segments.parquet")} <= lead | {
        ref.path for ck in arc.checkpoints for ref in commits.read(arc.storage, ck.number).all_files
    }
    assert sound(arc)


def test_a_directory_shard_goes_whole(tmp_path: Path) -> None:
    arc = turned(tmp_path, layout="directory")
    arc.storage.put_many((f"shards/00000001-crashed-00000.zarr/{name}", b"x") for name in ("zarr.json", "a/c/0"))
    let_go(arc)
    plan = arc.prune(dry_run=False, **NOW)
    gone = {one.key for one in plan.going if one.key.startswith("shards/")}
    assert "shards/00000001-crashed-00000.zarr" in gone
    assert len(gone) > 1
    assert not [key for key in keys_of(arc, "shards") if key.rpartition(".zarr/")[0] + ".zarr" in gone]
    assert sound(arc)


# -- what stays --------------------------------------------------------------------------------------------------------


def test_what_was_forgotten_a_while_ago_stays_for_the_wait(tmp_path: Path) -> None:
    arc = turned(tmp_path)
    aged(tmp_path, 100)  # the objects are old, the forgetting is not
    let_go(arc)
    plan = arc.prune("24h")
    assert plan.empty
    assert why(plan)[prune.WAITING] == len(forgotten(arc))
    aged(tmp_path, 23.9)
    assert arc.prune("24h").empty
    aged(tmp_path, 0.2)
    assert not arc.prune("24h").empty
    assert arc.prune("2d").empty
    assert not arc.prune(timedelta(hours=24)).empty


@pytest.mark.parametrize("again", [True, False])
def test_the_wait_counts_from_the_newest_forgetting_where_the_one_before_was_undone(
    tmp_path: Path, again: bool
) -> None:
    arc = archive.create(tmp_path)
    ring = Ring(arc)
    for _ in range(9):
        ring.turn(save=False)
        ring.w.commit()
    ring.turns(2)
    ring.w.close()
    before = arc.refresh().head.number
    told = archive.open(tmp_path, commit=before - 4).episodes.read()
    let_go(arc)
    aged(tmp_path, 25)
    if again:
        let_go(arc.undo())
    else:
        Ring(arc.refresh(), begin=50).w.close()
    plan = arc.prune("24h", dry_run=False)
    assert (prune.SUPERSEDED in why(plan)) == (not again)
    if again:
        np.testing.assert_equal(archive.open(tmp_path, commit=before - 4).episodes.read(), told)
        assert arc.undo().head.kind == "undo"
        aged(tmp_path, 25)
        assert prune.SUPERSEDED not in why(arc.prune("24h"))
    assert sound(arc)


def test_what_a_session_has_put_that_may_still_commit_stays(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    w = arc.writer(session="running")
    w.append(steps(range(900, 910)), env_ids=0)
    w.flush()
    put = left_behind(arc, "running")
    aged(tmp_path, 1000)
    plan = arc.prune(dry_run=False, **NOW)
    assert why(plan)[prune.RUNNING] > len(put)
    assert keys_of(arc) >= set(put)
    w.commit()
    w.close()
    with arc.writer(session="next"):
        pass
    assert {one.key for one in arc.prune(**NOW).going} >= set(put)  # it was replaced
    assert sound(arc)


def test_what_another_archive_refers_to_stays(tmp_path: Path) -> None:
    arc = turned(tmp_path / "source")
    target = archive.create(tmp_path / "target")
    resharding.merge([arc], to=target, copy=False)
    let_go(arc)
    keys = left_behind(arc)
    arc.storage.put("pins/0-0.json", json.dumps({"archive": "0", "url": "memory://x", "objects": keys}).encode())
    plan = arc.prune(dry_run=False, **NOW)
    assert why(plan)[prune.PINNED] >= len(keys)
    assert keys_of(arc) >= set(keys)
    other = archive.open(tmp_path / "target", allow_bases=True)
    assert len(other.episodes.read()) == len(other.episodes) > 0


def test_what_nobody_knows_stays(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    keys = [
        "shards/notes.txt",
        "states/readme",
        "manifest/x.parquet",
        "shards/0000000g-s-00000.zip",
        "journal/s/rank-00000/1.zip",
    ]
    elsewhere = ["notes.txt", "requests/1-00000000.json", "damaged/x", "others/1"]
    arc.storage.put_many((key, b"mine") for key in keys + elsewhere)
    plan = arc.prune(dry_run=False, **NOW)
    assert why(plan)[prune.STRANGE] == len(keys)
    assert {one.key for one in arc.storage.scan("")} >= {*keys, *elsewhere}


def test_commits_sessions_and_lists_stay(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    left_behind(arc)
    before = keys_of(arc, "commits", "sessions")
    arc.prune(dry_run=False, **NOW)
    Ring(arc, begin=50).w.close()
    left_behind(arc, "again")
    plan = arc.prune(dry_run=False, **NOW)
    assert keys_of(arc, "commits", "sessions") >= before
    assert why(plan)[prune.LIST] == 1
    for commit in arc.refresh().commits:
        if commit.pruned is not None:
            assert tablefiles.load(arc.storage, "pruned", [commit.pruned]).num_rows == commit.removed["objects"]


# -- refusals, plans ---------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    arc = turned(tmp_path)
    for older_than in ("59m", "0s", timedelta(minutes=1)):
        with pytest.raises(UsageError, match=r"is less than 1h: .* force=True"):
            arc.prune(older_than)
    for text in ("", "1", "1y", "-1h", "1.5h", 24, None, timedelta(hours=-1)):
        with pytest.raises(UsageError, match="older_than="):
            arc.prune(text, force=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="read only"):
        archive.open(tmp_path, commit=2).prune()
    left_behind(arc)
    head = arc.refresh().head.number
    with pytest.raises(UsageError, match="per_second=0"):
        arc.prune(dry_run=False, per_second=0, **NOW)
    assert arc.refresh().head.number == head


def test_of_the_groups_of_a_plan_those_that_go_come_first_and_of_these_the_largest() -> None:
    fates = [
        ObjectFate("shards/a", 900, "named by the newest commit"),
        ObjectFate("states/b", 10, "forgotten", "forgotten"),
        ObjectFate("shards/c", 30, "forgotten", "forgotten"),
        ObjectFate("shards/d", 50, "forgotten", "forgotten"),
        ObjectFate("manifest/e", 80, "left behind", "left behind"),
        ObjectFate("manifest/f", 80, "forgotten", "forgotten"),
    ]
    assert [(one.kind, one.goes, one.why, one.objects, one.bytes) for one in plans.grouped(fates)] == [
        ("manifest", True, "forgotten", 1, 80),
        ("manifest", True, "left behind", 1, 80),
        ("shards", True, "forgotten", 2, 80),
        ("states", True, "forgotten", 1, 10),
        ("shards", False, "named by the newest commit", 1, 900),
    ]


def test_a_plan_is_carried_out_once_and_says_what_it_did(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    left_behind(arc)
    plan = arc.prune(**NOW)
    assert "nothing is deleted yet" in str(plan)
    told: list[tuple[int, int]] = []
    done = plan.commit(progress=lambda *counts: told.append(counts))
    assert told[-1] == (plan.objects, plan.objects)
    assert "nothing is deleted yet" not in str(done)
    assert f"done by commit: {arc.refresh().head.number}" in str(done)
    assert arc.head.removed == {"objects": plan.objects, "bytes": plan.bytes}
    assert arc.head.pruned is not None
    listed = tablefiles.load(arc.storage, "pruned", [arc.head.pruned])
    assert set(listed["commit"].to_pylist()) == {arc.head.number}
    places = [(not group.goes, -group.bytes) for group in plan.groups]
    assert places == sorted(places)
    assert {group.kind for group in plan.groups} >= {"manifest", "shards", "states"}
    with pytest.raises(UsageError, match="carried out"):
        done.commit()
    copied = pickle.loads(pickle.dumps(plan))
    with pytest.raises(UsageError, match="another process"):
        copied.commit()
    document = json.loads(json.dumps(done.to_json()))
    assert document["goes"] == {"objects": plan.objects, "bytes": plan.bytes}
    assert [one["key"] for one in document["objects"]] == [one.key for one in plan.going]
    assert "<table" in done._repr_html_()
    assert isinstance(done, PrunePlan)


def test_a_plan_that_is_old_deletes_what_of_it_still_goes_and_nothing_else(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    plan = arc.prune(**NOW)
    archive.open(tmp_path).undo()
    later = left_behind(arc, "later")
    done = plan.commit()
    assert not {one.key for one in plan.going if one.why == prune.LET_GO} - keys_of(arc)
    assert keys_of(arc) >= set(later)
    assert done.deleted < plan.objects
    assert len(arc.refresh().checkpoints) == 6
    assert sound(arc)


def test_objects_that_cannot_be_deleted_are_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc = let_go(turned(tmp_path))
    keys = left_behind(arc)
    driver = type(arc.storage.driver)
    delete = driver.delete

    def refuse(self: Any, key: str, timeout_s: float) -> None:
        if key == keys[0]:
            raise PermissionError("not yours")
        delete(self, key, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "delete", refuse)
        done = arc.prune(dry_run=False, **NOW)
    assert [*done.errors] == [keys[0]]
    assert "refused" in done.errors[keys[0]]
    assert f"not deleted: {keys[0]}" in str(done)
    head = arc.refresh().head.number
    again = arc.prune(dry_run=False)  # without a wait: it was listed
    assert ([one.key for one in again.going], again.made, again.deleted) == ([keys[0]], None, 1)
    assert why(again)[prune.UNFINISHED] == 1
    assert arc.refresh().head.number == head


@pytest.mark.parametrize("backend", ["local", "moto", "s3fs"], indirect=True)
def test_a_bucket_that_keeps_versions_is_told(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = turned(backend.url, storage_options=backend.storage_options)
    left_behind(arc)
    assert arc.prune(**NOW).warnings == []
    monkeypatch.setattr(type(arc.storage), "versioned", lambda self: True)
    (warning,) = arc.prune(**NOW).warnings
    assert "deleting frees nothing by itself, 33 B stay as noncurrent versions" in warning
    assert "lifecycle rule" in warning


def test_an_archive_that_was_forgotten_at_can_go_on(tmp_path: Path) -> None:
    arc = let_go(turned(tmp_path))
    arc.prune(dry_run=False, **NOW)
    ck = arc.refresh().checkpoints.latest
    assert ck is not None
    share = resharding.plan(ck, world_size=1).share(0)
    ring = Ring(arc, begin=50, resume=share)
    ring.turns(3)
    let_go(arc.refresh())
    arc.prune(dry_run=False, **NOW)
    ring.turns(2)
    ring.w.close()
    assert len(all_told(arc)[1]) == 4
    assert sound(arc)


def test_what_was_half_written_goes_as_what_crashes_leave(tmp_path: Path) -> None:
    arc = small_archive(tmp_path)
    half = [tmp_path / "shards/.0123456789abcdef.tmp", tmp_path / "manifest/.fedcba9876543210.tmp"]
    for path in half:
        path.write_bytes(b"half")
    assert_whole(arc)
    assert arc.prune().empty  # somebody may be writing it
    aged(tmp_path, 25)
    plan = arc.prune().commit()
    assert sorted(one.key for one in plan.going) == sorted(str(path.relative_to(tmp_path)) for path in half)
    assert (plan.deleted, plan.errors) == (2, {})
    assert not any(path.exists() for path in half)
    assert_whole(arc.refresh())
