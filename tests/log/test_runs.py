"""Runs that no session writes to any more are in files: a commit, and opening a session, cost as much with many of
them as with few; and whoever asks for one finds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base import layout
from archive.log import CommitLog, RunEntry, runs
from archive.maintain import verify
from archive.testing import steps
from tests.support import format_reader
from tests.support.archives import by_hand, fresh, reopened
from tests.support.journals import die
from tests.support.pruning import NOW
from tests.support.sampling import few_of
from tests.support.ticks import NEVER_S


def named(at: int) -> str:
    """The name of a run; names do not come in their order."""
    return f"run-{at * 7919 % 1_000_003:06d}"


def with_runs(count: int, ranks: int = 0) -> archive.Archive:
    """An archive in which so many runs were begun, and have ended."""
    arc = fresh()
    counts = dict.fromkeys(range(ranks), 1 << 30)
    entries = {
        named(at): RunEntry(f"20260101-{at:06d}", opened=1, sequences=counts, journal=counts or None)
        for at in range(count)
    }
    log = CommitLog(arc.storage, arc.id, arc.head)
    log.commit("runs", by_hand("session", runs=entries))
    return arc.refresh()


def cost(arc: archive.Archive, work: Any) -> tuple[int, int, int]:
    """Requests, bytes read and bytes written."""
    before = arc.io_stats()
    work()
    done = arc.io_stats() - before
    return done.requests, done.bytes_in, done.bytes_out


def lived(count: int) -> list[tuple[int, int, int]]:
    """What an open, a new session, a commit and a checkpoint take, of a new run and of one that was there."""
    out = []
    url = with_runs(count).url
    for run in ("new", named(count // 2)):
        counted = archive.open(url)
        assert run not in counted.head.own_runs
        out.append((counted.io_stats().requests, counted.io_stats().bytes_in, 0))
        opened: list[archive.Writer] = []
        out.append(cost(counted, lambda arc=counted, run=run, to=opened: to.append(arc.writer(run=run))))
        (w,) = opened
        for work in (w.commit, lambda w=w: w.checkpoint(1).result()):
            w.add_episode(steps(3))
            out.append(cost(counted, work))
        w.close()
    size = archive.open(url).storage.get_all([layout.commit_key(archive.open(url).head.number)])
    return [*out, (0, len(size[0]), 0)]


def test_opening_and_writer_take_as_much_with_ten_thousand_runs_as_with_a_hundred() -> None:
    for few, many in zip(lived(100), lived(10_000), strict=True):
        assert many[0] <= few[0] + 1
        assert many[1] <= few[1] + 8_000
        assert many[2] <= few[2] + 8_000
    head = reopened(with_runs(10_000)).head
    assert len(head.runs) == len(set(head.runs)) == 10_000
    assert max(ref.bytes for ref in head.files_led_to) < 16_000
    large = with_runs(60, ranks=1_024)
    assert len(large.storage.get_all([layout.commit_key(1)])[0]) < runs.KEPT_BYTES + 4_096
    assert reopened(large).head.runs[named(30)].journal == dict.fromkeys(range(1_024), 1 << 30)


@pytest.mark.parametrize(("count", "kept"), [(48, 48), (49, 32)])
def test_a_commit_has_few_runs_itself(count: int, kept: int) -> None:
    arc = with_runs(count)
    assert len(arc.head.own_runs) == kept
    assert len(reopened(arc).head.runs) == count


def test_files_of_runs_hold_half_of_what_they_may_in_order() -> None:
    rows = [(f"run-{at:03d}", "x" * (1_000 + at)) for at in range(100)]
    pieces = runs._pieces(rows)
    assert [row for piece in pieces for row in piece] == rows
    sizes = [sum(len(text) for _, text in piece) for piece in pieces]
    assert max(sizes) <= runs.FILE_BYTES // 2 < min(sizes[:-1]) + 1_100
    assert runs._pieces(rows[:30]) == [rows[:30]]


@pytest.mark.parametrize("count", few_of([120, 10_000], 1))
def test_runs_that_are_begun_one_after_the_other_take_as_much_each(count: int) -> None:
    arc = fresh()
    spent = [cost(arc, lambda at=at: arc.writer(run=named(at)).close()) for at in range(count)]
    early, late = spent[count // 4 : count // 2], spent[-(count // 4) :]
    for kind, room in enumerate((1, 8_000, 8_000)):  # requests, bytes read and written
        before, after = (sum(one[kind] for one in part) / len(part) for part in (early, late))
        assert after < 1.5 * before + room
    assert max(requests for requests, *_ in late) < 60
    assert len(reopened(arc).head.runs) == count


FEW: dict[str, int] = {"MOST_OWN": 2, "KEPT_OWN": 1, "FILE_BYTES": 400}  # limits at which four runs are many
RUNS = ["b", "d", "a", "c"]


def job(arc: archive.Archive, run: str, start: int) -> None:
    """A start of a run: goes on from its newest checkpoint, adds an episode to another, and journals a second one."""
    newest = arc.refresh().checkpoints.of(run).latest
    w = arc.writer(
        run=run,
        session=f"{run}.{start}",
        resume=newest,
        journal_s=NEVER_S,
        keep=archive.Keep(last=1) if start else None,
    )
    w.add_episode(steps(2, start), episode_id=f"{run}.{start}.saved")
    w.checkpoint(start).result()
    w.add_episode(steps(2, start), episode_id=f"{run}.{start}.journaled")
    w.sync()
    die(w)


def said(arc: archive.Archive) -> dict[str, Any]:
    """What everybody who asks for runs is told, but for how many ticks there were."""
    arc = reopened(arc)
    table = arc.episodes.table
    return {
        "runs": [{**run.about, "sessions": run.sessions} for run in arc.runs.values()],
        "newest": {run: arc.runs[run].newest.episodes.table["episode_id"].to_pylist() for run in RUNS},
        "episodes": list(zip(table["episode_id"].to_pylist(), table["run"].to_pylist(), strict=True)),
        "kept": [(ck.run, ck.name.partition("tail-")[0]) for ck in arc.checkpoints.kept()],
        "tails": {run: [one.steps for one in arc.tails(run).ranks] for run in RUNS},
        "entries": {run: replace(entry, journal=None) for run, entry in arc.head.runs.items()},
    }


def test_whoever_asks_for_a_run_is_told_the_same_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Any]] = []
    for limits in ({}, FEW):
        for name, value in limits.items():
            monkeypatch.setattr(runs, name, value)
        arc, found = fresh(), list[Any]()
        for start in range(2):
            for run in RUNS:
                job(arc, run, start)
        found.append(said(arc))
        arc.tag("first", arc.checkpoints.of(RUNS[0]).latest)
        arc.forget(keep=archive.Keep(last=1)).commit()
        arc.undo()
        found.append(said(arc))
        arc.forget(keep=archive.Keep(last=1)).commit()
        before = arc.head.number
        arc.prune(**NOW).commit()
        found.append(said(arc))
        for run in RUNS[::2]:
            arc.recover(run)
            job(arc, run, 2)
        found.append(said(arc))
        assert verify(arc).sound
        assert bool(arc.head.run_files) == bool(limits)
        assert len(arc.head.own_runs) <= (FEW["MOST_OWN"] if limits else len(RUNS))
        with pytest.raises(archive.SessionInUseError, match=f"is one of run '{RUNS[1]}'"):
            arc.writer(run="other", session=f"{RUNS[1]}.1", rank=1, world_size=2)
        arc.restore(before)
        found.append({run: (one.stands_for, one.superseded, one.latest) for run, one in arc.head.runs.items()})
        told.append(found)
    assert told[0] == told[1]


def test_a_file_of_runs_that_is_damaged_is_found_and_no_run_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FEW.items():
        monkeypatch.setattr(runs, name, value)
    arc = archive.create(str(tmp_path / "root"))
    for run in RUNS:
        arc.writer(run=run).close()
    said = format_reader.runs(tmp_path / "root", format_reader.commits(tmp_path / "root")[-1])
    assert said == {run: entry.to_json() for run, entry in archive.open(arc.url).head.runs.items()}
    (run, *_), refs = {*RUNS} - {*arc.head.own_runs}, arc.head.files_led_to
    for ref in (one for one in refs if ".runs." in one.path or ".runfiles." in one.path):
        path = tmp_path / "root" / ref.path
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert verify(archive.open(arc.url)).findings
        if ref == arc.head.run_files:
            with pytest.raises(archive.IntegrityError, match="verify"):
                archive.open(arc.url).writer(run=run)
        path.write_bytes(whole)
    assert verify(archive.open(arc.url)).sound
