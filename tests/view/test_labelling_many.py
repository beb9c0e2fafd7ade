"""Labels in the viewer by several people, of many episodes at once, and of those keys that one may set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base import NotFoundError, UsageError
from archive.view import Settings, answers, labels_of
from archive.view.shown import Shown
from tests.support.commands import call
from tests.support.shown import ask, looked_at

SUCCESS = {"success": True}


@pytest.fixture
def shown(archive_url: str) -> Shown:
    return Shown(looked_at(archive_url, steps=3), Settings(by="anna"))


def test_all_that_meet_a_condition_are_labelled_by_one_commit_and_taken_back_by_another(shown: Shown) -> None:
    ask(answers.say, shown, {"labels": {"e4": {"success": False}}})
    head = shown.arc.head.number
    said = ask(answers.say_of_all, shown, {"labels": SUCCESS, "count": 3}, run="second")
    before = {"e3": {"success": None}, "e4": {"success": False}, "e5": {"success": None}}
    assert said == {"commit": head + 1, "before": before}
    assert ask(answers.rows, shown, where="label.success = true")["episode_id"] == ["e3", "e4", "e5"]
    assert ask(answers.say, shown, {"labels": before, "back": True})["commit"] == head + 2
    assert shown.arc.episodes["e4"].labels == {"success": False}
    assert ask(answers.rows, shown, where="label.success is null")["episode_id"] == ["e0", "e1", "e2", "e3", "e5"]


@pytest.mark.parametrize("body", [{}, {"labels": {}, "count": 6}, {"labels": SUCCESS}, {"labels": SUCCESS, "count": 5}])
def test_none_is_labelled_where_others_are_meant_than_somebody_confirmed(shown: Shown, body: Any) -> None:
    head = shown.arc.head.number
    with pytest.raises(UsageError):
        ask(answers.say_of_all, shown, body)
    with pytest.raises(UsageError, match="0 episodes"):
        ask(answers.say_of_all, shown, {"labels": SUCCESS, "count": 0}, where="return > 1e9")
    assert shown.arc.refresh().head.number == head


def test_what_is_said_already_is_not_said_again(shown: Shown) -> None:
    first = ask(answers.say, shown, {"labels": {"e0": {"success": True, "score": 1}}})
    again = ask(answers.say, shown, {"labels": {"e0": {"success": True}}})
    assert again == {"commit": first["commit"], "before": {"e0": {"success": True}}}
    assert (
        ask(answers.say, shown, {"labels": {"e0": {"score": True}}})["commit"] == first["commit"] + 1
    )  # true is not 1


def test_two_people_label_at_once_and_each_is_told_what_the_other_said(shown: Shown) -> None:
    other = Shown(archive.open(shown.arc.url), Settings(by="bob"))
    ask(answers.offered, other)
    ask(answers.say, shown, {"labels": {"e0": {"success": True}, "e1": {"success": True}}})
    told = ask(answers.say, other, {"labels": {"e1": {"success": False}, "e2": {"success": False}}})
    assert told["before"] == {"e1": {"success": True}, "e2": {"success": None}}
    assert ask(answers.said_of, other, id="e0") == {"id": "e0", "labels": {"success": True}}
    assert [one["by"] for one in archive.open(shown.arc.url).episodes["e1"].label_history] == ["anna", "bob"]
    with pytest.raises(NotFoundError):
        ask(answers.said_of, other, id="nobody")


def test_only_what_the_file_of_labels_says_may_be_set_but_all_may_be_taken_back(archive_url: str) -> None:
    given = [
        {"key": "grade", "kind": "choice", "values": ["bad", "good"]}, {"key": "score", "kind": "number", "most": 1},
        {"key": "success"}, {"key": "note", "kind": "note"},
    ]  # fmt: skip
    arc = looked_at(archive_url, steps=3).label({"e0": {"grade": "odd"}})
    shown = Shown(arc, Settings(labels=labels_of(given)))
    good = {"grade": "good", "score": 0.5, "success": False, "note": "x"}
    before = ask(answers.say, shown, {"labels": {"e0": good}})["before"]
    bad: tuple[dict[str, Any], ...] = (
        {"grade": "odd"}, {"grade": True}, {"score": 2}, {"score": True}, {"success": 1}, {"note": 3}, {"other": 1},
    )  # fmt: skip
    for wrong in bad:
        for answer, body in ((answers.say, {"e0": wrong}), (answers.say_of_all, wrong)):
            with pytest.raises(UsageError, match="label"):
                ask(answer, shown, {"labels": body, "count": 6})
    ask(answers.say, shown, {"labels": before, "back": True})
    assert arc.refresh().episodes["e0"].labels == {"grade": "odd"}


def test_the_keys_of_the_usual_labels_stay_when_the_first_one_is_set(shown: Shown) -> None:
    before = ask(answers.offered, shown)["labels"]
    ask(answers.say, shown, {"labels": {"e0": {"flagged": True, "note": "x"}}})
    assert ask(answers.offered, shown)["labels"] == before
    ask(answers.say, shown, {"labels": {"e0": {"score": 3}}})
    assert [one["key"] for one in ask(answers.offered, shown)["labels"]] == ["success", "flagged", "note", "score"]


def test_a_file_of_labels_is_checked_before_anything_is_shown(archive_url: str, tmp_path: Path) -> None:
    looked_at(archive_url, steps=1)
    file = tmp_path / "labels.json"
    for text, why in (("{", "cannot be read as JSON"), (json.dumps([{"kind": "flag"}]), "is no label")):
        file.write_text(text, encoding="utf-8")
        result = call("view", archive_url, "--no-browser", "--labels", str(file))
        assert result.exit_code != 0
        assert why in result.output
