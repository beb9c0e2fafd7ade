"""A run that goes back to an earlier checkpoint: what it left behind is in nothing that goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
import resharding
from archive.index import chains
from archive.index.chains import Branches, ByWriter
from archive.maintain import verify
from tests.support import format_reader
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps
from tests.support.sampling import examples
from tests.support.tampering import change_table, set_column

ENDS = (
    "complete",
    "terminated",
    "truncated",
    "reason",
    "return",
    "metadata",
    "update_count_max",
    "model_weights_uuids",
)


def resume(arc: archive.Archive, name: str, **more: Any) -> archive.Writer:
    """A writer that goes on from a checkpoint, of an archive opened anew."""
    found = reopened(arc)
    return found.writer(resume=found.checkpoints[name], **more)


def told(episodes: Any) -> dict[str, Any]:
    (row,) = episodes.table.select(ENDS).to_pylist()
    return dict(row)


def read(episodes: Any) -> list[int]:
    (data,) = episodes.read(["serial"])
    return list(data["serial"].tolist())


OPEN = dict.fromkeys(ENDS) | {"complete": False, "return": 0.5, "model_weights_uuids": []}


def test_an_episode_closed_after_the_checkpoint_is_open_in_the_branch_that_goes_on_from_there() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.checkpoint(0)
        w.close_episodes([0], terminated=True, reason="done")
        w.checkpoint(1)
    assert told(reopened(arc).episodes)["terminated"]
    with resume(arc, "step-0") as w:
        assert told(reopened(arc).episodes) == OPEN, "from when the session was opened"
        w.checkpoint(2)
        w.append(steps([2]), env_ids=0)
    found = reopened(arc)
    assert [told(found.checkpoints[f"step-{i}"].episodes) for i in (0, 2)] == [OPEN, OPEN]
    done = {"complete": True, "terminated": True, "truncated": True, "reason": "done"}
    assert told(found.checkpoints["step-1"].episodes) == OPEN | done
    assert told(found.episodes) == OPEN | {"return": 1.5}
    assert read(found.episodes) == [1, 2]


def test_steps_that_a_resume_left_behind_are_in_no_later_branch() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.checkpoint(1)
        w.append(steps([2]), env_ids=0, last=[True], terminated=[True], update_count=99, model_weights_uuid="gone")
        w.commit()
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    assert told(reopened(arc).checkpoints["step-2"].episodes) == OPEN
    with resume(arc, "step-2") as w:
        w.append(steps([3]), env_ids=0)
        w.checkpoint(3)
    found = reopened(arc)
    assert read(found.episodes) == read(found.checkpoints["step-3"].episodes) == [1, 3]
    assert told(found.episodes) == told(found.checkpoints["step-3"].episodes) == OPEN | {"return": 2.0}
    assert read(archive.open(arc.url, commit=3).episodes) == [1, 2], "as it was before the resume"


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_that_goes_back_twice_leaves_both_behind(moved: bool) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.checkpoint(1)
    for number in (2, 3):
        with resume(arc, "step-1") as w:
            w.append(steps([number]), env_ids=0, last=[True])
            w.add_episode(steps([10 * number]), episode_id=f"of {number}")
            w.checkpoint(number)
    with resume(arc, "step-1") as w:
        if moved:
            w.append(steps([4]), env_ids=0)
        w.checkpoint(4)
    found = reopened(arc)
    (name,) = [e.id for e in found.checkpoints["step-4"].episodes]
    want = [1, 4] if moved else [1]
    assert found.episodes[name].read()["serial"].tolist() == want == serials(found.checkpoints["step-4"])
    assert not found.episodes[name].complete
    assert {e.id for e in found.episodes} == {name, "of 2", "of 3"}, "all that was ever archived"
    assert serials(found.checkpoints["step-3"]) == [30, 1, 3]
    with resume(arc, "step-2") as w:
        w.checkpoint(5)
    assert reopened(arc).episodes[name].read()["serial"].tolist() == [1, 2], "back to what was left"


def test_what_ended_in_a_branch_that_was_left_stays_as_its_own_newest_session_had_it() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(0)
    with resume(arc, "step-0") as w:
        w.append(steps([1]), env_ids=0, episode_ids="x")
        w.checkpoint(1)
        w.close_episodes([0])
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    with resume(arc, "step-0") as w:
        w.checkpoint(3)
    assert len(reopened(arc).checkpoints["step-3"].episodes) == 0
    assert not reopened(arc).episodes["x"].complete


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("unfinished", ["continue", "close"])
def test_shares_follow_the_branch(ranks: int, unfinished: str) -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="first") for rank in range(2)]
    for rank, w in enumerate(writers):
        w.append(steps([10 * rank]), env_ids=0, episode_ids=f"e{rank}")
    [w.checkpoint(1) for w in writers][-1].result(60)
    for rank, w in enumerate(writers):
        w.append(steps([10 * rank + 1]), env_ids=0, last=[True], update_count=99)
        w.close()
    found = reopened(arc)
    plan = resharding.plan(found.checkpoints["step-1"], world_size=ranks, unfinished=unfinished)
    writers = [found.writer(resume=plan.share(rank), session="second") for rank in range(ranks)]
    ck = [w.checkpoint(2) for w in writers][-1].result(60)
    for w in writers:
        w.close()
    for episodes in (ck.episodes, reopened(arc).episodes):
        rows = episodes.table.select(["episode_id", "length", "complete", "reason", "update_count_max"]).to_pylist()
        assert sorted(r["episode_id"] for r in rows) == ["e0", "e1"]
        for row in rows:
            assert (row["length"], row["update_count_max"]) == (1, None)
            assert (row["complete"], row["reason"]) in ((False, None), (True, "resumed")), (
                "open, or closed by the resume"
            )


def test_an_open_episode_without_live_steps_goes_on_in_its_branch() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0, episode_ids="x")
        w.evict(0, before=1)
        w.checkpoint(1)
        w.append(steps([2]), env_ids=0, last=[True])
    with resume(arc, "step-1") as w:
        w.append(steps([3]), env_ids=0)
        ck = w.checkpoint(2).result()
    assert read(reopened(arc).episodes) == [1, 3]
    assert serials(ck) == [3]


def test_revisions_are_those_of_the_branch() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps([1]), episode_id="x")
        w.checkpoint(1)
        w.add_episode(steps([2]), episode_id="x", replace=True)
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    assert read(reopened(arc).episodes) == serials(reopened(arc).checkpoints["step-2"]) == [1]
    with reopened(arc).writer(run="labels") as w:  # nobody went back behind this one
        w.add_episode(steps([3]), episode_id="x", replace=True)
    with resume(arc, "step-2") as w:
        w.checkpoint(3)
    assert read(reopened(arc).episodes) == [3]
    assert serials(reopened(arc).checkpoints["step-3"]) == [1]


def test_what_a_checkpoint_was_staged_without_is_not_in_it_however_late_it_is_committed() -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="s") for rank in range(2)]
    writers[1].append(steps([1]), env_ids=0, episode_ids="x")
    late = writers[1].checkpoint(1, timeout_s=0.1)
    with pytest.raises(archive.errors.RanksMissingError):
        late.result(60)
    writers[1].append(steps([2]), env_ids=0, last=[True], update_count=99)
    writers[1].commit()
    ck = writers[0].checkpoint(1).result(60)
    assert told(ck.episodes) == OPEN
    for w in writers:
        w.close()
    found = reopened(arc)
    writers = [found.writer(rank, 2, session="t", resume=found.checkpoints["step-1"]) for rank in range(2)]
    assert told([w.checkpoint(2) for w in writers][1].result(60).episodes) == OPEN
    for w in writers:
        w.close()
    assert read(reopened(arc).episodes) == [1]


def test_without_buffers_a_session_takes_no_episode_over() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.commit()
        w.checkpoint(1, save_replay=False)
        w.append(steps([2]), env_ids=0, last=[True])
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    assert read(reopened(arc).episodes) == [1, 2]


def test_a_rank_that_starts_empty_and_first_does_not_hide_where_the_others_go_on_from() -> None:
    arc = fresh()
    with arc.writer(session="s") as w:
        w.append(steps([1]), env_ids=0)
        w.checkpoint(1)
        w.close_episodes()
    found = reopened(arc)
    share = resharding.plan(found.checkpoints["step-1"], world_size=2, unfinished="continue").share(0)
    writers = [found.writer(1, 2, session="t"), reopened(arc).writer(resume=share, session="t")]
    assert told(reopened(arc).episodes) == OPEN
    for w in writers:
        w.close()


def test_nothing_more_is_asked_for_where_nobody_resumed() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.commit()
        w.append(steps([2]), env_ids=0)
    found = reopened(arc)
    before = found.io_stats()
    assert found.episodes.table["length"].to_pylist() == [2]
    assert found.head.branches is None
    assert (found.io_stats() - before).requests == 1, "the segments table"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_from_one_checkpoint_each_have_their_own(order: tuple[int, int]) -> None:
    """As the writers of two runs see them, whichever wrote last; the archive shows what was written last."""
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0, episode_ids="x")
        w.checkpoint(1)
    ck = reopened(arc).checkpoints["step-1"]
    writers = [reopened(arc).writer(resume=Forked(ck, f"run {i}")) for i in range(2)]
    for i in order:
        writers[i].append(steps([10 + i]), env_ids=0, last=[True] if i else None)
        writers[i].commit()
    for i, w in enumerate(writers):
        w.evict(0, before=1)
        w.evict(0, positions=[1])
        w.append(steps([20 + i]), env_ids=0, first=[True])
        made = w.checkpoint(2 + i).result()
        known = made.whole_index.table(["episode_id", "complete", "length"]).to_pylist()
        (row,) = [r for r in known if r["episode_id"] == "x"]
        assert (row["complete"], row["length"]) == (bool(i), 2)
        w.close()
    assert reopened(arc).episodes["x"].read()["serial"].tolist() in ([1, 10], [1, 11])


class Forked:
    """A checkpoint that another run goes on from."""

    def __init__(self, checkpoint: archive.Checkpoint, run: str) -> None:
        self.checkpoint, self.run = checkpoint, run

    def to_resume(self, rank: int | None) -> Any:
        from dataclasses import replace

        return replace(self.checkpoint.to_resume(rank), run=self.run)


def test_many_resumes_are_followed_in_order() -> None:
    """A long run that goes back at random, against a model in plain lists."""
    rng = np.random.default_rng(7)
    arc = fresh()
    saved: list[list[int]] = []
    with arc.writer() as w:
        w.append(steps([0]), env_ids=0, episode_ids="x")
        w.checkpoint(0)
        saved.append([0])
    for number in range(1, 25):
        back = int(rng.integers(max(0, number - 3), number))
        have = list(saved[back])
        with resume(arc, f"step-{back}") as w:
            if rng.random() < 0.6:
                w.append(steps([100 + number]), env_ids=0)
                have.append(100 + number)
            w.checkpoint(number)
            saved.append(list(have))
            if rng.random() < 0.6:
                w.append(steps([200 + number]), env_ids=0)
                have.append(200 + number)
        assert read(reopened(arc).episodes) == have, number
    for number, want in enumerate(saved):
        ck = reopened(arc).checkpoints[f"step-{number}"]
        assert serials(ck) == want
        assert told(ck.episodes)["return"] == sum(want) / 2


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the branches and the segments table: sessions of two runs that go on from one another at any point."""
    branches: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    runs: dict[str, str] = {}
    sight: dict[str, list[dict[str, Any]]] = {}
    for number in range(draw(st.integers(1, 7))):
        session = f"s{number}"
        runs[session] = draw(st.sampled_from(["main", "main", "other"]))
        sight[session] = []
        parent = draw(st.sampled_from([None, *list(sight)[:-1]]))
        if parent is not None:
            runs.setdefault(parent, "main")
            for rank in range(2):
                mine = [r for r in rows if r["session"] == parent and r["rank"] == rank]
                cut = draw(st.integers(0, len(mine)))
                about = {"session": session, "run": runs[session], "parent": parent, "parent_run": runs[parent]}
                branches.append({**about, "rank": rank, "sequence": cut, "resumed_from": 1})
                gone = {id(r) for r in mine[cut:]}
                sight[session] += [r for r in sight[parent] if r["rank"] == rank and id(r) not in gone]
        for _ in range(draw(st.integers(0, 5))):
            rank, name = draw(st.integers(0, 1)), draw(st.sampled_from("abc"))
            earlier = [r for r in sight[session] if r["episode_id"] == name]
            before = earlier[-1] if earlier and draw(st.booleans()) else None
            sequence = sum(r["session"] == session and r["rank"] == rank for r in rows)
            rows.append({
                "episode_id": name, "session": session, "rank": rank, "sequence": sequence, "commit": len(rows) // 2,
                "created_at": len(rows), "replaces": before is None,
                "predecessor": before and chains.address(before["session"], before["rank"], before["sequence"]),
            })  # fmt: skip
            sight[session].append(rows[-1])
    return branches, rows


