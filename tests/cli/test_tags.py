"""`archive tag` and `tags`, and --commit by a tag."""

from __future__ import annotations

from pathlib import Path

import archive
from tests.support.archives import with_checkpoints
from tests.support.commands import call, document, printed


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


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with_checkpoints(tmp_path)
    assert call("tag", tmp_path, "paper", "--commit", 1, "--checkpoint", "step-1").exit_code == 2
    assert call("tag", tmp_path, "12").exit_code == 2
    assert "its tags: none" in call("episodes", tmp_path, "--commit", "thesis").output
