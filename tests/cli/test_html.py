"""`archive export --html`: one page of an episode, a checkpoint or a plan; nothing is replaced unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from tests.support.browser import held
from tests.support.commands import call, document


@pytest.fixture
def url(tmp_path: Path) -> str:
    root = str(tmp_path / "root")
    with archive.create(root).writer() as w:
        for i in range(3):
            w.add_episode({"image": np.zeros((4, 16, 16), np.uint8), "reward": np.full(4, i % 2)}, episode_id=f"e{i}")
        w.checkpoint(1, wait=True)
    return root


def moved(page: Any, *, dropped: bool) -> bool:
    """Whether the page shows a plan for two ranks that drops something, or nothing."""
    plan = page["answers"]["plan 2"]
    return len(plan["ranks"]) == 2 and bool(plan["moved"]) and bool(plan["dropped"]) == dropped


@pytest.mark.parametrize(
    ("arguments", "source", "wanted"),
    [
        (("e1",), "episode e1", lambda page: page["films"]),
        (("best",), "episode e1", lambda page: page["films"]),
        (("best", "--where", "return < 4"), "episode e0", lambda page: page["films"]),
        (("step-1",), "checkpoint step-1", lambda page: page["answers"]["checkpoint 2"]["ranks"]),
        (("latest",), "checkpoint step-1", lambda page: page["answers"]["checkpoint 2"]["ranks"]),
        (("latest", "--world-size", "2"), "plan of step-1 for 2 ranks", lambda page: moved(page, dropped=False)),
        (
            ("latest", "--world-size", "2", "--where", "return >= 4"),
            "plan of step-1 for 2 ranks",
            lambda page: moved(page, dropped=True),
        ),
    ],
)
def test_a_page(url: str, tmp_path: Path, arguments: tuple[str, ...], source: str, wanted: Any) -> None:
    told = document("export", url, "--html", *arguments, "-o", tmp_path / "page.html")
    assert told == {"to": str(tmp_path / "page.html"), "format": "html", "source": source}
    text = (tmp_path / "page.html").read_text("utf-8")
    assert wanted(held(text))
    assert text.startswith("<!doctype html>")


def test_a_page_of_some_fields_within_some_bytes(url: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    document("export", url, "--html", "e1", "--field", "reward", "--max-bytes", "130000", "-o", file)
    assert file.stat().st_size <= 130_000
    page = held(file.read_text("utf-8"))
    assert (list(page["films"]), list(page["curves"])[:1]) == ([], ["reward"])


def test_what_is_there_stays_unless_asked(url: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("mine")
    refused = call("export", url, "--html", "e1", "-o", file)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert file.read_text() == "mine"
    document("export", url, "--html", "e1", "-o", file, "--yes")
    assert held(file.read_text("utf-8"))["films"]


@pytest.mark.parametrize("file", ["nowhere/page.html", "."])
def test_a_page_goes_into_a_file(url: str, tmp_path: Path, file: str) -> None:
    before = sorted(tmp_path.iterdir())
    refused = call("export", url, "--html", "e1", "-o", tmp_path / file, "--yes")
    assert (refused.exit_code, "give another" in refused.stderr) == (2, True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--html", "none", "-o", "x"), 1, "no episode or checkpoint 'none'"),
        (("--html", "e1", "--world-size", "2", "-o", "x"), 1, "no checkpoint 'e1'"),
        (("--html", "e1", "--where", "return < 4", "-o", "x"), 1, "meets --where"),
        (("--html", "latest", "--field", "reward", "-o", "x"), 2, "--field is for the page of an episode"),
        (("--html", "latest", "--world-size", "2", "--max-bytes", "9", "-o", "x"), 2, "--max-bytes is for the page"),
        (("--html", "e1", "--field", "none", "-o", "x"), 2, "none"),
        (("--html", "e1", "--max-bytes", "900", "-o", "x"), 2, "does not fit"),
        (("--html", "e1", "--tokenizer", "/nowhere", "-o", "x"), 2, "tokenizer"),
        (("out", "--max-bytes", "9"), 2, "go with --html"),
        (("--html", "e1"), 2, "--output FILE"),
        ((), 2, "give TO"),
        (("out", "--world-size", "2"), 2, "go with --html"),
    ],
)
def test_bad_calls(url: str, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    failed = call("export", url, *arguments)
    assert failed.exit_code == code
    assert says in failed.stderr
    assert not (tmp_path / "x").exists()
