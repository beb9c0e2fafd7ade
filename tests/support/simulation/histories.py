"""Draws histories, runs them, and makes those that fail small.

A history is words: `seed=7 kind=log by=random:0.2 A.open:1 A.commit:5 B.prune:2 A!crash:30 @12>3` are a seed, the
rules that parties go by, a chooser, what the parties do (a rule and the number that it draws from), what befalls them
at which of their points or requests, and who goes on otherwise than by default. So a history means something whichever
words were left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from tests.support.simulation.choosers import Chooser, Given, Priorities, Random, Turns
from tests.support.simulation.library import forget_the_last
from tests.support.simulation.scheduler import HungError, Party, Scheduler
from tests.support.simulation.store import ObjectStore, Observation, serve

Rule = Callable[[Any, random.Random], None]
STRIKES = ("crash", "stop", "clock", "death")  # at a point of a party; a death is of one of its ranks
FAULTS = ("refused", "lost", "late")  # at a request of it
STOPS_S = (1.0, 90.0, 4_000.0)
CLOCKS_S = (-86_400.0, -3_600.0, -60.0, 7_200.0)
_WORD = re.compile(r"(\w+)([.!])(\w+):(\d+)(?:/(-?[\d.]+))?|@(\d+)>(\d+)|(\w+)=(\S+)")


@dataclass(frozen=True)
class Kind:
    """The rules of one kind of history. world: makes what its parties share. parties: how often one goes by which rule;
    lead: the same of the first one of a history. check: holds the end against the promises."""

    name: str
    world: Callable[[ObjectStore, str], Any]
    rules: Mapping[str, Rule]
    parties: Sequence[Mapping[str, float]]
    check: Callable[[Any], None]
    length: int
    lead: Sequence[Mapping[str, float]]
    points: int  # about so many has a party of an average history
    refusals: tuple[type[Exception], ...] = ()  # errors that a party may get: it goes on with its next step
    sizes: tuple[int, ...] = (2, 2, 3)  # how many parties a history has
    befalls: tuple[str, ...] = STRIKES + FAULTS
    by: tuple[str, ...] = ("random:0.02", "random:0.2", "random:0.7", "pct:1", "pct:2", "pct:3")

    def drawn(self, rng: random.Random) -> list[Word]:
        """What parties do, and what befalls them."""
        words: list[Word] = []
        names = "ABCDEF"[: rng.choice(self.sizes)]
        for name in names:
            weights = rng.choice(self.lead if name == "A" else self.parties)
            cumulative = list(accumulate(weights.values()))
            for _ in range(rng.randint(2, self.length)):
                rule = rng.choices(list(weights), cum_weights=cumulative)[0]
                words.append(Word(name, ".", rule, rng.getrandbits(16)))
        for _ in range(rng.choice([0, 1, 2, 4]) if self.befalls else 0):
            what, at = rng.choice(self.befalls), int(rng.expovariate(2 / self.points)) + 1
            value = {"stop": rng.choice(STOPS_S), "clock": rng.choice(CLOCKS_S)}.get(what, 0.0)
            words.append(Word(rng.choice(names), "!", what, at if what in STRIKES else at // 10 + 1, value))
        return words


@dataclass(frozen=True)
class Word:
    """What a party does (".") or what befalls it ("!")."""

    party: str
    mark: str
    what: str
    number: int
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.party}{self.mark}{self.what}:{self.number}{f'/{self.value:g}' if self.value else ''}"


@dataclass(frozen=True)
class History:
    """Words. deviations: None where the chooser draws them."""

    seed: int
    kind: str
    by: str
    words: tuple[Word, ...]
    deviations: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def drawn(cls, seed: int, kind: Kind) -> History:
        """The history of a seed."""
        rng = random.Random(f"{seed} {kind.name}")
        return cls(seed, kind.name, rng.choice(kind.by), tuple(kind.drawn(rng)))

    @classmethod
    def parse(cls, text: str) -> History:
        """What `str` has made of one."""
        words, deviations, named = [], [], {}
        for word in text.split():
            found = _WORD.fullmatch(word)
            assert found, f"{word!r} is no word of a history"
            if found[8]:
                named[found[8]] = found[9]
            elif found[6]:
                deviations.append((int(found[6]), int(found[7])))
            else:
                words.append(Word(found[1], found[2], found[3], int(found[4]), float(found[5] or 0)))
        given = tuple(deviations) if named["by"] == "given" else None
        return cls(int(named["seed"]), named["kind"], named["by"], tuple(words), given)

    def __str__(self) -> str:
        turns = [f"@{point}>{strand}" for point, strand in self.deviations or ()]
        return " ".join([f"seed={self.seed} kind={self.kind} by={self.by}", *map(str, self.words), *turns])

    def chooser(self, points: int) -> Chooser:
        """Who goes on."""
        if self.deviations is not None:
            return Given(dict(self.deviations))
        how, _, number = self.by.partition(":")
        rng = random.Random(f"{self.seed} chooser")
        if how == "random":
            return Random(rng, float(number))
        return Priorities(rng, int(number), points) if how == "pct" else Chooser()


@dataclass(frozen=True)
class Outcome:
    """What came of a history."""

    error: BaseException | None
    trace: list[str]
    deviations: tuple[tuple[int, int], ...]
    observations: list[Observation]
    requests: int

    @property
    def digest(self) -> str:
        """One text for all that happened, in order."""
        return hashlib.sha256("\n".join(self.trace).encode("utf-8", "surrogatepass")).hexdigest()


KINDS: dict[str, Kind] = {}


def run(history: History, chooser: Chooser | None = None) -> Outcome:
    """Carry a history out. To be called within `library.replaced()`."""
    kind = KINDS[history.kind]
    rng = random.Random(f"{history.seed} store")
    faults = {(one.party, one.number): one.what for one in history.words if one.what in FAULTS}
    store = ObjectStore(rng.choice([0.001, 0.02, 0.5]), rng.random() < 0.3, faults)
    names = sorted({one.party for one in history.words if one.mark == "."})
    s = Scheduler(chooser or history.chooser((len(names) + 1) * kind.points))
    run = _Run(history, kind, store, s, names)
    s.spawn("main", Party("world", history.seed), run.root, main=True)
    error: BaseException | None = None
    try:
        s.run()
    except HungError as hung:
        error = hung
    if s.failures:
        error = s.failures[0]
    return Outcome(error, s.trace, tuple(s.deviations), store.seen, store.requests)


class _Run:
    """One run of a history: its parties begin, are struck, begin again, and are checked in the end."""

    def __init__(self, history: History, kind: Kind, store: ObjectStore, s: Scheduler, names: Sequence[str]) -> None:
        self._history, self._kind, self._store, self._s, self._names = history, kind, store, s, names
        self._left = 0
        self._root: Any = None
        self._parties: list[Party] = []

    def root(self) -> None:
        self._root = self._s.running
        self.world = self._kind.world(self._store, serve(self._store))
        for name in self._names:
            words = [one for one in self._history.words if one.party == name]
            self._left += 1
            struck = sorted((one for one in words if one.what in STRIKES), key=lambda one: one.number)
            self._begin(name, [one for one in words if one.mark == "."], struck)
        while self._left > 0:
            self._s.block("the parties")
        for party in self._parties:  # whoever is left ends as by a power cut
            self._s.kill(party)
        self._s.block("what is on its way", 100.0)
        self._kind.check(self.world)

    def _begin(self, name: str, steps: list[Word], strikes: list[Word], points: int = 0) -> None:
        """Let a party do these steps. After a crash it begins anew with those that are left."""
        party = Party(name, f"{self._history.seed} {len(self._parties)}", points)
        party.strikes = [(one.number, partial(self._strike, party, one, steps, strikes)) for one in strikes]
        self._parties.append(party)

        def script() -> None:
            actor = self.world.actor(name)
            while steps:
                step = steps.pop(0)
                with contextlib.suppress(*self._kind.refusals):
                    self._kind.rules[step.what](actor, random.Random(step.number))
            self._left -= 1
            if self._left == 0:
                self._s.unblock(self._root)

        self._s.spawn("main", party, script, main=True)

    def _strike(self, party: Party, one: Word, steps: list[Word], strikes: list[Word]) -> None:
        if one.what == "clock":
            party.clock_s += one.value
        elif one.what == "stop":
            self._s.stop(party, one.value)
        elif one.what == "death":
            if living := [rank for rank in party.launched if rank.alive]:
                self._s.kill(living[-1 - one.number % 2 * (len(living) > 1)])
        elif self._s.works(party):
            self._begin(party.name, steps, [other for other in strikes if other.number > one.number], party.points)
            self._s.kill(party)


def every(history: History, preemptions: int) -> Iterator[Outcome]:
    """The outcomes of all interleavings of its requests with so many preemptions at the most, each once."""
    left: list[tuple[tuple[tuple[int, int], ...], int]] = [((), 0)]
    while left:
        turns, used = left.pop()
        chooser = Turns(dict(turns))
        yield run(replace(history, by="given", deviations=turns), chooser)
        forget_the_last()
        last = turns[-1][0] if turns else 0
        for point, strand, preempts in chooser.others:
            if point > last and used + preempts <= preemptions:
                left.append(((*turns, (point, strand)), used + preempts))


# -- what fails --------------------------------------------------------------------------------------------------------


class HistoryError(AssertionError):
    """A history went wrong; says how to see it again."""


def shrunk(history: History, tries: int = 200) -> History:
    """A history that fails by the same kind of error with as few words and turns as so many tries find."""
    first = run(history)
    assert first.error is not None
    kind, best = type(first.error), replace(history, by="given", deviations=first.deviations)
    budget = [tries]

    def fails(one: History) -> tuple[tuple[int, int], ...] | None:
        """The turns by which it does: those that it has, or of one of a few choosers."""
        for again in (
            one,
            replace(one, by="default", deviations=()),
            *(replace(one, by=by, seed=one.seed, deviations=None) for by in ("random:0.2", "pct:2", "random:0.7")),
        ):
            budget[0] -= 1
            if budget[0] < 0:
                return None
            found = run(again)
            forget_the_last()
            if type(found.error) is kind:
                return found.deviations
        return None

    best = _fewer(best, fails)
    turns = best.deviations or ()
    size = max(1, len(turns) // 2)
    while turns and budget[0] > 0:
        at = len(turns)
        while at > 0 and budget[0] > 0:
            fewer = (*turns[: max(0, at - size)], *turns[at:])
            budget[0] -= 1
            if type(run(replace(best, deviations=fewer)).error) is kind:
                turns = fewer
            forget_the_last()
            at -= size
        if size == 1:
            break
        size //= 2
    return replace(best, deviations=turns)


def _fewer(best: History, fails: Callable[[History], tuple[tuple[int, int], ...] | None]) -> History:
    """Leave out parties, then words."""
    for name in sorted({one.party for one in best.words}):
        some = replace(best, words=tuple(one for one in best.words if one.party != name))
        if some.words and (turns := fails(some)) is not None:
            best = replace(some, by="given", deviations=turns)
    at = len(best.words)
    while at > 0:
        at -= 1
        some = replace(best, words=best.words[:at] + best.words[at + 1 :])
        if (turns := fails(some)) is not None:
            best = replace(some, by="given", deviations=turns)
    return best


def explore(seeds: Iterator[int], kind: Kind, stop: Callable[[int, int], bool], tries: int = 200) -> tuple[int, int]:
    """Run the histories of these seeds until `stop(histories, requests so far)`; the numbers of both.

    HistoryError for the first that goes wrong, with a small history that does, too, found in so many tries.
    """
    histories = requests = 0
    while not stop(histories, requests):
        history = History.drawn(next(seeds), kind)
        found = run(history)
        if found.error is not None:
            print(f"SIM_HISTORY='{history}' went wrong: {found.error!r:.1000}")  # making it small may take too long
            small = shrunk(history, tries)
            again = run(small)
            raise HistoryError(
                f"the history of seed {history.seed} went wrong after {histories} others; so does SIM_HISTORY='{small}'"
            ) from (again.error or found.error)
        histories, requests = histories + 1, requests + found.requests
        del found
        forget_the_last()
    return histories, requests
