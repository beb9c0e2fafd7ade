"""Labels that are set in the viewer: one batch is one commit, and can be taken back; where one may not, nothing is."""

from __future__ import annotations

from typing import Any

import pytest

import archive
from archive.base import NotFoundError, UsageError
from archive.testing import faults
from archive.view import Settings, answers, labels_of
from archive.view.shown import Shown
from tests.support.shown import ask, looked_at


@pytest.fixture
def shown(archive_url: str) -> Shown:
    return Shown(looked_at(archive_url), Settings(by="anna"))


def test_a_batch_is_one_commit_and_says_what_was_before(shown: Shown) -> None:
    first = ask(answers.say, shown, {"labels": {"e0": {"success": True}, "e1": {"success": False, "note": "x"}}})
    assert first["before"] == {"e0": {"success": None}, "e1": {"success": None, "note": None}}
    second = ask(answers.say, shown, {"labels": {"e1": {"success": True}}, "by": "bob"})
    assert second == {"commit": first["commit"] + 1, "before": {"e1": {"success": False}}}
    fresh = archive.open(shown.arc.url)
    assert fresh.episodes["e1"].labels == {"note": "x", "success": True}
    assert [said["by"] for said in fresh.episodes["e1"].label_history] == ["anna", "anna", "bob"]


def test_taking_back_is_saying_what_was_before(shown: Shown) -> None:
    before = ask(answers.say, shown, {"labels": {"e0": {"success": True}}})["before"]
    ask(answers.say, shown, {"labels": before})
    assert shown.arc.episodes["e0"].labels == {}


def test_what_is_found_of_the_episodes_stays_when_a_label_is_set(shown: Shown) -> None:
    ask(answers.rows, shown, sort="return", columns=["episode_id", "metadata"])
    before = shown.listing(_nothing())
    ask(answers.say, shown, {"labels": {"e0": {"success": True}}})
    after = shown.listing(_nothing())
    assert after is not before
    assert after._orders["return"] is before._orders["return"]
    assert ask(answers.rows, shown, where="label.success = true")["episode_id"] == ["e0"]
    assert ask(answers.rows, shown, where="label.success is null", sort="return")["episode_id"][0] == "e4"


def _nothing() -> Any:
    from archive.view.wire import Query

    return Query({})


def test_a_pass_over_the_episodes_knows_how_far_it_is_and_who_is_next(shown: Shown) -> None:
    ask(answers.say, shown, {"labels": {name: {"success": True} for name in ("e0", "e1", "e3")}})
    offered = ask(answers.offered, shown, run="second")
    assert (offered["count"], offered["labelled"]["success"]) == (3, 1)
    assert ask(answers.next_unlabelled, shown, id="e0", key="success") == {"id": "e2"}
    assert ask(answers.next_unlabelled, shown, id="e5", key="success") == {"id": "e2"}
    assert ask(answers.next_unlabelled, shown, id="e3", key="success", where="update_count = 30") == {"id": None}


@pytest.mark.parametrize(
    "body",
    [[], {}, {"labels": {}}, {"labels": {"e0": {}}}, {"labels": {"e0": 1}}, {"labels": {"e0": {"a": 1}}, "by": 3}],
)
def test_what_is_no_batch_is_refused(shown: Shown, body: Any) -> None:
    head = shown.arc.head.number
    with pytest.raises(UsageError):
        ask(answers.say, shown, body)
    assert shown.arc.refresh().head.number == head


def test_a_label_of_an_unknown_episode_leaves_all_unsaid(shown: Shown) -> None:
    with pytest.raises(NotFoundError):
        ask(answers.say, shown, {"labels": {"e0": {"success": True}, "nobody": {"success": True}}})
    assert shown.arc.refresh().episodes["e0"].labels == {}


def test_nothing_is_labelled_where_one_may_not(archive_url: str) -> None:
    arc = looked_at(archive_url)
    pinned = archive.open(archive_url, commit=arc.head.number)
    for shown, why in ((Shown(arc, Settings(read_only=True)), "--read-only"), (Shown(pinned), "read only")):
        assert why in ask(answers.offered, shown)["why_not"]
        with pytest.raises(UsageError, match="nothing can be labelled"):
            ask(answers.say, shown, {"labels": {"e0": {"success": True}}})


def test_credentials_that_may_not_write_are_seen_as_such(archive_url: str) -> None:
    looked_at(archive_url)
    shown = Shown(archive.open(archive_url))
    with faults.at(archive_url, op="create", what="deny", times=None):
        assert ask(answers.writable, shown)["why_not"] == "these credentials may not write here"


def test_labels_that_are_there_are_offered_by_what_their_values_are(shown: Shown) -> None:
    values: dict[str, Any] = {"good": True, "score": 0.5, "grade": "ok"}
    ask(answers.say, shown, {"labels": {"e0": values}})
    kinds = {one["key"]: one["kind"] for one in ask(answers.offered, shown)["labels"]}
    assert kinds == {"good": "flag", "score": "number", "grade": "choice", "note": "note"}


def test_labels_to_set_are_said_by_a_small_json() -> None:
    given = [{"key": "success"}, {"key": "grade", "kind": "choice", "values": ["bad", "good"]}]
    assert [one["kind"] for one in labels_of(given)] == ["flag", "choice"]
    for wrong in ({}, [], [1], [{"kind": "flag"}], [{"key": "a", "kind": "b"}], [{"key": "a", "kind": "choice"}]):
        with pytest.raises(UsageError):
            labels_of(wrong)
