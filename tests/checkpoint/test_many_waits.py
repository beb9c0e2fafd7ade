"""Ranks of a large job that wait for each other: how often they ask, by a clock that only waiting moves, and who acts
for all. Each rank's wait is run by itself, as nothing but the store joins them; an object is there from when it was
made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations, pairwise
from math import ceil, inf
from typing import Any
from unittest.mock import Mock

import pytest

import archive
from archive.base import Line, layout, shutdown, waits
from archive.base.errors import RanksMissingError
from archive.checkpoint import Joint, assembly, requests, rounds
from archive.journal import ends
from archive.log import CommitLog, Place
from archive.saved import Part
from archive.store.drivers import PAGE
from tests.support.counted_store import CountedStore, Requests, counted_stores, store_of
from tests.support.thousand_ranks import ManyRanks

LONG_S, MINUTES_S = 60.0, 900.0
LARGE, THOUSAND = 128, 1024
WORLDS = [LARGE, pytest.param(THOUSAND, marks=pytest.mark.soak)]
Asked = dict[int, Requests]  # by rank
POLL = requests._Watch._poll


class VirtualClock:
    """A clock that stands still but while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.most_s = 0.0, inf

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.most_s:
            raise TimeoutError

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    made = VirtualClock()
    with counted_stores():
        yield made


class World:
    """The ranks of a session that rank 0 has opened, each with a log of its own."""

    def __init__(self, size: int, clock: VirtualClock, patch: pytest.MonkeyPatch) -> None:
        self.size, self.clock = size, clock
        self.job = ManyRanks("counted://waits", size, 6)
        self.job.open_first()
        self.arc = archive.open(self.job.url)
        self.store: CountedStore = store_of(self.job.url)
        self.store.clock, self.store.is_virtual = clock.monotonic, True
        self.patch = patch

    def log(self) -> CommitLog:
        return CommitLog(self.arc.storage, self.arc.id, self.arc.head)

    def place(self, rank: int) -> Place:
        return Place(rank, self.size, "main", self.job.session)

    def each(self, wait: Callable[[int], object], ranks: Any = None) -> Asked:
        """What each rank asks, in the order of their turns; each begins at second 0."""
        out: Asked = {}
        with self.patch.context() as patch:
            patch.setattr(waits, "time", self.clock)
            for rank in sorted(range(self.size) if ranks is None else ranks, key=lambda one: _turn(one, self.size)):
                self.clock.now = 0.0
                with self.store.counting() as out[rank]:
                    wait(rank)
        return out

    def join(self, rank: int, timeout_s: float = 600.0, speaks: Any = None, watch: Any = None) -> Any:
        """Wait for a checkpoint whose part this rank has staged, and look for requests beside it by a watch."""
        key = layout.state_key(self.job.session, "step-1", rank)
        return assembly.join(
            self.log(), Joint(self.place(rank), "step-1", 1), {rank: Part(self.arc.storage, key)},
            timeout_s=timeout_s, given_up=lambda: False, ending=lambda: False,
            absent=lambda missing, waited_s, aloud: None if speaks is None else speaks(rank, aloud),
            otherwise=lambda: watch is not None and watch.look_between(),
        )  # fmt: skip


def _turn(rank: int, world: int) -> int:
    return Line(rank, world, 1.0).turn


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(requests._Watch, "_poll", lambda self: None)  # its looks come by another clock
    made = World(request.param, clock, monkeypatch)
    yield made
    made.job.writer._end()


def check_rates(asked: Asked, until_s: float = LONG_S) -> None:
    """Each rank asks once a second, and so all of them about as often as there are ranks. Who lists more than a
    thousand names pauses for each thousand."""
    total, at_once = Counter[int](), ceil(len(asked) / PAGE)
    for rank, mine in asked.items():
        times = [int(one.began) for one in mine if one.began < until_s]
        for (first, since), (last, until) in combinations(enumerate(times), 2):
            assert last - first < until - since + at_once, (rank, Counter(times))
        total.update(times)
    print(f"{len(asked)} ranks that wait: at most {max(total.values())} requests a second")
    assert max(total.values()) <= len(asked) * 1100 / 1024
    for rank, mine in asked.items():
        rate = Counter(int(one.began) for one in mine if one.began < until_s)
        assert max(rate.values()) <= 1, (rank, rate)


