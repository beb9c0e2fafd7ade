"""The command line: comparing, resharding, exporting and importing; what it asks before,
and what it shows meanwhile."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import archive
import resharding
from tests.support.commands import call, document, printed
from tests.support.places import DATA, ROOT
from tests.support.ranks import world


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Two checkpoints: between them an episode grew, one left, one came."""
    root = str(tmp_path / "runs" / "one")
    with archive.create(root).writer(session="s") as w:
        w.append({"reward": np.arange(3.0)}, env_ids=0, episode_ids="grows", first=True)
        for name in ("leaves", "stays"):
            w.add_episode({"reward": np.ones(4)}, episode_id=name, metadata={"task": name})
        marks = {"staleness": {"stays": 1, "leaves": 2}}
        w.checkpoint(1, progress={"step": 1, "same": 5}, attributes=marks, metrics={"loss": 2.0}).result()
        w.append({"reward": np.arange(2.0)}, env_ids=0)
        w.remove("leaves")
        w.add_episode({"reward": np.full(5, 3.0)}, episode_id="comes")
        columns = {"priority": np.arange(14.0)}
        marks = {"staleness": {"stays": 4}}
        w.checkpoint(2, columns=columns, progress={"step": 2, "same": 5}, attributes=marks).result()
    return root


# -- diff ----------------------------------------------------------------------------------------------------------


def test_diff_of_checkpoints(url: str) -> None:
    told = document("diff", url, "step-1", "step-2")
    assert (told["added"], told["gone"], told["longer"], told["shorter"]) == (["comes"], ["leaves"], ["grows"], [])
    assert (told["steps"], told["episodes"]) == ({"before": 11, "after": 14}, None)
    assert (told["from"]["checkpoint"], told["to"]["checkpoint"]) == ("step-1", "step-2")
    assert told["progress"] == {"step": {"before": 1, "after": 2}}
    assert told["metrics"] == {"loss": {"before": 2.0, "after": None}}
    assert told["attributes"] == {"staleness": 1}
    assert told["columns_added"] == ["replay/priority"]
    text = printed("diff", url, "step-1", "step-2")
    assert "1: comes" in text
    assert "11 -> 14" in text
    assert "progress       step 1 -> 2" in text
    assert "shorter" not in text


def test_diff_of_commits(url: str) -> None:
    last = archive.open(url).head.number
    told = document("diff", url, 1, last)
    assert sorted(told["added"]) == ["comes", "grows", "leaves", "stays"]
    assert told["checkpoints_added"] == ["step-1", "step-2"]
    assert told["shards_added"] == len(archive.open(url).shards)
    assert document("diff", url, 1, last, "--where", "metadata.task = 'stays'")["added"] == ["stays"]
    assert ", ... (--limit 0 shows all)" in printed("diff", url, 1, last, "-n", 2)
    assert call("diff", url, "step-1", "nope").exit_code == 1


# -- ls, log, checkpoints ------------------------------------------------------------------------------------------


def test_ls_of_a_folder_lists_its_archives(url: str) -> None:
    archive.create(Path(url).parent / "two")
    (Path(url).parent / "neither").mkdir()
    rows = document("ls", Path(url).parent)
    assert [(row["archive"], row["runs"]) for row in rows] == [("one", ["main"]), ("two", [])]
    assert archive.open(rows[0]["url"]).id == archive.open(url).id
    empty = call("ls", Path(url).parent / "neither")
    assert (empty.exit_code, "there is no archive at" in empty.stderr) == (1, True)


def test_where_picks_shards_commits_and_checkpoints(url: str) -> None:
    shards = document("ls", url)
    assert 0 < len(document("ls", url, "--where", "episode_id = 'comes'")) < len(shards)
    assert document("ls", url, "--where", "return > 1000") == []
    assert [row["name"] for row in document("checkpoints", url, "--where", "step >= 2 and whole = true")] == ["step-2"]
    assert {row["kind"] for row in document("log", url, "--where", "kind = 'checkpoint'")} == {"checkpoint"}
    assert len(document("log", url, "--where", "kind = 'checkpoint'", "-n", 1)) == 1
    assert call("checkpoints", url, "--where", "nope = 1").exit_code == 2
    assert call("log", url, "--where", "__import__('os')").exit_code == 2


# -- reshard, split, compact ---------------------------------------------------------------------------------------