@settings(max_examples=examples(150), deadline=None)
@given(histories())
def test_what_stands_is_what_the_format_says(history: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    branches, rows = history
    kinds = {"session": pa.dictionary(pa.int32(), pa.string()), "rank": pa.int32(), "sequence": pa.int64(),
             "predecessor": pa.string(), "replaces": pa.bool_(), "commit": pa.int64(),
             "created_at": pa.timestamp("us", tz="UTC"), "episode_id": pa.string()}  # fmt: skip
    table = pa.table({n: pa.array([r[n] for r in rows], k) for n, k in kinds.items()})
    known = Branches.of(pa.Table.from_pylist(branches) if branches else pa.table({}))
    detail = table.select(chains.DETAIL)
    found = chains.resolve(
        table.select(chains.COLUMNS), lambda: detail, None, lambda part, of: known.current(ByWriter(part), of)
    )
    got = {rows[int(found.of(i)[0])]["episode_id"]: found.of(i).tolist() for i in range(found.episodes)}
    want = format_reader.chains(rows, format_reader.origins(branches))
    assert got == {name: [rows.index(row) for row in chain] for name, chain in want.items()}
    assert not len(known.spliced(ByWriter(detail), chains.predecessors(detail)))


# -- other archives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_branches_come_along_when_archives_are_merged(copy: bool) -> None:
    arc = fresh()
    to = f"{arc.url}-to"

    def merged() -> archive.Archive:
        made = resharding.merge([arc.url], to=to, copy=copy, allow_bases=True)
        assert resharding.merge([arc.url], to=to, copy=copy, allow_bases=True).head.number == made.head.number, (
            "twice is once"
        )
        return archive.open(to, allow_bases=True)

    with arc.writer() as w:
        w.append(steps([1]), env_ids=0, episode_ids="x")
        w.checkpoint(1)
        w.append(steps([2]), env_ids=0, last=[True], terminated=[True])
    assert read(merged().episodes) == [1, 2]
    assert merged().head.branches is None
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    assert told(merged().episodes) == OPEN
    assert read(merged().episodes) == [1]
    with resume(arc, "step-2") as w:
        w.append(steps([3]), env_ids=0)
    assert read(merged().episodes) == [1, 3]
    assert verify(merged()).findings == []
    again = resharding.merge([to], to=f"{to}-2", copy=copy, allow_bases=True)
    assert again.snapshot.branches.origins == reopened(arc).snapshot.branches.origins
    with archive.create(f"{arc.url}-other").writer() as w:
        w.add_episode(steps([7]))
    elsewhere = resharding.merge([f"{arc.url}-other"], to=f"{arc.url}-3", copy=copy, allow_bases=True)
    assert elsewhere.head.branches is None, "only what tells of the episodes that came along"


def test_a_resharded_checkpoint_is_of_its_branch() -> None:
    arc = fresh()
    with arc.writer(session="s") as w:
        for env in range(2):
            w.append(steps([10 * env]), env_ids=env)
        w.checkpoint(1)
        w.close_episodes()
    found = reopened(arc)
    plan = resharding.plan(found.checkpoints["step-1"], world_size=2, unfinished="continue")
    ck = resharding.reshard(found, plan, f"{arc.url}-to", copy=True)
    assert not any(ck.episodes.table["complete"].to_pylist())
    other = archive.open(f"{arc.url}-to")
    assert not any(other.episodes.table["complete"].to_pylist())
    share = resharding.plan(other.checkpoints["step-1"], world_size=1, unfinished="continue").share(0)
    with other.writer(resume=share) as w:
        w.checkpoint(2)
    assert verify(archive.open(f"{arc.url}-to")).findings == []


def test_compaction_keeps_branches() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(10)), env_ids=0, episode_ids="x")
        w.evict(0, positions=list(range(1, 10)))
        w.checkpoint(1)
        w.append(steps([20]), env_ids=0, last=[True])
    with resume(arc, "step-1") as w:
        w.checkpoint(2)
    assert resharding.compact(reopened(arc)).shards == 1
    found = reopened(arc)
    latest = found.checkpoints.latest
    assert latest is not None
    assert read(found.episodes) == list(range(10))
    assert serials(latest) == [0]
    with found.writer(resume=latest) as w:
        w.append(steps([30]), env_ids=0)
        w.checkpoint(3)
    assert read(reopened(arc).episodes) == [*range(10), 30]
    assert verify(reopened(arc)).findings == []


