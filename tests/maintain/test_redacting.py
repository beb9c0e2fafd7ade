"""Redaction: nothing is left of an episode, in no form, and others read the same, bit for bit; or nothing is done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep, tables
from archive.errors import ConflictError, NotFoundError, UsageError
from archive.log import CommitLog, tablefiles
from archive.maintain import draft, relocation, verify
from tests.support.archives import by_hand
from tests.support.checkpoints import steps
from tests.support.compactions import SCHEMA, plain, whole
from tests.support.kills import die_at
from tests.support.letting_go import Ring, all_told
from tests.support.pruning import NOW, killed_at
from tests.support.sampling import one_in, sampled
from tests.support.traces import traces


def redact_and_die(url: str, k: int, name: str = "") -> None:
    """Plan to redact an episode, then carry it out up to its k-th operation."""
    plan = archive.open(url).forget(ids=[name], redact=True)
    die_at(k)
    plan.commit()


GONE, WHO, SAID = "the-episode-that-goes", "somebody-with-a-name", "what-was-said-of-them"
SECRET = np.float32([3.14159, 2.71828, 1.41421, 1.73205])
TRACES = (GONE.encode(), WHO.encode(), SAID.encode(), SECRET.tobytes())


def secret(first: int, count: int = 10) -> dict[str, Any]:
    """Steps with a pattern that is found in nobody else's."""
    made = steps(range(first, first + count))
    made["obs"]["image"][:] = SECRET
    return made


def add(w: archive.Writer, name: str, first: int) -> None:
    """An episode of ten steps; the one that is to go has a pattern and a name in it."""
    if name == GONE:
        w.add_episode(secret(first), episode_id=name, metadata={"who": WHO})
    else:
        w.add_episode(steps(range(first, first + 10)), episode_id=name, metadata={"number": first})


def filled(where: Path, layout: str = "packed", compression: str | None = "zstd:1") -> archive.Archive:
    """Six episodes in one shard, the third of which is to go; a checkpoint holds the last three."""
    arc = archive.create(where, layout=layout)
    names = ["e0", "e1", GONE, "e3", "e4", "e5"]
    with arc.writer(compression=compression) as w:
        for k, name in enumerate(names):
            add(w, name, 10 * k)
        w.commit()
        arc.refresh().label({GONE: {"note": SAID}, "e3": {"note": "of another"}}, by="anna")
        w.remove(names[:3])
        w.checkpoint(1, columns={"p": np.arange(30.0)}, attributes={"age": {"e3": 1}}).result()
    return arc.refresh()


def redact(arc: archive.Archive, **how: Any) -> Any:
    return arc.refresh().forget(ids=[GONE], redact=True, **how)


def end_session(arc: archive.Archive, run: str = "main") -> None:
    """Another writer of the run, so that the one before can no longer commit."""
    with arc.refresh().writer(run=run) as w:
        w.commit()


def others(told: tuple[dict[str, Any], Any]) -> Any:
    return {name: one for name, one in told[0].items() if name != GONE}, told[1]


def check_gone(arc: archive.Archive, before: Any, *wanted: bytes) -> None:
    """Nothing is found of it after a prune, and all others are as they were."""
    arc.refresh().prune(dry_run=False, **NOW)
    root = Path(arc.url.removeprefix("file://"))
    assert traces(root, *(wanted or TRACES)) == []
    now = all_told(arc)
    np.testing.assert_equal(now[0], others(before)[0])
    np.testing.assert_equal(now[1], {number: before[1][number] for number in now[1]})
    assert verify(archive.open(arc.url), deep=True).sound


