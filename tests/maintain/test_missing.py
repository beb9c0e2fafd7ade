"""Newest commits that were removed: noticed by the next session where somebody has seen them, told of by `verify`, and
gone on without by `repair`. What looks alike and is not (crashes, races, prunes) is no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli, maintain
from archive.base import CorruptCommitError, layout
from archive.maintain import repair, verify
from archive.testing import faults, trace
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.nonsense import filled
from tests.support.ticks import NEVER_S

Report = maintain.Report


def add(w: Any, step: int, **options: Any) -> None:
    w.add_episode({"x": np.arange(3)}, episode_id=f"e{step}")
    w.checkpoint(step, **options).result()


def job(arc: archive.Archive, *steps: int, **options: Any) -> str:
    """A job that made these checkpoints and died; its session."""
    w = arc.writer(**options)
    for step in steps:
        add(w, step)
    die(w)
    return str(w.session)


def without(arc: archive.Archive, *numbers: int) -> archive.Archive:
    """The archive as it is opened once these commits are removed."""
    arc.storage.delete([layout.commit_key(number) for number in numbers])
    return archive.open(arc.url)


def verified(arc: archive.Archive) -> Report:
    return verify(archive.open(arc.url))


def missing(report: Report) -> list[str]:
    return [one.object for one in report.findings if "missing" in one.problem]


def after_a_checkpoint(arc: archive.Archive) -> list[int]:
    """Commits 1 (session), 2, 3 (checkpoints)."""
    job(arc, 1, 2)
    return [2, 3]


def after_a_crash_before_the_commit(arc: archive.Archive) -> list[int]:
    """The second rank never came: what the first has staged names the checkpoint before."""
    ranks = [archive.open(arc.url).writer(r, 2, session="s") for r in range(2)]
    pending = [w.checkpoint(1) for w in ranks]
    for one in pending:
        one.result(30)
    left = ranks[0].checkpoint(2, timeout_s=0.1)
    with pytest.raises(archive.errors.RanksMissingError):
        left.result(30)
    die(*ranks)
    return [2]


def after_a_claim(arc: archive.Archive) -> list[int]:
    """The next session had begun."""
    job(arc, 1, session="first")
    with (
        faults.at(arc.url, op="create", k=1, what="fail", times=None, key="commits/"),
        pytest.raises(archive.ArchiveError),
    ):
        archive.open(arc.url).writer(session="next")
    return [2]


def after_the_next_session(arc: archive.Archive) -> list[int]:
    job(arc, 1, session="first")
    job(arc, session="next")
    return [2, 3]


def after_a_tick(arc: archive.Archive) -> list[int]:
    w = arc.writer(journal_s=NEVER_S)
    add(w, 1)
    w.add_episode({"x": np.arange(3)}, episode_id="later")
    w.sync()
    die(w)
    return [2]


SEEN = [
    after_a_checkpoint, after_a_crash_before_the_commit, after_a_claim, after_the_next_session, after_a_tick
]  # fmt: skip


@pytest.mark.parametrize("history", SEEN)
def test_the_next_session_notices_and_goes_on_when_told(history: Callable[[archive.Archive], list[int]]) -> None:
    arc = fresh()
    gone = history(arc)
    assert missing(verified(arc)) == []
    left = without(arc, *gone)
    if history is after_a_tick:
        with pytest.raises(CorruptCommitError, match=rf"(?s)commit {gone[-1]} is missing .*archive repair"):
            left.recover()
    else:
        keys = [one.key for one in arc.storage.scan("")]
        with pytest.raises(CorruptCommitError, match=r"(?s)commit \d is missing .*archive repair"):
            left.writer()
        assert [one.key for one in arc.storage.scan("")] == keys, "nothing was written"
    report = verified(arc)
    known = gone if history in (after_a_crash_before_the_commit, after_a_claim, after_a_tick) else gone[:-1]
    assert {layout.commit_key(n) for n in known} <= set(missing(report)) or "missing" in report.findings[0].problem
    done = repair(arc.storage)
    assert done.commit >= known[-1]
    with archive.open(arc.url).writer(run="main") as w:
        add(w, 9)
    assert missing(verified(arc)) == []


def test_the_last_commit_with_nothing_after_it_is_noted_and_no_finding() -> None:
    arc = fresh()
    session = job(arc, 1, 2)
    left = without(arc, 3)
    report = verified(arc)
    assert report.sound
    (staged,) = (one for one in report.notes if one.object.startswith("states/"))
    assert staged.object == layout.state_key(session, "step-2", 0)
    for words in ("rank 0 of 1 of checkpoint 'step-2', step 2, of run 'main'", "6 live steps", "commit", "removed"):
        assert words in staged.problem
    told = {one.object.split(".")[-2]: one.problem for one in report.notes if one.object.startswith("manifest/")}
    assert "made for commit 3" in told["checkpoints"]
    assert "'step-2', step 2" in told["checkpoints"]
    assert "episodes" in told["segments"]
    assert any(one.object.startswith("shards/") for one in report.notes)
    left.writer().close()


def test_a_commit_that_was_made_again_is_another_one() -> None:
    """Who does not open a session does not look; `verify` tells by the checksum."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    add(w, 1)
    w.add_episode({"x": np.arange(3)})
    w.sync()
    die(w)
    without(arc, 2).tag("again", 1)
    assert verified(arc).findings[0].object == layout.commit_key(2)
    assert "another one" in verified(arc).findings[0].problem


