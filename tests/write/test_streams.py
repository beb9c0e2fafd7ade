"""Which position and episode each row gets: Streams.assign, which is vectorised,
against an oracle that goes row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.arrays import spans
from archive.base.errors import UsageError
from archive.write.episodes import EpisodeRecord, NewEpisodes
from archive.write.rowruns import EnvRuns
from archive.write.streams import Rows, Streams
from tests.support.sampling import examples


def new_episodes(claim: Callable[[str], bool] = lambda name: False) -> NewEpisodes:
    taken = [0]

    def take(count: int) -> int:
        taken[0] += count
        return taken[0] - count

    return NewEpisodes(claim, take, "auto-{}".format, {})


@dataclass
class Naive:
    """One episode as the oracle sees it."""

    name: str
    env: int
    headless: bool
    begin: int
    end: int | None = None
    reason: str | None = None
    terminated: bool | None = None
    truncated: bool | None = None


class Oracle:
    """Rows one at a time, as a person would."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.open: dict[int, int] = {}
        self.episodes: dict[int, Naive] = {}
        self.broken: set[int] = set()

    def row(
        self, env: int, name: str | None, first: bool | None, last: bool, position: int | None, ends: tuple[Any, Any]
    ) -> tuple[int, int]:
        expected = self.next.get(env, 0)
        at = expected if position is None else position
        current = self.episodes[self.open[env]] if env in self.open else None
        jumped = at != expected and env in self.next
        other = name is not None and current is not None and name != current.name
        if current is None or jumped or first or other:
            if current is not None:
                current.end, current.reason = expected, "gap" if jumped else "interrupted"
                self.broken.add(self.open[env])
            whole = first if first is not None else not jumped
            self.open[env] = len(self.episodes)
            self.episodes[self.open[env]] = Naive(name or "", env, not whole, at)
        number = self.open[env]
        if last:
            episode = self.episodes[self.open.pop(env)]
            episode.end, (episode.terminated, episode.truncated) = at + 1, ends
        self.next[env] = at + 1
        return at, number


