"""Ranks that take every Nth prompt at paces of their own, are killed, and go on on other numbers of ranks: each prompt
is drawn once, and trained on once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import resharding
from archive.base import UsageError
from archive.ledger.prompts import lowest
from tests.support.archives import fresh
from tests.support.checkpoints import steps
from tests.support.journals import die
from tests.support.ticks import NEVER_S

COUNT = 604
WORLDS = (4, 3, 5, 1, 2)
Say = Callable[[int], Any]


class Rank:
    """One rank of a session; it draws what nobody has drawn, each `world`-th of it."""

    def __init__(
        self, w: Any, rng: random.Random, say: Say, at: Callable[[Any], int], pace: float, *, journaled: bool
    ) -> None:  # fmt: skip
        self.w, self.rng, self.say, self.pace, self.journaled = w, rng, say, pace, journaled
        self.prompts, self.unmade = w.ledger("prompts"), list[Any]()
        self.begun = at(self.prompts.cursor)
        assert self.prompts.undrawn(range(self.begun)) == [], "all have passed what lies before the joint cursor"
        self.todo = self.prompts.undrawn(range(self.begun, COUNT))[w.rank :: w.world_size]
        for key, sibling in self.prompts.to_reissue():
            self.seal(key, sibling)

    def seal(self, key: Any, sibling: int = 0) -> None:
        with self.w.together():
            self.prompts.seal(key, sibling, self.w.add_episode(steps([key])))

    def step(self) -> None:
        """Draw some, make some, train on some, and have it durable or not."""
        if self.todo and self.rng.random() < self.pace:
            count = self.rng.randint(1, 9)
            drawn, self.todo = self.todo[:count], self.todo[count:]
            self.prompts.draw(drawn, cursor=self.say(drawn[-1] + 1))
            made = self.rng.randint(0, count)
            self.unmade += drawn[made:]
            for key in drawn[:made]:
                self.seal(key)
        ready = self.prompts.to_train()[: self.rng.randint(0, 20)]
        self.prompts.train([group.key for group in ready])
        self.w.remove([name for group in ready for name in group.episodes], missing="ignore")
        if self.journaled and self.rng.random() < 0.3:
            self.w.sync()

    def finish(self) -> None:
        if self.todo:
            self.prompts.draw(self.todo, cursor=self.say(COUNT))
        for key in (*self.unmade, *self.todo):
            self.seal(key)
        self.prompts.train([group.key for group in self.prompts.to_train()])


def saved(ranks: list[Rank], step: int) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda one: one.w.checkpoint(step, wait=True), ranks))


@pytest.mark.parametrize("journal_s", [NEVER_S, None])
@pytest.mark.parametrize(
    ("say", "at"),
    [
        (lambda row: row, lambda cursor: cursor or 0),
        (lambda row: {"epoch": 0, "row": [row]}, lambda cursor: cursor["row"][0] if cursor else 0),
    ],
    ids=["a row", "parts"],
)
def test_strides_over_other_numbers_of_ranks_skip_and_double_none(
    say: Say, at: Callable[[Any], int], journal_s: float | None
) -> None:
    rng, arc, behind = random.Random(5), fresh(), []
    for number, world in enumerate((*WORLDS, 3)):
        ck = arc.refresh().recover()
        plan = None if ck is None else resharding.plan(ck, world)
        of = [{"rank": r, "world_size": world} if plan is None else {"resume": plan.share(r)} for r in range(world)]
        writers = [arc.writer(session=f"s{number}", journal_s=journal_s, **one) for one in of]
        paces = [1.0, *(rng.choice([0.0, 0.05, 0.3]) for _ in range(world - 1))]  # one is fast, some do nothing
        how = {"journaled": journal_s is not None}
        ranks = [Rank(w, rng, say, at, pace, **how) for w, pace in zip(writers, rng.sample(paces, world), strict=True)]
        if ck is not None:
            behind.append(max(map(at, ck.ledger("prompts").cursors.values())) - ranks[0].begun)
        for count in range(8):
            for one in ranks:
                one.step()
            if count == 3 and (journal_s is None or rng.random() < 0.5):
                saved(ranks, number)
        if number < len(WORLDS):
            die(*writers)
    for one in ranks:
        one.finish()
    saved(ranks, len(WORLDS) + 1)
    view = arc.refresh().ledger("prompts")
    rows = view.rows.to_pylist()
    for state in ("drawn", "trained"):
        assert Counter(int(row["key"]) for row in rows if row["state"] == state) == Counter(range(COUNT))
    assert (view.counts["trained"], view.to_reissue(), view.undrawn(range(COUNT))) == (COUNT, [], [])
    assert max(behind) > 50, "the fastest was far ahead of what all had passed"
    die(*writers)


def test_a_rank_that_said_nothing_stands_where_the_session_before_had_come_to() -> None:
    arc = fresh()
    for session, (world, said, joint) in enumerate(
        [(2, {0: 9, 1: 7}, 7), (3, {0: 20, 2: 30}, 7), (1, {}, 7), (1, {0: 40}, 40)]
    ):
        plan = resharding.plan(arc.checkpoints.latest, world) if session else None
        of = [{"rank": r, "world_size": world} if plan is None else {"resume": plan.share(r)} for r in range(world)]
        writers = [arc.writer(session=f"s{session}", **one) for one in of]
        for rank, cursor in said.items():
            writers[rank].ledger("prompts").draw(f"{session}/{rank}", cursor=cursor)
            assert writers[rank].ledger("prompts").cursors[rank] == cursor
        pending = [w.checkpoint(session, save_replay=bool(session % 2)) for w in writers]
        view = pending[0].result().ledger("prompts")
        assert view.cursor == joint
        for w in writers:
            w.close()
        arc.refresh()


def test_a_rank_that_is_missing_from_a_checkpoint_has_passed_nothing() -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="one") for rank in range(2)]
    writers[0].ledger("prompts").draw("a", cursor=9)
    made = writers[0].checkpoint(1, timeout_s=0.5, partial=True).result()
    assert made.missing_ranks == [1]
    assert made.ledger("prompts").cursor is None
    die(*writers)


def test_epochs_are_told_apart_and_odd_cursors_have_no_joint() -> None:
    with fresh().writer() as w:
        prompts = w.ledger("prompts")
        prompts.draw([1, 2], cursor=[0, 2])
        prompts.drop([1], "bad")
        assert (prompts.undrawn(range(4)), prompts.undrawn([3, 2, 1], rounds=2)) == ([0, 3], [3, 2, 1])
        prompts.draw(1)
        assert (prompts.undrawn([1, 2, "1"], rounds=2), prompts.cursor) == ([2, "1"], [0, 2])
    assert lowest([[1, 5], [0, 90]]) == [0, 5]
    assert lowest([{"a": 1}, {"b": 2}, {"a": 0, "b": 3}]) == {"a": 0, "b": 2}
    assert lowest([{"a": None}, {"a": 3}]) == {"a": None}
    assert lowest(["x", "x"]) == "x"
    for odd in (["x", "y"], [1, "1"], [True, False], [[1], [1, 2]]):
        with pytest.raises(UsageError, match="undrawn"):
            lowest(odd)