def test_all_commits_gone() -> None:
    arc = fresh()
    job(arc, 1, 2)
    left = without(arc, 1, 2, 3)
    assert left.head.number == 0
    with pytest.raises(CorruptCommitError, match="commit 2 is missing"):
        left.writer()
    assert repair(arc.storage).commit == 2
    archive.open(arc.url).writer().close()


def test_what_looks_alike_is_no_alarm(tmp_path: Path) -> None:
    arc = archive.open(str(filled(tmp_path / "root")))
    before = verified(arc)
    assert before.sound
    stale = archive.open(arc.url)
    w = arc.writer(run="main", session="s1")
    stale.writer(run="another", session="s2").close()
    other = archive.open(arc.url).writer(run="main", session="s3")  # fences the first one off
    w.add_episode({"x": np.arange(3)})
    with pytest.raises(archive.errors.SupersededError):
        w.commit()
    die(w)
    add(other, 7)
    other.close()
    stale.writer(run="another", session="s4").close()  # from what was open before
    assert verified(arc).sound


def test_another_archives_objects_prove_nothing(tmp_path: Path) -> None:
    arc, other = fresh(), fresh()
    job(arc, 1, 2, 3, session="s")
    job(other, 1, session="s")
    key = layout.rank_key("t", 0)
    archive.open(arc.url).writer(session="t").close()
    other.storage.put(key, arc.storage.get(key))
    archive.open(other.url).writer().close()
    assert verified(other).sound


def test_what_it_costs() -> None:
    """Two listings when a session is opened on a run that there is, one on a new one; a look at what is newer."""
    arc = fresh()
    before = job(arc, 1, 2)
    again = archive.open(arc.url)
    with trace(arc) as seen:
        w = again.writer(resume=None)
    die(w)
    listed = [one.key for one in seen.rows if one.verb == "list" and one.key != "requests"]
    assert listed == [f"states/{before}", "sessions"]
    assert [one.key for one in seen.rows if one.verb == "get"] == [layout.commit_key(4)] * 2, "one less than before"


def test_the_commands(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "root"))
    job(arc, 1, 2)
    without(arc, 2, 3)
    run = CliRunner()
    told = run.invoke(cli.main, ["verify", arc.url])
    assert told.exit_code == 1
    assert "missing" in told.output
    assert "no commit names" in told.output
    notes = json.loads(run.invoke(cli.main, ["verify", arc.url, "--json"]).output)["notes"]
    assert any("'step-2'" in one["problem"] for one in notes)
    would = run.invoke(cli.main, ["repair", arc.url])
    assert (would.exit_code, "would put empty commits" in would.output) == (0, True)
    assert run.invoke(cli.main, ["repair", arc.url, "--yes"]).exit_code == 0
    archive.open(arc.url).writer().close()


def test_who_opened_the_archive_before_a_commit_does_not_miss_it() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    stale = archive.open(arc.url)
    add(w, 1)
    w.add_episode({"x": np.arange(3)})
    w.sync()
    assert stale.tails().total.objects == 2
    assert verify(stale).sound
    w.close()
