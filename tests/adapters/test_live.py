"""The home of live buffers: what is known of one, which values a journal gets of it, and the state that it keeps."""

from __future__ import annotations

import copy
import json
import random
import time
import uuid
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import Item, LiveBuffer, Saved, Tracked, appended, kept_items, live, part_of, states_of
from archive.base.errors import CorruptStateError, NotFoundError, UsageError
from tests.support.ticks import NEVER_S, abandoned, journal, recovered


class Ring:
    """Something that can be referred to weakly."""


def writer(**options: Any) -> archive.Writer:
    return archive.create(f"memory://live-{uuid.uuid4().hex}").writer(0, 1, session="one", **options)


def episodes(w: Any, count: int, steps: int = 3) -> list[str]:
    return [w.add_episode({"x": np.arange(steps)}, env_id=i) for i in range(count)]


# -- what is known -----------------------------------------------------------------------------------------------------


def test_what_is_known_belongs_to_one_buffer_of_one_writer() -> None:
    tracked: Tracked[str] = Tracked()
    ring, w, other = Ring(), writer(), writer()
    assert tracked.of(ring, w) is None
    tracked.keep(ring, w, "first")
    tracked.keep(ring, w.buffer("demo"), "demo")
    tracked.keep(ring, w, "second")
    assert (tracked.of(ring, w), tracked.of(ring, w.buffer("demo")), tracked.of(ring, other)) == (
        "second",
        "demo",
        None,
    )
    assert tracked.all(ring) == ["demo", "second"]
    assert tracked.of(Ring(), w) is None
    tracked.forget(ring)
    assert tracked.of(ring, w) is None
    for one in (w, other):
        one.close()


def test_what_a_restore_left_is_taken_by_the_writer_that_goes_on_with_it() -> None:
    tracked: Tracked[str] = Tracked()
    ring, w = Ring(), writer()
    episodes(w, 3)
    ck = w.checkpoint(1).result(60)
    w.close()
    share = resharding.plan(ck, world_size=1).share(0)
    arc = archive.open(w._storage.url)
    tracked.keep(ring, w, "earlier")
    tracked.restored(ring, share.buffer("replay"), "restored")
    with arc.writer(0, 1, run="another") as stranger:
        episodes(stranger, 3)
        assert tracked.of(ring, stranger) is None
    with arc.writer(resume=share) as heir:
        assert tracked.of(ring, heir) == "restored"
        episodes(heir, 1)
        assert tracked.of(ring, heir) == "restored"  # its own from now on
    with arc.writer(0, 1, run="third") as late:
        assert tracked.of(ring, late) is None


def test_items_are_written_once_and_leave() -> None:
    w, written = writer(), list[int]()

    def add(key: int) -> str | None:
        written.append(key)
        return None if key == 9 else w.add_episode({"x": np.arange(2.0)})

    held = kept_items(w, {}, [(1, "a"), (2, "a"), (9, "a")], add)
    assert [*held] == [1, 2]
    assert held[1] == Item("a", w.live["episode_id"].to_pylist()[0])
    again = kept_items(w, held, [(1, "a"), (2, "b"), (3, "a")], add)
    assert written == [1, 2, 9, 2, 3]
    assert set(w.live["episode_id"].to_pylist()) == {item.episode_id for item in again.values()}
    assert again[1] == held[1]
    w.remove([again[1].episode_id])
    assert [*kept_items(w, again, [(1, "a")], add)] == [1]  # written anew: it had left
    assert written[-1] == 1
    w.close()


# -- what a journal gets -----------------------------------------------------------------------------------------------


class Followed:
    """A writer whose buffer has a column, and what its journal got of this at each tick."""

    def __init__(self) -> None:
        self.w = writer(journal_s=NEVER_S)
        self.ids = episodes(self.w, 10)
        self.values = np.arange(30.0)
        self.tick(state={"cursor": 0})

    def tick(self, *, state: Any = None, dtype: Any = None) -> int:
        """Steps whose values the tick has."""
        given = self.values if dtype is None else self.values.astype(dtype)
        with self.w.together():
            appended(self.w, "replay", lambda part: Saved({"priority": given}, state=state))
        before = len(journal(archive.open(self.w._storage.url), "one"))
        self.w.sync()
        self.objects = journal(archive.open(self.w._storage.url), "one")[before:]
        found = [one.index.columns.get("replay", {}).get("priority") for one in self.objects]
        return sum(hi - lo for one in found if one is not None for *_, lo, hi in one.steps)

    def recovered(self) -> Any:
        assert self.w._journal is not None
        self.w._journal.ticker.stop()
        return archive.open(self.w._storage.url).recover()


