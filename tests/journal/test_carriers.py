"""Who stores for a node may be unreachable, hang, be one of two, or know less than others: its ranks go on, what is
acknowledged is found, and what nobody awaits goes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import layout
from archive.journal import carrier, node, rendezvous
from archive.maintain import verify
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.nodes import add, add_all, carries, lines, met, world, writer
from tests.support.processes import until
from tests.support.ticks import NEVER_S


@pytest.fixture(autouse=True)
def _slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests may need long for a tick."""
    monkeypatch.setattr(carrier, "MAX_WINDOW_S", 30.0)
    monkeypatch.setattr(node, "_MEET_S", 30.0)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def tick(w: archive.Writer, name: str) -> str:
    """An episode that is acknowledged."""
    out = add(w, name)
    w.sync()
    return out


def recovered(arc: archive.Archive) -> set[str]:
    """The live episodes of a recovery, or of the newest checkpoint if that has all; each is there once."""
    now = archive.open(arc.url)
    found = now.recover() or now.checkpoints.latest
    assert found is not None
    assert verify(archive.open(arc.url), deep=True).sound
    names = found.episodes.table["episode_id"].to_pylist()
    assert len(names) == len({*names})
    for one, data in zip(found.episodes, found.episodes.read(), strict=True):
        np.testing.assert_array_equal(data["x"], np.arange(3) + 100 * int(one.id.rpartition("-")[2]))
    return set(names)


def save(ws: list[archive.Writer], step: int) -> None:
    for one in [w.checkpoint(step) for w in ws]:
        one.result(60)


def mark(arc: archive.Archive) -> int:
    """The number of node 0's objects below which none is awaited."""
    return (archive.open(arc.url).head.runs["main"].nodes or {})[0]


def awaited(arc: archive.Archive) -> set[str]:
    """The objects of node 0 that a prune leaves, with all that is live removed before."""
    archive.open(arc.url).prune("0s", dry_run=False, force=True)
    return {one.key for one in arc.storage.scan("journal") if "/node-" in one.key}


def gets(arc: archive.Archive) -> int:
    """The requests for objects of journals that a look at the tails makes."""
    now = archive.open(arc.url)
    before = now.storage.stats.snapshot()
    now.tails()
    return (now.storage.stats.snapshot() - before).get


def apart(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch, short: Path, world_size: int) -> list[archive.Writer]:
    """The first two ranks of a node, in containers of their own, which do not meet."""
    out = []
    for rank in range(2):
        (own := short / str(rank)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(own))
        out.append(writer(arc, rank, world_size, 1))
        met(out[-1])
    return out


def quiet(w: archive.Writer, step: int) -> None:
    """An object of the journal without steps, which is garbage once it is in a checkpoint."""
    w.journal(progress={"at": step})
    w.sync()


# -- who shares no more ------------------------------------------------------------------------------------------------