def test_reshard_saves_for_other_ranks(tmp_path: Path) -> None:
    arc, ck = world(2)
    to = str(tmp_path / "to")
    refused = call("reshard", arc.url, 3, "--to", to)
    assert (refused.exit_code, "--copy" in refused.stderr or "copy=True" in refused.stderr) == (2, True)
    assert not Path(to).exists()
    told = document("reshard", arc.url, 3, "--to", to, "--copy")
    found = archive.open(to).checkpoints.latest
    assert found is not None
    assert (told["ranks"], found.world_size, told["steps"]) == (3, 3, resharding.plan(ck, world_size=3).steps)
    assert call("reshard", arc.url, 3, "--to", to, "--checkpoint", "nope").exit_code == 1


def test_split_takes_the_first_that_meet_a_condition(url: str, tmp_path: Path) -> None:
    to = tmp_path / "to"
    printed("split", url, 1, "--where", "return >= 4 and return < 15", "--to", to, "--copy")
    assert [e.id for e in archive.open(to).episodes] == ["leaves"]
    assert call("split", url, 9, "--to", tmp_path / "other").exit_code == 2
    assert not (tmp_path / "other").exists(), "a call that is refused makes nothing"


def test_compact_says_what_it_would_do(tmp_path: Path) -> None:
    root = str(tmp_path / "a")
    with archive.create(root).writer() as w:
        names = [w.add_episode({"reward": np.ones(10)}) for _ in range(10)]
        w.remove(names[1:])
        w.checkpoint(1).result()
    before = archive.open(root).head.number
    assert "would write 10 live steps of 1 thin or small shards anew; add --yes" in printed("compact", root)
    assert archive.open(root).head.number == before
    assert document("compact", root) == {"shards": 1, "steps": 10, "commit": None}
    done = document("compact", root, "--yes")
    assert (done["shards"], done["steps"], done["commit"]) == (1, 10, before + 1)
    assert "nothing to do" in printed("compact", root)


# -- export and import ---------------------------------------------------------------------------------------------


def test_export_of_plain_files(url: str, tmp_path: Path) -> None:
    told = document("export", url, tmp_path / "out", "--where", "return > 10", "--field", "reward")
    assert (told["episodes"], told["files"]) == (1, ["part-000000.npz"])
    with np.load(tmp_path / "out" / "part-000000.npz") as file:
        assert [e["episode_id"] for e in json.loads(str(file["episodes"]))] == ["comes"]
        np.testing.assert_array_equal(file["0/reward"], np.full(5, 3.0))
    again = call("export", url, tmp_path / "out")
    assert again.exit_code == 2
    assert "add --yes" in again.stderr
    assert document("export", url, tmp_path / "out", "--yes")["episodes"] == 4
    assert document("export", url, tmp_path / "pq", "-f", "parquet", "--checkpoint", "step-1")["episodes"] == 3


@pytest.mark.parametrize(
    "arguments", [["--set", "x=1"], ["-f", "lerobot", "--set", "nope=1"], ["-f", "alf", "--where", "return > 1"]]
)
def test_options_that_a_format_does_not_have(url: str, tmp_path: Path, arguments: list[str]) -> None:
    refused = call("export", url, tmp_path / "out", *arguments)
    assert refused.exit_code == 2, refused.output
    assert not (tmp_path / "out").exists()


def test_rlinf_comes_in_and_goes_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    root, out = tmp_path / "a", tmp_path / "out"
    told = document("import", root, DATA / "rlinf", "-f", "rlinf")
    assert told["ranks"] == 4
    assert archive.open(root).checkpoints.latest.run == "imported"  # type: ignore[union-attr]
    again = call("import", root, DATA / "rlinf", "-f", "rlinf")
    assert (again.exit_code, "add --yes" in again.stderr) == (2, True)
    printed("export", root, out, "-f", "rlinf")
    assert sorted(p.name for p in out.iterdir()) == [f"rank_{i}" for i in range(4)]
    second = document("import", tmp_path / "b", out, "-f", "rlinf", "--set", "name=back")
    assert (second["episodes"], second["checkpoint"]) == (told["episodes"], "back")


@pytest.mark.parametrize("there", [False, True])
def test_an_import_that_fails_leaves_no_empty_archive(tmp_path: Path, there: bool) -> None:
    pytest.importorskip("torch")
    root = tmp_path / "a"
    if there:
        archive.create(root)
    assert call("import", root, tmp_path / "typo", "-f", "rlinf").exit_code != 0
    assert (root / "archive.json").exists() is there
    assert document("import", root, DATA / "rlinf", "-f", "rlinf")["ranks"] == 4


def test_alf_comes_in_and_goes_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    told = document("import", tmp_path / "a", DATA / "alf" / "rank_0.pt", "-f", "alf", "--set", "step=7")
    assert (told["step"], told["ranks"]) == (7, 1)
    files = [DATA / "alf" / f"rank_{i}.pt" for i in range(4)]
    assert document("import", tmp_path / "all", *files, "-f", "alf")["ranks"] == 4
    assert call("import", tmp_path / "none", *files, "-f", "rlinf").exit_code == 2
    printed("export", tmp_path / "a", tmp_path / "out.pt", "-f", "alf", "--set", "rank=0")
    assert document("import", tmp_path / "b", tmp_path / "out.pt", "-f", "alf")["episodes"] == told["episodes"]


