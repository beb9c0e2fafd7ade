"""Labels: said of episodes after they were written, found as columns, and shown only where what they are of is."""

from __future__ import annotations

import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import archive
import resharding
from archive.base.errors import ExpiredError, NotFoundError, StateError, UsageError
from archive.log import Change, CommitLog, tablefiles
from tests.support.archives import by_hand, fresh, reopened, with_checkpoints
from tests.support.backends import Backend
from tests.support.checkpoints import steps

stores = pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)


def labelled(episodes: Any) -> dict[str, dict[str, Any]]:
    """Episode id -> its labels."""
    return {ep.id: dict(ep.labels) for ep in episodes}


@stores
def test_labels_are_columns_conditions_and_values(backend: Backend) -> None:
    arc = with_checkpoints(backend.url, storage_options=backend.storage_options)
    arc.label({"e0": {"success": True, "quality": 0.9}, "e2": {"success": False, "quality": 1}}, by="anna")
    for one in (arc, archive.open(backend.url, storage_options=backend.storage_options)):
        table = one.episodes.table
        assert table["label.success"].to_pylist() == [True, None, False]
        assert table["label.quality"].to_pylist() == [0.9, None, 1.0]
        assert labelled(one.episodes) == {
            "e0": {"quality": 0.9, "success": True}, "e1": {}, "e2": {"quality": 1, "success": False}
        }  # fmt: skip
        found = one.episodes.filter(where="label.success = true and label.quality > 0.5")
        assert [ep.id for ep in found] == ["e0"]
        assert list(one.episodes.to_pandas()["label.quality"])[::2] == [0.9, 1.0]
        assert [ep.id for ep in one.episodes.filter(where=pc.field("label.quality") > 0.95)] == ["e2"]
        assert [ep.id for ep in one.checkpoints["step-0"].episodes.filter(where="label.success")] == ["e0"]


def test_one_small_object_and_a_commit_is_all_that_is_written(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    arc.label({"e0": {"success": True}})
    new = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path not in before}
    assert sorted(path.parent.name for path in new) == ["000000", "manifest"]
    assert sum(new.values()) < 8192
    assert {path: path.stat().st_size for path in before} == before
    assert (arc.head.kind, arc.head.files("segments")) == ("label", arc.commits[-2].files("segments"))


def test_the_newest_counts_and_what_was_said_before_is_kept() -> None:
    arc = with_checkpoints(fresh().url + "x")
    arc.label({"e0": {"success": True}}, by="anna")
    arc.label({"e0": {"success": False, "note": "fell"}}, by="bob")
    arc.label({"e0": {"note": None}})
    ep = arc.episodes["e0"]
    assert ep.labels == {"success": False}
    assert "label.note" not in arc.episodes.table.column_names
    assert [(row["key"], row["value"], row["by"]) for row in ep.label_history] == [
        ("success", True, "anna"), ("success", False, "bob"), ("note", "fell", "bob"), ("note", None, None)
    ]  # fmt: skip
    assert arc.labels["commit"].to_pylist() == [5, 6, 6, 7]
    assert arc.labels["value"].to_pylist() == ["true", "false", '"fell"', None]


def test_a_selection_is_labelled_and_shows_it() -> None:
    arc = with_checkpoints(fresh().url + "x")
    chosen = arc.episodes.filter(where="return > 0")
    assert chosen.label({"by hand": [1, "ü"]}, checked=True, by="anna") is chosen
    assert chosen.table["label.checked"].to_pylist() == [True, True]
    assert labelled(arc.episodes) == {"e0": {}} | {n: {"by hand": [1, "ü"], "checked": True} for n in ("e1", "e2")}
    assert labelled(reopened(arc).episodes) == labelled(arc.episodes)
    arc.episodes["e0"].label(checked=False)
    assert arc.episodes.table["label.checked"].to_pylist() == [False, True, True]
    arc.checkpoints["step-0"].episodes.label(first=1)
    assert labelled(arc.episodes)["e0"] == {"checked": False, "first": 1}
    again = pickle.loads(pickle.dumps(chosen))
    assert again.table["label.checked"].to_pylist() == [True, True]