# -- nothing is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["packed", "directory"])
@pytest.mark.parametrize("compression", ["zstd:1", None])
def test_nothing_is_left_and_others_are_as_they_were(tmp_path: Path, layout: str, compression: str | None) -> None:
    arc = filled(tmp_path, layout, compression)
    for one in TRACES:
        assert traces(tmp_path, one), "it is found as long as it is there"
    before = all_told(arc)
    plan = redact(arc)
    assert (plan.redacted.episodes, plan.redacted.shards, plan.redacted.steps) == (1, 1, 50)
    assert plan.redacted.bytes > 1000
    assert "1 episodes; 1 shards" in str(plan)
    assert plan.to_json()["redacted"]["obstacles"] == ()
    made = plan.commit().made
    assert made.removed["redacted"] == 1
    assert made.kind == "forget"
    np.testing.assert_equal(all_told(arc), others(before))
    assert traces(tmp_path, *TRACES), "it goes when it is pruned"
    check_gone(arc, before)


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_with_every_kind_of_field(tmp_path: Path, layout: str) -> None:
    arc = archive.create(tmp_path, layout=layout)
    with arc.writer(schema=SCHEMA) as w:
        for k in range(5):
            made = whole(k, 4 + k) | {"info": [{"who": WHO if k == 2 else k}] * (4 + k)}
            w.add_episode(made, episode_id=GONE if k == 2 else f"e{k}")
        w.commit()
        w.clear()
        w.checkpoint(1).result()
    with arc.writer(run="plain") as w:
        w.add_episode(plain(0, 7), episode_id="p0")
        w.add_episode(plain(60, 0), episode_id="empty-beside")
        w.add_episode({"k": np.arange(3)[:0], "obs": np.zeros((0, 3), np.float32)}, episode_id="empty")
        w.add_episode(plain(3, 5) | {"text": [WHO] * 5}, episode_id=GONE + "-too")
    end_session(arc, "plain")
    before = all_told(arc)
    del before[0][GONE + "-too"]
    arc.refresh().forget(ids=[GONE, GONE + "-too"], redact=True, dry_run=False)
    check_gone(arc, before, GONE.encode(), WHO.encode())