def test_values_that_stay_are_journaled_once() -> None:
    one = Followed()
    assert one.tick(state={"cursor": 0}) == 0
    assert one.objects == []
    one.values[4] = 77.0
    assert 0 < one.tick(state={"cursor": 0}) <= 3  # its episode, at most
    one.values[:] += 1
    assert one.tick(state={"cursor": 1}) == 30
    one.values[7] = np.nan
    assert 0 < one.tick() <= 3
    assert one.tick() == 0  # what is no number is what it was
    one.w.evict(0, before=2)
    one.values = one.values[2:]
    assert one.tick() == 0
    np.testing.assert_array_equal(one.recovered().column("priority", 0), one.values)


def test_after_a_checkpoint_a_tick_has_all_again() -> None:
    """What later ticks are added to is that checkpoint, whatever it was given."""
    one = Followed()
    one.w.checkpoint(1).result(60)
    one.values[3] = 5.0
    assert one.tick() == 30
    np.testing.assert_array_equal(one.recovered().column("priority", 0), one.values)


def test_values_of_another_dtype_are_all_journaled() -> None:
    one = Followed()
    assert one.tick(dtype=np.float32) == 30


@pytest.mark.parametrize("gone", [0, 9])
def test_the_newest_state_is_found_with_its_rank(gone: int) -> None:
    one = Followed()
    one.w.add_episode({"x": np.arange(2)}, env_id=11)
    one.values = np.arange(32.0)
    one.tick(state={"system": "here", "cursor": 5})
    one.w.remove([one.ids[gone]])
    one.values = one.values[3:]
    one.tick(state={"system": "here", "cursor": 6, "array": np.arange(3), "random": random.Random(3).getstate()})
    share = resharding.plan(one.recovered(), world_size=1).share(0)
    (state,) = states_of(share, "here").values()
    assert state["cursor"] == 6
    assert state["array"].tolist() == [0, 1, 2]
    assert state["random"] == random.Random(3).getstate()
    assert states_of(share, "elsewhere") == {}


@pytest.mark.parametrize(
    ("numbers", "expected"), [((None,), 0), ((None, 3), 1), ((9, 10), 1), ((10, 9), 0), ((None, None), None)]
)
def test_the_state_of_the_highest_number_counts(numbers: tuple[int | None, ...], expected: int | None) -> None:
    """Those that were written without a number are the oldest."""
    one = Followed()
    states = [
        {"session": "one", "state": live.as_text({"system": "here", "place": place})}
        | ({} if number is None else {"number": number})
        for place, number in enumerate(numbers)
    ]
    one.w.journal(attributes={live.STATE: dict.fromkeys(one.ids) | dict(zip(one.ids, states, strict=False))})
    one.w.sync()
    share = resharding.plan(one.recovered(), world_size=1).share(0)
    if expected is None:
        with pytest.raises(UsageError, match="knows nothing of what came after"):
            states_of(share, "here")
    else:
        assert states_of(share, "here")[0]["place"] == expected


# -- what fails --------------------------------------------------------------------------------------------------------


class Row(LiveBuffer):
    """A buffer of one row of steps, which fails when it is told to: before it has appended, or after."""

    system = "row"
    _known: Tracked[int] = Tracked()

    def __init__(self, name: str = "replay") -> None:
        super().__init__(name)
        self.length, self.fails, self.looks = 0, "", 0

    @property
    def held(self) -> int:
        return self.length

    def append(self, part: Any) -> Saved:
        self.looks += 1
        if self.fails == "before":
            raise OSError("not now")
        known = self._known.of(self, part) or 0
        if self.length > known:
            part.append({"x": np.arange(known, self.length)}, env_ids=0)
        self._known.keep(self, part, self.length)
        if self.fails == "after":
            raise OSError("not now")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        return Saved({"priority": np.arange(self.length) + 0.5}, state={"system": self.system, "length": self.length})

    prepared = put = lambda self, *given: None  # type: ignore[assignment]


def followed(*rows: Row) -> Any:
    w = writer(journal_s=NEVER_S)
    for row in rows:
        w.buffer(row.name)
    live.follow(lambda: {row.name: row for row in rows}, w)
    return w


def in_the_background(w: Any) -> None:
    """A tick as the journal's thread makes it."""
    w._journal.ticker._wanted = w._journal.ticker.oldest
    w._tick()
    w._pipeline.wait_idle(60)


def durable(w: Any, row: Row) -> int:
    return int(dict(w.durable_until.positions).get((row.name, 0), 0))


