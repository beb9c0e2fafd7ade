"""Runs as values: what belongs to each, from the tables and commits alone; several side by side;
on the command line."""

from __future__ import annotations

import copy
import pickle
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import CorruptStateError, NotFoundError
from archive.log import sessions
from archive.maintain import verify
from tests.support.archives import fresh, reopened
from tests.support.browser import held
from tests.support.checkpoints import steps
from tests.support.commands import call, document


def written(arc: archive.Archive, run: str, names: str, **how: Any) -> archive.Checkpoint:
    """Episodes of these names in a session of a run, and a checkpoint."""
    with arc.writer(run=run, **how) as w:
        for i, name in enumerate(names):
            w.add_episode({"reward": np.full(3, i)}, episode_id=name, update_count=i)
        return w.checkpoint(1, f"of-{names}").result()


def runs_of(arc: archive.Archive) -> dict[str, str | None]:
    table = arc.episodes.table
    return dict(zip(table["episode_id"].to_pylist(), table["run"].to_pylist(), strict=True))


def test_what_a_run_is() -> None:
    arc = fresh()
    first = written(arc, "job1", "ab", session="one")
    written(arc, "job1", "c", session="two", resume=first)
    written(arc, "job2", "de", session="three", fork_from=first)
    arc = reopened(arc)
    assert list(arc.runs) == ["job1", "job2"]
    job1, job2 = arc.runs.values()
    assert (job1.sessions, job2.sessions) == (["one", "two"], ["three"])
    assert (job1.forked_from, job2.forked_from) == (None, {"run": "job1", "name": "of-ab", "commit": first.number})
    assert [ck.name for ck in job1.checkpoints] == ["of-ab", "of-c"]
    assert job1.newest.name == "of-c"  # type: ignore[union-attr]
    assert sorted(e.id for e in job1.episodes) == ["a", "b", "c"]
    assert {e.run for e in job2.episodes} == {"job2"}
    assert job1.about["episodes"] == 3
    assert (job2.about["steps"], job2.about["forked_from"]) == (6, "of-ab of job1")
    assert first.number in job1.commits
    assert job2.commits == [arc.checkpoints.of("job2").latest.number]  # type: ignore[union-attr]
    assert repr(arc.runs).endswith(": job1, job2>")
    assert "from 'of-ab' of 'job1'" in repr(job2)
    assert ("job1" in arc.runs, "x" in arc.runs, arc.runs.get("x")) == (True, False, None)
    with pytest.raises(NotFoundError, match="its runs: 'job1', 'job2'"):
        arc.runs["x"]


def test_episodes_by_run() -> None:
    arc = fresh()
    written(arc, "job1", "ab")
    written(arc, "job2", "c")
    arc = reopened(arc)
    before = arc.io_stats().requests
    assert runs_of(arc) == {"a": "job1", "b": "job1", "c": "job2"}
    assert [e.id for e in arc.episodes.filter(run="job1")] == ["a", "b"]
    assert [e.id for e in arc.episodes.filter(run=["job1", "job2"])] == ["a", "b", "c"]
    assert [e.id for e in arc.episodes.filter(where="run = 'job2'")] == ["c"]
    assert len(arc.episodes.filter(run="none")) == 0
    assert arc.io_stats().requests - before == len(arc.manifest_urls), "the segments table, and nothing for the runs"
    assert [e.run for e in arc.checkpoints.of("job2").latest.episodes] == ["job2"]  # type: ignore[union-attr]
    assert arc.episodes.to_pandas()["run"].tolist() == ["job1", "job1", "job2"]
    assert fresh().episodes.table["run"].to_pylist() == []
    for again in (pickle.loads(pickle.dumps(arc)), copy.copy(arc)):
        assert list(again.runs) == ["job1", "job2"]