def test_one_that_lies_alone_is_dropped_without_writing_anything_anew(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for k, name in enumerate(["e0", GONE]):
            add(w, name, 10 * k)
            w.commit()
    refused(arc, "of a session that may still commit: save a checkpoint without them, or open another writer")
    end_session(arc)
    arc.refresh().add_fields({"score": {GONE: np.repeat(SECRET.view(np.float64), 5)}})
    before = all_told(arc)
    shards = {one.key for one in arc.storage.scan("shards")}
    plan = redact(arc, dry_run=False)
    assert (plan.redacted.shards, plan.redacted.steps) == (2, 0)
    assert {one.key for one in arc.storage.scan("shards")} == shards
    check_gone(arc, before)


def test_a_redaction_may_be_a_job_and_any_other_forgetting_not(tmp_path: Path) -> None:
    arc = filled(tmp_path)
    with pytest.raises(UsageError, match="are of a redaction"):
        arc.forget(ids=["e1"]).commit(job="one")
    assert redact(arc).commit(job="one").made is not None
    assert GONE not in arc.refresh().episodes.table["episode_id"].to_pylist()


def test_all_revisions_and_several_at_once(tmp_path: Path) -> None:
    arc = filled(tmp_path)
    with arc.writer(run="other") as w:
        w.add_episode(secret(300, 4), episode_id=GONE, replace=True)
        add(w, "more", 310)
        w.commit()
    end_session(arc, "other")
    before = all_told(arc)
    del before[0]["e4"]
    with pytest.raises(UsageError, match="live in checkpoints: step-1"):
        arc.refresh().forget(ids=[GONE, "e4"], redact=True, dry_run=False)
    arc.refresh().forget(ids=[GONE, "e0"], redact=True, dry_run=False)
    del before[0]["e0"]
    arc.refresh().prune(dry_run=False, **NOW)
    assert traces(tmp_path, *TRACES) == []
    now = all_told(arc)
    del now[0]["e4"]
    np.testing.assert_equal(now, others(before))


def test_what_a_compaction_or_an_earlier_forgetting_left_in_shards_goes_too(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for k, name in enumerate(["e0", GONE, "e2", "e3"]):
            add(w, name, 10 * k)
        w.remove(["e0", "e2"])
        w.checkpoint(1).result()
        assert resharding.compact(arc, min_alive=1).shards == 1  # two copies: its old shard stays for the other two
        w.remove([GONE])
        w.checkpoint(2, columns={"p": np.zeros(10)}).result()
        w.add_episode(secret(100, 3), episode_id="revised")
        add(w, "beside", 110)
        w.commit()
        w.add_episode(secret(100, 3), episode_id="revised", replace=True)
        w.remove(["revised", "beside"])
        w.checkpoint(3, columns={"p": np.ones(10)}).result()
        w.checkpoint(4, columns={"p": np.full(10, 2.0)}).result()
    arc.refresh().forget(Keep(last=1), episodes="superseded", dry_run=False)
    before = all_told(arc)
    arc.refresh().forget(ids=[GONE], redact=True, dry_run=False)
    arc.refresh().forget(ids=["revised"], redact=True, dry_run=False)
    del before[0]["revised"]
    check_gone(arc, before)


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_late_fields_of_it_are_taken_out_of_the_shards_that_they_share(tmp_path: Path, layout: str) -> None:
    arc = filled(tmp_path, layout)
    names = ["e0", "e1", GONE, "e3", "e4", "e5"]
    scores = {name: np.full(10, k, np.float64) for k, name in enumerate(names)}
    scores[GONE] = np.repeat(SECRET.view(np.float64), 5)
    arc.add_fields({"score": scores, "judge": {name: [f"of {name}"] * 10 for name in names}}, provenance={"v": 1})
    arc.add_fields({"score": {name: scores[name] + 1 for name in ("e0", "e1")}})
    arc.add_fields({"other": {"e5": np.arange(10)}})
    arc.drop_fields(["other"])
    before = all_told(arc.refresh())
    plan = redact(arc)
    assert plan.redacted.shards == 2, "that of its steps, and that of its late fields"
    plan.commit()
    np.testing.assert_equal(all_told(arc), others(before))
    check_gone(arc, before)
    with arc.refresh().writer() as w:
        add(w, "e6", 900)
    arc.refresh().add_fields({"score": {"e6": np.zeros(10)}})
    assert [one["score"][0] for one in arc.refresh().episodes.read(fields=["score"])] == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0]


def test_late_rows_that_go_over_several_episodes_are_cut(tmp_path: Path) -> None:
    """Of one row of the late table, the steps before and after those that go."""
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for k, name in enumerate(["e0", GONE, "e2"]):
            w.append(steps(range(10 * k, 10 * k + 10)), env_ids=0, last=[i == 9 for i in range(10)], episode_ids=name)
    end_session(arc)
    arc.refresh().add_fields({"score": {name: np.arange(10) + 10 * k for k, name in enumerate(["e0", GONE, "e2"])}})
    table = arc.refresh().snapshot.annotations.late
    one = table.slice(0, 1).to_pylist()[0] | {"length": 30}
    row = tables.from_columns("late", {name: [value] for name, value in one.items()})
    file = tablefiles.write(arc.storage, "t", "late", row)
    CommitLog(arc.storage, arc.id, arc.head).commit("test/one", by_hand("late", late=(file,)))
    before = all_told(arc.refresh())
    assert len(before[0]["e2"][1]["score"]) == 10
    redact(arc, dry_run=False)
    assert arc.snapshot.annotations.late["length"].to_pylist() == [10, 10]
    check_gone(arc, before, GONE.encode(), np.arange(10, 20).tobytes())


# -- done in between, undone, done again -------------------------------------------------------------------------------


def test_it_can_be_undone_until_it_is_pruned_and_done_again(tmp_path: Path) -> None:
    arc = filled(tmp_path)
    before = all_told(arc)
    redact(arc, dry_run=False)
    with pytest.raises(NotFoundError, match="there is no episode"):
        redact(arc)
    arc.undo()
    np.testing.assert_equal(all_told(arc), before)
    redact(arc, dry_run=False)
    check_gone(arc, before)
    with pytest.raises(ConflictError, match="pruned"):
        arc.refresh().undo()


@pytest.mark.parametrize("count", one_in(3))
def test_killed_at_any_operation_it_is_done_or_not_and_done_again_it_is_done(tmp_path: Path, count: int) -> None:
    arc = filled(tmp_path / "a")
    before = all_told(arc)
    for k in sampled(range(100), count):
        where = tmp_path / f"killed-{k}"
        shutil.copytree(tmp_path / "a", where)
        killed = killed_at(str(where), k, partial(redact_and_die, name=GONE))
        other = archive.open(where)
        done = other.head.kind == "forget"
        np.testing.assert_equal(all_told(other), others(before) if done else before)
        if not done:
            redact(other, dry_run=False)
        check_gone(other, before)
        shutil.rmtree(where)
        if not killed:
            break
    assert not killed
    assert k > 5


def test_a_plan_holds_after_others_committed_something_else(tmp_path: Path) -> None:
    arc = filled(tmp_path)
    plan = redact(arc)
    add_another(tmp_path)
    before = all_told(arc)
    plan.commit()
    check_gone(arc, before)


def add_another(where: Path) -> None:
    with archive.open(where).writer(run="other") as w:
        add(w, "more", 200)


def meanwhile(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Have something done while the steps of others are written anew."""
    write = relocation.write

    def first(*args: Any) -> Any:
        monkeypatch.setattr(relocation, "write", write)
        call()
        return write(*args)

    monkeypatch.setattr(relocation, "write", first)


def test_who_commits_while_it_is_carried_out_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = filled(tmp_path)
    plan = redact(arc)
    meanwhile(monkeypatch, lambda: add_another(tmp_path))
    plan.commit()
    before = all_told(arc)
    assert "more" in before[0]
    check_gone(arc, before)


@pytest.mark.parametrize("said", ["label", "field"])
def test_what_is_said_of_it_while_it_is_carried_out_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    arc = filled(tmp_path)
    plan = redact(arc)
    other = archive.open(tmp_path)
    if said == "label":
        meanwhile(monkeypatch, lambda: other.label({GONE: {"note": SAID + "!"}, "e0": {"note": "kept"}}))
        plan.commit()
    else:
        late = {"score": {GONE: np.repeat(SECRET.view(np.float64), 5), "e0": np.zeros(10)}}
        meanwhile(monkeypatch, lambda: other.add_fields(late))
        with pytest.raises(ConflictError, match="plan again"):
            plan.commit()
        redact(arc, dry_run=False)
    before = all_told(arc)
    check_gone(arc, before)


def test_a_compaction_while_it_is_carried_out_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = filled(tmp_path)
    plan = redact(arc)
    meanwhile(monkeypatch, lambda: resharding.compact(archive.open(tmp_path), min_alive=1))
    before = all_told(arc)
    with pytest.raises(ConflictError, match="plan again"):
        plan.commit()
    redact(arc, dry_run=False)
    arc.prune(dry_run=False, **NOW)
    assert traces(tmp_path, *TRACES) == []
    np.testing.assert_equal(all_told(arc)[0], others(before)[0])


# -- what stands in the way --------------------------------------------------------------------------------------------


def refused(arc: archive.Archive, says: str, **how: Any) -> None:
    """That it is refused, with nothing done; and what the plan says of it."""
    plan = redact(arc, **how)
    assert plan.obstacles
    keys = {one.key for folder in ("manifest", "shards", "states", "commits") for one in arc.storage.scan(folder)}
    with pytest.raises(UsageError, match=says):
        plan.commit()
    assert "nothing is forgotten yet" not in str(plan)
    assert "stands in the way" in str(plan)
    assert keys == {
        one.key for folder in ("manifest", "shards", "states", "commits") for one in arc.storage.scan(folder)
    }


def test_what_is_live_goes_once_it_left_the_buffer_and_the_checkpoints(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for k, name in enumerate(["e0", GONE, "e2"]):
            add(w, name, 10 * k)
        w.checkpoint(1, attributes={"age": {GONE: 3}}).result()
        refused(arc, r"live in checkpoints: step-1 \(commit 2\)")
        w.remove([GONE])
        w.checkpoint(2, columns={"p": np.zeros(20)}).result()
        refused(arc, r"live in checkpoints: step-1 \(commit 2\)")
        before = all_told(arc.refresh())
        redact(arc, keep=Keep(last=1), dry_run=False)
        w.checkpoint(3, columns={"p": np.ones(20)}).result()
    before[1].clear()
    arc.refresh().prune(dry_run=False, **NOW)
    assert traces(tmp_path, *TRACES) == []
    np.testing.assert_equal(all_told(arc)[0], others(before)[0])
    assert serials_of(arc) == [*range(10), *range(20, 30)]


def serials_of(arc: archive.Archive) -> list[int]:
    latest = arc.refresh().checkpoints.latest
    assert latest is not None
    return [n for data in latest.episodes.read() for n in data["serial"].tolist()]


def test_the_newest_checkpoint_must_not_name_it_in_its_staged_rows_or_borrow_from_one_that_does(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        for k, name in enumerate(["e0", GONE]):
            add(w, name, 10 * k)
        w.remove([GONE])
        w.checkpoint(1, columns={"p": np.zeros(10)}).result()
        refused(arc, r"objects of checkpoints name some of them: step-1 \(commit 2\); save another checkpoint")
        w.checkpoint(2, columns={"p": np.zeros(10)}).result()
        refused(arc, r"name some of them: step-2 \(commit 3\)", keep=Keep(last=1))
        w.checkpoint(3, columns={"p": np.ones(10)}).result()
        before = all_told(arc.refresh())
        redact(arc, keep=Keep(last=1), dry_run=False)
    check_gone(arc, before)


@pytest.mark.parametrize("where", ["attributes", "open", "unconsumed", "progress", "state"])
def test_whatever_a_staged_object_says_of_it_is_found(tmp_path: Path, where: str) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        add(w, GONE, 0)
        w.commit()
        w.remove([GONE])
        add(w, "e1", 10)
        said: dict[str, Any] = {
            "attributes": {"attributes": {"next": {"e1": [GONE]}}}, "unconsumed": {"unconsumed": [{"after": GONE}]},
            "progress": {"progress": {"seen": [GONE]}}, "state": {"state": {"seen": {GONE: 1}}}, "open": {},
        }[where]  # fmt: skip
        if where == "open":
            w.append(secret(30, 3), env_ids=5, episode_ids="going-on")
        w.checkpoint(1, **said).result()
        if where != "open":
            refused(arc, "objects of checkpoints name some of them: step-1")
            return
        plan = arc.refresh().forget(ids=["going-on"], redact=True)
        assert any("of a session that may still commit" in one for one in plan.obstacles)
        assert any("live in checkpoints: step-1" in one for one in plan.obstacles)
        with pytest.raises(UsageError, match="save a checkpoint without them"):
            plan.commit()


def test_tags_stay_and_so_does_what_they_lead_to(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer() as w:
        add(w, "e0", 0)
        w.checkpoint(0).result()
        arc.refresh().tag("before")
        for k, name in enumerate([GONE, "e2"]):
            add(w, name, 10 * k + 10)
        w.commit()
        w.remove([GONE])
        w.checkpoint(1).result()
    assert redact(arc).obstacles == ()
    arc.tag("paper")
    refused(arc, "a tag stays: paper; copy the other episodes")


def test_other_archives_that_refer_to_its_shards_are_named(tmp_path: Path) -> None:
    arc = filled(tmp_path / "a")
    url = str(tmp_path / "b")
    merged = resharding.merge([arc], to=url)
    refused(arc, f"other archives refer to shards that must go: .*{url}")
    refused(merged, f"their steps lie in other archives: .*{arc.url}")


def test_a_checkpoint_that_only_tables_of_before_serve_stands_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc = filled(tmp_path)
    monkeypatch.setattr(draft, "_serves", lambda *_: False)
    refused(arc, r"can be read with tables of before alone: step-1 \(commit 4\)")


def test_writers_go_on(tmp_path: Path) -> None:
    arc = archive.create(tmp_path)
    with arc.writer(run="done") as w:
        for k, name in enumerate(["e0", GONE, "e2"]):
            add(w, name, 1000 + 10 * k)
    end_session(arc, "done")
    ring = Ring(arc)
    ring.turns(3)
    before = all_told(arc)
    redact(arc, dry_run=False)
    ring.turns(2)
    now = all_told(arc)
    assert {*now[0]} >= {*before[0]} - {GONE}
    np.testing.assert_equal({number: now[1][number] for number in before[1]}, before[1])
    arc.refresh().prune(dry_run=False, **NOW)
    assert traces(tmp_path, *TRACES) == []
    assert verify(archive.open(tmp_path), deep=True).sound
