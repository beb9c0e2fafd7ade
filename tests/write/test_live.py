"""The live set against a dictionary: which step stands where, whatever is added and evicted in whatever order, and
whatever of it is taken back."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from archive.arrays import Steps
from archive.write import OWN, live_steps
from archive.write.live import LiveSet
from tests.support.sampling import examples

ENVS = st.integers(-1, 2)


def columns(runs: Steps) -> list[list[int]]:
    """Env row, position, length, episode, number of the stream and place in it."""
    named = (runs["episode"], runs["source"], runs["written"])
    return [c.tolist() for c in (runs.stream, runs.lo, runs.length, *named)]


def expanded(runs: Steps) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(env, position) -> (episode, stream, place in the stream) of every step."""
    out: dict[tuple[int, int], tuple[int, int, int]] = {}
    for env, position, length, episode, stream, lo in zip(*columns(runs), strict=True):
        for i in range(length):
            assert (env, position + i) not in out, "a step is live once"
            out[env, position + i] = (episode, stream, lo + i)
    return out


def stretch(env: int, lo: int, hi: int) -> Steps:
    return Steps(*(np.array([of]) for of in (env, lo, hi)))


def added(live: LiveSet, env: int, position: int, length: int, episode: int) -> None:
    live.add(stretch(env, position, position + length).beside(episode=np.array([episode])))


class LiveSetMachine(RuleBasedStateMachine):
    """Adds at growing positions, evicts anything, and looks only now and then: what is deferred must not matter. Calls
    that are refused are taken back. All that leaves is told, by its address."""

    @initialize(resumed=st.lists(st.integers(0, 5), max_size=3))
    def begin(self, resumed: list[int]) -> None:
        self.live = LiveSet(("s", 0), journaled=True)
        self.steps: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.empty: dict[tuple[int, int], int] = {}  # episodes without steps
        self.next = dict.fromkeys(range(-1, 3), 0)
        self.episodes = 0
        self.told: set[tuple[object, ...]] = set()
        self.ever: set[tuple[int, int, int]] = set()
        if resumed:
            rows = [(env, 0, length, env, env % 2, 100) for env, length in enumerate(resumed)]
            self.live.resume(
                live_steps(*map(np.array, zip(*rows, strict=True))),
                [("a", 1, 7), ("b", 2, 8)],
                dict(enumerate(resumed)),
            )
            self.steps = {(e, i): (e, s, 100 + i) for e, _, n, _, s, _ in rows for i in range(n)}
            self.empty = {(e, 0): e for e, _, n, *_ in rows if not n}
            self.next |= {e: max(1, n) for e, _, n, *_ in rows}
            self.episodes = len(resumed)
        self.ever = {(stream, env, at) for (env, _), (_, stream, at) in self.steps.items()}
        self.saved: object = None

    @rule(env=ENVS, length=st.integers(0, 5), skip=st.integers(0, 2), same=st.booleans())
    def add(self, env: int, length: int, skip: int, same: bool) -> None:
        self.episodes += not same or length == 0
        at = self.next[env] + skip
        added(self.live, env, at, length, self.episodes)
        self.steps |= {(env, at + i): (self.episodes, OWN, at + i) for i in range(length)}
        self.ever |= {(OWN, env, at + i) for i in range(length)}
        if not length:
            self.empty[env, at] = self.episodes
        self.next[env] = at + max(1, length)

    @rule()
    def call(self) -> None:
        """A call begins, which may be refused."""
        known = (self.steps, self.empty, self.next, self.episodes, self.told, self.ever)
        self.saved = (self.live.kept[0](), copy.deepcopy(known))

    @rule()
    def refuse(self) -> None:
        if self.saved is not None:
            mark, known = self.saved  # type: ignore[misc]
            self.live.kept[1](mark)
            self.steps, self.empty, self.next, self.episodes, self.told, self.ever = known
            self.saved = None

    @rule(env=ENVS, back=st.integers(0, 9))
    def evict_before(self, env: int, back: int) -> None:
        position = max(0, self.next[env] - back)
        self.live.evict(stretch(env, 0, position))
        for known in (self.steps, self.empty):
            for key in [k for k in known if k[0] == env and k[1] < position]:
                del known[key]  # type: ignore[attr-defined]

    @rule(env=ENVS, positions=st.lists(st.integers(0, 40), max_size=6))
    def evict(self, env: int, positions: list[int]) -> None:
        positions = [p for p in positions if p < self.next[env]]
        array = np.array(positions, np.int64)
        self.live.evict(Steps(np.full(len(array), env), array, array + 1))
        for p in positions:
            self.steps.pop((env, p), None)
            self.empty.pop((env, p), None)

    @rule(which=st.lists(st.integers(0, 12), max_size=3))
    def remove(self, which: list[int]) -> None:
        gone = [k for k, v in self.steps.items() if v[0] in which]
        assert self.live.remove(np.array(which, np.int64)) == len(gone)
        for key in gone:
            del self.steps[key]
        self.empty = {k: v for k, v in self.empty.items() if v not in which}

    @rule()
    def clear(self) -> None:
        self.live.clear()
        self.steps, self.empty = {}, {}

    @rule()
    def look(self) -> None:
        self.check(self.live.runs())

    @rule()
    def tell(self) -> None:
        """What was live once and is no more was told, and nothing that is live."""
        streams = {("a", 1): 0, ("b", 2): 1, ("s", 0): OWN}
        for one in self.live.take_left():
            session, rank, env, lo, hi = one
            place = streams[session, rank]
            self.told |= {(place, env if place == OWN else None, at) for at in range(lo, hi)}
        live = {(stream, env, at) for (env, _), (_, stream, at) in self.steps.items()}
        wide = {(stream, env if stream == OWN else None, at) for stream, env, at in self.ever - live}
        assert wide <= self.told
        assert not {one for one in live if one[0] == OWN} & self.told

    def check(self, runs: Steps) -> None:
        assert expanded(runs) == self.steps
        place = list(zip(runs.stream.tolist(), runs.lo.tolist(), strict=True))
        assert place == sorted(place)
        zero = {(e, p): i for e, p, n, i in zip(*columns(runs)[:4], strict=True) if n == 0}
        assert zero == self.empty
        assert int(runs.length.sum()) == len(self.steps)
        self.check_merged(runs)

    @staticmethod
    def check_merged(runs: Steps) -> None:
        """No two neighbours could be one run."""
        rows = list(zip(*columns(runs), strict=True))
        for a, b in pairwise(rows):
            env, position, length, episode, stream, lo = a
            assert not (length and b[2] and b == (env, position + length, b[2], episode, stream, lo + length))

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.check(self.live.runs())


