"""`archive ledger`: what became of prompts, and what is to be done again."""

from __future__ import annotations

from pathlib import Path

import archive
from tests.support.checkpoints import steps
from tests.support.commands import call, document, printed

ODD = "\x1b[31mred\n"


def filled(root: Path) -> archive.Archive:
    arc = archive.create(root)
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        ledger.draw(["a", ODD, 7], siblings=2)
        for sibling in range(2):
            ledger.seal("a", sibling, w.add_episode(steps([sibling])))
        w.checkpoint(1, wait=True)
        ledger.start(7)
        ledger.train("a")
        w.ledger("others").draw(1)
    return arc


def test_it_counts_what_is_in_which_state(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    found = {row["ledger"]: row for row in document("ledger", tmp_path / "a")}
    assert found["prompts"] == {
        "ledger": "prompts", "drawn": 1, "started": 1, "sealed": 0, "trained": 1, "dropped": 0, "to_reissue": 4,
        "to_train": 0,
    }  # fmt: skip
    assert found["others"]["drawn"] == 1
    (then,) = document("ledger", tmp_path / "a", "--name", "prompts", "--checkpoint", "step-1")
    assert (then["sealed"], then["to_train"], then["trained"]) == (1, 1, 0)
    assert "to_train" in printed("ledger", tmp_path / "a")


def test_what_is_to_be_done_again_is_a_line_each_and_acts_on_no_terminal(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    lines = printed("ledger", tmp_path / "a", "--name", "prompts", "--to-reissue").splitlines()
    assert lines == [*(f'"\\u001b[31mred\\n" {sibling}' for sibling in (0, 1)), "7 0", "7 1"]
    rows = document("ledger", tmp_path / "a", "--name", "prompts", "--to-reissue")
    assert [(row["key"], row["sibling"]) for row in rows] == [(ODD, 0), (ODD, 1), (7, 0), (7, 1)]


def test_a_ledger_or_a_run_that_is_not_there(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    for wrong in (("--name", "x"), ("--run", "x")):
        result = call("ledger", tmp_path / "a", *wrong)
        assert result.exit_code == 1
        assert "there is" in result.output
