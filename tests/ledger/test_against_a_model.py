"""A ledger through random resumes from older checkpoints, against a plain model: what a branch that was left behind
said never shows up, nothing is skipped and nothing is trained twice."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import archive
from archive.ledger import Group, Rollout
from archive.log.records import Recovered
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import steps
from tests.support.clocks import running_backwards

KEYS = ("a", "b", 3, "d", 5)
MOST_SIBLINGS = 3


@dataclass
class ModelRound:
    """A round of a key, as somebody would write it down."""

    number: int
    far: list[str]
    left: list[bool]
    episodes: dict[int, str] = field(default_factory=dict)
    ended: str = ""
    trained_at: tuple[str, int] = ("", 0)  # session, and how many checkpoints it had made

    @property
    def complete(self) -> bool:
        return not self.ended and "sealed" in self.far and set(self.far) <= {"sealed", "dropped"}

    @property
    def state(self) -> str:
        if self.ended or self.complete:
            return self.ended or "sealed"
        return "started" if set(self.far) - {"drawn"} else "drawn"


Model = dict[Any, list[ModelRound]]


def open_rounds(model: Model) -> list[tuple[Any, ModelRound]]:
    return [(key, one) for key, rounds in model.items() for one in rounds if not one.ended]


class Walk:
    """A run that checkpoints now and then, and goes back to any of its checkpoints."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.arc = fresh()
        self.model: Model = {}
        self.saved: dict[str, tuple[Model, str, int]] = {}  # name -> the model, its session, how many it had made
        self.cursor: Any = None
        self.cursors: dict[str, Any] = {}  # checkpoint -> where the reader stood
        self.serial = 0
        self.writer = self.arc.writer()
        self.made = 0

    @property
    def ledger(self) -> Any:
        return self.writer.ledger("prompts")

    def act(self) -> None:
        act = self.random.choices(
            [self.draw, self.start, self.seal, self.train, self.drop, self.commit, self.save, self.go_back],
            [8, 6, 14, 6, 2, 2, 3, 2],
        )[0]
        act()

    def draw(self) -> None:
        keys = [key for key in KEYS if not (self.model.get(key) and not self.model[key][-1].ended)]
        keys = self.random.sample(keys, min(len(keys), 2))
        siblings = self.random.randint(1, MOST_SIBLINGS)
        self.serial += 1
        self.cursor = {"at": self.serial}
        self.ledger.draw(keys, siblings=siblings, cursor=self.cursor)
        for key in keys:
            rounds = self.model.pop(key, [])
            number = rounds[-1].number + 1 if rounds else 0
            self.model[key] = [*rounds, ModelRound(number, ["drawn"] * siblings, [False] * siblings)]

    def _one(self, states: set[str]) -> tuple[Any, ModelRound, int] | None:
        found = [
            (key, rounds[-1], sibling)
            for key, rounds in self.model.items()
            if not rounds[-1].ended
            for sibling, state in enumerate(rounds[-1].far)
            if state in states
        ]
        return self.random.choice(found) if found else None

    def start(self) -> None:
        if one := self._one({"drawn", "started"}):
            key, held, sibling = one
            self.ledger.start(key, sibling)
            held.far[sibling], held.left[sibling] = "started", False

    def seal(self) -> None:
        if one := self._one({"drawn", "started"}):
            key, held, sibling = one
            self.serial += 1
            name = self.writer.add_episode(steps([self.serial]))
            self.ledger.seal(key, sibling, name)
            held.far[sibling], held.left[sibling], held.episodes[sibling] = "sealed", False, name

    def train(self) -> None:
        groups = self.ledger.to_train()
        if groups:
            key = self.random.choice(groups).key
            self.ledger.train(key)
            held = next(one for one in self.model[key] if one.complete)
            held.ended, held.trained_at = "trained", (self.writer.session, self.made)

    def drop(self) -> None:
        if one := self._one({"drawn", "started", "sealed"}):
            key, held, sibling = one
            if self.random.random() < 0.5:
                self.ledger.drop(key, "slow", sibling=sibling)
                held.far[sibling], held.left[sibling] = "dropped", False
                held.episodes.pop(sibling, None)
                held.ended = "dropped" if set(held.far) == {"dropped"} else ""
            else:
                self.ledger.drop(key, "bad")
                which = next((r for r in self.model[key] if r.complete), held)
                which.ended = "dropped"

    def commit(self) -> None:
        self.writer.commit()

    def save(self) -> None:
        name = f"step-{len(self.saved)}"
        self.writer.checkpoint(len(self.saved), save_replay=self.random.random() < 0.5, wait=True)
        self.made += 1
        self.saved[name] = copy.deepcopy(self.model), self.writer.session, self.made
        self.cursors[name] = self.cursor

    def go_back(self) -> None:
        if not self.saved:
            return
        self.writer.close()
        name = self.random.choice(list(self.saved))
        found = reopened(self.arc)
        ck = found.checkpoints[name]
        model, session, made = self.saved[name]
        self.model, self.cursor = copy.deepcopy(model), self.cursors[name]
        if ck.replay_saved and self.random.random() < 0.5:
            self._forget_trained(ck, session, made)
        for _, one in open_rounds(self.model):
            one.left = [far in ("drawn", "started") for far in one.far]
        self.writer = found.writer(resume=ck)
        self.made = 0

    def _forget_trained(self, ck: Any, session: str, made: int) -> None:
        """As if it were recovered from an earlier one: what was trained since is unknown to its weights."""
        earlier = {m: n for n, (_, s, m) in self.saved.items() if s == session and m <= made}
        known = self.random.choice([0, *earlier])
        limits = {0: 0} if not known else reopened(self.arc).checkpoints[earlier[known]].record.sequences
        ck.record = replace(ck.record, recovered=Recovered(trained=limits or {}))
        for rounds in self.model.values():
            for one in rounds:
                if one.ended == "trained" and one.trained_at[0] == session and one.trained_at[1] >= known:
                    one.ended = ""

    def check(self, ledger: Any, model: Model, cursor: Any, *, all_left: bool = False) -> None:
        assert ledger.cursor == cursor
        held = open_rounds(model)
        left = [
            Rollout(key, s)
            for key, one in held
            for s, far in enumerate(one.far)
            if far in ("drawn", "started") and (all_left or one.left[s])
        ]
        assert sorted(ledger.to_reissue(), key=repr) == sorted(left, key=repr)
        ready = [Group(key, [one.episodes[s] for s in sorted(one.episodes)]) for key, one in held if one.complete]
        assert sorted(ledger.to_train(), key=repr) == sorted(ready, key=repr)
        for key in KEYS:
            rounds = model.get(key)
            assert ledger.state(key) == (rounds[-1].state if rounds else None)
        states = [rounds[-1].state for rounds in model.values()]
        assert ledger.counts == {state: states.count(state) for state in ledger.counts}