def test_a_put_that_fails_once_does_not_end_following(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row()
    w, real, failed = followed(row), type(writer()._storage).create_once, list[str]()

    def flaky(self: Any, key: str, *args: Any, **options: Any) -> Any:
        if key.startswith("journal/") and not failed:
            failed.append(key)
            raise OSError("slow down")
        return real(self, key, *args, **options)

    monkeypatch.setattr(type(w._storage), "create_once", flaky)
    for row.length in (3, 5, 8):
        in_the_background(w)
    w._pipeline.wait_idle(60)
    assert failed
    assert durable(w, row) == 8
    assert recovered(w).column("priority", 0).tolist() == [n + 0.5 for n in range(8)]


@pytest.mark.parametrize("fails", ["before", "after", "interrupt"])
def test_a_look_that_fails_is_told_is_made_again_and_journals_nothing(fails: str) -> None:
    row, other = Row(), Row("other")
    w = followed(row, other)
    row.length, other.length = 2, 2
    w.sync()
    row.length, row.fails, other.length, began = 4, fails, 4, time.monotonic()
    in_the_background(w)
    w.commit()  # without a look
    assert (durable(w, row), durable(w, other)) == (2, 4)
    assert w.durable_until.seconds_behind >= time.monotonic() - began > 0
    with pytest.raises(KeyboardInterrupt if fails == "interrupt" else OSError):
        w.sync()
    held = archive.open(w._storage.url).recover()
    assert held is not None
    assert held.column("priority", 0).tolist() == [0.5, 1.5]
    (state,) = states_of(resharding.plan(held, world_size=1).share(0).buffer("replay"), "row").values()
    assert state["length"] == 2
    row.fails = ""
    in_the_background(w)
    assert w.durable_until.seconds_behind < time.monotonic() - began
    assert durable(w, row) == row.length == 4
    assert recovered(w).column("priority", 0).tolist() == [0.5, 1.5, 2.5, 3.5]


def test_a_close_tells_what_it_could_not_take_in() -> None:
    row = Row()
    w = followed(row)
    row.length, row.fails = 3, "before"
    with pytest.raises(OSError, match="not now"):
        w.close()


def test_commits_in_between_do_not_put_a_look_off() -> None:
    row = Row()
    w = followed(row)
    began = w._journal.ticker.oldest
    w.sync()
    looked = w._journal.ticker.oldest
    assert looked > began
    row.length = 3
    w.commit()
    w.upload()
    assert w._journal.ticker.oldest == looked
    abandoned(w)


def test_a_sync_among_calls_that_belong_together_is_refused() -> None:
    row = Row()
    w = followed(row)
    row.length = 3
    with w.together(), pytest.raises(UsageError, match="after the block"):
        w.sync()
    w.sync()
    assert durable(w, row) == 3
    abandoned(w)


# -- the state as JSON -------------------------------------------------------------------------------------------------

STATE = {"a": np.arange(6.0).reshape(2, 3), "b": [1, "x", None], "c": np.zeros((0, 2), np.int8), "d": np.array(True)}
DAMAGES: dict[str, Any] = {
    "nothing": lambda given: None,
    "a list": lambda given: [],
    "no tree": lambda given: {"arrays": given["arrays"]},
    "no arrays": lambda given: {"tree": given["tree"]},
    "arrays of a list": lambda given: given | {"arrays": []},
    "another dtype": lambda given: _with(given, 0, "<i8"),
    "objects": lambda given: _with(given, 0, "|O"),
    "no dtype": lambda given: _with(given, 0, "nonsense"),
    "another shape": lambda given: _with(given, 1, [3, 2]),
    "a shape that is none": lambda given: _with(given, 1, [-1, "x"]),
    "too large a shape": lambda given: _with(given, 1, [2**62, 2**62]),
    "too few bytes": lambda given: _with(given, 2, "AAAA"),
    "no base64": lambda given: _with(given, 2, "é"),
    "no bytes": lambda given: _with(given, 2, None),
}


def _with(given: Any, place: int, value: Any) -> Any:
    made = copy.deepcopy(given)
    made["arrays"]["a0"][place] = value
    return made


def test_a_state_comes_back() -> None:
    found = live.from_text(live.as_text(STATE), "here")
    assert found.keys() == STATE.keys()
    assert found["b"] == STATE["b"]
    for name in "acd":
        np.testing.assert_array_equal(found[name], STATE[name], strict=True)


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_state_is_an_error_that_says_where(what: str) -> None:
    with pytest.raises(CorruptStateError, match="here"):
        live.from_text(json.dumps(DAMAGES[what](json.loads(live.as_text(STATE)))), "here")


@pytest.mark.parametrize("text", [None, 7, "", "{", "[" * 100_000])
def test_a_state_that_is_no_text_of_json_is_an_error(text: Any) -> None:
    with pytest.raises(CorruptStateError, match="here"):
        live.from_text(text, "here")


def test_a_state_may_be_as_deep_as_it_is_in_a_checkpoint() -> None:
    state: Any = 1
    for _ in range(45):
        state = {"in": [state]} if not isinstance(state, dict) else {"in": state}
    one = Followed()
    one.tick(state={"system": "here", "deep": state})
    (found,) = states_of(resharding.plan(one.recovered(), world_size=1).share(0), "here").values()
    assert found["deep"] == state


def test_another_writers_buffer_is_made_by_its_name() -> None:
    w = writer()
    assert part_of(w, "replay") is w
    assert part_of(w, "demo") is w.buffer("demo")
    with pytest.raises(NotFoundError, match="has no buffer 'other'"):
        live.restore({"other": None}, w.checkpoint(1).result(60), 0, "error")  # type: ignore[dict-item]
    w.close()