def test_sessions_that_no_commit_names_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that was started more often than its entry remembers, claims tell the rest."""
    monkeypatch.setattr(sessions, "REMEMBERED_SESSIONS", 1)
    arc = fresh()
    for name in "abcd":
        written(arc, "often", name, session=f"s-{name}")
    arc = reopened(arc)
    assert arc.runs["often"].sessions == ["s-c", "s-d"]
    assert set(runs_of(arc).values()) == {"often"}
    files = fsspec.filesystem("memory")
    root = arc.url.removeprefix("memory:/")
    files.rm(f"{root}/sessions/s-a", recursive=True)
    assert runs_of(reopened(arc)) == {"a": None, "b": "often", "c": "often", "d": "often"}
    files.pipe(f"{root}/sessions/s-b/rank-00000.json", b"{")
    with pytest.raises(CorruptStateError, match="s-b"):
        runs_of(reopened(arc))


@pytest.mark.parametrize("copied", [True, False])
def test_episodes_of_another_archive_keep_their_run(copied: bool) -> None:
    one, other = fresh(), fresh()
    written(one, "left", "ab", session="one")
    written(other, "right", "c", session="other")
    to = f"memory://{uuid.uuid4().hex}"
    resharding.merge([one.url, other.url], to=to, copy=copied)
    arc = archive.open(to, allow_bases=True)
    assert runs_of(arc) == {"a": "left", "b": "left", "c": "right"}
    assert list(arc.runs) == ["left", "right"]
    assert (arc.runs["left"].newest, arc.runs["left"].sessions, len(arc.runs["left"].episodes)) == (None, [], 2)
    again = f"memory://{uuid.uuid4().hex}"
    resharding.merge([arc], to=again, copy=True)
    assert runs_of(archive.open(again)) == runs_of(arc)


def test_an_open_episode_goes_on_in_both_runs() -> None:
    """Each run's checkpoints have its own steps, and verify finds nothing to complain of."""
    arc = fresh()
    w = arc.writer(run="job1")
    w.append(steps([0, 1]), env_ids=0, first=[True, False])
    base = w.checkpoint(1).result()
    fork = arc.writer(run="job2", fork_from=base)
    w.append(steps([2]), env_ids=0)
    fork.append(steps([52, 53]), env_ids=0)
    made = {"job1": w.checkpoint(2).result(), "job2": fork.checkpoint(2).result()}
    w.append(steps([3]), env_ids=0, last=True)
    made["job1"] = w.checkpoint(3).result()
    for writer in (w, fork):
        writer.close()
    arc = reopened(arc)
    for run, serial in (("job1", [0, 1, 2, 3]), ("job2", [0, 1, 52, 53])):
        ck = arc.checkpoints.of(run).latest
        assert ck is not None
        assert [e.read()["serial"].tolist() for e in ck.episodes] == [serial]
        assert [e.complete for e in ck.episodes] == [run == "job1"]
    assert verify(arc, deep=True).sound


def test_runs_side_by_side() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    arc = fresh()
    written(arc, "job1", "abc")
    written(arc, "job2", "def")
    arc = reopened(arc)
    returns, lengths = arc.runs.plot("job1", "job2")
    assert [text.get_text() for text in returns.get_legend().get_texts()] == ["job1", "job2"]
    assert sum(patch.get_height() for patch in lengths.patches) == 6
    assert len({line.get_color() for line in returns.lines}) == 2
    axes = arc.episodes.filter(run="job1").plot(label="mine")
    assert arc.episodes.filter(run="job2").plot(axes, "yours") is axes
    _, alone = pyplot.subplots()
    assert arc.runs["job1"].plot(alone) is alone
    assert len(fresh().runs.plot()) == 2
    pyplot.close("all")
    for html in (arc.runs._repr_html_(), arc._repr_html_()):
        assert "job2" in html
        assert "return of job2" in html


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> str:
    arc = archive.create(tmp_path / "root")
    first = written(arc, "job1", "ab")
    written(arc, "job2", "c", fork_from=first)
    return arc.url


def test_commands_by_run(url: str, tmp_path: Path) -> None:
    assert [row["run"] for row in document("info", url)["run_table"]] == ["job1", "job2"]
    assert "of-ab of job1" in call("info", url).stdout
    assert [e["episode_id"] for e in document("episodes", url, "--run", "job2")["episodes"]] == ["c"]
    assert document("episodes", url, "--run", "job2", "--run", "job1")["found"] == 3
    assert [row["name"] for row in document("checkpoints", url, "--run", "job1")] == ["of-ab"]
    assert document("plan", url, "2", "--run", "job1")["checkpoint"] == "of-ab"
    assert document("export", url, tmp_path / "out", "--run", "job2")["episodes"] == 1
    told = document("reshard", url, "2", "--run", "job1", "--to", tmp_path / "resharded", "--copy")
    assert (told["checkpoint"], told["ranks"]) == ("of-ab", 2)


@pytest.mark.parametrize("arguments", [("plan", "2"), ("export", "--html", "latest", "-o"), ("reshard", "2", "--to")])
def test_commands_ask_which_run(url: str, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    target = () if arguments[0] == "plan" else (tmp_path / "to",)
    failed = call(arguments[0], url, *arguments[1:], *target)
    assert failed.exit_code == 2
    assert "--run" in failed.stderr
    assert "'job1'" in failed.stderr
    failed = call(arguments[0], url, *arguments[1:], *target, "--run", "x")
    assert failed.exit_code == 1
    assert "no run 'x'" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (("archive",), "archive"),
        (("archive", "--run", "job1"), "run job1"),
        (("episodes", "--where", "return > 0"), "1 episodes"),
        (("episodes", "--run", "job2"), "1 episodes"),
        (("latest", "--run", "job2"), "checkpoint of-c"),
    ],
)
def test_pages_by_run(url: str, tmp_path: Path, arguments: tuple[str, ...], source: str) -> None:
    assert document("export", url, "--html", *arguments, "-o", tmp_path / "page.html")["source"] == source
    page = held((tmp_path / "page.html").read_text("utf-8"))
    assert page["table"]
    assert "episodes" in page["pages"]