# -- a checkpoint ----------------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_another_ask_once_a_second_and_one_says_so(world: World) -> None:
    staged(world, late=world.size - 1, at_s=1e9)
    told: list[tuple[int, bool]] = []

    def wait(rank: int) -> None:
        with pytest.raises(RanksMissingError, match="has not staged"):
            world.join(rank, LONG_S, lambda *one: told.append(one))

    asked = world.each(wait, range(world.size - 1))
    check_rates({rank: mine for rank, mine in asked.items() if rank})
    assert len(asked[0]) <= world.size + LONG_S + 3, "it reads what comes in, and asks once a second"
    assert {rank for rank, speaks in told if speaks} == {0}
    assert len({rank for rank, _ in told}) == waits.TOLD, "of the others nobody lists"


def staged(world: World, late: int | None = None, at_s: float = 0.0) -> None:
    """All ranks have staged, one of them later than the others."""
    world.job.add(0)
    world.clock.now = 0.0
    world.job.stage_others(0, first=0)
    if late is not None:
        world.store.made[layout.state_key(world.job.session, "step-1", late)] = at_s


def check_joined(world: World, asked: Asked, by: int) -> None:
    """One rank has read what all have staged, and committed it; the others have seen no more than that."""
    every = Requests(one for mine in asked.values() for one in mine)
    assert {rank for rank, mine in asked.items() if mine.of("commits/", "create")} == {by}
    read = {rank: len(mine.of("states/", "get")) for rank, mine in asked.items()}
    assert read.pop(by) <= 2 * world.size + 3 * LONG_S
    assert set(read.values()) <= {0}, read
    print(f"{world.size} ranks: {len(every)} requests for a checkpoint that rank {by} committed")


def test_one_rank_joins_what_all_have_staged(world: World) -> None:
    staged(world, late=world.size - 1, at_s=20.0)
    asked = world.each(world.join)
    check_joined(world, asked, by=0)
    check_rates({rank: mine for rank, mine in asked.items() if rank}, 20.0)
    waited = sum(len(mine) for rank, mine in asked.items() if rank) / (world.size - 1)
    assert waited <= 20 + 3, "a request a second, and the commit"


