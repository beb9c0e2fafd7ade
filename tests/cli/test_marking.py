"""`archive tag` and `tags`, and --commit by a tag; `label` and `labels`, and labels in `episodes` and `show`."""

from __future__ import annotations

from pathlib import Path

import archive
from tests.support.archives import with_checkpoints
from tests.support.commands import call, document, printed


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
