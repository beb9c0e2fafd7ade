"""Checkpoints as the browser asks for them: what each has, columns, plans, what forgetting would do, journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import NotFoundError, UsageError
from archive.testing import trace
from archive.view import answers, pages
from archive.view.shown import Shown
from tests.support.shown import ask

STEPS, WIDE = 20, 500


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A run of four checkpoints with priorities, each with an episode more, the third under a tag."""
    arc = archive.create(str(tmp_path_factory.mktemp("saved") / "arc"))
    with arc.writer() as w:
        for k in range(4):
            w.add_episode({"x": np.random.default_rng(k).normal(size=(STEPS, WIDE))}, episode_id=f"e{k}")
            w.checkpoint(10 * k, metrics={"loss": abs(1.5 - k)}, columns={"p": np.arange(STEPS * (k + 1)) / 2}).result()
    arc.tag("best", arc.checkpoints[2].number)
    return Shown(archive.open(arc.url))


def test_one_checkpoint_is_looked_at_without_reading_the_others(shown: Shown) -> None:
    number, fresh = shown.arc.checkpoints[3].number, Shown(archive.open(shown.arc.url))
    with trace(fresh.arc) as there:
        ask(answers.checkpoint, fresh, number=number)
    read = {row.key for row in there.rows if row.key.startswith("commits/")}
    assert len(read) <= 2  # its own, and that of the one before, which it is compared with


def test_the_timeline_says_what_each_one_has(shown: Shown) -> None:
    found = ask(answers.checkpoints, shown)
    assert [one["step"] for one in found] == [0, 10, 20, 30]
    assert [one["new"] for one in found] == [{"episodes": 1, "steps": STEPS}] * 4
    assert [one["tags"] for one in found] == [[], [], ["best"], []]
    assert found[1]["metrics"] == {"loss": 0.5}
    assert ask(answers.checkpoints, shown, run="none") == []


def test_one_says_what_came_since_the_one_before_and_how_many_bytes(shown: Shown) -> None:
    numbers = [one["commit"] for one in ask(answers.checkpoints, shown)]
    found = ask(answers.checkpoint, shown, number=numbers[2])
    assert found["ranks"] == [{"rank": 0, "steps": 3 * STEPS}]
    changed = found["changed"]
    assert (changed["since"]["step"], changed["added"], changed["gone"]) == (10, 1, 0)
    raw = STEPS * WIDE * 8
    assert 0.5 * raw < found["written"] < 1.5 * raw
    assert ask(answers.checkpoint, shown, number=numbers[0])["changed"] is None
    with pytest.raises(NotFoundError, match="no checkpoint"):
        ask(answers.checkpoint, shown, number=99)


def test_a_column_is_told_as_a_histogram_and_rank_by_rank(shown: Shown) -> None:
    number = ask(answers.checkpoints, shown)[-1]["commit"]
    found = ask(answers.column, shown, number=number, name="p")
    assert sum(found["counts"]) == 4 * STEPS
    assert found["ranks"] == [{"rank": 0, "rows": 80, "least": 0.0, "mean": 19.75, "most": 39.5}]
    with pytest.raises(NotFoundError, match="no column 'q'"):
        ask(answers.column, shown, number=number, name="q")


@pytest.mark.parametrize(
    ("asked", "stays", "command"),
    [
        ({"last": 1}, [30], "--keep-last 1"),
        ({"every": 20}, [0, 20, 30], "--keep-every 20"),
        ({"best": "loss:min:2"}, [10, 20, 30], "--keep-best loss:min:2"),
        ({"within": "7d"}, [0, 10, 20, 30], "--keep-within 7d"),
    ],
)
def test_what_forgetting_would_let_go_of_is_shown_and_nothing_is(
    shown: Shown, asked: dict[str, Any], stays: list[int], command: str
) -> None:  # fmt: skip
    head = shown.arc.head.number
    found = ask(answers.forgetting, shown, **asked)
    steps = {one["step"] for one in found["checkpoints"] if one["stays"]}
    assert steps == {*stays, 20}  # which a tag names
    assert found["command"] == command
    assert shown.arc.refresh().head.number == head


@pytest.mark.parametrize("asked", [{"within": "soon"}, {"best": "loss:min:0"}, {"last": "x"}])
def test_what_is_no_policy_is_refused(shown: Shown, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ask(answers.forgetting, shown, **asked)


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_a_plan_for_any_number_of_ranks_accounts_for_each_step(shown: Shown, ranks: int) -> None:
    number = ask(answers.checkpoints, shown)[-1]["commit"]
    found = ask(answers.plan, shown, number=number, ranks=ranks)
    dropped = sum(one["steps"] for one in found["dropped"].values())
    assert len(found["ranks"]) == ranks
    assert sum(steps for _, _, steps in found["moved"]) == sum(one["steps"] for one in found["ranks"])
    assert sum(one["steps"] for one in found["ranks"]) + dropped == 4 * STEPS
    for refused in (0, 100_000):
        for answer, given in ((answers.plan, {}), (pages.page, {"what": "plan"})):
            with pytest.raises(UsageError, match=f"ranks={refused}.*1 to 1024"):
                ask(answer, shown, number=number, ranks=refused, **given)


def test_a_journal_beyond_the_newest_checkpoint_is_told_rank_by_rank(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path / "journaled"))
    w = arc.writer(run="job", journal_s=3600)
    w.add_episode({"x": np.zeros(5)}, episode_id="a")
    w.checkpoint(1).result()
    w.add_episode({"x": np.zeros(7)}, episode_id="b")
    w.sync()
    shown = Shown(archive.open(arc.url))
    found = ask(answers.tails, shown, run="job")
    assert [(one["rank"], one["steps"]) for one in found["ranks"]] == [(0, 7)]
    w.close()
    with pytest.raises(NotFoundError, match="no run"):
        ask(answers.tails, shown, run="other")