# -- verify notices a splice -------------------------------------------------------------------------------------------


def branching(root: Path) -> archive.Archive:
    """An archive on disk: a tail that a resume left behind, an env that stood still, and one that went on."""
    arc = archive.create(str(root))
    with arc.writer(session="s") as w:
        w.append(steps([1]), env_ids=0, episode_ids="x")
        w.checkpoint(1)
        w.append(steps([2]), env_ids=0, last=[True])
    with resume(arc, "step-1", session="t") as w:
        w.checkpoint(2)
    with resume(arc, "step-2", session="u") as w:
        w.append(steps([3]), env_ids=0)
        w.checkpoint(3)
    return reopened(arc)


def splice(root: Path) -> None:
    """The newest row of the episode goes on from the tail that was left behind, as it never must."""

    def change(table: Any) -> Any:
        (mine,) = [i for i, session in enumerate(table["session"].to_pylist()) if session == "u"]
        before = table["predecessor"].to_pylist()
        assert before[mine] == "s:0:0"
        before[mine] = "s:0:1"
        return set_column(table, "predecessor", pa.array(before, pa.string()))

    change_table(root, "segments", change)


def test_verify_notices_a_splice(tmp_path: Path) -> None:
    arc = branching(tmp_path / "a")
    assert verify(arc).findings == []
    splice(tmp_path / "a")
    spliced = reopened(arc)
    assert read(spliced.episodes) == [1, 2, 3]
    (finding,) = verify(spliced).findings
    assert finding.episodes == ("x",)
    for words in ("'x'", "'u:0:0' goes on from 's:0:1'", "resumed from commit 5"):
        assert words in finding.problem