@pytest.mark.parametrize(
    ("name", "file", "given"), [("lerobot", "set", ["--set", "fps=10"]), ("d3rlpy", "set.npz", [])]
)
def test_datasets_go_out_and_come_in(tmp_path: Path, name: str, file: str, given: list[str]) -> None:
    root = str(tmp_path / "a")
    with archive.create(root).writer() as w:
        for i in range(3):
            steps = {"observation": np.ones((4 + i, 2), np.float32), "action": np.zeros((4 + i, 1), np.float32)}
            w.add_episode(steps | {"reward": np.full(4 + i, i, np.float32)}, terminated=True, metadata={"task": "push"})
    printed("export", root, tmp_path / file, "-f", name, *given, "--where", "length > 4")
    assert document("import", tmp_path / "b", tmp_path / file, "-f", name)["episodes"] == 2


@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari's, of what the call leaves out
def test_minari_goes_out_and_comes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari", reason="Minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    steps = {"observations": np.ones((5, 2), np.float32), "actions": np.zeros((4, 1)), "rewards": np.ones(4)}
    with archive.create(tmp_path / "a").writer(schema=archive.Schema(axes={"observations": "offset"})) as w:
        w.add_episode(steps, terminated=True)
    printed("export", tmp_path / "a", "cli/made-v0", "-f", "minari", "--set", "algorithm_name=none")
    assert document("import", tmp_path / "b", "cli/made-v0", "-f", "minari")["episodes"] == 1


# -- bars and completion -------------------------------------------------------------------------------------------


def on_terminal(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and what a terminal shows of stderr."""
    master, slave = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                shown.append(data)
        except OSError:
            return

    process = subprocess.Popen(
        [sys.executable, "-m", "archive.cli", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=slave, text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "140"},
    )  # fmt: skip
    os.close(slave)
    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(timeout=60)
    reader.join()
    os.close(master)
    return process.returncode, out, b"".join(shown).decode()


def test_long_work_draws_a_bar_on_a_terminal_only(url: str, tmp_path: Path) -> None:
    code, out, shown = on_terminal("verify", url, "--deep", "--json")
    assert code == 0, shown
    assert json.loads(out)["sound"] is True
    total = len(archive.open(url).shards) + archive.open(url).head.number
    for words in ("verify", f"{total} of {total} objects", "B/s", "left"):
        assert words in shown, shown
    code, _, shown = on_terminal("merge", url, "--to", str(tmp_path / "to"), "--copy")
    assert (code, f"{len(archive.open(url).shards)} of" in shown) == (0, True), shown
    assert call("verify", url).stderr == ""


@pytest.mark.parametrize("words", [("split", "3"), ("filter", "--where", "length > 1")], ids=lambda words: words[0])
def test_the_bar_moves_with_the_shards_that_are_copied(
    url: str, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, int]] = []

    @contextmanager
    def bar(*_: Any) -> Iterator[Any]:
        yield lambda done, total: moved.append((done, total))

    monkeypatch.setattr("archive.cli.move.bar", bar)
    printed(words[0], url, *words[1:], "--to", tmp_path / "to", "--copy")
    total = len(archive.open(tmp_path / "to").shards)
    assert moved == [(i + 1, total) for i in range(total)]
    assert total > 1


@pytest.mark.parametrize("name", ["npz", "d3rlpy"])
def test_an_export_to_a_url_makes_nothing_here(
    url: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(Path.cwd().iterdir())
    with archive.create(tmp_path / "runs" / "two").writer() as w:
        steps = {"observation": np.ones((4, 2)), "action": np.zeros((4, 1)), "reward": np.ones(4)}
        w.add_episode(steps, terminated=True)
    printed("export", tmp_path / "runs" / "two", f"memory://{name}.npz", "-f", name)
    assert sorted(Path.cwd().iterdir()) == before
    assert fsspec.filesystem("memory").exists(f"/{name}.npz")


def test_the_shell_completes_commands_and_options() -> None:
    def completed(words: str, place: int) -> str:
        env = {**os.environ, "_ARCHIVE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        code = "from archive.cli import main; main(prog_name='archive')"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        return done.stdout

    assert "plain,reshard" in completed("archive res", 1)
    assert "plain,lerobot" in completed("archive export a b --format ", 5)
    assert "plain,--where" in completed("archive episodes --wh", 2)
