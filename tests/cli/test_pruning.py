"""`archive prune`."""

from __future__ import annotations

from pathlib import Path

import archive
from tests.support.archives import with_checkpoints
from tests.support.commands import call, document, printed
from tests.support.pruning import aged, keys_of, left_behind


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