@pytest.mark.parametrize("clock_s", [None, 60.0, 0.0])
@settings(deadline=None, max_examples=25)
@example(20975750)  # goes back to before anything was drawn
@given(st.integers(0, 2**32))
def test_a_ledger_is_what_its_branch_said(clock_s: float | None, seed: int) -> None:
    """clock_s: how far a look at the clock sets it back; None: it is right."""
    with nullcontext() if clock_s is None else running_backwards(clock_s):
        walk = Walk(seed)
        for _ in range(40):
            walk.act()
            walk.check(walk.ledger, walk.model, walk.cursor)
        walk.writer.close()
    found = reopened(walk.arc)
    for name, (model, _, _) in walk.saved.items():
        walk.check(found.checkpoints[name].ledger("prompts"), model, walk.cursors[name], all_left=True)
    walk.check(found.ledger("prompts"), walk.model, walk.cursor, all_left=True)


def test_a_key_that_is_trained_again_and_in_flight_again_has_two_rounds() -> None:
    arc = fresh()
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        w.checkpoint(0, wait=True)
        ledger.draw("a")
        name = w.add_episode(steps([1]))
        ledger.seal("a", 0, name)
        ledger.train("a")
        ledger.draw("a")
        w.checkpoint(1, wait=True)
    ck = reopened(arc).checkpoints["step-1"]
    ck.record = replace(ck.record, recovered=Recovered())
    with reopened(arc).writer(resume=ck) as w:
        ledger = w.ledger("prompts")
        assert ledger.to_train() == [Group("a", [name])]
        assert ledger.to_reissue() == [Rollout("a", 0)]
        with pytest.raises(archive.UsageError, match="in flight"):
            ledger.draw("a")
        ledger.train("a")
        assert ledger.to_train() == []
        assert ledger.to_reissue() == [Rollout("a", 0)]
    assert reopened(arc).ledger("prompts").to_train() == []
