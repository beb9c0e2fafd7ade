"""Forgetting: what goes and what stays, each with its reason; nothing that stays reads otherwise, even when all that
went is deleted."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.errors import ConflictError, ExpiredError, NotFoundError, UsageError
from archive.maintain import survivors, verify
from archive.maintain.retention import ForgetRequest
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps
from tests.support.compactions import Job, of_checkpoint
from tests.support.letting_go import Ring, all_told, forgotten, remove_forgotten


def _why(plan: Any) -> dict[str, tuple[str, ...]]:
    return {one.name: one.reasons for one in plan.checkpoints if one.stays}


def _fates(plan: Any) -> dict[str, int]:
    return {group.reason: group.episodes for group in plan.episodes}


def _same_as(now: tuple[Any, Any], before: tuple[Any, Any]) -> None:
    """All that is there reads as it did."""
    for part, earlier in zip(now, before, strict=True):
        np.testing.assert_equal(part, {key: earlier[key] for key in part})


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_says_of_each_checkpoint_why_it_stays_and_changes_nothing() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(9)
    arc.refresh()
    before, head = all_told(arc), arc.head.number
    plan = arc.forget(Keep(last=2, every=4, best=("return", 2)), episodes="unreferenced")
    assert _why(plan) == {
        "step-0": ("every 4",), "step-3": ("one of the 2 of greatest return",), "step-4": ("every 4",),
        "step-7": ("last 2", "one of the 2 of greatest return"),
        "step-8": ("last 2", "every 4", "newest of its run with buffers", "newest whole of its run"),
    }  # fmt: skip
    assert (plan.checkpoints_gone, plan.episodes_gone, plan.empty) == (4, 0, False)
    assert arc.refresh().head.number == head
    assert all_told(arc)[0].keys() == before[0].keys()
    plan = arc.forget(Keep(last=2), episodes="unreferenced")
    assert _fates(plan) == {"held by checkpoints that stay": 4, "no checkpoint that stays holds them": 5}
    assert plan.objects > 20
    assert plan.bytes > 10_000


def test_a_plan_is_text_json_and_a_picture_in_which_nothing_acts() -> None:
    arc = fresh()
    with arc.writer() as w:
        for step, name in enumerate(["a\x1b[31m\nb", "<script>", "c"]):
            w.add_episode(steps(range(step * 5, step * 5 + 5)), episode_id=f"{name}-{step}")
            w.clear()
            w.checkpoint(step, name=name).result()
    plan = arc.refresh().forget(Keep(last=1), episodes="unreferenced")
    assert "\x1b" not in str(plan)
    assert "a\\x1b[31m\\nb" in str(plan)
    assert "<script>" not in plan._repr_html_()
    assert "&lt;script&gt;" in plan._repr_html_()
    as_json = plan.to_json()
    assert as_json["goes"] == {"checkpoints": 2, "episodes": 3, "objects": plan.objects, "bytes": plan.bytes}
    assert [one["stays"] for one in as_json["checkpoints"]] == [False, False, True]
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    with pytest.raises(UsageError, match="plan again"):
        copy.commit()
    assert re.search(r"nothing is forgotten yet", str(plan))
    assert not re.search("yet", str(plan.commit()))


def test_a_long_plan_names_all_that_stays_and_sums_up_what_goes() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(range(5)))
        for step in range(120):
            w.checkpoint(step, save_replay=False).result()
    arc.refresh().tag("paper", arc.checkpoints["step-3"])
    plan = arc.forget(Keep(last=1, every=2))
    gone = [step for step in range(1, 118, 2) if step != 3]
    for text in (str(plan), plan._repr_html_()):
        named = {int(number) for number in re.findall(r"step-(\d+)", text)}
        assert named == {*range(0, 120, 2), 3, 119, *gone[-40:]}
        assert "tag &#x27;paper&#x27;" in text or "tag 'paper'" in text
        assert f"and {len(gone) - 40} more" in text
        assert f"1 to {gone[-41]}" in text
    assert len(plan.to_json()["checkpoints"]) == 120


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "needs keep=, episodes="), ({"keep": Keep()}, "retains nothing"), ({"keep": 5}, "keep=5"),
        ({"episodes": "all"}, "unreferenced"), ({"keep": Keep(best=("typo", "max"))}, "retains none of the 3"),
        ({"keep": Keep(every=50)}, "retains none .* add last=1"), ({"ids": []}, "ids"), ({"ids": [3]}, "ids"),
        ({"where": "return >"}, "condition"), ({"where": "colour = 3"}, "colour"),
        ({"where": "return < 0", "redact": True}, "give their ids"), ({"redact": True}, "give their ids"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], says: str) -> None:
    arc = fresh()
    Ring(arc, begin=1).turns(3)
    head = arc.refresh().head.number
    with pytest.raises(UsageError, match=says):
        arc.forget(**asked, dry_run=False)
    with pytest.raises(NotFoundError, match="no episode 'nobody'"):
        arc.forget(ids=["nobody"])
    assert arc.refresh().head.number == head


def test_a_request_says_what_was_given() -> None:
    every = ForgetRequest(Keep(last=2), "unreferenced", "return > 1", ("a", "b"), "main", redact=True)
    told = "keep=Keep(last=2), episodes=unreferenced, where=return > 1, run=main, 2 ids, redact"
    assert (str(every), str(ForgetRequest(episodes="superseded"))) == (told, "episodes=superseded")


def test_nothing_to_forget_makes_no_commit() -> None:
    arc = fresh()
    Ring(arc).turns(2)
    plan = arc.refresh().forget(Keep(last=5), episodes="superseded", dry_run=False)
    assert plan.empty
    assert plan.made is None
    assert arc.refresh().head.kind == "checkpoint"


# -- what goes, and what stays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "episodes"),
    [("packed", None), ("packed", "superseded"), ("packed", "unreferenced"), ("directory", "unreferenced")],
)
def test_what_stays_reads_the_same_after_all_that_went_is_deleted(
    layout: str, episodes: str | None, tmp_path: Path
) -> None:
    arc = archive.create(tmp_path / "a", layout=layout)
    Ring(arc).turns(3)
    second = Ring(arc, begin=3, resume=arc.refresh().checkpoints[1])  # leaves a tail behind
    second.turns(3)
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(900, 905)), episode_id="revised")
        w.checkpoint(1, columns={"p": np.zeros(5)}).result()
        w.add_episode(steps(range(905, 912)), episode_id="revised", replace=True)
        w.checkpoint(2, columns={"p": np.zeros(7)}).result()
    before = all_told(arc)
    made = arc.refresh().forget(Keep(last=1), episodes=episodes, dry_run=False).made
    assert made is not None
    assert made.kind == "forget"
    assert made.let_go == made.number
    now = all_told(arc)
    _same_as(now, before)
    assert {ck["name"] for ck in now[1].values()} == {"step-5", "step-2"}
    assert "revised" in now[0]
    assert len(now[0]) == 7 if episodes != "unreferenced" else len(now[0]) < 7
    gone = remove_forgotten(arc)
    assert len(gone) == made.removed["objects"]
    _same_as(all_told(arc), now)
    assert verify(archive.open(arc.url), deep=True).sound
    second.w.close()


def test_superseded_rows_alone() -> None:
    arc = fresh()
    with arc.writer() as w:
        for revision in range(4):
            w.add_episode(steps(range(revision * 9, revision * 9 + 4 + revision)), episode_id="e", replace=revision > 0)
            w.commit()
        w.add_episode(steps(range(90, 99)), episode_id="other")
        w.clear()
        w.checkpoint(1).result()
    before = all_told(arc)
    plan = arc.refresh().forget(episodes="superseded", dry_run=False)
    assert [(g.stays, g.episodes, g.steps) for g in plan.episodes if not g.stays] == [(False, 1, 4 + 5 + 6)]
    assert plan.episodes_gone == 0
    assert "episodes that go: 0 of 2\n" in str(plan)
    assert len(plan.checkpoints) == 1
    _same_as(all_told(arc), before)
    assert arc.refresh().snapshot.rows == 2
    remove_forgotten(arc)
    np.testing.assert_equal(all_told(arc), before)


def test_episodes_by_condition_and_by_id() -> None:
    arc = fresh()
    with arc.writer() as w:
        for k in range(6):
            w.add_episode(steps(range(k * 5, k * 5 + 5)), episode_id=f"e{k}", metadata={"good": k % 2 == 0})
        w.remove(["e0", "e1", "e2"])
        w.checkpoint(1).result()
    before = all_told(arc)
    plan = arc.refresh().forget(where="metadata.good = true", dry_run=False)
    held = next(g for g in plan.episodes if g.reason.startswith("held"))
    assert held.stays
    assert held.episodes == 3, "asked for or not, a checkpoint holds them"
    assert {e.id for e in arc.refresh().episodes} == {"e1", "e3", "e4", "e5"}
    assert arc.forget(ids=["e1", "e4"], dry_run=False).episodes_gone == 1
    assert {e.id for e in arc.refresh().episodes} == {"e3", "e4", "e5"}
    both = arc.forget(Keep(last=1), episodes="unreferenced", where="return < 0")
    assert both.empty, "conditions narrow"
    _same_as(all_told(arc), before)


def test_the_ring_goes_on_and_resumes_as_before(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    ring = Ring(arc, held=4)
    ring.turns(6)
    ck = arc.refresh().checkpoints["step-5"]
    before = [(s.read(), s.columns["p"]) for s in map(resharding.plan(ck, world_size=3).share, range(3))]
    arc.forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    remove_forgotten(arc)
    again = arc.refresh().checkpoints["step-5"]
    assert again.served_by.number == arc.head.number
    assert again.number == ck.number
    shares = map(resharding.plan(again, world_size=3).share, range(3))
    np.testing.assert_equal([(s.read(), s.columns["p"]) for s in shares], before)
    newest = ring.turn()
    assert serials(newest) == list(range(30, 70))
    assert serials(reopened(arc).checkpoints["step-6"]) == serials(newest)
    with reopened(arc).writer(resume=again) as w:
        w.append(steps(range(900, 905)), env_ids=0)
        assert serials(w.checkpoint(9).result()) == [*range(20, 60), *range(900, 905)]
    ring.w._end()


def test_what_was_forgotten_is_not_resumed_from() -> None:
    arc = fresh()
    Ring(arc).turns(4)
    old = arc.refresh().checkpoints["step-1"]
    arc.forget(Keep(last=1), dry_run=False)
    with pytest.raises(ExpiredError, match="was forgotten by commit"):
        arc.writer(resume=old)


def test_a_compacted_archive_lets_go_of_its_old_shards(tmp_path: Path) -> None:
    job = Job(tmp_path / "a")
    resharding.compact(job.opened())
    arc = job.opened()
    newest = arc.checkpoints.latest
    assert newest is not None
    before = of_checkpoint(newest)
    shards = len(arc.shards)
    plan = arc.forget(Keep(last=1), episodes="unreferenced", dry_run=False)
    assert plan.checkpoints_gone == 1
    assert len(job.opened().shards) < shards
    remove_forgotten(arc)
    arc = job.opened()
    assert arc.checkpoints.latest is not None
    np.testing.assert_equal(of_checkpoint(arc.checkpoints.latest), before)
    np.testing.assert_equal(of_checkpoint(arc.checkpoints["step-2"]), before)
    assert verify(arc, deep=True).sound
    assert serials_of(job.save(3)) == serials_of(arc.checkpoints["step-2"])


def serials_of(ck: Any) -> Any:
    return [(e.id, e.length) for e in ck.episodes]


# -- two at once -------------------------------------------------------------------------------------------------------


def test_a_plan_is_carried_out_as_printed_or_not_at_all() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(5)
    plan = arc.refresh().forget(Keep(last=2), episodes="unreferenced")
    ring.turn()
    with pytest.raises(ConflictError, match="plan again"):
        plan.commit()
    plan = arc.refresh().forget(Keep(every=2))
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(900, 905)))
        w.checkpoint(1).result()
    with pytest.raises(ConflictError, match="plan again"):
        arc.forget(Keep(every=2)).commit() and plan.commit()
    plan = arc.refresh().forget(Keep(last=1))
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(905, 910)))
    made = plan.commit().made
    assert made is not None
    assert made.number == arc.refresh().head.number, "what only stays is no conflict"


def test_forgetting_twice_serves_again(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    ring = Ring(arc)
    ring.turns(4)
    arc.refresh().forget(Keep(last=2), episodes="unreferenced", dry_run=False)
    ring.turns(2)
    before = all_told(arc)
    arc.refresh().forget(Keep(last=3), episodes="unreferenced", dry_run=False)
    head = arc.refresh().head
    assert [ck.served_by.number for ck in arc.checkpoints] == [head.number] * 3
    assert len(head.files("segments")) == 1
    remove_forgotten(arc)
    _same_as(all_told(arc), before)
    assert not forgotten(arc) & {ref.path for ref in head.all_files}


# -- nets below --------------------------------------------------------------------------------------------------------


def test_a_revision_that_a_checkpoint_holds_stays_with_it() -> None:
    arc = fresh()
    with arc.writer() as w:
        for revision in range(3):
            w.add_episode(steps(range(revision * 9, revision * 9 + 4)), episode_id="e", replace=revision > 0)
            w.checkpoint(revision).result()
    before = all_told(arc)
    plan = arc.refresh().forget(Keep(every=2), episodes="superseded", dry_run=False)
    assert [(g.reason, g.steps) for g in plan.episodes if not g.stays] == [("superseded rows of episodes that stay", 4)]
    assert [ck.served_by.number for ck in arc.refresh().checkpoints] == [arc.head.number] * 2
    remove_forgotten(arc)
    _same_as(all_told(arc), before)
    assert serials(arc.checkpoints["step-0"]) == [0, 1, 2, 3]


def test_an_episode_never_becomes_an_earlier_one() -> None:
    """Whatever was decided of its rows: all of them stay rather than that."""
    arc = fresh()
    with arc.writer() as w:
        for revision in range(3):
            w.add_episode(steps(range(revision * 9, revision * 9 + 4)), episode_id="e", replace=revision > 0)
        w.add_episode(steps(range(90, 94)), episode_id="other")
        w.add_episode(steps(range(95, 99)), episode_id="gone")
    snapshot = arc.refresh().snapshot
    rows = survivors._ByEpisode(snapshot)
    stays = np.array([True, True, False, True, False])
    assert survivors._as_before(rows, stays).tolist() == [True, True, True, True, False]
