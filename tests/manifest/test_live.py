"""The live set against a dictionary: which step stands where, whatever is added and evicted in whatever order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from archive.manifest.live import OWN, LiveRuns, LiveSet
from tests.support.sampling import examples

ENVS = st.integers(-1, 2)


def expanded(runs: LiveRuns) -> dict[tuple[int, int], tuple[int, int, int]]:
    """(env, position) -> (episode, stream, place in the stream) of every step."""
    out: dict[tuple[int, int], tuple[int, int, int]] = {}
    for env, position, length, episode, stream, lo in zip(*(c.tolist() for c in runs), strict=True):
        for i in range(length):
            assert (env, position + i) not in out, "a step is live once"
            out[env, position + i] = (episode, stream, lo + i)
    return out


class LiveSetMachine(RuleBasedStateMachine):
    """Adds at growing positions, evicts anything, and looks only now and then: what is deferred must not matter."""

    @initialize()
    def begin(self) -> None:
        self.live = LiveSet()
        self.steps: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.empty: dict[tuple[int, int], int] = {}  # episodes without steps
        self.next = dict.fromkeys(range(-1, 3), 0)
        self.episodes = 0

    @rule(
        env=ENVS,
        length=st.integers(0, 5),
        skip=st.integers(0, 2),
        same=st.booleans(),
        stream=st.sampled_from([OWN, 0, 1]),
    )
    def add(self, env: int, length: int, skip: int, same: bool, stream: int) -> None:
        self.episodes += not same or length == 0
        at = self.next[env] + skip
        lo = at if stream == OWN else at + 100
        self.live.add(env, np.array([at]), np.array([length]), np.array([self.episodes]), stream, np.array([lo]))
        self.steps |= {(env, at + i): (self.episodes, stream, lo + i) for i in range(length)}
        if not length:
            self.empty[env, at] = self.episodes
        self.next[env] = at + max(1, length)

    @rule(env=ENVS, back=st.integers(0, 9))
    def evict_before(self, env: int, back: int) -> None:
        position = max(0, self.next[env] - back)
        self.live.evict_before(env, position)
        for known in (self.steps, self.empty):
            for key in [k for k in known if k[0] == env and k[1] < position]:
                del known[key]  # type: ignore[attr-defined]

    @rule(env=ENVS, positions=st.lists(st.integers(0, 40), max_size=6))
    def evict(self, env: int, positions: list[int]) -> None:
        positions = [p for p in positions if p < self.next[env]]
        array = np.array(positions, np.int64)
        self.live.evict(env, array)
        array[:] = 0  # it was copied
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

    def check(self, runs: LiveRuns) -> None:
        assert expanded(runs) == self.steps
        place = list(zip(runs.env.tolist(), runs.position.tolist(), strict=True))
        assert place == sorted(place)
        zero = {(e, p): i for e, p, n, i in zip(*(c.tolist() for c in runs[:4]), strict=True) if n == 0}
        assert zero == self.empty
        assert runs.steps == len(self.steps)
        self.check_merged(runs)

    @staticmethod
    def check_merged(runs: LiveRuns) -> None:
        """No two neighbours could be one run."""
        rows = list(zip(*(c.tolist() for c in runs), strict=True))
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
    after, between = LiveSet(), LiveSet()
    after.add(0, np.array([0]), np.array([length]), np.array([7]))
    for live in (after, between):
        if live is between:
            live.add(0, np.array([0]), np.array([length]), np.array([7]))
            live.runs()
        live.evict(0, np.array(holes, np.int64))
        if live is between:
            live.runs()
        live.evict_before(0, before)
    want = sorted(set(range(before, length)) - set(holes))
    for live in (after, between):
        assert [p for _, p in expanded(live.runs())] == want


def test_many_small_additions_are_merged_as_they_come() -> None:
    live = LiveSet()
    for p in range(10_000):
        live.add(3, np.array([p]), np.array([1]), np.array([p // 5000]))
    assert len(live._added) < 5000
    assert [c.tolist() for c in live.runs()] == [[3, 3], [0, 5000], [5000, 5000], [0, 1], [OWN, OWN], [0, 5000]]


def test_resumed_runs_keep_their_streams() -> None:
    runs = LiveRuns(*(np.array(c) for c in ([0, 0, 1], [0, 5, 0], [5, 2, 3], [0, 0, 1], [0, 1, OWN], [40, 9, 0])))
    live = LiveSet(runs)
    live.evict(0, np.array([1, 5]))
    live.evict_before(1, 1)
    assert expanded(live.runs()) == {
        (0, 0): (0, 0, 40), (0, 2): (0, 0, 42), (0, 3): (0, 0, 43), (0, 4): (0, 0, 44), (0, 6): (0, 1, 10),
        (1, 1): (1, OWN, 1), (1, 2): (1, OWN, 2),
    }  # fmt: skip
