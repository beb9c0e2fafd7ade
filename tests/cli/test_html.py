"""`archive export --html`: one page of an episode, a checkpoint or a plan; nothing is replaced unasked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import archive
from tests.support.commands import call, document


@pytest.fixture
def url(tmp_path: Path) -> str:
    root = str(tmp_path / "root")
    with archive.create(root).writer() as w:
        for i in range(3):
            w.add_episode({"image": np.zeros((4, 16, 16), np.uint8), "reward": np.full(4, i % 2)}, episode_id=f"e{i}")
        w.checkpoint(1, wait=True)
    return root


@pytest.mark.parametrize(
    ("arguments", "source", "wanted"),
    [
        (("e1",), "episode e1", "<canvas"),
        (("best",), "episode e1", "<canvas"),
        (("best", "--where", "return < 4"), "episode e0", "<canvas"),
        (("step-1",), "checkpoint step-1", "Live steps"),
        (("latest",), "checkpoint step-1", "Live steps"),
        (("latest", "--world-size", "2"), "plan of step-1 for 2 ranks", "Who gets what"),
        (("latest", "--world-size", "2", "--where", "return >= 4"), "plan of step-1 for 2 ranks", "Dropped"),
    ],
)
def test_a_page(url: str, tmp_path: Path, arguments: tuple[str, ...], source: str, wanted: str) -> None:
    told = document("export", url, "--html", *arguments, "-o", tmp_path / "page.html")
    assert told == {"to": str(tmp_path / "page.html"), "format": "html", "source": source}
    text = (tmp_path / "page.html").read_text("utf-8")
    assert wanted in text
    assert text.startswith("<!doctype html>")


def test_a_page_of_some_fields_within_some_bytes(url: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    document("export", url, "--html", "e1", "--field", "reward", "--max-bytes", "20000", "-o", file)
    assert file.stat().st_size <= 20000
    assert "<canvas" not in file.read_text("utf-8")
    assert 'data-field="reward"' in file.read_text("utf-8")


def test_what_is_there_stays_unless_asked(url: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("mine")
    refused = call("export", url, "--html", "e1", "-o", file)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert file.read_text() == "mine"
    document("export", url, "--html", "e1", "-o", file, "--yes")
    assert "<canvas" in file.read_text("utf-8")


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