def test_the_next_in_line_joins_where_the_first_has_died(world: World) -> None:
    """It is of another machine than the first. The others ask for the commit alone."""
    staged(world)
    asked = world.each(world.join, range(1, world.size))
    check_joined(world, asked, by=world.size // 2)
    step_s = Line(0, world.size, assembly.STEP_IN_S).step_of(world.size)
    (made,) = (one for mine in asked.values() for one in mine.of("commits/", "create"))
    assert step_s <= made.ended <= step_s + 3
    check_rates({rank: mine for rank, mine in asked.items() if rank != world.size // 2}, made.ended)


def test_ranks_that_wait_past_the_end_do_not_read_what_others_have_staged(world: World) -> None:
    """All but one have staged when the time is over: each rank asks for what it needs to say so."""
    staged(world, late=3, at_s=1e9)

    def wait(rank: int) -> None:
        with pytest.raises(RanksMissingError, match=rf"rank 3 of {world.size} has not staged"):
            world.join(rank, 30.0)

    asked = world.each(wait, [rank for rank in range(world.size) if rank != 3])
    assert max(len(mine) for rank, mine in asked.items() if rank) <= 30 + 10
    assert len(asked[0]) <= 30 + 20


def test_when_a_job_ends_at_once_a_few_ranks_save_what_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    staged(world, late=3, at_s=1e9)
    joint = lambda rank: Joint(world.place(rank), "step-1", 1)  # noqa: E731
    key = partial(layout.state_key, world.job.session, "step-1")
    own = lambda rank: {rank: Part(world.arc.storage, key(rank))}  # noqa: E731
    ranks = [rank for rank in range(world.size) if rank != 3]
    asked = world.each(lambda rank: assembly.commit_present(world.log(), joint(rank), own(rank), hurried=True), ranks)
    check_joined(world, asked, by=0)
    crashed = world.each(lambda rank: assembly.commit_present(world.log(), joint(rank), own(rank)), ranks)
    read = [len(mine.of("states/", "get")) for rank, mine in crashed.items() if rank]
    assert sum(read) == 0, "what rank 0 has made serves all"
    alone = {5: own(5)}
    for rank in ranks:
        world.store.made[key(rank)] = 0.0 if rank == 5 else 1e9
    (mine,) = world.each(lambda rank: assembly.commit_present(world.log(), joint(rank), alone[rank]), [5]).values()
    assert max((one.ended for one in mine), default=0.0) == 0.0, "a rank that crashes alone waits for nobody"


def test_ranks_that_stage_after_a_partial_commit_do_not_wait_for_those_that_are_in_it(world: World) -> None:
    """Half of the ranks end in time; the other half finds all parts there, and makes the checkpoint whole."""
    staged(world)
    line = sorted(range(world.size), key=lambda rank: _turn(rank, world.size))
    early, late = line[: world.size // 2], line[world.size // 2 :]
    key = partial(layout.state_key, world.job.session, "step-1")

    def end(rank: int) -> None:
        own = {rank: Part(world.arc.storage, key(rank))}
        one = assembly.commit_present(world.log(), Joint(world.place(rank), "step-1", 1), own, hurried=True)
        made[one.number] = one.checkpoint.whole

    for rank in late:
        world.store.made[key(rank)] = 1e9
    made: dict[int, bool] = {}
    world.each(end, early)
    for rank in late:
        world.store.made[key(rank)] = 0.0
    asked = world.each(end, late)
    assert sorted(made.values()) == [False, True]
    check_joined(world, asked, by=late[0])
    assert max(one.ended for mine in asked.values() for one in mine) == 0.0, "nobody waits"


def test_ranks_that_crash_one_after_the_other_wait_for_nobody(world: World) -> None:
    staged(world)
    line = sorted(range(world.size), key=lambda rank: _turn(rank, world.size))[:12]
    key = partial(layout.state_key, world.job.session, "step-1")
    for rank in range(world.size):
        world.store.made[key(rank)] = 1e9
    for rank in line:
        world.store.made[key(rank)] = 0.0
        own, joint = {rank: Part(world.arc.storage, key(rank))}, Joint(world.place(rank), "step-1", 1)
        (mine,) = world.each(
            lambda _, own=own, joint=joint: assembly.commit_present(world.log(), joint, own), [rank]
        ).values()
        assert max(one.ended for one in mine) == 0.0, rank


def test_in_haste_few_ranks_try_at_once_and_all_within_seconds() -> None:
    line = Line(0, THOUSAND, 0.5)
    due = [line.in_haste_s(before) for before in range(THOUSAND)]
    assert due == sorted(due)
    assert due[:7] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert due[-1] < 9.0
    assert sum(one < 4.0 for one in due) < 20


# -- requests for a checkpoint, and the opening of a session -----------------------------------------------------------


def _watches(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Watches of all ranks, which begin at second 0."""
    with monkeypatch.context() as patch:
        patch.setattr(waits, "time", world.clock)
        world.clock.now = 0.0
        return {rank: requests._Watch(world.arc.storage, world.place(rank)) for rank in range(world.size)}


def test_ranks_agree_on_a_checkpoint_by_requests_in_proportion_to_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    watches = _watches(world, monkeypatch)
    for rank, watch in watches.items():  # each is asked at another step; the last one answers late
        watch.calls = rank % 7
        assert not watch.agreed(True, False)
    last = layout.agreement_key(world.job.session, 0, world.size - 1)
    world.store.made[last] = 20.0
    acted: dict[int, int] = {}

    def wait(rank: int) -> None:
        while not watches[rank].agreed(False, False):
            pass
        acted[rank] = watches[rank].calls

    asked = world.each(wait)
    assert set(acted.values()) == {6 + 1 + requests.LEAD_STEPS}
    check_rates({rank: mine for rank, mine in asked.items() if rank}, 20.0)
    assert len(asked[0]) <= 2 * world.size + 30
    assert max(len(mine) for rank, mine in asked.items() if rank) <= 20 + 3


def test_the_next_in_line_says_what_is_agreed_on_where_the_first_has_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    watches = _watches(world, monkeypatch)
    for watch in watches.values():
        assert not watch.agreed(True, False)

    def wait(rank: int) -> None:
        while not watches[rank].agreed(False, False):
            pass

    asked = world.each(wait, range(1, world.size))
    said = {rank for rank, mine in asked.items() if mine.of("sessions/", "create")}
    assert said == {world.size // 2}
    read = Counter({rank: len(mine.of("sessions/", "get")) for rank, mine in asked.items()})
    assert read.pop(world.size // 2) <= 2 * world.size + 100
    assert max(read.values()) <= Line(0, world.size, rounds.STEP_IN_S).step_of(world.size) + 5


def _end(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """The watches of ranks that are all told to end, and at different calls; their time to agree is over."""
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    monkeypatch.setattr(shutdown, "process", shutdown.Shutdown())
    shutdown.process.begin(shutdown.AGREE_PART)
    watches = _watches(world, monkeypatch)
    for rank, watch in watches.items():
        watch.calls = 100 + rank
    return watches


def test_ranks_far_back_in_line_that_end_agree_on_one_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten of them have answered, and died."""
    watches = _end(world, monkeypatch)
    line = sorted(range(world.size), key=lambda rank: _turn(rank, world.size))
    for watch in watches.values():
        assert not watch.agreed(True, True)
    acted = set()

    def wait(rank: int) -> None:
        while not watches[rank].agreed(True, True):
            pass
        acted.add(watches[rank].calls)

    asked = world.each(wait, line[10:])
    assert acted == {100 + world.size - 1 + 1 + requests.LEAD_STEPS}
    assert {rank for rank, mine in asked.items() if mine.of("sessions/", "create")} == {line[10]}


def test_a_rank_that_hears_of_it_late_saves_without_those_that_have_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So does rank 0, which looks for answers, but also for what another rank has said."""
    watches = _end(world, monkeypatch)
    for _ in range(3):
        watches[5].agreed(True, True)
    assert watches[5].round == 1
    shutdown.process.began = float("-inf")  # the others were not told
    for rank in (0, 7):
        watches[rank].calls = 500

        def wait(rank: int) -> None:
            while not watches[rank].agreed(True, False):
                pass

        (mine,) = world.each(wait, [rank]).values()
        assert max(one.ended for one in mine) <= 5.0, "it does not wait for ranks that never answer"
        assert watches[rank].calls == 500 + 1 + requests.LEAD_STEPS
        assert shutdown.process.passed(shutdown.LAST_PART)
        assert "waits for none of them" in caplog.messages[-1]
        shutdown.process.began = float("-inf")


def _watched(world: World, watches: dict[int, Any], until_s: float, ranks: Any = None) -> Asked:
    """What the watches ask in the background, by their own pauses."""

    def idle(rank: int) -> None:
        stop = Mock(wait=lambda pause_s: world.clock.sleep(pause_s) or world.clock.now > until_s)
        world.patch.setattr(watches[rank], "_stop", stop)
        POLL(watches[rank])

    return world.each(idle, ranks)


def test_ranks_look_for_requests_by_few_lists(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank looks every 2.5 s whether another was asked. Of the lists that show new requests rank 0 makes most."""
    watches = _watches(world, monkeypatch)
    asked = _watched(world, watches, MINUTES_S)
    for rank, mine in asked.items():
        heard = [0.0, *(one.began for one in mine.of("sessions/", "head"))]
        assert max(b - a for a, b in pairwise(heard)) <= requests.ASKED_POLL_S, rank
        listed = [one.began for one in mine.of("requests", "list")]
        every_s = requests.list_s(_turn(rank, world.size))
        assert len(listed) == pytest.approx(MINUTES_S / every_s, abs=1), rank
        assert max(b - a for a, b in pairwise([0.0, *listed])) <= every_s + 2 * requests.ASKED_POLL_S, rank
        assert len(mine) == len(heard) - 1 + len(listed)
    check_rates(asked, MINUTES_S)
    lists = sum(len(mine.of("requests", "list")) for mine in asked.values())
    assert lists / MINUTES_S <= 0.5 + world.size / requests.MOST_POLL_S


def test_a_request_is_seen_whichever_ranks_are_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees it by itself, the first ones in line soon: nobody has to know who is alive."""
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    watches = _watches(world, monkeypatch)
    requests.post(world.arc.storage)
    line = sorted(range(world.size), key=lambda rank: _turn(rank, world.size))
    for rank in (*line[:3], line[40], line[-1]):
        requests._asked.flag.clear()
        seen_s = requests.list_s(_turn(rank, world.size))
        _watched(world, watches, seen_s - 2 * requests.ASKED_POLL_S, [rank])
        assert not requests._asked.flag.is_set()
        _watched(world, watches, seen_s + 2 * requests.ASKED_POLL_S, [rank])
        assert requests._asked.flag.is_set(), rank
    assert requests.list_s(0) == requests.POLL_S
    assert max(requests.list_s(turn) for turn in range(THOUSAND)) == requests.MOST_POLL_S == 300.0


def test_ranks_that_wait_for_another_hear_of_requests_by_no_more_than_one_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(world, late=world.size - 1, at_s=1e9)
    watches = _watches(world, monkeypatch)

    def wait(rank: int) -> None:
        with pytest.raises(RanksMissingError, match="has not staged"):
            world.join(rank, LONG_S, watch=watches[rank])
        assert watches[rank]._lent.within(requests.ASKED_POLL_S), "so nothing is asked in the background"

    asked = world.each(wait, range(world.size - 1))
    check_rates({rank: mine for rank, mine in asked.items() if rank})
    for rank, mine in asked.items():
        heard = [one.began for one in mine.of("sessions/", "head") if one.began < LONG_S]
        assert max(b - a for a, b in pairwise(heard)) <= requests.ASKED_POLL_S + (rank == 0), rank


def test_a_rank_that_waits_for_answers_asks_for_nothing_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come meanwhile are answered by what it waits for."""
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    watches = _watches(world, monkeypatch)
    seen: list[Requests] = []

    def waits_long(self: rounds.RequestRound, own: rounds.Answer) -> rounds.Agreed:
        seen.append(_watched(world, watches, LONG_S, [5])[5])
        return rounds.Agreed(own.ready)

    monkeypatch.setattr(rounds.RequestRound, "await_agreement", waits_long)
    assert [watches[5].agreed(True, False) for _ in range(3)] == [False, False, True]
    assert [len(asked) for asked in seen] == [0]


def test_ranks_hear_of_another_that_was_asked_though_the_first_has_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_asked", requests._Asked())
    watches = _watches(world, monkeypatch)
    watches[2].agreed(True, True)
    asked = _watched(world, watches, requests.ASKED_POLL_S, [1])
    assert requests._asked.flag.is_set()
    assert [one.verb for one in asked[1]] == ["head"]
    assert requests.ASKED_POLL_S <= shutdown.AGREE_PART * shutdown.WITHIN_S / 2, "in time, where a rank is told to end"


def test_ranks_that_wait_for_one_to_end_a_journal_ask_once_a_second(world: World, clock: VirtualClock) -> None:
    ended = world.log().head.runs["main"].session
    other = Place(0, world.size, "main", "later")
    assert ended != other.session
    clock.most_s = LONG_S

    def wait(rank: int) -> None:
        with suppress(TimeoutError):
            ends._opened(world.log(), Place(rank, world.size, "main", "later"))

    check_rates(world.each(wait), ends.OTHER_RANK_S)


@pytest.mark.parametrize(("ranks", "put_off_s"), [(2, 0.02), (LARGE, 1.0)])
def test_a_look_is_put_off_by_little_where_few_ranks_ask(
    ranks: int, put_off_s: float, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a small job that wait for each other in turn would each add a second to the wait of the other."""
    monkeypatch.setattr(waits, "time", clock)
    wait = Line(0, ranks, 1.0).wait(None, assembly.FIRST_POLL_S, assembly.MAX_POLL_S)
    for _ in range(8):
        wait.pause()
    before = clock.now
    wait.put_off()
    assert clock.now - before == pytest.approx(put_off_s)
    wait.pause()
    assert clock.now - before == pytest.approx(put_off_s + assembly.MAX_POLL_S)


def test_a_line_has_ranks_of_other_machines_next_to_each_other() -> None:
    for world in (1, 2, 3, 8, 1000, 1024):
        turns = sorted(range(world), key=lambda rank: _turn(rank, world))
        assert [_turn(rank, world) for rank in turns] == list(range(world))
        assert turns[0] == 0
        assert all(abs(a - b) >= world // 4 for a, b in pairwise(turns)) or world < 9
        assert Line(turns[-1], world, 1.0).before(range(world)) == world - 1
