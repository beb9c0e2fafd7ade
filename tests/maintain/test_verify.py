"""Verifying and repairing: what is damaged is named, what is not is left alone, and nothing is deleted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli
from archive.base.errors import CorruptCommitError, NotFoundError, UsageError
from archive.maintain import repair, verify
from archive.store.storage import Storage
from archive.testing import faults


@pytest.fixture
def root(tmp_path: Path) -> Path:
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        for i in range(5):
            w.add_episode({"x": np.arange(3000) + i, "note": [f"{i}"] * 3000})
            w.checkpoint(i, columns={"p": np.ones(3000 * (i + 1))}, state={"a": np.arange(9)}).result()
    return tmp_path / "a"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_archive_has_no_findings(root: Path, deep: bool) -> None:
    report = verify(archive.open(root), deep=deep)
    assert report.sound, report.findings
    assert (report.commits, report.states, report.shards) == (6, 5, 5)
    assert (report.bytes > 5000) == deep


@pytest.mark.parametrize("folder", ["commits/000000", "shards", "states", "manifest"])
def test_a_flipped_byte_anywhere_is_found(root: Path, folder: str) -> None:
    path = sorted(p for p in (root / folder).rglob("*") if p.is_file())[1]
    sound = [p.name for p in (root / folder).rglob("*")]
    flip(path, path.stat().st_size // 3)
    report = verify(archive.open(root), deep=True)
    assert not report.sound
    assert any(path.name in f.object or path.stem in f.object for f in report.findings)
    assert [p.name for p in (root / folder).rglob("*")] == sound


def test_what_lies_in_a_lost_shard_is_named(root: Path) -> None:
    lost = archive.open(root).episodes[2].id
    (root / archive.open(root).shards[2]).unlink()
    (finding,) = verify(archive.open(root)).findings
    assert finding.episodes == (lost,)


def test_a_damaged_newest_commit_is_an_error_until_it_is_repaired(root: Path) -> None:
    newest = sorted((root / "commits/000000").iterdir())[-1]
    flip(newest, 40)
    damaged = newest.read_bytes()
    with pytest.raises(CorruptCommitError, match="archive repair"):
        archive.open(root)
    done = repair(Storage.connect(root))
    assert (root / done.kept_as).read_bytes() == damaged
    arc = archive.open(root)
    assert arc.head.number == done.commit == 6
    assert len(arc.episodes) == 4
    with arc.writer(resume=arc.checkpoints.latest) as w:
        w.add_episode({"x": np.arange(3), "note": ["a"] * 3})
    assert len(archive.open(root).episodes) == 5
    assert verify(archive.open(root)).sound


@pytest.mark.parametrize("what", ["truncate", "corrupt"])
def test_a_sound_commit_whose_answer_came_damaged_is_not_repaired(root: Path, what: str) -> None:
    before = archive.open(root).head
    with faults.at(root, op="get", key="commits/", what=what) as fault, pytest.raises(UsageError, match="is sound"):
        repair(Storage.connect(root))
    assert fault.hits
    assert archive.open(root).head == before


def test_a_repair_gets_over_lost_answers(root: Path) -> None:
    flip(sorted((root / "commits/000000").iterdir())[-1], 40)
    with faults.at(root, key="damaged/", what="lose_answer") as fault:
        done = repair(Storage.connect(root))
    assert fault.hits
    assert archive.open(root).head.number == done.commit


def test_there_is_nothing_to_repair_in_a_sound_archive(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sound"):
        repair(Storage.connect(root))
    with pytest.raises(NotFoundError):
        repair(Storage.connect(tmp_path / "none"))


def test_the_commands_say_what_they_would_do_and_do_it_when_told(root: Path) -> None:
    run = CliRunner()
    assert run.invoke(cli.main, ["verify", str(root), "--deep"]).exit_code == 0
    newest = sorted((root / "commits/000000").iterdir())[-1]
    flip(newest, 40)
    told = run.invoke(cli.main, ["repair", str(root)])
    assert told.exit_code == 0
    assert "add --yes" in told.output
    assert run.invoke(cli.main, ["info", str(root)]).exit_code == 1
    assert run.invoke(cli.main, ["repair", str(root), "--yes"]).exit_code == 0
    shard = root / archive.open(root).shards[0]
    flip(shard, shard.stat().st_size // 3)
    found = run.invoke(cli.main, ["verify", str(root), "--deep", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.output)["findings"][0]["object"] == archive.open(root).shards[0]


def test_plans_checkpoints_requests_and_transfers_from_the_command_line(root: Path, tmp_path: Path) -> None:
    run = CliRunner()

    def document(*words: object) -> dict[str, object]:
        done = run.invoke(cli.main, [*map(str, words), "--json"])
        assert done.exit_code == 0, done.output
        out: dict[str, object] = json.loads(done.output)
        return out

    ranks = document("plan", root, 2)["ranks"]
    assert isinstance(ranks, list)
    assert sum(r["steps"] for r in ranks) == 15000
    assert len(run.invoke(cli.main, ["checkpoints", str(root)]).output.splitlines()) >= 5
    assert str(document("request-checkpoint", root)["request"]).startswith("requests/")
    assert document("split", root, 2, "--to", tmp_path / "b", "--copy")["episodes"] == 2
    assert document("merge", root, tmp_path / "b", "--to", tmp_path / "c")["episodes"] == 5
    assert document("filter", root, "--where", "length > 1", "--to", tmp_path / "d")["episodes"] == 5
    assert document("compact", root, "--yes", "--min-full", 0)["shards"] == 0
    assert document("compact", root, "--yes")["shards"] == 5, "small ones are joined"
