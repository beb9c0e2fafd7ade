"""The command line: what it prints for people and as JSON, how it fails, how fast it starts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import archive
from archive.cli import demo, options, output
from tests.support import servers
from tests.support.commands import HOSTILE, call, document, printed
from tests.support.processes import FORKSERVER

# -- commands ----------------------------------------------------------------------------------------------------------


def test_info_tells_what_is_there(url: str) -> None:
    told = document("info", url)
    assert told["url"].endswith("/runs")
    wanted = {"commit": 3, "layout": "packed", "format": 2, "episodes": 3, "incomplete": 1, "steps": 7, "shards": 2}
    assert wanted.items() <= told.items()
    assert told["update_counts"] == {"least": 0, "greatest": 10}
    assert told["runs"] == {"main": "one"}
    text = printed("info", url).split()
    assert [text[text.index(word) + 1] for word in ("episodes", "steps", "layout")] == ["3", "7", "packed"]


def test_info_of_an_archive_without_commits(tmp_path: Path) -> None:
    archive.create(tmp_path / "new")
    told = document("info", tmp_path / "new")
    assert (told["commit"], told["episodes"], told["steps"], told["shards"]) == (0, 0, 0, 0)
    assert "episodes" in printed("info", tmp_path / "new")


def test_ls_gives_urls_that_zarr_opens(url: str) -> None:
    import zarr

    rows = document("ls", url)
    assert [(row["steps"], row["segments"], row["commit"]) for row in rows] == [(6, 2, 2), (1, 1, 3)]
    assert zarr.open_group(rows[0]["url"], mode="r")["obs/x"].shape == (6,)
    assert rows[0]["url"] in printed("ls", url)


def test_episodes_are_filtered(url: str) -> None:
    def ids(*arguments: object) -> list[str]:
        return [row["episode_id"] for row in document("episodes", url, *arguments)["episodes"]]

    assert ids() == ["a", "b", HOSTILE]
    assert ids("--weights", "w1") == ["b"]
    assert ids("--weights", "w1", "--weights", "w0") == ["a", "b"]
    assert ids("--updates", "0:10") == ["a"]
    assert ids("--updates", "1:") == ["b"]
    assert ids("--updates", "10") == ["b"]
    assert ids("--where", "return > 2 and metadata.task = 'b'") == ["b"]
    assert ids("--incomplete") == [HOSTILE]
    assert ids("--complete") == ["a", "b"]
    assert ids("--buffer", "demo") == []
    assert ids("--commit", "2") == ["a", "b"]


def test_episodes_says_how_many_it_left_out(url: str) -> None:
    assert document("episodes", url, "-n", 1)["found"] == 3
    assert "3 episodes, the newest 1 shown" in printed("episodes", url, "-n", 1)
    assert printed("episodes", url, "--limit", 0).endswith("3 episodes\n")


def test_show_tells_of_one_episode(url: str) -> None:
    told = document("show", url, "b", "--read", "obs", "-r", "reward", "--start", 1)
    assert told["fields"] == {"obs/x": "<f8[] step", "reward": "<f8[] step"}
    assert told["values"] == {"obs": {"x": [1.0, 2.0]}, "reward": [1.5, 1.5]}
    assert (told["return"], told["metadata"], told["update_counts"]) == (4.5, {"task": "b"}, [10, 11])
    text = printed("show", url, "b", "-r", "obs")
    assert "obs/x\n[0. 1. 2.]" in text
    assert "metadata             {" in text


def test_text_is_shown_step_by_step(tmp_path: Path) -> None:
    with archive.create(tmp_path / "said").writer(schema=archive.Schema(json=["turn"])) as w:
        steps = {
            "says": ["one\ntwo", HOSTILE], "tokens": [np.arange(2), np.arange(3)],
            "turn": [{"role": "user", "content": "hi"}] * 2
        }  # fmt: skip
        w.add_episode(steps, episode_id="e")
    text = printed("show", tmp_path / "said", "e", "-r", "says", "-r", "tokens", "-r", "turn")
    assert "[0]    one\n       two\n[1]    x\\x1b[31m\n       <script>[bold]\n" in text
    assert "[1]    3 values\n       0 1 2\n" in text
    assert "[1]    [user]\n       hi\n" in text
    assert "[1]    3 values" in printed("show", tmp_path / "said", "e", "-r", "tokens", "--start", 1)


def test_log_is_newest_first(url: str) -> None:
    rows = document("log", url)
    assert [(row["commit"], row["kind"], row["segments"]) for row in rows] == [
        (3, "commit", 1),
        (2, "commit", 2),
        (1, "session", 0),
    ]
    assert rows[1]["about"] == "the first two"
    assert [row["commit"] for row in document("log", url, "-n", 1)] == [3]


def test_what_comes_from_an_archive_is_text(url: str) -> None:
    for command in (("episodes", url), ("show", url, HOSTILE), ("log", url)):
        assert "\x1b" not in printed(*command)
    assert r"x\x1b[31m\n<script>[bold]" in printed("episodes", url)
    missing = call("show", url, "\x1b[31m")
    assert "\x1b" not in missing.stderr
    assert document("episodes", url, "--incomplete")["episodes"][0]["return"] is None


def test_a_narrow_terminal_cuts_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_terminal_width", lambda: 44)
    text = click.unstyle(printed("episodes", url, "--where", "length = 3"))
    assert "metadata" not in text.splitlines()[0]
    assert "left out for want of room: weights, updates, env_id, rank, buffer, commit, metadata" in text
    for row in document("ls", url):
        assert row["url"] in click.unstyle(printed("ls", url)), "what is copied from the terminal is whole"
    monkeypatch.setattr(output, "_terminal_width", lambda: 300)
    assert "left out" not in printed("episodes", url)


def test_prose_goes_on_in_the_next_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "_terminal_width", lambda: 60)
    output.table([{"step": "a", "what happened": "word " * 30, "requests": 1}], ("step", "what happened", "requests"))
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert sum(line.count("word") for line in lines) == 30
    assert max(map(len, lines)) <= 60


def test_tables_that_nobody_watches_are_plain(url: str) -> None:
    for line in printed("episodes", url).splitlines():
        assert line == line.rstrip() != ""


# -- the demonstration -------------------------------------------------------------------------------------------------


def _check_costs(rows: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(demo.STEPS)
    assert rows[1]["sent"] > 100_000 < rows[5]["received"]
    assert rows[3]["requests"] == 0


def test_demo_writes_finds_and_reads_back_and_adds_to_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = printed("demo")
    assert "every bit as it was written" in text
    assert [word for word in text.split() if word in ("seconds", "requests", "sent", "received")]
    assert "each once and on its step" in text
    assert text.splitlines()[-1] == "Open the viewer: archive view demo-archive"
    each, by_weights = demo.WEIGHTS * demo.EPISODES_EACH, "update_count >= 0"  # those of the ranks name none
    assert len(archive.open("demo-archive").episodes.filter(where=by_weights)) == each
    monkeypatch.setattr(demo, "get_context", lambda _: FORKSERVER)  # the ranks need not load the library each
    again = document("demo")["steps"]
    assert again[0]["did"].endswith("episodes are there already")
    found = archive.open("demo-archive").episodes.filter(where=by_weights)
    assert len(found) == 2 * each
    assert len({episode.session for episode in found}) == 2
    _check_costs(again)


def test_demo_ends_with_a_line_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `make demo` the command is on no PATH, so its own path is said."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", [".venv/bin/archive", "demo"])
    assert demo.program() == ".venv/bin/archive"
    monkeypatch.setattr("sys.argv", ["/usr/lib/python3/archive/cli/__main__.py", "demo"])
    assert demo.program() == "archive"


def test_demo_on_s3(moto_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "get_context", lambda _: FORKSERVER)
    where = f"s3://bucket/{tmp_path.name}-demo"
    given = (f"--storage-option=key={servers.KEY}", f"--storage-option=secret={servers.SECRET}")
    credentials = (*given, "--endpoint-url", moto_endpoint)
    told = document("demo", where, *credentials)
    assert told["url"] == where
    _check_costs(told["steps"])
    assert "testsecret" not in json.dumps(told)
    assert document("info", where, *credentials)["episodes"] > demo.WEIGHTS * demo.EPISODES_EACH


def test_demo_fails_when_something_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = archive.Episodes.read
    monkeypatch.setattr(archive.Episodes, "read", lambda self, *a, **k: whole(self, *a, **k)[::-1])
    failed = call("demo", tmp_path / "d")
    assert failed.exit_code == 1
    assert "the demonstration failed" in failed.stderr


# -- failing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["info", "{}/nowhere"], 1, "there is no archive at"),
        (["info", "{}", "--commit", "99"], 1, "has no commit 99"),
        (["show", "{}", "nope"], 1, "`archive episodes` lists them"),
        (["show", "{}", "a", "--read", "nope"], 2, "`archive show` lists those"),
        (["episodes", "{}", "--where", "retrn > 1"], 2, "names the column 'retrn'"),
        (["episodes", "{}", "--where", "__import__('os')"], 2, "__import__"),
        (["episodes", "{}", "--updates", "1:x"], 2, "neither a number nor START:STOP"),
        (["info"], 2, "Missing argument"),
        (["info", "{}", "--storage-option", "secretvalue"], 2, "wants KEY=VALUE"),
        (["nope"], 2, "No such command"),
        (["ls", "nope://x/y"], 1, "nope"),
    ],
)
def test_failures_are_one_line(url: str, arguments: list[str], code: int, words: str) -> None:
    result = call(*(a.format(url) for a in arguments))
    told = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.exit_code == code, result.output
    assert words in told[0]
    assert result.stderr.splitlines()[-1] == told[0]
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "secretvalue" not in result.stderr


def test_somebody_waits_no_longer_than_he_says() -> None:
    began = time.monotonic()
    credentials = [f"--storage-option=key={servers.KEY}", f"--storage-option=secret={servers.SECRET}"]
    failed = call("info", "s3://bucket/x", "--endpoint-url", "http://127.0.0.1:9", "--retry-for", 1, *credentials)
    assert time.monotonic() - began < options.DEADLINE_S
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "gave up after" in failed.stderr
    assert "--retry-for" in failed.stderr


def test_choices_are_those_of_the_library() -> None:
    from resharding import placement

    assert placement.POLICIES == options.POLICIES


def test_debug_shows_where_it_failed(tmp_path: Path) -> None:
    result = call("info", tmp_path / "nowhere", "--debug")
    assert isinstance(result.exception, archive.NotFoundError)


def test_what_nobody_foresaw_is_one_line_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(archive.Archive, "shards", property(fail))
    result = call("info", url)
    assert result.exit_code == 1
    assert result.stderr == "Error: two lines (RuntimeError, unexpected: run it again with --debug, and report it)\n"
