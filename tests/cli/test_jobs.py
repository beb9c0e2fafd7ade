"""Jobs by the command line: listed, shown with the episodes that failed, followed, cancelled."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import one_line
from archive.cli import maintain
from tests.support.commands import HOSTILE, call, document, printed

FIRST_BAD = 30


def doubled(steps: Mapping[str, Any]) -> dict[str, Any]:
    if steps["reward"][0] in (3, 5):
        raise ValueError(HOSTILE)
    return {"twice": 2 * steps["reward"]}


def interrupted(steps: Mapping[str, Any]) -> dict[str, Any]:
    if steps["reward"][0] == FIRST_BAD:
        raise KeyboardInterrupt
    return {"thrice": 3 * steps["reward"]}


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Of two jobs one is finished, in which two episodes failed, and one is not."""
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        for i in range(40):
            w.add_episode({"reward": np.arange(5.0) + i}, episode_id=f"e{i}")
    arc.refresh().episodes.map(doubled, ["reward"], ["twice"], job="score-v2", on_error="skip")
    with pytest.raises(KeyboardInterrupt):
        arc.refresh().episodes.map(interrupted, ["reward"], ["thrice"], job="other")
    return tmp_path / "a"


def test_jobs_are_listed(url: Path, tmp_path: Path) -> None:
    rows = {row["job"]: row for row in document("jobs", url)}
    assert (rows["score-v2"]["state"], rows["score-v2"]["committed"], rows["score-v2"]["failed"]) == (
        "finished",
        190,
        2,
    )
    assert rows["other"]["state"] == "unfinished"
    assert 0 < rows["other"]["batches"] < rows["other"]["of"] == 20
    assert re.search(r"score-v2 +map +20 +20 +190 +2 +0 +finished", printed("jobs", url))
    archive.create(tmp_path / "none")
    assert document("jobs", tmp_path / "none") == []


def test_a_job_is_shown_with_the_episodes_that_failed(url: Path) -> None:
    text = printed("jobs", url, "score-v2")
    assert "\x1b" not in text
    assert re.search(r"e3 +ValueError: x", text)
    assert "1 more: -n 0 shows all" in printed("jobs", url, "score-v2", "-n", 1)
    told = document("jobs", url, "score-v2")
    assert told["failures"] == dict.fromkeys(("e3", "e5"), f"ValueError: {one_line(HOSTILE)}")
    archive.open(url).prune("0s", force=True, dry_run=False)
    assert "a prune has deleted the list" in printed("jobs", url, "score-v2")
    assert document("jobs", url, "score-v2")["failures"] is None


def test_a_job_is_cancelled_with_yes(url: Path) -> None:
    assert "Add --yes to do it" in printed("jobs", url, "other", "--cancel")
    assert archive.open(url).jobs["other"].state == "unfinished"
    assert document("jobs", url, "other", "--cancel", "--yes")["state"] == "cancelled"
    for more in ((), ("--yes",)):
        refused = call("jobs", url, "other", "--cancel", *more)
        assert (refused.exit_code, "cancelled already" in refused.output) == (2, True)


def test_a_job_is_followed_to_its_end(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintain, "LOOK_S", 0.01)
    other = archive.open(url).jobs["other"]
    looks: list[int] = []

    def told(done: int, total: int) -> None:
        looks.append(done)
        if len(looks) == 3:
            ending.start()

    ending = threading.Thread(target=other.cancel)
    monkeypatch.setattr(maintain, "bar", lambda *_, **__: Bar(told))
    assert document("jobs", url, "other", "--follow")["state"] == "cancelled"
    ending.join()
    assert len(looks) > 3


class Bar:
    def __init__(self, told: Any) -> None:
        self._told = told

    def __enter__(self) -> Any:
        return self._told

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--cancel",), "give its name"),
        (("--follow",), "give its name"),
        (("--yes",), "--yes is for --cancel"),
        (("score-v2", "--yes"), "--yes is for --cancel"),
    ],
)
def test_a_call_that_makes_no_sense(url: Path, given: tuple[str, ...], told: str) -> None:
    refused = call("jobs", url, *given)
    assert (refused.exit_code, told in refused.output) == (2, True), refused.output


def test_a_job_that_is_not_there(url: Path) -> None:
    refused = call("jobs", url, "else")
    assert (refused.exit_code, "no job 'else'" in refused.output) == (1, True)