def test_who_gave_up_keeps_nothing_of_its_node_awaited(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    arc = fresh()
    ws = apart(arc, monkeypatch, short, 3)
    wanted = {tick(w, f"first-{number}") for number in range(3) for w in (ws[1], ws[0])}
    until(lambda: any(w._node is not None and w._node.mark is None for w in ws))
    assert ws[0]._node is not None
    monkeypatch.setattr(tempfile, "tempdir", str(short / ("0" if ws[0]._node.mark is None else "1")))
    ws.append(late := writer(arc, 2, 3, 1))
    until(lambda: late._node is not None and late._node.mark is None)
    assert late._node is not None
    late._node._thread.join(30)
    assert late._node._link is None, "nor does it share anything once who told it is gone"
    for step in range(1, 4):
        for number in range(10):
            quiet(ws[0], number)
            quiet(ws[1], number)
        save(ws, step)
        made = arc.storage.scan("journal/s/node-00000")
        assert mark(arc) == 1 + max(int(one.key[-13:-4]) for one in made)
        assert gets(arc) == 4, "the next object of the node and of each rank is not there"
    assert len(awaited(arc)) <= 4, "those with live steps"
    wanted |= {tick(w, "last") for w in ws}
    die(*ws)
    assert recovered(arc) == wanted


def test_a_rank_that_cannot_meet_the_others_keeps_nothing_awaited(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    arc = fresh()
    first = writer(arc, 0, 2, 1)
    met(first)
    (far := short / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    ws = [first, writer(arc, 1, 2, 1)]
    met(ws[1])
    wanted = {tick(w, f"tick-{number}") for number in range(5) for w in ws}
    save(ws, 1)
    assert mark(arc) == 5
    wanted |= {tick(w, "last") for w in ws}
    die(*ws)
    assert recovered(arc) == wanted


def unreachable(w: archive.Writer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A rank that does not reach who stores for its node, until this is called."""
    assert w._node is not None
    meeting, link = w._node._meeting, w._node._link
    assert meeting is not None
    assert link is not None
    connect, away = meeting.connect, [True]
    monkeypatch.setattr(meeting, "connect", lambda seconds: None if away else connect(seconds))
    link.close()
    until(lambda: w._node is not None and w._node._link is None)
    w._node._met.set()
    return away.clear


def test_a_rank_that_reaches_nobody_follows_its_node_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "LOOK_S", 0.1)
    arc = fresh()
    ws = world(arc, 2, 1)
    wanted = {tick(w, "first") for w in ws}
    (other,) = [w for w in ws if not carries(w)]
    (first,) = [w for w in ws if carries(w)]
    back = unreachable(other, monkeypatch)
    for number in range(10):
        wanted |= {tick(first, f"tick-{number}"), tick(other, f"tick-{number}")}
    count = lines(arc)["node-00000"]
    until(lambda: other._node is not None and other._node.known == count)
    save(ws, 1)
    assert mark(arc) == count
    back()
    until(lambda: other._node is not None and other._node._link is not None)
    wanted |= {tick(w, "together") for w in (other, first)}
    assert lines(arc)[f"rank-{other.rank:05d}"] == 10, "and it shares again"
    die(*ws)
    assert recovered(arc) == wanted


def test_who_carries_and_stores_nothing_keeps_nothing_awaited(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    """As a rank that learns may, in a container of its own beside ranks that collect."""
    monkeypatch.setattr(node, "LOOK_S", 0.1)
    monkeypatch.setattr(carrier, "BEAT_S", 0.1)
    arc = fresh()
    idle, busy = apart(arc, monkeypatch, short, 2)
    for number in range(5):
        quiet(busy, number)
    until(lambda: idle._node is not None and idle._node.known == 5)
    assert idle._node is not None
    assert idle._node._carrier is not None
    assert idle._node._carrier._next == 5, "so the others in its container are told, too"
    save([idle, busy], 1)
    assert mark(arc) == 5
    assert awaited(arc) == set()
    wanted = {tick(w, name) for name in ("first", "second") for w in (idle, busy)}
    die(idle, busy)
    assert recovered(arc) == wanted


def test_a_look_from_afar_goes_past_what_was_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery may move the mark of a node beyond what a rank of it knows."""
    arc = fresh()
    ws = world(arc, 2, 1)
    (other,) = [w for w in ws if not carries(w)]
    (first,) = [w for w in ws if carries(w)]
    unreachable(other, monkeypatch)
    for number in range(5):
        quiet(first, number)
    tick(first, "tick")
    recovered(arc)
    assert len(awaited(arc)) == 1
    for number in range(3):
        quiet(first, number)
    assert other._node is not None
    assert other._node.known < 5
    other._node._look()
    assert other._node.known == 9
    die(*ws)


def test_a_rank_told_in_the_midst_of_a_tick_stores_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    ws = world(arc, 2, 1)
    wanted = {tick(w, "first") for w in ws}
    come, go_on = threading.Event(), threading.Event()
    stored = carrier.Carrier._stored

    def gives_up(self: carrier.Carrier, ticks: Any) -> Any:
        come.set()
        assert go_on.wait(30)
        self._gave_up = True
        return None

    monkeypatch.setattr(carrier.Carrier, "_stored", gives_up)
    (other,) = [w for w in ws if not carries(w)]
    wanted.add(add(other, "second"))
    acknowledging = threading.Thread(target=other.sync)
    acknowledging.start()
    assert come.wait(30)
    assert other._node is not None
    early = other.checkpoint(1)  # its mark is of a rank that shares
    go_on.set()
    acknowledging.join(30)
    monkeypatch.setattr(carrier.Carrier, "_stored", stored)
    until(lambda: all(w._node is not None and w._node.mark is None for w in ws))
    for one in (early, *(w.checkpoint(1) for w in ws if w is not other)):
        one.result(60)
    wanted |= {tick(w, "third") for w in ws}
    assert lines(arc)["node-00000"] <= 2
    die(*ws)
    assert recovered(arc) == wanted


# -- who hangs ---------------------------------------------------------------------------------------------------------


class Hung:
    """Uploads of objects of nodes, by these ranks, do not end before `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ws: archive.Writer) -> None:
        self.go_on, self.came = threading.Event(), threading.Event()
        self.taken: list[int] = []  # numbers of ticks that were handed over
        for w in ws:
            self._hang(monkeypatch, w)
        take = carrier.Carrier._take

        def noted(this: carrier.Carrier, link: Any, message: Any) -> None:
            if message.kind == carrier.MessageKind.TICK:
                self.taken.append(message.number)
            take(this, link, message)

        monkeypatch.setattr(carrier.Carrier, "_take", noted)

    def _hang(self, monkeypatch: pytest.MonkeyPatch, w: archive.Writer) -> None:
        create = w._storage.create_once

        def slow(key: str, data: Any, **options: Any) -> None:
            if "/node-" in key:
                self.came.set()
                assert self.go_on.wait(60)
            create(key, data, **options)

        monkeypatch.setattr(w._storage, "create_once", slow)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[archive.Archive, list[archive.Writer], Hung]]:
    monkeypatch.setattr(node, "PATIENCE_S", 0.5)
    monkeypatch.setattr(carrier, "PATIENCE_S", 0.5)
    monkeypatch.setattr(carrier, "BEAT_S", 0.1)
    arc = fresh()
    ws = world(arc, 3, 1)
    add_all(ws, "first")
    found = Hung(monkeypatch, *(w for w in ws if carries(w)))
    yield arc, ws, found
    found.go_on.set()
    die(*ws)


def test_while_an_upload_hangs_a_neighbour_waits_once(
    caplog: pytest.LogCaptureFixture, hung: tuple[archive.Archive, list[archive.Writer], Hung]
) -> None:
    arc, ws, it = hung
    (first,) = [w for w in ws if carries(w)]
    other, third = (w for w in ws if w is not first)
    before = lines(arc)["node-00000"]
    wanted = {f"first-{w.rank}" for w in ws}
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            wanted.add(tick(other, f"tick-{number}"))
        assert it.taken == [1], "one tick of its was handed over, and waited for"
        until(lambda: "has been on its way" in caplog.text)
        wanted.add(tick(third, "tick"))
        time.sleep(3 * carrier.BEAT_S)
    assert [record.levelname for record in caplog.records if "on its way" in record.message] == ["WARNING"]
    assert lines(arc) == {
        "node-00000": before, f"rank-{other.rank:05d}": 6, f"rank-{third.rank:05d}": 1
    }  # fmt: skip
    it.go_on.set()
    until(lambda: other._node is not None and not other._node._waiting)
    handed = len(it.taken)
    wanted.add(tick(other, "together"))
    assert it.taken[handed:] == [7]
    assert lines(arc)[f"rank-{other.rank:05d}"] == 6, "it shares again"
    save(ws, 1)
    wanted |= {tick(w, "last") for w in ws}
    die(*ws)
    assert recovered(arc) == wanted


def test_the_tick_that_was_waited_for_may_be_there_twice_and_counts_once(
    hung: tuple[archive.Archive, list[archive.Writer], Hung],
) -> None:
    arc, ws, it = hung
    other = next(w for w in ws if not carries(w))
    wanted = {f"first-{w.rank}" for w in ws} | {tick(other, "second"), tick(other, "third")}
    it.go_on.set()
    until(lambda: other._node is not None and not other._node._waiting)
    assert lines(arc)["node-00000"] >= 2
    assert lines(arc)[f"rank-{other.rank:05d}"] == 2
    die(*ws)
    assert recovered(arc) == wanted


def test_what_waits_behind_a_hung_upload_is_bounded(
    hung: tuple[archive.Archive, list[archive.Writer], Hung], monkeypatch: pytest.MonkeyPatch
) -> None:
    arc, ws, it = hung
    monkeypatch.setattr(node, "PATIENCE_S", 60.0)
    monkeypatch.setattr(carrier, "MAX_WAITING_BYTES", 10_000)  # of one tick, not of two
    wanted = {f"first-{w.rank}" for w in ws}
    (first,) = [w for w in ws if carries(w)]
    waiting = threading.Thread(target=lambda: wanted.add(tick(first, "under way")))
    waiting.start()
    assert it.came.wait(30)
    second, third = (w for w in ws if w is not first)
    queued = threading.Thread(target=lambda: wanted.add(tick(second, "queued")))
    queued.start()
    assert first._node is not None
    carries_it = first._node._carrier
    assert carries_it is not None
    until(lambda: len(carries_it._ticks) == 1)
    wanted |= {tick(third, f"alone-{number}") for number in range(3)}
    assert lines(arc)[f"rank-{third.rank:05d}"] == 3, "it was told at once each time"
    assert len(carries_it._ticks) == 1
    it.go_on.set()
    waiting.join(30)
    queued.join(30)
    die(*ws)
    assert recovered(arc) == wanted


def test_who_is_closed_while_its_upload_hangs_begins_no_object_more(
    hung: tuple[archive.Archive, list[archive.Writer], Hung], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would collide with those of the next one, which would take itself for one of two."""
    arc, ws, it = hung
    monkeypatch.setattr(node, "PATIENCE_S", 60.0)
    (first,) = [w for w in ws if carries(w)]
    others = [w for w in ws if w is not first]
    wanted = {f"first-{w.rank}" for w in ws}
    works = [threading.Thread(target=lambda w=w: wanted.add(tick(w, "second"))) for w in others]
    works[0].start()
    assert it.came.wait(30)
    works[1].start()
    assert first._node is not None
    old = first._node._carrier
    assert old is not None
    until(lambda: len(old._ticks) == 1)
    die(first)
    for work in works:
        work.join(30)
    until(lambda: any(map(carries, others)))
    old._has_stored = False  # as after an outage
    wanted |= {tick(w, "after-0") for w in others}
    it.go_on.set()
    old._carrying.join(30)
    for number in range(1, 4):
        wanted |= {tick(w, f"after-{number}") for w in others}
    assert all(w._node is not None and w._node.mark is not None for w in others)
    assert old._ticks == []
    die(*others)
    assert recovered(arc) == wanted


# -- who knows less than others ----------------------------------------------------------------------------------------


def test_a_rank_that_comes_after_a_prune_stores_where_recoveries_look() -> None:
    arc = fresh()
    first = writer(arc, 0, 2, 1)
    met(first)
    for number in range(3):
        quiet(first, number)
    wanted = {tick(first, "first")}
    die(first)
    assert recovered(arc) == wanted
    assert awaited(arc) == {layout.node_key("s", 0, 3)}
    late = writer(arc, 1, 2, 1)
    met(late)
    wanted |= {tick(late, name) for name in ("second", "third")}
    assert lines(arc) == {"node-00000": 3}
    die(late)
    assert recovered(arc) == wanted


def test_who_comes_late_looks_from_the_mark_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, the objects of hours would take minutes."""
    arc = fresh()
    first = writer(arc, 0, 2, 1)
    met(first)
    wanted = {tick(first, f"tick-{number}") for number in range(20)}
    assert recovered(arc) == wanted
    wanted |= {tick(first, f"more-{number}") for number in range(20)}
    die(first)
    looked: list[int] = []
    is_there = node.NodeJournal._is_there

    def counted(self: node.NodeJournal, number: int) -> bool:
        looked.append(number)
        return is_there(self, number)

    monkeypatch.setattr(node.NodeJournal, "_is_there", counted)
    late = writer(arc, 1, 2, 1)
    met(late)
    assert late._node is not None
    assert late._node.known == 40
    assert looked[:2] == [0, 20]
    assert set(looked) <= {0, *range(20, 60)}
    assert len(looked) < 40
    wanted.add(tick(late, "last"))
    assert lines(arc) == {"node-00000": 41}
    die(late)
    assert recovered(arc) == wanted


def test_who_finds_its_number_free_after_a_prune_looks_before_it_says_so(
    monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    """Of two that store for a node, one knew of no object: a recovery took in those of the other one, a prune
    deleted them."""
    monkeypatch.setattr(carrier, "SURE_S", 0.05)  # a prune waits for longer, but for this one
    arc = fresh()
    ws = apart(arc, monkeypatch, short, 2)
    for number in range(3):
        quiet(ws[0], number)
    wanted = {tick(ws[0], "first")}
    assert recovered(arc) == wanted
    assert awaited(arc) == {layout.node_key("s", 0, 3)}
    assert ws[1]._node is not None
    assert ws[1]._node.known == 0
    time.sleep(0.1)
    wanted |= {tick(ws[1], name) for name in ("second", "third")}
    die(*ws)
    assert recovered(arc) == wanted


def test_who_begins_to_carry_stores_where_recoveries_look_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked, and a rank that knows of no object says hello before its own does."""
    arc = fresh()
    first, other = (writer(arc, rank, 3, 1) for rank in range(2))
    for w in (first, other):
        met(w)
    if not carries(first):
        first, other = other, first
    for number in range(3):
        quiet(other, number)
    wanted = {tick(other, "first")}
    assert recovered(arc) == wanted
    assert awaited(arc) == {layout.node_key("s", 0, 3)}
    assert other._node is not None
    meeting, go_on = other._node._meeting, threading.Event()
    assert meeting is not None
    connect = meeting.connect

    def later(seconds: float) -> rendezvous.Link | None:
        assert not carries(other) or go_on.wait(30)
        return connect(seconds)

    monkeypatch.setattr(meeting, "connect", later)
    die(first)
    until(lambda: carries(other))
    late = writer(arc, 2, 3, 1)
    met(late)
    wanted.add(tick(late, "second"))
    assert lines(arc) == {"node-00000": 2}
    go_on.set()
    die(late, other)
    assert recovered(arc) == wanted


def test_who_finds_an_object_of_its_own_whose_answer_was_lost_goes_on_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    ws = world(arc, 2, 1)
    add_all(ws, "first")
    assert ws[0]._node is not None

    def lost(key: str, buffers: Any) -> None:
        arc.storage.create_once(key, buffers)
        raise archive.StorageError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(ws[0]._node._carrier, "_storage", SimpleNamespace(create_once=lost))
        add_all(ws, "second")
    before = lines(arc)
    add_all(ws, "third")
    assert lines(arc)["node-00000"] > before["node-00000"]
    assert {**lines(arc), "node-00000": 0} == {**before, "node-00000": 0}, "no rank stored by itself"
    die(*ws)
    assert recovered(arc) == {f"{name}-{rank}" for name in ("first", "second", "third") for rank in range(2)}


def test_who_cannot_look_says_of_nothing_that_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    (w,) = world(arc, 1, 1)
    assert w._node is not None
    wanted = {tick(w, "first")}

    def fails() -> int:
        raise archive.StorageError("the store does not answer")

    carries_it = w._node._carrier
    assert carries_it is not None
    monkeypatch.setattr(carries_it, "_settled", fails)
    carries_it._sure = None
    wanted.add(tick(w, "second"))
    assert lines(arc) == {"node-00000": 2, "rank-00000": 1}
    die(w)
    assert recovered(arc) == wanted


def test_who_begins_to_carry_and_cannot_look_tries_it_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exists, failing = node.NodeJournal._is_there, iter([True])

    def fails_once(journal: node.NodeJournal, number: int) -> bool:
        if next(failing, False):
            raise archive.StorageError("nobody answers")
        return exists(journal, number)

    monkeypatch.setattr(node.NodeJournal, "_is_there", fails_once)
    arc = fresh()
    (w,) = world(arc, 1, 1)
    wanted = {tick(w, "first"), tick(w, "second")}
    assert lines(arc) == {"node-00000": 2}
    assert "objects of node 0 were not looked for; this is tried again" in caplog.text
    assert "nobody answers" in caplog.text
    die(w)
    assert recovered(arc) == wanted


# -- processes and sockets ---------------------------------------------------------------------------------------------


def test_who_cannot_take_a_connection_takes_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has too many open files for a moment."""
    arc = fresh()
    first = writer(arc, 0, 2, 1)
    met(first)
    refused, made = [OSError("too many open files"), RuntimeError("can't start new thread")], carrier.Link

    def link(connected: Any) -> rendezvous.Link:
        if refused:
            raise refused.pop()
        return made(connected)

    monkeypatch.setattr(carrier, "Link", link)
    second = writer(arc, 1, 2, 1)
    met(second)
    until(lambda: second._node is not None and second._node._link is not None)
    assert not refused
    wanted = {tick(w, "first") for w in (second, first)}
    die(first, second)
    assert recovered(arc) == wanted


def test_who_listens_no_more_leaves_the_socket_of_another(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock was removed, as folders of temporary files are cleaned."""
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    one, other = rendezvous.Rendezvous("name"), rendezvous.Rendezvous("name")
    sockets = [one.listen()]
    assert other.listen() is None
    (lock,) = (short / f"archive-{os.getuid()}").glob("*.lock")
    lock.unlink()
    sockets.append(other.listen())
    one.leave()
    link = one.connect(1.0)
    assert link is not None
    link.close()
    other.leave()
    assert one.connect(1.0) is None
    for made in sockets:
        assert made is not None
        made.close()


def test_who_is_closed_before_it_begins_to_carry_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not answer its look for longer than its end waits."""
    arc = fresh()
    come, go_on = threading.Event(), threading.Event()
    look = node.NodeJournal._look

    def slow(self: node.NodeJournal) -> float | None:
        come.set()
        assert go_on.wait(30)
        return look(self)

    with monkeypatch.context() as patch:
        patch.setattr(node.NodeJournal, "_look", slow)
        closed = writer(arc, 0, 2, 1)
        assert come.wait(30)
        die(closed)
    other = writer(arc, 1, 2, 1)
    met(other)
    assert carries(other)
    go_on.set()
    assert closed._node is not None
    closed._node._thread.join(30)
    assert not carries(closed)
    wanted = {tick(other, "first")}
    die(other)
    assert recovered(arc) == wanted


def test_an_outage_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    (w,) = world(arc, 1, 1)
    create = w._storage.create_once

    def fails(key: str, data: Any, **options: Any) -> None:
        if "/node-" in key:
            raise archive.StorageError("the store does not answer")
        create(key, data, **options)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(w._storage, "create_once", fails)
        wanted = {tick(w, f"tick-{number}") for number in range(4)}
    assert len([record for record in caplog.records if "were not stored together" in record.message]) == 1
    wanted.add(tick(w, "last"))
    assert lines(arc) == {"rank-00000": 4, "node-00000": 1}
    die(w)
    assert recovered(arc) == wanted


def test_a_writer_that_nobody_holds_is_collected() -> None:
    arc = fresh()
    held = archive.open(arc.url)
    (w,) = world(held, 1, 1, journal_s=NEVER_S)
    tick(w, "first")
    seen = weakref.ref(w)
    del w
    with contextlib.suppress(Exception):
        until(lambda: gc.collect() >= 0 and seen() is None)
    assert seen() is None
