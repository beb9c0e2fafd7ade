"""Looking after an archive by the command line: `forget`, `undo`, `restore`, `prune`; `tag`, `tags`, `label`, `labels`,
and what `episodes` and `show` make of these."""

from __future__ import annotations

from pathlib import Path

import pytest

import archive
from archive import Keep
from archive.checkpoint import keep_of
from tests.support.archives import with_checkpoints
from tests.support.commands import call, document, printed
from tests.support.letting_go import Ring
from tests.support.pruning import aged, keys_of, left_behind


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


def test_it_says_what_would_go_and_deletes_it_when_told_to(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    keys = set(left_behind(arc))
    assert "objects that go: 0" in printed("prune", tmp_path)
    aged(tmp_path, 25)
    said = printed("prune", tmp_path)
    assert "objects that go: 3" in said
    assert "never committed, and older than the wait" in said
    assert "nothing is deleted yet: add --yes" in said
    assert "objects that go: 0" in printed("prune", tmp_path, "--older-than", "2d")
    assert keys_of(arc) >= keys
    done = document("prune", tmp_path, "--yes", "--per-second", 1000)
    assert (done["deleted"], done["errors"], done["commit"]) == (3, {}, archive.open(tmp_path).head.number)
    assert not keys_of(arc) & keys
    assert "done by commit" not in printed("prune", tmp_path, "--yes")


def test_less_than_an_hour_is_refused_unless_forced(tmp_path: Path) -> None:
    arc = with_checkpoints(tmp_path)
    left_behind(arc)
    refused = call("prune", tmp_path, "--older-than", "1s", "--yes")
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert document("prune", tmp_path, "--older-than", "0s", "--force", "--yes")["deleted"] == 3
    assert call("prune", tmp_path, "--older-than", "soon").exit_code == 2


def test_labels_are_said_listed_and_found(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    assert "success, note of 2 episodes" in printed(
        "label", tmp_path, "success=true", "note=well done", "--id", "e0", "--id", "e1", "--by", "anna"
    )
    assert document("label", tmp_path, "success=null", "--where", "label.success = true and return = 0") == {
        "episodes": 1, "labels": {"success": None}, "commit": 6
    }  # fmt: skip
    found = document("episodes", tmp_path, "--where", "label.success = true")
    assert [row["episode_id"] for row in found["episodes"]] == ["e1"]
    assert "label.success" in printed("episodes", tmp_path)
    assert document("show", tmp_path, "e1")["labels"] == {"note": "well done", "success": True}
    rows = document("labels", tmp_path)
    assert [(row["key"], row["value"]) for row in rows][-1] == ("success", None)
    assert len(rows) == 5
    assert len(document("labels", tmp_path, "-n", 2)) == 2
    assert "anna" in printed("labels", tmp_path)
    assert document("labels", tmp_path, "--commit", 4) == []


def test_which_episodes_are_meant_is_said_once(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    assert call("label", tmp_path, "a=1").exit_code == 2
    assert call("label", tmp_path, "a=1", "--id", "e0", "--where", "return = 0").exit_code == 2
    assert call("label", tmp_path, "a", "--id", "e0").exit_code == 2
    assert "such as 'x'" in call("label", tmp_path, "a=1", "--id", "x").output
    assert document("label", tmp_path, "a=1", "--where", "return > 99")["commit"] is None
    assert archive.open(tmp_path).head.number == 4


def test_a_tag_is_given_listed_and_opened(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    assert "'paper' is commit 3, checkpoint 'step-1' of run 'main'" in printed(
        "tag", tmp_path, "paper", "--checkpoint", "step-1", "--by", "anna"
    )
    assert document("tag", tmp_path, "begin", "--commit", 1)["commit"] == 1
    assert [row["name"] for row in document("tags", tmp_path)] == ["paper", "begin"]
    assert "anna" in printed("tags", tmp_path)
    assert document("episodes", tmp_path, "--commit", "paper")["found"] == 2
    assert document("episodes", tmp_path, "--commit", "3")["found"] == 2
    assert archive.open(tmp_path).tags["paper"].by == "anna"


def test_what_is_wrong_with_a_tag_is_said(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    assert call("tag", tmp_path, "paper", "--commit", 1, "--checkpoint", "step-1").exit_code == 2
    assert call("tag", tmp_path, "12").exit_code == 2
    assert "its tags: none" in call("episodes", tmp_path, "--commit", "thesis").output