def test_what_is_of_no_episode_is_refused_and_nothing_written() -> None:
    arc = with_checkpoints(fresh().url + "x")
    with pytest.raises(NotFoundError, match=r"2 of these episodes are not at .* such as 'x', 'y'"):
        arc.label({"e0": {"a": 1}, "x": {"a": 1}, "y": {"a": 1}})
    for wrong in ({"e0": {"": 1}}, {"e0": {"a\nb": 1}}, {"e0": {3: 1}}, {3: {"a": 1}}):
        with pytest.raises((UsageError, archive.FieldError)):
            arc.label(wrong)  # type: ignore[dict-item]
    with pytest.raises(StateError, match="success"):
        arc.label({"e0": {"success": object()}})
    with pytest.raises(UsageError, match="no labels were given"):
        arc.episodes.label()
    assert reopened(arc).head.number == arc.head.number == 4
    assert arc.label({}).episodes[:0].label(a=1) is not None
    assert reopened(arc).head.number == 4


@pytest.mark.parametrize(
    ("values", "kind", "column"),
    [
        ([True, False, True], pa.bool_(), [True, False, True]),
        ([1, -5, 0], pa.int64(), [1, -5, 0]),
        ([1, 0.5, 1e300], pa.float64(), [1.0, 0.5, 1e300]),
        ([math.inf, -math.inf, 2], pa.float64(), [math.inf, -math.inf, 2.0]),
        (["a", "", 'é"\\'], pa.string(), ["a", "", 'é"\\']),
        ([np.float32(0.5), np.int64(3), 2**70], pa.float64(), [0.5, 3.0, float(2**70)]),
        ([[1], {"a": None}, []], pa.string(), ["[1]", '{"a":null}', "[]"]),
        ([True, 1, "a"], pa.string(), ["true", "1", '"a"']),
    ],
)
def test_a_column_is_of_the_type_of_its_values(values: list[Any], kind: Any, column: list[Any]) -> None:
    arc = with_checkpoints(fresh().url + "x")
    arc.label({f"e{i}": {"k": value} for i, value in enumerate(values)})
    found = arc.episodes.table["label.k"]
    assert (found.type, found.to_pylist()) == (kind, column)
    assert [ep.labels["k"] for ep in arc.episodes] == [getattr(v, "item", lambda v=v: v)() for v in values]


def test_values_that_cannot_be_compared_are_an_error_of_the_condition_alone() -> None:
    arc = with_checkpoints(fresh().url + "x")
    arc.label({"e0": {"k": True, "q": math.nan}, "e1": {"k": "yes"}})
    with pytest.raises(UsageError, match=r"label\.k has values of several types"):
        arc.episodes.filter(where="label.k = true")
    assert len(arc.episodes.filter(where=pc.field("length") > 1)) == 3
    assert math.isnan(arc.episodes["e0"].labels["q"])
    assert not len(arc.episodes.filter(where="label.never = 1"))


def test_time_travel_shows_what_was_said_until_then() -> None:
    arc = with_checkpoints(fresh().url + "x")
    for value in (1, 2):
        arc.label({"e0": {"k": value}})
    assert [reopened(arc, commit=n).episodes["e0"].labels for n in (4, 5, 6)] == [{}, {"k": 1}, {"k": 2}]
    then = reopened(arc, commit=5)
    assert then.checkpoints["step-0"].episodes[0].labels == {"k": 1}
    for say in (lambda: then.label({"e0": {"k": 3}}), lambda: then.episodes.label(k=3),
                lambda: then.checkpoints[0].episodes[0].label(k=3)):  # fmt: skip
        with pytest.raises(UsageError, match="opened at commit 5"):
            say()


def test_labels_are_said_beside_a_writer_and_one_another(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    failed: list[BaseException] = []

    def say(name: str) -> None:
        try:
            for i in range(5):
                archive.open(tmp_path).label({"e0": {name: i}}, by=name)
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=say, args=(f"t{i}",)) for i in range(3)]
    [t.start() for t in threads]
    with archive.open(tmp_path).writer(resume=arc.checkpoints.latest) as w:
        for i in range(5):
            w.add_episode(steps([10 + i]), episode_id=f"new{i}")
            w.commit()
    [t.join() for t in threads]
    assert not failed
    arc.refresh()
    assert arc.episodes["e0"].labels == {f"t{i}": 4 for i in range(3)}
    assert len(arc.episodes["e0"].label_history) == 15
    assert len(arc.episodes) == 8
    assert len(arc.label({"e1": {"t0": 1}}).head.files("labels")) < 5


# -- what a label is of ------------------------------------------------------------------------------------------------


