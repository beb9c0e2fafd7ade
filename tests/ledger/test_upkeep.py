"""A ledger beside what lets go: forgotten, undone, restored, pruned, merged, split and redacted; and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import archive
import resharding
from archive.ledger import Group, Rollout
from archive.maintain import verify
from archive.maintain.survivors import AWAITED
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import steps
from tests.support.tampering import change_table, replace_text


def filled(arc: archive.Archive) -> dict[str, str]:
    """Three prompts, sealed, of which one was trained on, and one in flight; and a newer run with a checkpoint."""
    with arc.writer(run="old") as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b", "c", "d"])
        names = {key: w.add_episode(steps([i]), episode_id=f"of {key}") for i, key in enumerate("abc")}
        ledger.seal(list(names), 0, list(names.values()))
        ledger.train("a")
        w.checkpoint(1, wait=True)
        w.clear()
        w.checkpoint(2, wait=True)
    with reopened(arc).writer(run="old", resume=reopened(arc).checkpoints["step-2"]) as w:
        w.checkpoint(3, wait=True)
    return names


def urls(arc: archive.Archive) -> list[str]:
    """The files of the ledger table."""
    return [arc.storage.full_url(file.path) for file in arc.refresh().head.files("ledger")]


def looked_at(arc: archive.Archive) -> tuple[Any, Any, Any]:
    view = arc.ledger("prompts", run="old")
    return view.to_reissue(), view.to_train(), view.counts


def test_what_is_forgotten_with_its_steps_is_to_be_done_again_until_it_is_undone() -> None:
    arc = fresh()
    filled(arc)
    arc.refresh()
    before = looked_at(arc)
    assert before[:2] == ([Rollout("d", 0)], [Group("b", ["of b"]), Group("c", ["of c"])])
    arc.forget(keep=archive.Keep(last=1), ids=["of a", "of b"], dry_run=False)
    assert looked_at(arc)[:2] == ([Rollout("b", 0), Rollout("d", 0)], [Group("c", ["of c"])])
    assert arc.ledger("prompts", run="old").state("a") == "trained"
    assert verify(reopened(arc)).sound
    arc.undo()
    assert looked_at(arc) == before
    assert verify(reopened(arc)).sound


@pytest.mark.parametrize("by", ["writer", "hand"])
def test_finished_rollouts_that_no_buffer_holds_are_not_forgotten_until_they_are_trained_on(by: str) -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", "b", "c", "d"], siblings=2)
        for key in "abcd":
            ledger.seal(key, 0, w.add_episode(steps([1]), episode_id=f"of {key}"))
        ledger.seal("a", 1, w.add_episode(steps([2]), episode_id="of a, too"))
        ledger.drop("b", "bad")
        ledger.drop("c", "bad", sibling=0)
        w.checkpoint(0, wait=True)
        w.clear()
        w.checkpoint(1, save_replay=False, wait=True)
    policy: Any = {"keep": archive.Keep(last=1), "forget": "unreferenced"} if by == "writer" else {}
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-1"], **policy) as w:
        for step in (2, 3):
            w.add_episode(steps([3]))
            w.checkpoint(step, wait=True)
            w.clear()
        if by == "hand":
            plan = reopened(arc).forget(archive.Keep(last=1), episodes="unreferenced", dry_run=False)
            assert {one.reason: one.episodes for one in plan.episodes}[AWAITED] == 3
            assert AWAITED in str(plan)
        assert {"of a", "of a, too", "of d"} <= {ep.id for ep in reopened(arc).episodes}
        assert w.ledger("prompts").to_train() == [Group("a", ["of a", "of a, too"])]
        w.ledger("prompts").train("a")
        w.checkpoint(4, wait=True)
        w.checkpoint(5, wait=True)
    reopened(arc).forget(archive.Keep(last=1), episodes="unreferenced", dry_run=False)
    assert {ep.id for ep in reopened(arc).episodes} == {"of d"}
    reopened(arc).forget(ids=["of d"], dry_run=False)
    assert Rollout("d", 0) in reopened(arc).ledger("prompts").to_reissue()


def test_what_was_trained_on_since_the_newest_checkpoint_stays_for_a_resume_from_it() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.ledger("prompts").draw(["a"])
        w.ledger("prompts").seal("a", 0, w.add_episode(steps([1]), episode_id="of a"))
        w.clear()
        w.checkpoint(0, wait=True)
        w.checkpoint(1, save_replay=False, wait=True)
        w.ledger("prompts").train("a")
    arc.refresh().forget(episodes="unreferenced", dry_run=False)
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-1"]) as w:
        assert w.ledger("prompts").to_train() == [Group("a", ["of a"])]


def test_nothing_names_an_episode_that_was_redacted(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "archive"))
    filled(arc)
    arc.refresh()
    arc.forget(keep=archive.Keep(last=1), dry_run=False)
    plan = arc.forget(keep=archive.Keep(last=1), ids=["of b"], redact=True)
    assert not plan.obstacles, plan.obstacles
    plan.commit()
    assert looked_at(arc)[0] == [Rollout("b", 0), Rollout("d", 0)]
    assert all("of b" not in pq.read_table(url)["episode_id"].to_pylist() for url in urls(arc))
    assert verify(reopened(arc)).sound


def test_a_restore_has_the_ledger_of_then_and_a_resume_goes_on_from_it() -> None:
    arc = fresh()
    filled(arc)
    arc.refresh()
    number, before = arc.head.number, looked_at(arc)
    with reopened(arc).writer(run="old", resume=arc.checkpoints["step-3"]) as w:
        w.ledger("prompts").train(["b", "c"])
        w.ledger("prompts").drop("d", "late")
    arc.refresh()
    assert looked_at(arc)[:2] == ([], [])
    arc.restore(commit=number)
    assert looked_at(arc) == before
    with reopened(arc).writer(resume=reopened(arc).checkpoints["step-3"]) as w:
        assert w.ledger("prompts").to_reissue() == [Rollout("d", 0)]
        assert w.ledger("prompts").to_train() == before[1]


def test_a_merge_leaves_ledgers_where_they_are_and_keeps_its_own(tmp_path: Path) -> None:
    one, two = (archive.create(str(tmp_path / name)) for name in ("one", "two"))
    filled(one)
    with two.writer() as w:
        w.ledger("others").draw("x")
    resharding.merge([one.url], to=two.url)
    merged = archive.open(two.url, allow_bases=True)
    assert merged.ledgers == ["others"]
    assert len(merged.episodes) == 3
    resharding.merge([one.url], to=str(tmp_path / "three"), copy=True)
    assert archive.open(str(tmp_path / "three")).ledgers == []
    assert verify(merged).sound


def test_a_sealed_prompt_whose_episode_is_not_there_is_damage(tmp_path: Path) -> None:
    filled(archive.create(tmp_path / "archive"))
    change_table(tmp_path / "archive", "ledger", replace_text("episode_id", "of c", "gone"))
    findings = verify(archive.open(tmp_path / "archive")).findings
    assert any("is sealed with episode 'gone'" in one.problem for one in findings)


def test_duckdb_reads_what_became_of_prompts(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    arc = archive.create(tmp_path / "archive")
    filled(arc)
    with duckdb.connect() as connection:
        found = connection.execute(
            "SELECT key, state, episode_id FROM read_parquet(?) QUALIFY row_number() OVER "
            "(PARTITION BY key, round ORDER BY created_at DESC, sequence DESC) = 1 ORDER BY key",
            [urls(arc)],
        ).fetchall()
    assert found == [
        ('"a"', "trained", None), ('"b"', "sealed", "of b"), ('"c"', "sealed", "of c"), ('"d"', "drawn", None),
    ]  # fmt: skip
