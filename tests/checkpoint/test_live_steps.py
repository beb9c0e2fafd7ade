"""What a checkpoint finds in the newest files of the segments table, against what it finds in the whole table."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import archive
import resharding
from archive import tables
from archive.checkpoint import Checkpoint
from archive.index import chains
from archive.log import Commit, FileRef, RunEntry, tablefiles
from archive.log.records import CheckpointRecord, Lineage, StagedObject
from archive.maintain import verify
from tests.support import tampering
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps
from tests.support.sampling import examples, few_of

SESSIONS = ["s0", "s1", "s2"]
STORAGE = fresh().snapshot.storage
Row = dict[str, Any]


# -- random tables -----------------------------------------------------------------------------------------------------


@st.composite
def segments(draw: st.DrawFn) -> list[Row]:
    """Rows in almost any order of commits, with links, revisions, ends and ids that two episodes have."""
    out: list[Row] = []
    orderly = draw(st.booleans())
    for number in range(draw(st.integers(1, 16))):
        name, session = draw(st.sampled_from("abcdefg")), draw(st.sampled_from(SESSIONS))
        env = draw(st.integers(0, 1))
        stream = [r for r in out if (r["session"], r["env_id"]) == (session, env)]
        earlier = [r for r in out if r["episode_id"] == name]
        before = draw(st.sampled_from([None, *earlier[-2:]]))
        closing = bool(earlier) and draw(st.integers(0, 5)) == 0
        out.append({
            "episode_id": name, "session": session, "buffer": "replay", "rank": 0, "env_id": env,
            "position": sum(max(1, r["length"]) for r in stream),
            "sequence": -1 - number if draw(st.integers(0, 9)) == 9 else number,
            "predecessor": before and chains.address(before["session"], 0, before["sequence"]),
            "replaces": bool(earlier) and before is None and draw(st.integers(0, 3)) > 0,
            "length": 0 if closing else draw(st.sampled_from([0, 1, 2, 3])),
            "shard": None if closing else "shards/x.zip",
            "schema": "{}", "model_weights_uuids": [f"w{number}"], "update_count_min": number,
            "update_count_max": number, "first": before is None, "last": draw(st.booleans()),
            "episode_start": 0 if before is None else before["episode_start"] + before["length"],
            "return": float(number), "created_at": number,
            "commit": 1 + (number // 2 if orderly else draw(st.integers(0, 4))),
        })  # fmt: skip
        if draw(st.integers(0, 19)) == 19:
            out[-1]["predecessor"] = "gone:0:7"
    return out


@st.composite
def live_runs(draw: st.DrawFn, rows: list[Row]) -> list[Row]:
    """Some of the steps, of the newest rows mostly, each once."""
    out = []
    for row in rows[-draw(st.integers(0, len(rows))) :]:
        if row["shard"] is not None and draw(st.integers(0, 3)):
            lo = row["position"] + draw(st.integers(0, max(0, row["length"] - 1)))
            out.append({
                "rank": 0, "buffer": "replay", "env_id": row["env_id"], "position": 100 * len(out),
                "session": row["session"], "stream_rank": 0, "stream_env": row["env_id"], "lo": lo,
                "hi": row["position"] + row["length"],
            })  # fmt: skip
    return out


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Commit, list[Row]]:
    """A commit whose segments lie in several files, and their rows."""
    rows = draw(segments())
    cuts = sorted({0, len(rows), *draw(st.lists(st.integers(0, len(rows)), max_size=5))})
    files = tuple(stored("segments", rows[a:b]) for a, b in pairwise(cuts))
    if draw(st.integers(0, 4)) == 0:
        files = tuple(FileRef(f.path, f.bytes, f.crc32c, f.rows, f.commit) for f in files)  # of an earlier writer
    session = draw(st.sampled_from([*SESSIONS, "another"]))
    parent = draw(st.sampled_from([None, *[s for s in SESSIONS if s != session]]))
    resumed = {
        "session": session, "run": "main", "parent": parent, "parent_run": "main", "rank": 0,
        "sequence": draw(st.integers(0, 16)), "resumed_from": 1, "commit": 1,
    }  # fmt: skip
    own = draw(st.sampled_from([{}, {0: 99}, {0: draw(st.integers(0, 16))}]))
    record = CheckpointRecord(
        "c", 1, 1, 1, True, (), (StagedObject(0, "states/x.zip", ""),), {}, {}, {}, Lineage(), sequences=own
    )
    made = Commit(
        "checkpoint", session=session, number=9, segments=files, live=stored("live", draw(live_runs(rows))),
        branches=(stored("branches", [resumed]),) if parent else None, checkpoint=record,
        runs={"main": RunEntry("s2", ("s0", "s1", "another"))},
    )  # fmt: skip
    return made, rows


def stored(kind: str, rows: list[Row]) -> FileRef:
    names = tables.schema(kind).names
    return tablefiles.write(STORAGE, "s", kind, tables.from_columns(kind, {n: [r.get(n) for r in rows] for n in names}))


# -- the comparison ----------------------------------------------------------------------------------------------------


class Whole(Checkpoint):
    """Without the newest files alone."""

    @property
    def index(self) -> Any:
        return self.whole_index


def seen(held: Checkpoint) -> Any:
    """All that it says, with rows by their addresses."""
    table = held.index.snapshot.columns(["session", "rank", "sequence"]).to_pylist()
    names = [chains.address(*row.values()) for row in table]
    located = held.located
    pieces = [located["run"].tolist(), [names[i] for i in located.stream.tolist()]]
    pieces += [column.tolist() for column in (located.lo, located.hi, located["position"])]
    heads, numbers = held.groups
    told = [
        None if n < 0 else ([names[i] for i in held.index.chains.of(n)], held.index.table().slice(n, 1).to_pylist())
        for n in numbers.tolist()
    ]
    return pieces, heads.tolist(), told


@settings(max_examples=examples(200), deadline=None)
@given(checkpoints())
def test_the_newest_files_tell_the_same_as_the_whole_table(made: tuple[Commit, list[Row]]) -> None:
    commit, rows = made
    held = Checkpoint(STORAGE, commit)
    assert seen(held) == seen(Whole(STORAGE, commit))
    event("part of the table" if held.index.snapshot.rows < len(rows) else "the whole table")


# -- a ring ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of each commit in a file of their own, to begin with."""
    monkeypatch.setattr(tablefiles, "_RECENT_ROWS", 1)
    monkeypatch.setattr(tablefiles, "_RECENT_COMMITS", 1)


