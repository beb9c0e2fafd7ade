"""`archive forget`, `undo` and `restore`."""

from __future__ import annotations

from pathlib import Path

import pytest

import archive
from archive import Keep
from archive.checkpoint import keep_of
from tests.support.commands import call, document, printed
from tests.support.letting_go import Ring


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    made = Ring(archive.create(tmp_path / "a"))
    made.turns(6)
    made.w.close()
    return tmp_path / "a"


def test_forget_says_what_it_would_do_and_does_it_with_yes(ring: Path) -> None:
    asked = ("forget", ring, "--keep-last", 2, "--keep-every", 5, "--episodes", "unreferenced")
    text = printed(*asked)
    assert "checkpoints that go: 3 of 6" in text
    assert "add --yes" in text
    assert "last 2; every 5; newest of its run" in text
    assert len(archive.open(ring).checkpoints) == 6
    told = document(*asked, "--yes")
    assert told["goes"]["checkpoints"] == 3
    assert told["commit"] == archive.open(ring).head.number
    assert [ck.name for ck in archive.open(ring).checkpoints] == ["step-0", "step-4", "step-5"]
    assert "nothing is to be forgotten" in printed(*asked, "--yes")
    assert document("undo", ring) == {"commit": None, "undoes": 8}
    assert document("undo", ring, "--yes") == {"commit": 9, "undoes": 8}
    assert len(archive.open(ring).checkpoints) == 6
    assert call("undo", ring).exit_code == 2


def test_redact_says_what_stands_in_the_way_and_does_it_with_yes(ring: Path) -> None:
    first, *_, last = [e.id for e in archive.open(ring).episodes]
    text = printed("forget", ring, "--id", last, "--redact")
    assert "stands in the way: some of the episodes are live in checkpoints: step-5" in text
    assert "add --yes" not in text
    refused = call("forget", ring, "--id", last, "--redact", "--yes")
    assert refused.exit_code == 2
    assert "was not done" in refused.output
    asked = ("forget", ring, "--id", first, "--redact", "--keep-last", 1)
    assert "redacts: 1 episodes" in printed(*asked)
    told = document(*asked, "--yes")
    assert told["redacted"]["obstacles"] == []
    assert first not in {e.id for e in archive.open(ring).episodes}


def test_each_way_to_keep(ring: Path) -> None:
    for options, kept in (
        (("--keep-best", "return"), 2), (("--keep-best", "return:3"), 3), (("--keep-best", "return:min:2"), 3),
        (("--keep-within", "1h"), 6), (("--keep-last", 3, "--run", "main"), 3),
    ):  # fmt: skip
        told = document("forget", ring, *options)
        assert sum(one["stays"] for one in told["checkpoints"]) == kept, options
    first = archive.open(ring).episodes[0].id
    assert document("forget", ring, "--keep-last", 1, "--where", "length = 10", "--id", first)["goes"]["episodes"] == 1
    assert call("forget", ring).exit_code == 2
    assert "give a time" in call("forget", ring, "--keep-within", "soon").output


@pytest.mark.parametrize(
    ("text", "best"),
    [("a", ("a", "max")), ("a:min", ("a", "min")), ("a:3", ("a", 3)), ("a:b:min:3", ("a:b", "min", 3))],
)
def test_the_best_as_text(text: str, best: tuple[str, ...]) -> None:
    assert keep_of(None, None, None, text) == Keep(best=best)


def test_restore_asks_first(ring: Path) -> None:
    assert "would go back before the newest 3 commits" in printed("restore", ring, "--commit", 4)
    assert document("restore", ring, "--commit", 4, "--yes") == {"commit": 8, "restores": 4}
    assert [ck.name for ck in archive.open(ring).checkpoints] == ["step-0", "step-1", "step-2"]
    assert call("restore", ring, "--commit", 99, "--yes").exit_code == 2