TestLiveSet = LiveSetMachine.TestCase
TestLiveSet.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(0, 59), max_size=40), st.integers(0, 60))
def test_adding_and_evicting_commute(length: int, holes: list[int], before: int) -> None:
    holes, before = [h for h in holes if h < length], min(before, length)
    after, between = LiveSet(("s", 0)), LiveSet(("s", 0))
    added(after, 0, 0, length, 7)
    for live in (after, between):
        if live is between:
            added(live, 0, 0, length, 7)
            live.runs()
        at = np.array(holes, np.int64)
        live.evict(Steps(np.zeros_like(at), at, at + 1))
        if live is between:
            live.runs()
        live.evict(stretch(0, 0, before))
    want = sorted(set(range(before, length)) - set(holes))
    for live in (after, between):
        assert [p for _, p in expanded(live.runs())] == want


def test_many_small_changes_are_merged_as_they_come() -> None:
    live = LiveSet(("s", 0), journaled=True)
    for p in range(10_000):
        added(live, 3, p, 1, p // 5000)
    assert len(live._added) < 5000
    assert columns(live.runs()) == [[3, 3], [0, 5000], [5000, 5000], [0, 1], [OWN, OWN], [0, 5000]]
    for p in range(40):
        live.evict(Steps(np.arange(1000), np.zeros(1000, np.int64), np.full(1000, p)))
    assert max(len(live._evicted), len(live._left)) < 20
    assert int(live.runs().length.sum()) == 10_000 - 39


def test_resumed_runs_keep_their_streams() -> None:
    runs = live_steps(*(np.array(c) for c in ([0, 0, 1], [0, 5, 0], [5, 2, 3], [0, 0, 1], [0, 1, OWN], [40, 9, 0])))
    live = LiveSet(("s", 0))
    live.resume(runs, [("a", 0, 0), ("b", 0, 0)], {})
    live.evict(Steps(np.zeros(2, np.int64), np.array([1, 5]), np.array([2, 6])))
    live.evict(stretch(1, 0, 1))
    assert expanded(live.runs()) == {
        (0, 0): (0, 0, 40), (0, 2): (0, 0, 42), (0, 3): (0, 0, 43), (0, 4): (0, 0, 44), (0, 6): (0, 1, 10),
        (1, 1): (1, OWN, 1), (1, 2): (1, OWN, 2),
    }  # fmt: skip