@st.composite
def calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls of append: each with masks, ids and positions, or without."""
    out, clock = [], 0
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 9))
        masks = st.lists(st.booleans(), min_size=n, max_size=n)
        skips = draw(st.none() | st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=n, max_size=n))
        out.append({
            "env": draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
            "first": draw(st.none() | masks),
            "last": draw(st.none() | masks),
            "ended": draw(st.none() | masks),
            "fresh_ids": draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n)),
            "skips": skips,
        })  # fmt: skip
        clock += n
    return out


def positions_of(call: dict[str, Any], following: dict[int, int]) -> list[int] | None:
    """Positions with the jumps of the call."""
    if call["skips"] is None:
        return None
    following, out = dict(following), []
    for env, skip in zip(call["env"], call["skips"], strict=True):
        out.append(following.get(env, 0) + skip)
        following[env] = out[-1] + 1
    return out


def names_of(call: dict[str, Any], oracle: Oracle, serial: list[int]) -> list[str | None] | None:
    """Ids that go on with the open episode, or are new: those that `first`, `last` and jumps allow."""
    if call["fresh_ids"] is None:
        return None
    current: dict[int, str | None] = {e: oracle.episodes[i].name for e, i in oracle.open.items()}
    following = dict(oracle.next)
    positions = positions_of(call, oracle.next)
    out: list[str | None] = []
    for i, env in enumerate(call["env"]):
        jumped = positions is not None and env in following and positions[i] != following[env]
        if call["fresh_ids"][i] or current.get(env) is None or jumped or (call["first"] and call["first"][i]):
            serial[0] += 1
            current[env] = f"given-{serial[0]}"
        out.append(current[env])
        following[env] = (positions[i] if positions is not None else following.get(env, 0)) + 1
        if call["last"] and call["last"][i]:
            current[env] = None
    return out


@settings(max_examples=examples(400), deadline=None)
@given(calls())
def test_assign_agrees_with_the_oracle(sequence: list[dict[str, Any]]) -> None:
    streams, oracle, serial, new = Streams(), Oracle(), [0], new_episodes()
    number_of: dict[int, int] = {}  # the oracle's number -> ours

    for call in sequence:
        names, positions = names_of(call, oracle, serial), positions_of(call, oracle.next)
        masks = {k: None if call[k] is None else np.array(call[k], bool) for k in ("first", "last", "ended")}
        rows = Rows(np.array(call["env"], np.int64), masks["first"], masks["last"], masks["ended"], None, names,
                    None if positions is None else np.array(positions, np.int64))  # fmt: skip
        got = streams.assign(rows, new)
        broken = streams.take_broken_off()
        for i, env in enumerate(call["env"]):
            ends = (None if call["ended"] is None else call["ended"][i], None)
            at, number = oracle.row(
                env, None if names is None else names[i], None if call["first"] is None else call["first"][i],
                bool(call["last"] and call["last"][i]), None if positions is None else positions[i], ends,
            )  # fmt: skip
            assert got.positions[i] == at
            assert number_of.setdefault(number, int(got.episodes[i])) == got.episodes[i]
            record = streams.records[number_of[number]]
            oracle.episodes[number].name = oracle.episodes[number].name or record.id  # where none was given
            assert oracle.episodes[number].name == record.id
            assert streams.records.number_of(record.id) == got.episodes[i]
        assert len(set(number_of.values())) == len(number_of)
        assert set(broken) == {number_of[n] for n in oracle.broken}
        oracle.broken.clear()
    check_records(streams, oracle, number_of)


def check_records(streams: Streams, oracle: Oracle, number_of: dict[int, int]) -> None:
    assert streams.positions() == dict(sorted(oracle.next.items()))
    assert streams.open_episodes() == {env: number_of[n] for env, n in sorted(oracle.open.items())}
    assert len(streams.records) == len(oracle.episodes)
    for number, want in oracle.episodes.items():
        got = streams.records[number_of[number]]
        assert (got.env_id, got.headless, got.begin, got.end) == (want.env, want.headless, want.begin, want.end)
        assert (got.broken, got.reason) == (want.reason is not None, want.reason)
        assert (got.terminated, got.truncated) == (want.terminated, want.truncated)


def run(streams: Streams, envs: list[int], **columns: Any) -> tuple[list[int], list[int]]:
    arrays = {k: np.array(v) if k != "episode_ids" else v for k, v in columns.items()}
    got = streams.assign(Rows(np.array(envs, np.int64), **arrays), new_episodes())
    return got.positions.tolist(), got.episodes.tolist()


def test_a_row_without_an_id_goes_on_with_the_open_episode() -> None:
    streams = Streams()
    assert run(streams, [0, 0], episode_ids=["a", None]) == ([0, 1], [0, 0])
    assert run(streams, [0, 0], episode_ids=[None, "a"]) == ([2, 3], [0, 0])
    assert run(streams, [0, 0, 0], episode_ids=["a", None, "b"]) == ([4, 5, 6], [0, 0, 1])


def test_a_refused_call_changes_nothing() -> None:
    streams = Streams()
    run(streams, [0, 0, 1], last=[False, False, True])
    before = (streams.positions(), streams.open_episodes(), list(streams.records))

    def picky(name: str) -> bool:
        if name == "no":
            raise UsageError("no")
        return False

    def refuse(count: int) -> int:
        raise UsageError("no more")

    for rows in (
        Rows(np.array([0, 1]), first=np.array([True, True]), episode_ids=["yes", "no"]),
        Rows(np.array([0, 1]), positions=np.array([9, 0])),
        Rows(np.array([0, 0]), positions=np.array([3, 3])),
        Rows(EnvRuns(np.array([0, 1]), np.array([1, 3]), np.array([2, 2]))),
        Rows(np.array([0, 1]), first=np.array([True, True])),
    ):
        with pytest.raises(UsageError):
            streams.assign(rows, new_episodes(picky)._replace(take=refuse))
    assert (streams.positions(), streams.open_episodes(), list(streams.records)) == before
    assert streams.take_broken_off() == []


def test_many_env_rows_find_their_slots() -> None:
    streams = Streams()
    envs = np.random.default_rng(0).permutation(5000) * 7
    for t in range(3):
        assert set(streams.assign(Rows(envs), new_episodes()).positions.tolist()) == {t}
    assert streams.positions() == dict.fromkeys(sorted(envs.tolist()), 3)
    assert {streams.records[i].env_id: e for e, i in streams.open_episodes().items()} == {e: e for e in envs.tolist()}


def test_going_on_from_a_resumed_buffer() -> None:
    streams = Streams()
    index = streams.records.add(EpisodeRecord("old", 4))
    streams.start_at(4, 100, index)
    streams.start_at(5, 50)
    assert run(streams, [4, 5, 4]) == ([100, 50, 101], [index, 1, index])
    assert streams.records[1].begin == 50
    assert streams.close(4) == index
    assert streams.close(4) is streams.close(99) is None


@pytest.mark.parametrize("jump", [0, 3])
def test_runs_of_env_rows_get_what_their_rows_would_get_one_by_one(jump: int) -> None:
    """What is open in an env row goes on, or is broken off by a jump."""
    env, length = np.array([2, 5, 9]), np.array([4, 3, 5])
    last = np.array([0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0], bool)
    got = []
    for by_runs in (False, True):
        streams, new = Streams(), new_episodes()
        streams.assign(Rows(np.array([2, 5]), last=np.array([False, True])), new)
        position = np.array([1, 1, 0]) + np.array([jump, 0, 0])
        if by_runs:
            rows = Rows(EnvRuns(env, position, length), last=last)
        else:
            rows = Rows(np.repeat(env, length), last=last, positions=spans(position, length))
        found = streams.assign(rows, new)
        state = (streams.positions(), streams.open_episodes(), streams.take_broken_off(), list(streams.records))
        got.append((found.positions.tolist(), found.episodes.tolist(), state))
    assert got[0] == got[1]
    assert got[0][2][2] == ([0] if jump else [])
