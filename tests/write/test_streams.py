"""Which position and episode each row gets: Streams.assign, which is vectorised,
against an oracle that goes row by row."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archive.arrays import Steps, spans
from archive.base.errors import UsageError
from archive.log import Place
from archive.write.episodes import EpisodeRecord, Ids
from archive.write.streams import AppendedRows, Streams
from tests.support.sampling import examples


def ids(known: Set[str] = frozenset()) -> Ids:
    return Ids(Place(0, 1, "main", "s"), lambda: known)


def assigned(streams: Streams, rows: AppendedRows, of: Ids) -> Steps:
    """The rows as they were given, after those by env rows were seen to be the same."""
    runs, given = streams.assign(rows, of, {}, "")
    everyone = [sorted(zip(*map(np.ndarray.tolist, (o.stream, o.lo, o["episode"])), strict=True))
                for o in (runs.each(), given.each())]  # fmt: skip
    assert everyone[0] == everyone[1]
    return given


def marked(streams: Streams, new: Ids) -> Any:
    return [(cut_back, mark()) for mark, cut_back in (streams.kept, streams.records.kept, new.kept)]


def cut_back(marks: Any) -> None:
    for cut_back, mark in marks:
        cut_back(mark)


def places(given: Steps) -> list[int]:
    return given.each().lo.tolist()


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
    streams, oracle, serial, new = Streams(), Oracle(), [0], ids()
    number_of: dict[int, int] = {}  # the oracle's number -> ours

    for call in sequence:
        names, positions = names_of(call, oracle, serial), positions_of(call, oracle.next)
        masks = {k: None if call[k] is None else np.array(call[k], bool) for k in ("first", "last", "ended")}
        rows = AppendedRows(np.array(call["env"], np.int64), masks["first"], masks["last"], masks["ended"], None,
                            None if names is None else np.array(names, object),
                    None if positions is None else np.array(positions, np.int64))  # fmt: skip
        before = facts(streams)
        marks = marked(streams, new)
        assigned(streams, rows, new)  # as of a call that is refused
        cut_back(marks)
        assert facts(streams) == before
        got = assigned(streams, rows, new)
        broken, streams.ended = streams.ended, []
        episodes, found = of_rows(got), places(got)
        for i, env in enumerate(call["env"]):
            ends = (None if call["ended"] is None else call["ended"][i], None)
            at, number = oracle.row(
                env, None if names is None else names[i], None if call["first"] is None else call["first"][i],
                bool(call["last"] and call["last"][i]), None if positions is None else positions[i], ends,
            )  # fmt: skip
            assert found[i] == at
            assert number_of.setdefault(number, int(episodes[i])) == episodes[i]
            record = streams.records[number_of[number]]
            oracle.episodes[number].name = oracle.episodes[number].name or record.id  # where none was given
            assert oracle.episodes[number].name == record.id
            assert streams.records.number_of(record.id) == episodes[i]
        assert len(set(number_of.values())) == len(number_of)
        assert set(broken) == {number_of[n] for n in oracle.broken}
        oracle.broken.clear()
    check_records(streams, oracle, number_of)


def check_records(streams: Streams, oracle: Oracle, number_of: dict[int, int]) -> None:
    assert streams.positions() == dict(sorted(oracle.next.items()))
    assert streams.open_episodes() == {env: number_of[n] for env, n in sorted(oracle.open.items())}
    assert len(streams.records) == len(oracle.episodes)
    for number, want in oracle.episodes.items():
        got, end = streams.records[number_of[number]], streams.records.end(number_of[number])
        assert (got.env_id, got.headless, got.begin) == (want.env, want.headless, want.begin)
        assert (end and end.position) == want.end
        if end is not None:
            assert (end.broken, end.reason) == (want.reason is not None, want.reason)
            assert (end.terminated, end.truncated) == (want.terminated, want.truncated)


def facts(streams: Streams) -> Any:
    """All that is known of streams and episodes."""
    records = [(streams.records[i], streams.records.end(i)) for i in range(len(streams.records))]
    return streams.positions(), streams.open_episodes(), records, [streams.records.number_of(r.id) for r, _ in records]


def of_rows(given: Steps) -> list[int]:
    """The episode of each row, as given."""
    return given.each()["episode"].tolist()


def run(streams: Streams, envs: list[int], **columns: Any) -> tuple[list[int], list[int]]:
    arrays = {k: np.array(v, object if k == "episode_ids" else None) for k, v in columns.items()}
    got = assigned(streams, AppendedRows(np.array(envs, np.int64), **arrays), ids())
    return places(got), of_rows(got)


def test_a_row_without_an_id_goes_on_with_the_open_episode() -> None:
    streams = Streams()
    assert run(streams, [0, 0], episode_ids=["a", None]) == ([0, 1], [0, 0])
    assert run(streams, [0, 0], episode_ids=[None, "a"]) == ([2, 3], [0, 0])
    assert run(streams, [0, 0, 0], episode_ids=["a", None, "b"]) == ([4, 5, 6], [0, 0, 1])


def test_what_is_refused_after_some_was_done_is_cut_off() -> None:
    streams, new = Streams(), ids({"no"})
    run(streams, [0, 0, 1], last=[False, False, True])
    before, mark = facts(streams), marked(streams, new)
    for rows in (
        AppendedRows(np.array([0, 1]), first=np.array([True, True]), episode_ids=np.array(["yes", "no"], object)),
        AppendedRows(np.array([0, 1]), positions=np.array([9, 0])),
        AppendedRows(np.array([0, 0]), positions=np.array([3, 3])),
        AppendedRows(Steps(np.array([0, 1]), np.array([1, 3]), np.array([3, 5]))),
    ):
        with pytest.raises(UsageError):
            assigned(streams, rows, new)
        cut_back(mark)
        assert facts(streams) == before
    assert new.named("yes") == ("yes", False)


def test_an_id_means_the_revision_that_is_left() -> None:
    records = Streams().records
    records.add(EpisodeRecord("a", 0))
    mark, cut_back = records.kept
    before = mark()
    for _ in range(2):
        assert records.number_of("a") == 0
        assert (records.add(EpisodeRecord("a", 1)), records.add(EpisodeRecord("a", 2))) == (1, 2)
        assert records.number_of("a") == 2
        cut_back(before)
    assert (records.number_of("a"), len(records)) == (0, 1)


def test_many_env_rows_find_their_slots() -> None:
    streams = Streams()
    envs = np.random.default_rng(0).permutation(5000) * 7
    for t in range(3):
        assert set(places(assigned(streams, AppendedRows(envs), ids()))) == {t}
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
        streams, new = Streams(), ids()
        assigned(streams, AppendedRows(np.array([2, 5]), last=np.array([False, True])), new)
        position = np.array([1, 1, 0]) + np.array([jump, 0, 0])
        if by_runs:
            rows = AppendedRows(Steps(env, position, position + length), last=last)
        else:
            rows = AppendedRows(np.repeat(env, length), last=last, positions=spans(position, length))
        found = assigned(streams, rows, new)
        got.append((places(found), of_rows(found), facts(streams), streams.ended))
    assert got[0] == got[1]
    assert got[0][3] == ([0] if jump else [])