def ring(count: int, held: int = 6) -> archive.Archive:
    """An archive after so many checkpoints of a ring of 2 env rows, whose episodes go on over five of them."""
    arc = fresh()
    with arc.writer() as w:
        for at in range(count):
            for env in range(2):
                w.append(steps([10 * at + env]), env_ids=env, first=[at % 5 == 0], last=[at % 5 == 4])
                w.evict(env, before=max(0, at + 1 - held))
            w.checkpoint(at)
    return reopened(arc)


@pytest.mark.usefixtures("many_files")
def test_of_a_ring_the_newest_files_are_enough() -> None:
    arc = ring(120)
    ck = arc.checkpoints.latest
    assert ck is not None
    assert serials(ck) == [10 * at + env for env in range(2) for at in range(114, 120)]
    assert ck.snapshot.rows < arc.snapshot.rows / 4
    assert ck.whole_index.snapshot.rows == arc.snapshot.rows


@pytest.mark.usefixtures("many_files")
def test_an_open_episode_without_live_steps_is_found_however_old_it_is() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=7, episode_ids="old")
        w.evict(7, before=1)
        for at in range(20):
            w.append(steps([10 + at]), env_ids=0, first=[True], last=[True])
            w.evict(0, before=at)
            w.checkpoint(at)
    ck = reopened(arc).checkpoints["step-19"]
    assert ck.snapshot.rows < arc.refresh().snapshot.rows
    with reopened(arc).writer(resume=ck) as w:
        w.append(steps([2]), env_ids=7, last=[True])
    assert reopened(arc).episodes["old"].read()["serial"].tolist() == [1, 2]
    share = resharding.plan(reopened(arc).checkpoints["step-19"], world_size=1, unfinished="continue").share(0)
    with reopened(arc).writer(resume=share) as w:
        assert [row["episode_id"] for row in w.live.to_pylist()] == [e.id for e in ck.episodes]


@pytest.mark.usefixtures("many_files")
def test_a_live_step_that_no_file_has_is_damage() -> None:
    ck = ring(12).checkpoints.latest
    assert ck is not None
    files = ck.commit.files("segments")
    held = Checkpoint(ck.snapshot.storage, ck.commit, Commit("x", segments=files[:-1]))
    with pytest.raises(archive.errors.CorruptManifestError, match="of which only 5 are in"):
        _ = held.located


# -- what it costs -----------------------------------------------------------------------------------------------------


def cost(arc: archive.Archive) -> tuple[int, int]:
    """Requests and bytes of a plan, and of what a resume reads beside data."""
    before = arc.io_stats()
    ck = arc.checkpoints.latest
    assert ck is not None
    resharding.plan(ck, 2).share(0)
    ck.to_resume()
    spent = arc.io_stats() - before
    return spent.requests, spent.bytes_in


@pytest.mark.parametrize("count", few_of([200, 60, 300], 1))
def test_a_plan_costs_the_same_at_any_age(count: int) -> None:
    requests, size = cost(ring(20))
    later, later_size = cost(ring(count))
    assert later <= requests + 1
    assert later_size <= 1.5 * size


def test_a_checkpoint_costs_the_same_at_any_age() -> None:
    arc = fresh()
    spent = []
    with arc.writer() as w:
        for at in range(200):
            before = arc.io_stats()
            w.append(steps([at]), env_ids=0, first=[at % 5 == 0], last=[at % 5 == 4])
            w.evict(0, before=max(0, at - 5))
            w.checkpoint(at).result()
            used = arc.io_stats() - before
            spent.append((used.requests, used.bytes_in + used.bytes_out))
    early, late = np.mean(spent[5:45], axis=0), np.mean(spent[-40:], axis=0)
    (requests, size), (later, later_size) = early, late
    assert later <= 1.2 * requests
    assert later_size <= size + 9_000, "rows of segments and checkpoints, a few of which are written again each time"


# -- what readers go by is verified ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "said"), [("steps", 7), ("commit", [1, 1])])
def test_what_is_said_of_a_segments_file_is_verified(tmp_path: Path, key: str, said: Any) -> None:
    tampering.write_some(tmp_path)
    newest = tampering.commit_files(tmp_path)[-1]
    wrong = tampering.body(newest)
    wrong["segments"][0][key] = said
    tampering.seal(newest, wrong)
    (finding,) = verify(archive.open(str(tmp_path))).findings
    assert finding.object.endswith(".segments.parquet")
    assert "rows of commits (2, 2) with 15 steps" in finding.problem
