"""At three in the morning: what is damaged is said with what to do, and what is said works."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import archive
from archive import cli
from archive.base import ArchiveError
from archive.cli import output
from archive.maintain import repair

COMMAND = re.compile(r"`archive (restore \S+ --commit (\d+) --yes)`")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints of a run, each with steps and state of its own."""
    with archive.create(str(tmp_path / "root")).writer() as w:
        for step in (1, 2, 3):
            w.append({"x": np.arange(5) + step}, env_ids=0, first=step == 1)
            w.checkpoint(step, state={"step": step}).result()
    return tmp_path / "root"


def ask(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output


def test_a_state_that_is_gone_leads_to_the_checkpoint_before(root: Path) -> None:
    (state,) = root.glob("states/*/step-3/*.zip")
    state.unlink()
    code, told = ask("verify", str(root))
    assert code == 1
    assert "checkpoint 'step-3' (commit 4) of run 'main' cannot be resumed" in told
    assert "checkpoint 'step-2' (commit 3) of run 'main' is the newest sound one; contents were not read" in told
    with pytest.raises(ArchiveError, match=r"'step-3' \(commit 4\) of run 'main' cannot be resumed") as error:
        archive.open(str(root)).checkpoints.latest.state(0)
    (wanted,), (also,) = COMMAND.findall(told), COMMAND.findall(str(error.value))
    assert wanted == also
    assert wanted[1] == "3"
    assert ask(*wanted[0].split())[0] == 0
    newest = archive.open(str(root)).checkpoints.latest
    assert (newest.name, newest.state(0)["step"]) == ("step-2", 2)
    assert [len(data["x"]) for data in newest.episodes.read()] == [10]


def test_steps_that_are_gone_are_found_by_a_deep_look(root: Path) -> None:
    shard = max(root.glob("shards/*.zip"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(shard.read_bytes())
    data[-len(data) // 2] ^= 255
    at = data.find(b"PK\x01\x02") - 8  # in the last chunk
    data[at] ^= 255
    shard.write_bytes(bytes(data))
    code, told = ask("verify", str(root), "--deep")
    assert code == 1
    assert "checkpoint 'step-3' (commit 4) of run 'main' cannot be resumed" in told
    assert "checkpoint 'step-2' (commit 3) of run 'main' is the newest sound one; `archive restore" in told


def test_damage_that_no_new_checkpoint_needs(root: Path) -> None:
    next(iter(root.glob("states/*/step-1/*.zip"))).unlink()
    told = ask("verify", str(root))[1]
    assert "checkpoint 'step-3' (commit 4) of run 'main' is sound" in told
    assert "cannot be resumed" not in told


def test_without_a_deep_look_it_says_so(root: Path) -> None:
    assert "all sound; contents were not read" in ask("verify", str(root))[1]
    assert ask("verify", str(root), "--deep")[1].endswith("all sound\n")


def test_a_commit_that_is_missing_in_the_middle_does_not_end_a_repair(root: Path) -> None:
    commits = sorted(root.glob("commits/*/*.json"))
    commits[1].unlink()
    code, told = ask("repair", str(root))
    assert code
    assert "Of those before it 2 cannot be read: put them back from a copy" in told
    commits[-1].write_bytes(b"damaged")
    assert repair(archive.open(str(root), commit=3).storage).commit == 4
    assert archive.open(str(root)).checkpoints.latest.name == "step-2"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_terminal_cuts_nothing_that_decides(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_terminal_width", lambda: width)
    problem = "a long story " * 20 + "and the command at its end"
    output.table(
        [{"object": "shards/" + "x" * 90, "problem": problem, "more": "y" * 90}], ("object", "problem", "more")
    )
    told = re.sub(r"\x1b\[[0-9;]*m|\s+", " ", capsys.readouterr().out)
    assert "x" * 90 in told
    assert "and the command at its end" in told