def test_what_was_said_of_a_revision_is_not_said_of_the_next() -> None:
    arc = with_checkpoints(fresh().url + "x")
    arc.label({"e0": {"success": True}, "e1": {"success": True}})
    old = arc.checkpoints["step-2"]
    with arc.writer(resume=old) as w:
        w.add_episode({"x": np.ones(2)}, episode_id="e0", replace=True)
    arc.refresh()
    assert labelled(arc.episodes) == {"e0": {}, "e1": {"success": True}, "e2": {}}
    assert labelled(arc.checkpoints["step-2"].episodes)["e0"] == {"success": True}
    assert arc.labels.num_rows == 2


def test_what_was_said_of_a_tail_that_a_resume_left_behind_is_not_said_of_what_took_its_place() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0, episode_ids=["a"])
        w.checkpoint(0)
        w.commit()
        reopened(arc).label({"a": {"begun": True}})
        w.append(steps([2]), env_ids=0, last=[True])
        w.commit()
        reopened(arc).label({"a": {"success": False}})
    before = reopened(arc)
    assert before.episodes["a"].labels == {"begun": True, "success": False}
    assert before.checkpoints[0].episodes["a"].labels == {"begun": True}
    with before.writer(resume=before.checkpoints[0]) as w:
        w.append(steps([3]), env_ids=0, last=[True])
    after = reopened(arc)
    assert after.episodes["a"].labels == {"begun": True}
    after.label({"a": {"success": True}})
    assert after.episodes["a"].labels == {"begun": True, "success": True}


def test_labels_stay_when_as_many_or_fewer_ranks_go_on(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for env in range(4):
            w.append(steps([env, env]), env_ids=env, episode_ids=[f"e{env}"] * 2)
        ck = w.checkpoint(0).result()
    arc.refresh().label({f"e{env}": {"n": env} for env in range(4)})
    plan = resharding.plan(arc.checkpoints.latest, world_size=2, num_envs=2)
    shares = [plan.share(rank) for rank in range(2)]
    assert {name: said for share in shares for name, said in labelled(share).items()} == {
        f"e{env}": {"n": env} for env in range(4)
    }
    writers = [archive.open(tmp_path).writer(resume=share, session="two") for share in shares]
    for w in writers:
        w.append(steps([7, 8]), env_ids=[0, 1], last=[True, True])
    pending = [w.checkpoint(1) for w in writers]
    made = [p.result() for p in pending]
    [w.close() for w in writers]
    arc.refresh()
    kept = arc.episodes.filter(where="label.n is not null")
    assert labelled(kept) == {f"e{env}": {"n": env} for env in range(4)}
    assert labelled(arc.checkpoints.latest.episodes).items() >= labelled(kept).items()
    assert made[0].number > ck.number


def test_episodes_that_were_let_go_of_meanwhile_are_not_labelled() -> None:
    arc = with_checkpoints(fresh().url + "x")
    seen = arc.episodes
    CommitLog(arc.storage, arc.id, arc.head).commit("forget", _without_first(arc))
    with pytest.raises(ExpiredError, match="1 of these episodes, such as 'e0', were forgotten"):
        seen.label(success=True)
    with pytest.raises(NotFoundError, match="'e0'"):
        arc.label({"e0": {"success": True}})
    seen[1:].label(success=True)
    assert labelled(reopened(arc).episodes) == {"e1": {"success": True}, "e2": {"success": True}}


def _without_first(arc: archive.Archive) -> Change:
    rows = tablefiles.load(arc.storage, "segments", arc.head.files("segments"))
    file = tablefiles.write(arc.storage, "s", "segments", rows.slice(1))
    return by_hand("forget", segments=(file,), let_go=arc.head.number + 1)


def test_who_labels_one_after_the_other_reads_the_tables_once(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    arc.label({"e0": {"k": 0}})
    segments = sum(ref.bytes for ref in arc.head.files("segments"))
    seen, before = arc.episodes, arc.io_stats()
    for i in range(1, 4):
        arc.label({"e0": {"k": i}})
        assert [ep.labels for ep in arc.episodes.filter(where=f"label.k = {i}")] == [{"k": i}]
    used = arc.io_stats() - before
    said = sum(ref.bytes for commit in arc.commits for ref in commit.files("labels"))
    assert used.bytes_in <= 2 * said
    assert segments > 3000
    assert seen["e0"].labels == {"k": 0}
    with arc.writer(resume=arc.checkpoints.latest) as w:
        w.add_episode(steps([5]), episode_id="new")
    assert len(arc.episodes) == 4
