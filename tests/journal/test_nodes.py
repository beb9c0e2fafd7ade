"""Ranks of a node share the objects of their journals: one PUT a node and tick, and all that each rank is promised by
itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import layout
from archive.journal import carrier, ends, node, rendezvous
from archive.log import Place
from archive.maintain import verify
from archive.saved import NodeIndex, NodeObject, pack_node
from tests.support import format_journal
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.nodes import add, add_all, carries, lines, met, world, writer
from tests.support.processes import until
from tests.support.ticks import NEVER_S

RANKS, NODES = 6, 2


@pytest.fixture(autouse=True)
def _slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests may need long for a tick."""
    monkeypatch.setattr(carrier, "MAX_WINDOW_S", 30.0)
    monkeypatch.setattr(node, "_MEET_S", 30.0)


def names(found: Any) -> set[str]:
    return set(found.episodes.table["episode_id"].to_pylist())


def check(ck: archive.Checkpoint, wanted: set[str], steps: int = 3) -> None:
    """It has these episodes, each once, with their steps."""
    listed = ck.episodes.table["episode_id"].to_pylist()
    assert sorted(listed) == sorted(wanted)
    for episode, data in zip(ck.episodes, ck.episodes.read(), strict=True):
        np.testing.assert_array_equal(data["x"], np.arange(steps) + 100 * int(episode.id.rpartition("-")[2]))


def recovered(arc: archive.Archive) -> archive.Checkpoint:
    found = archive.open(arc.url).recover()
    assert found is not None
    assert verify(archive.open(arc.url), deep=True).sound
    return found


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_tick_is_one_object_a_node_and_no_other_request() -> None:
    arc = fresh()
    ws = world(arc, RANKS, NODES)
    for w in ws:
        add(w, "tick-0")  # which asks for the names that there are
    before = [w._storage.stats.snapshot() for w in ws]
    for tick in range(4):
        for w in ws if tick else ():
            add(w, f"tick-{tick}")
        for w in (ws[1], ws[5]):
            w.sync()
        for w in ws:  # all ranks of a node have flushed at once
            until(lambda w=w: not w.durable_until.seconds_behind)
    spent = [w._storage.stats.snapshot() - was for w, was in zip(ws, before, strict=True)]
    assert sum(one.create for one in spent) == 4 * NODES
    assert sum(one.put + one.get + one.list + one.head for one in spent) == 0
    assert lines(arc) == {"node-00000": 4, "node-00001": 4}
    die(*ws)
    check(recovered(arc), {f"tick-{tick}-{rank}" for tick in range(4) for rank in range(RANKS)})


def test_a_commit_and_a_checkpoint_adopt_what_lies_there() -> None:
    arc = fresh()
    ws = world(arc, RANKS, NODES)
    add_all(ws, "first")
    ws[1].commit()
    assert archive.open(arc.url).episodes["first-1"].read()["x"].tolist() == [100, 101, 102]
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    arc.refresh()
    check(arc.checkpoints.latest, {f"first-{r}" for r in range(RANKS)})
    assert {layout.object_of(shard).split("/")[2] for shard in arc.shards} == {"node-00000", "node-00001"}
    assert not list(arc.storage.scan("shards"))
    assert arc.head.runs["main"].nodes == {0: 1, 1: 1}
    assert not arc.tails()
    die(*ws)


def test_a_shard_in_an_object_of_a_node_opens_with_other_tools(tmp_path: Path) -> None:
    import zarr

    arc = archive.create(str(tmp_path))
    (w,) = world(arc, 1, 1)
    add(w, "first")
    w.sync()
    w.close()
    arc.refresh()
    group = zarr.open_group(arc.shard_url(0), mode="r", zarr_format=3)
    assert group["x"][:].tolist() == [0, 1, 2]


def test_without_it_nothing_is_other_than_before() -> None:
    arc = fresh()
    ws = [archive.open(arc.url).writer(r, 2, session="s", journal_s=NEVER_S) for r in range(2)]
    for w in ws:
        add(w, "first")
        w.sync()
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    arc.refresh()
    assert lines(arc) == {"rank-00000": 1, "rank-00001": 1}
    assert arc.head.format["features"] == ["journal"]
    assert b"node" not in b"".join(arc.storage.get_all([one.key for one in arc.storage.scan("commits")]))
    assert all(arc.checkpoints.latest.staged(rank).index.node is None for rank in range(2))
    die(*ws)


def test_an_earlier_version_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    ws = world(arc, 2, 1)
    monkeypatch.setattr(layout, "FEATURES", layout.FEATURES - {layout.NODES})
    with pytest.raises(archive.UpgradeError, match="node journals"):
        archive.open(arc.url)
    die(*ws)


# -- who carries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "dead"])
def test_another_rank_carries_where_the_first_one_is_gone(how: str) -> None:
    arc = fresh()
    ws = world(arc, 3, 1)
    for w in ws:
        add(w, "first")
    ws[2].sync()
    (first,) = [w for w in ws if carries(w)]
    others = [w for w in ws if w is not first]
    first.close() if how == "closed" else die(first)
    until(lambda: any(map(carries, others)))
    add_all(others, "second")
    die(*others)
    entry = lines(arc)
    assert entry["node-00000"] >= 2
    check(recovered(arc), {*(f"first-{r}" for r in range(3)), *(f"second-{w.rank}" for w in others)})


def test_a_rank_that_comes_late_and_carries_goes_on_after_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that carried died as it began, the others have not told it yet how many objects there are, and the store
    did not answer when it looked for them."""
    monkeypatch.setattr(node.NodeJournal, "_look", lambda self: None)
    arc = fresh()
    (first,) = [writer(arc, 0, 2, 1)]
    for tick in range(20):
        add(first, f"tick-{tick}")
        first.sync()
    die(first)
    late = writer(arc, 1, 2, 1)
    met(late)
    assert late._node is not None
    assert late._node.known == 0
    for name in ("late", "later"):
        add(late, name)
        late.sync()
    die(late)
    assert lines(arc) == {"node-00000": 22}
    check(recovered(arc), {*(f"tick-{tick}-0" for tick in range(20)), "late-1", "later-1"})


def test_a_rank_that_gets_no_answer_stores_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process that carries were stopped, or the store slow for it."""
    arc = fresh()
    ws = world(arc, 3, 1)
    monkeypatch.setattr(node, "PATIENCE_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(carrier.Carrier, "_stored", lambda self, ticks: go_on.wait(10) and None)
    acknowledged = []
    for w in ws[1:]:
        add(w, "alone")
        w.sync()
        acknowledged.append(f"alone-{w.rank}")
    assert lines(arc) == {"rank-00001": 1, "rank-00002": 1}
    go_on.set()
    die(*ws)
    check(recovered(arc), set(acknowledged))


def test_a_large_tick_is_an_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MAX_SHARED_BYTES", 20_000)
    arc = fresh()
    (w,) = world(arc, 1, 1)
    for number, steps in enumerate((3, 10_000, 3, 10_000, 10_000, 3)):
        w.add_episode({"x": np.random.default_rng(number).random(steps)}, episode_id=f"{number}")
        w.sync()
    die(w)
    assert lines(arc) == {"node-00000": 3, "rank-00000": 3}
    (tail,) = archive.open(arc.url).tails().ranks
    assert (tail.objects, tail.next, tail.node) == (6, 6, (0, 3))
    assert names(recovered(arc)) == {str(number) for number in range(6)}


def test_what_does_not_fit_into_one_object_goes_into_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MOST_BYTES", 10_000)
    arc = fresh()
    ws = world(arc, 3, 1)
    add_all(ws, "first")
    die(*ws)
    assert lines(arc) == {"node-00000": 3}
    check(recovered(arc), {f"first-{r}" for r in range(3)})


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


def test_ranks_that_do_not_meet_make_objects_of_their_own(
    monkeypatch: pytest.MonkeyPatch, short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers on one machine, without a folder that they share: who finds that another one carries too, stops."""
    arc = fresh()
    ws = []
    for rank in range(2):
        own = short / str(rank)
        own.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(own))
        ws.append(writer(arc, rank, 2, 1))
        met(ws[-1])
    assert all(map(carries, ws))
    with caplog.at_level(logging.WARNING):
        for tick in range(4):
            for w in ws:
                add(w, f"tick-{tick}")
                w.sync()
    told = [record for record in caplog.records if "its ranks do not meet" in record.message]
    assert 1 <= len(told) <= 2
    assert lines(arc).keys() >= {"node-00000"}
    die(*ws)
    check(recovered(arc), {f"tick-{tick}-{rank}" for tick in range(4) for rank in range(2)})


@pytest.mark.parametrize("when", ["before", "since"])
def test_ranks_of_copies_of_an_archive_do_not_meet(tmp_path: Path, when: str) -> None:
    """Copies have its id; one that was made since the session was opened has its commits, too."""
    urls = [str(tmp_path / name) for name in ("one", "other")]
    arc = archive.create(urls[0])
    if when == "since":
        first = writer(arc, 0, 2, 1)
        die(first)
    shutil.copytree(*urls)
    ws = [writer(archive.open(url), 1, 2, 1) for url in urls]
    for w, name in zip(ws, ("mine", "yours"), strict=True):
        met(w)
        add(w, name)
        w.sync()
    assert all(map(carries, ws))
    die(*ws)
    for url, name in zip(urls, ("mine", "yours"), strict=True):
        check(recovered(archive.open(url)), {f"{name}-1"})


def test_ranks_of_an_archive_that_was_made_anew_at_a_place_meet_nobody_of_the_one_before(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        w = writer(archive.create(tmp_path / "root"), 0, 1, 1)
        assert w._node is not None
        found.append(w._node._names)
        die(w)
        shutil.rmtree(tmp_path / "root")
    assert found[0] != found[1]


def test_a_rank_has_one_connection_to_who_carries() -> None:
    arc = fresh()
    (w,) = world(arc, 1, 1)
    assert w._node is not None
    assert w._node._meeting is not None
    second = w._node._meeting.connect(10.0)
    assert second is not None
    second.send(rendezvous.Message(carrier.MessageKind.HELLO, w.rank))
    assert second.receive() is None
    second.close()
    add(w, "first")
    w.sync()
    die(w)
    assert lines(arc) == {"node-00000": 1}


@pytest.mark.parametrize("why", ["no sockets", "a folder of somebody else's", "a long path"])
def test_where_ranks_cannot_meet_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, short: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    folder = short if why != "a long path" else short / ("x" * 90)
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if why == "a folder of somebody else's":
        (folder / f"archive-{os.getuid()}").mkdir(mode=0o755)
    if why == "no sockets":
        monkeypatch.delattr(rendezvous.socket, "AF_UNIX")
    arc = fresh()
    with caplog.at_level(logging.WARNING):
        ws = world(arc, 2, 1)
        for w in ws:
            add(w, "first")
            w.sync()
            add(w, "second")
            w.sync()
    told = [record for record in caplog.records if "cannot share" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING], "the first rank of a node says it"
    assert lines(arc) == {"rank-00000": 2, "rank-00001": 2}
    die(*ws)
    check(recovered(arc), {f"{name}-{r}" for name in ("first", "second") for r in range(2)})


def test_ranks_may_keep_journals_of_both_kinds(caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    ws = [writer(arc, 0, 3, 1), writer(arc, 1, 3, 1, journal="rank"), writer(arc, 2, 3, 1)]
    for _ in range(2):
        for w in ws:
            add(w, f"tick-{_}")
            w.sync()
    assert lines(arc)["rank-00001"] == 2
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    for w in ws:
        add(w, "last")
        w.sync()
    die(*ws)
    check(recovered(arc), {f"{name}-{r}" for name in ("tick-0", "tick-1", "last") for r in range(3)})


def test_a_rank_whose_session_knows_no_nodes_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    first = writer(arc, 0, 2, 1, journal="rank")
    with caplog.at_level(logging.DEBUG):
        second = writer(arc, 1, 2, 1)
    assert "opened by a rank with journals of the ranks, so rank 1, of node 0, makes objects of its own" in caplog.text
    for w in (first, second):
        add(w, "first")
        w.sync()
    die(first, second)
    check(recovered(arc), {"first-0", "first-1"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"journal": "host"}, r"journal='host': give 'rank' .* or 'node'"),
        ({"journal": "node", "journal_s": None}, "journal='node' needs journal_s="),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(archive.UsageError, match=says):
        fresh().writer(**{"journal_s": 2.0, **options})


@pytest.mark.parametrize(("number", "count"), [("x", "2"), ("2", "2"), ("0", "0"), ("-1", "2"), ("0", "3")])
def test_an_environment_that_names_no_node_is_refused(monkeypatch: pytest.MonkeyPatch, number: str, count: str) -> None:
    monkeypatch.setenv("GROUP_RANK", number)
    monkeypatch.setenv("GROUP_WORLD_SIZE", count)
    says = f"GROUP_RANK='{number}' and GROUP_WORLD_SIZE='{count}' name no node of a world of 2 ranks"
    with pytest.raises(archive.UsageError, match=says):
        fresh().writer(0, 2, session="s", journal_s=2.0, journal="node")


def test_a_local_rank_is_a_number_or_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1"), ("LOCAL_RANK", "")):
        monkeypatch.setenv(name, value)
    place = Place(0, 2, "main", "s")
    assert node.node_of("node", 2.0, place) == node.Node(0, 1, 0)
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(archive.UsageError, match="LOCAL_RANK='x' is no number"):
        node.node_of("node", 2.0, place)


def test_without_a_word_about_nodes_each_rank_makes_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    arc = fresh()
    with caplog.at_level(logging.WARNING):
        w = arc.writer(0, 2, session="s", journal_s=NEVER_S, journal="node")
    assert "nothing says which node this is" in caplog.text
    add(w, "first")
    w.sync()
    assert lines(arc) == {"rank-00000": 1}
    die(w)


def test_a_rank_that_is_alone_is_the_first_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    assert node.node_of("node", 2.0, Place(0, 1, "main", "s")) == node.Node(0, 1, 0)


def test_slurm_says_which_node_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    found = node.node_of("node", 2.0, Place(3, 4, "main", "s"))
    assert found == node.Node(1, 2, 1)


# -- what is promised --------------------------------------------------------------------------------------------------


def refused(w: archive.Writer, name: str) -> None:
    """It can make nothing durable any more."""
    add(w, name)
    with pytest.raises(archive.SupersededError, match="open a new writer to take over"):
        w.sync()


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("journal", ["node", "rank"])
def test_a_successor_ends_the_journals_of_ranks_and_nodes(world_size: int, journal: str) -> None:
    """Without a look at the commits: the next object is there, a node's, and a rank's that would store by itself."""
    arc = fresh()
    old = [writer(arc, r, 3, 1, journal="rank" if r == 1 else "node") for r in range(3)]
    for w in old:
        met(w) if w._node else None
        add(w, "first")
        w.sync()
    plan = resharding.plan(archive.open(arc.url).recover(), world_size=world_size)
    new = []
    for rank in range(world_size):
        new.append(writer(arc, rank, world_size, 1, session="new", journal=journal, resume=plan.share(rank)))
    for w in old:
        before = w._storage.stats.snapshot()
        refused(w, "late")
        assert (w._storage.stats.snapshot() - before).list == 0
    for w in new:
        add(w, "new")
        w.sync()
    die(*old, *new)
    check(recovered(arc), {*(f"first-{r}" for r in range(3)), *(f"new-{r}" for r in range(world_size))})


def test_a_zombie_that_no_longer_reaches_its_node_is_refused_too() -> None:
    arc = fresh()
    old = world(arc, 3, 1)
    add_all(old, "first")
    share = resharding.plan(archive.open(arc.url).recover(), world_size=1).share(0)
    new = writer(arc, 0, 1, 1, session="new", resume=share)
    for w in old:
        assert w._node is not None
        w._node.close()
        w._node._link = None
    for w in old:
        refused(w, "late")
    die(*old, new)
    check(archive.open(arc.url).recover() or archive.open(arc.url).checkpoints.latest, {f"first-{r}" for r in range(3)})


def test_what_was_acknowledged_while_the_successor_began_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the recovery and the opening; also a rank's own object after one of its node's."""
    arc = fresh()
    old = world(arc, 3, 1)
    add_all(old, "first")
    share = resharding.plan(archive.open(arc.url).recover(), world_size=1).share(0)
    for w in old:
        add(w, "second")
    old[0].sync()
    monkeypatch.setattr(node, "MAX_SHARED_BYTES", 1)
    add(old[0], "third")
    old[0].sync()
    with pytest.raises(archive.ConflictError, match=r"has journaled more \(ranks 0, 1, 2, in 4 objects\)"):
        writer(arc, 0, 1, 1, session="new", resume=share)
    for w in old:
        refused(w, "late")
    die(*old)
    check(recovered(arc), {*(f"{n}-{r}" for r in range(3) for n in ("first", "second")), "third-0"})


def test_ticks_after_the_cut_of_one_rank_are_found_though_another_was_cut_later() -> None:
    """The node's objects go on while its ranks make a checkpoint, one after the other."""
    arc = fresh()
    ws = world(arc, 3, 1)
    add_all(ws, "first")
    pending = []
    for w in ws:
        pending.append(w.checkpoint(1))
        add(w, "after")
        w.sync()
    for one in pending:
        one.result(60)
    entry = archive.open(arc.url).head.runs["main"]
    assert entry.nodes == {0: 1}, "the first rank was cut after object 0"
    die(*ws)
    check(recovered(arc), {f"{n}-{r}" for r in range(3) for n in ("first", "after")})


def test_a_second_recovery_takes_what_came_after_the_first_one() -> None:
    arc = fresh()
    ws = world(arc, 4, 2)
    for tick in range(3):
        for w in ws:
            add(w, f"tick-{tick}")
        for w in ws:
            w.sync()
        check(recovered(arc), {f"tick-{n}-{r}" for r in range(4) for n in range(tick + 1)})
        assert archive.open(arc.url).head.runs["main"].nodes == {0: tick + 1, 1: tick + 1}
    die(*ws)


@pytest.mark.parametrize("where", ["the index", "a tick", "the end"])
def test_damage_of_a_nodes_object_is_that_of_the_ticks_in_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    ws = world(arc, 3, 1)
    add(ws[2], "first")
    ws[2].sync()  # object 0
    for w in ws:
        add(w, "second")
    for w in ws:
        w.sync()  # object 1, and maybe more
    last = max(one.key for one in arc.storage.scan("journal"))
    add(ws[2], "third")
    ws[2].sync()
    die(*ws)
    key = layout.node_key("s", 0, 1)
    assert last == key
    data = bytearray(arc.storage.get(key))
    found = NodeObject(bytes(data), key, key)
    place = found.members[1, 0]
    at = {"the index": 60, "a tick": place.offset + place.size // 2, "the end": len(data) - 20}[where]
    data[at] ^= 4
    arc.storage.delete([key])
    arc.storage.put(key, bytes(data))
    tails = {one.rank: one for one in archive.open(arc.url).tails().ranks}
    lost = {1} if where == "a tick" else {0, 1, 2}
    assert {rank for rank, one in tails.items() if one.ended == "damaged"} == lost
    assert [tails[rank].objects for rank in range(3)] == ([1, 0, 3] if where == "a tick" else [0, 0, 1])
    report = verify(archive.open(arc.url), deep=True)
    assert len(report.warnings) == len(lost)
    if where != "a tick":
        assert {one.object for one in report.warnings} == {key}
    with caplog.at_level(logging.WARNING):
        made = archive.open(arc.url).recover()
    assert made is not None
    wanted = {"first-2"} | ({"second-0", "second-2", "third-2"} if where == "a tick" else set())
    check(made, wanted)
    assert "objects from there on are lost" in caplog.text


def test_damage_of_an_object_is_of_no_rank_that_has_a_later_one_or_that_is_of_another_node() -> None:
    arc = fresh()
    ws = world(arc, 4, 2)
    for rank, name in ((0, "first"), (1, "damaged"), (0, "third"), (2, "far"), (3, "far")):
        add(ws[rank], name)
        ws[rank].sync()
    die(*ws)
    assert lines(arc) == {"node-00000": 3, "node-00001": 2}
    key = layout.node_key("s", 0, 1)
    data = bytearray(arc.storage.get(key))
    data[60] ^= 4  # in its index, which alone says whose ticks it has
    arc.storage.delete([key])
    arc.storage.put(key, bytes(data))
    tails = archive.open(arc.url).tails().ranks
    assert {one.rank: (one.ended, one.objects) for one in tails} == {
        0: ("missing", 2), 1: ("damaged", 0), 2: ("missing", 1), 3: ("missing", 1),
    }  # fmt: skip


def ticked_thrice() -> tuple[archive.Archive, str]:
    """An archive whose one rank has died after three ticks, tick-0-0 to tick-2-0; the key of the object of the second
    one."""
    arc = fresh()
    (w,) = world(arc, 1, 1)
    for tick in range(3):
        add(w, f"tick-{tick}")
        w.sync()
    die(w)
    return arc, layout.node_key("s", 0, 1)


def test_a_tick_that_is_there_twice_counts_once() -> None:
    """Its answer was lost, and its rank has stored it by itself; or who carried did so again."""
    arc, key = ticked_thrice()
    found = NodeObject(arc.storage.get(key), key, key)
    place = found.members[0, 1]
    arc.storage.put(layout.journal_key("s", 0, 1), arc.storage.get(key)[place.offset : place.offset + place.size])
    again = NodeIndex("main", "s", 0, 3, "0" * 16)
    arc.storage.put(again.key, b"".join(pack_node(again, {(0, 1): found.tick((0, 1))._data})[0]))
    check(recovered(arc), {f"tick-{tick}-0" for tick in range(3)})


def test_behind_an_object_that_cannot_be_read_nothing_is_stored_together() -> None:
    """It may be what ends the journal: a rank that stores by itself finds the end of its own."""
    arc = fresh()
    (w,) = world(arc, 1, 1)
    arc.storage.put(layout.node_key("s", 0, 0), b"damaged")
    add(w, "first")
    w.sync()
    assert lines(arc) == {"node-00000": 1, "rank-00000": 1}
    die(w)


def test_a_damaged_object_stays_for_the_ranks_that_may_yet_commit_what_it_has() -> None:
    """Its ticks are whole, and the ranks know where they lie: their next checkpoint has them."""
    arc = fresh()
    ws = world(arc, 2, 1)
    before = 0
    for name in ("first", "damaged", "last"):
        at, before = before, lines(arc).get("node-00000", 0)
        for w in ws:
            add(w, name)
        for w in ws:
            w.sync()
    for number in range(at, before):
        key = layout.node_key("s", 0, number)
        data = bytearray(arc.storage.get(key))
        data[40] ^= 0xFF  # in its index
        arc.storage.put(key, bytes(data))
    found = archive.open(arc.url)
    check(found.recover(), {"first-0", "first-1"})
    assert found.head.runs["main"].nodes == {0: at}
    archive.open(arc.url).prune("0s", dry_run=False, force=True)
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    die(*ws)
    now = archive.open(arc.url)
    assert now.head.runs["main"].nodes == {0: lines(arc)["node-00000"]}
    check(now.checkpoints.latest, {f"{name}-{rank}" for name in ("first", "damaged", "last") for rank in range(2)})


def test_one_damaged_answer_hides_no_tick_from_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    (w,) = world(arc, 1, 1)
    add(w, "first")
    w.sync()
    die(w)
    get_head, answers = arc.storage.get_head, [b"damaged"]
    monkeypatch.setattr(arc.storage, "get_head", lambda *given: answers.pop() if answers else get_head(*given))
    successor = ends._Successor(SimpleNamespace(storage=arc.storage, head=arc.head), Place(0, 1, "main", "new"), "s")
    assert [*successor.lying([(0, 0)], [(1, True)])] == [0]


def test_a_tick_that_is_there_twice_outlives_damage_of_one() -> None:
    arc, key = ticked_thrice()
    data = bytearray(arc.storage.get(key))
    place = NodeObject(bytes(data), key, key).members[0, 1]
    arc.storage.put(layout.journal_key("s", 0, 1), bytes(data[place.offset : place.offset + place.size]))
    data[place.offset + place.size // 2] ^= 4
    arc.storage.delete([key])
    arc.storage.put(key, bytes(data))
    check(recovered(arc), {f"tick-{tick}-0" for tick in range(3)})


def test_a_prune_keeps_what_is_awaited_and_deletes_what_nobody_needs() -> None:
    arc = fresh()
    ws = world(arc, 4, 2)
    for w in ws:
        add(w, "first")
        w.journal(progress={"at": 1})
    for w in ws:
        w.sync()
    for w in ws:
        w.journal(progress={"at": 2})  # an object without steps
    for w in ws:
        w.sync()
    looked = archive.open(arc.url)
    assert not looked.prune("0s", force=True).going
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    looked = archive.open(arc.url)
    looked.prune("0s", dry_run=False, force=True)
    assert lines(arc) == {"node-00000": 1, "node-00001": 1}, "the steps are live, what was said is in the checkpoint"
    add_all(ws, "second")
    archive.open(arc.url).prune("0s", dry_run=False, force=True)
    assert lines(arc) == {"node-00000": 2, "node-00001": 2}
    die(*ws)
    check(recovered(arc), {f"{n}-{r}" for n in ("first", "second") for r in range(4)})


def cut_apart(*, forgotten: bool) -> tuple[archive.Archive, list[archive.Writer]]:
    """Two ranks and an object with a tick of each, of which only the first one's is in the newest checkpoint; whose
    episode is no longer live if it is to be forgotten."""
    arc = fresh()
    ws = world(arc, 2, 1)
    add_all(ws, "first")
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    early = ws[1].checkpoint(2)
    add_all(ws, "late")
    assert lines(arc) == {"node-00000": 2}
    if forgotten:
        ws[0].remove(["late-0"])
    for one in (ws[0].checkpoint(2), early):
        one.result(60)
    entry = archive.open(arc.url).head.runs["main"]
    assert (entry.journal, entry.nodes) == ({0: 3 if forgotten else 2, 1: 1}, {0: 1})
    return archive.open(arc.url), ws


def pruned(arc: archive.Archive) -> archive.PrunePlan:
    return archive.open(arc.url).prune("0s", dry_run=False, force=True)


def test_what_is_forgotten_of_one_rank_takes_nothing_of_another_along() -> None:
    arc, ws = cut_apart(forgotten=True)
    arc.forget(archive.Keep(last=1), ids=["late-0"], dry_run=False)
    plan = pruned(arc)
    assert "journaled, and not in a checkpoint yet" in str(plan)
    assert not [one.key for one in plan.going if one.key == layout.node_key("s", 0, 1)]
    for w in ws:  # and once it is awaited no more, it goes
        add(w, "third")
        w.sync()
    ck = recovered(arc)
    check(ck, {"first-0", "first-1", "late-1", "third-0", "third-1"})
    for w in ws:
        w.remove([f"{name}-{w.rank}" for name in ("first", "third")])
    ws[1].remove(["late-1"])
    for one in [w.checkpoint(3) for w in ws]:
        one.result(60)
    die(*ws)
    archive.open(arc.url).forget(archive.Keep(last=1), ids=["late-1"], dry_run=False)
    pruned(arc)
    assert layout.node_key("s", 0, 1) not in {one.key for one in arc.storage.scan("journal")}


def test_a_forgotten_object_that_is_awaited_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier forgetting may have listed it."""
    from archive.maintain import draft

    arc, ws = cut_apart(forgotten=True)

    def listed(storage: Any, head: Any, before: Any, after: Any) -> dict[str, int]:
        return dict.fromkeys({key for key in before if not key.endswith(layout.PRUNED)}.difference(after), 1)

    monkeypatch.setattr(draft, "no_longer", listed)
    arc.forget(archive.Keep(last=1), ids=["late-0"], dry_run=False)
    pruned(arc)
    die(*ws)
    check(recovered(arc), {"first-0", "first-1", "late-1"})


def test_a_compaction_and_a_prune_leave_what_is_awaited() -> None:
    arc, ws = cut_apart(forgotten=False)
    resharding.compact(arc)
    archive.open(arc.url).forget(archive.Keep(last=1), dry_run=False)
    pruned(arc)
    die(*ws)
    check(recovered(arc), {f"{name}-{rank}" for name in ("first", "late") for rank in range(2)})


@pytest.mark.parametrize("alive", [True, False])
def test_a_redaction_takes_no_tick_along_that_is_awaited(alive: bool) -> None:
    """Objects of a node are looked through for steps that no row names, of forgotten episodes; as are those that no row
    names yet."""
    arc = fresh()
    ws = world(arc, 2, 1)
    for w in ws:
        for name in ("gone", "forgotten", "kept"):
            add(w, name)
    for w in ws:
        w.sync()
    for w in ws:
        w.remove([f"gone-{w.rank}", f"forgotten-{w.rank}"])
    for step in (1, 2):
        for one in [w.checkpoint(step) for w in ws]:
            one.result(60)
    archive.open(arc.url).forget(archive.Keep(last=1), ids=["forgotten-0"], dry_run=False)
    add_all(ws, "late")
    ws[0].commit()
    if not alive:
        die(*ws)
    archive.open(arc.url).forget(archive.Keep(last=1), ids=["gone-0"], dry_run=False, redact=True)
    assert any(shard.startswith("journal/") for shard in archive.open(arc.url).shards), "it was not rewritten"
    pruned(arc)
    if alive:
        for w in ws:
            add(w, "last")
            w.sync()
        die(*ws)
    check(recovered(arc), {f"{n}-{r}" for n in ("kept", "late", *(["last"] if alive else [])) for r in range(2)})
    left = [arc.storage.get(one.key) for one in arc.storage.scan("") if one.key.startswith(("journal/", "shards/"))]
    assert not [data for data in left if b"gone-0" in data or b"forgotten-0" in data]


def test_what_is_to_be_redacted_but_lies_beside_what_is_awaited_is_an_obstacle() -> None:
    arc, ws = cut_apart(forgotten=True)
    with pytest.raises(archive.UsageError, match="has journaled since its newest checkpoint names some of them"):
        arc.forget(archive.Keep(last=1), ids=["late-0"], dry_run=False, redact=True)
    die(*ws)
    check(recovered(arc), {"first-0", "first-1", "late-1"})


@pytest.mark.parametrize(
    ("seed", "rounds"), [(0, 2), *(pytest.param(seed, 4, marks=pytest.mark.soak) for seed in range(1, 4))]
)
def test_whatever_is_forgotten_redacted_or_compacted_no_tail_changes(seed: int, rounds: int) -> None:
    """In any order, with prunes between, and checkpoints whose ranks are cut before and after a tick."""
    rng, arc = np.random.default_rng(seed), fresh()
    ws = world(arc, 3, 1)
    live: list[list[str]] = [[] for _ in ws]

    def tick(name: str) -> None:
        for w in ws:
            live[w.rank].append(add(w, name))
            if len(live[w.rank]) > 2 and rng.integers(0, 2):
                w.remove([live[w.rank].pop(int(rng.integers(0, 2)))])
        for w in ws:
            w.sync()

    def save(step: int) -> None:
        order = [ws[at] for at in rng.permutation(3)]
        pending = [w.checkpoint(step) for w in order[:1]]
        tick(f"between-{step}")
        for one in [w.checkpoint(step) for w in order[1:]] + pending:
            one.result(60)

    def look_after() -> None:
        now = archive.open(arc.url)
        before = {one.rank: one.held.table("segments")["episode_id"].to_pylist() for one in now.tails().ranks}
        gone = sorted(names(now) - {name for of in live for name in of})
        some = [one for one in gone if rng.integers(0, 2)]
        verb = int(rng.integers(0, 3))
        with contextlib.suppress(archive.ConflictError, archive.UsageError):  # what cannot go yet
            if verb == 2:
                resharding.compact(now)
            elif some:
                now.forget(archive.Keep(last=1), ids=some, dry_run=False, redact=verb == 1)
        pruned(arc)
        after = {
            one.rank: one.held.table("segments")["episode_id"].to_pylist()
            for one in archive.open(arc.url).tails().ranks
        }
        assert after == before

    for step in range(1, rounds + 1):
        tick(f"tick-{step}")
        save(step)
        tick(f"after-{step}")
        if rng.integers(0, 2):
            ws[int(rng.integers(0, 3))].commit()
        look_after()
    die(*ws)
    check(recovered(arc), {name for of in live for name in of})


# -- what else leads to them -------------------------------------------------------------------------------------------


def saved(ticks: int = 2) -> archive.Archive:
    """An archive whose steps lie in objects of nodes, with a checkpoint."""
    arc = fresh()
    ws = world(arc, 4, 2)
    for tick in range(ticks):
        for w in ws:
            add(w, f"tick-{tick}")
        for w in ws:
            w.sync()
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    die(*ws)
    return archive.open(arc.url)


EVERY = {f"tick-{tick}-{rank}" for tick in range(2) for rank in range(4)}


@pytest.mark.parametrize("copy", [False, True])
def test_other_archives_refer_to_them_or_copy_them(copy: bool) -> None:
    arc, url = saved(), f"memory://{uuid.uuid4().hex}"
    resharding.merge([arc.url], to=url, copy=copy)
    other = archive.open(url, allow_bases=[arc.url])
    check(other.checkpoints.latest or other, EVERY)
    assert names(other) == EVERY
    pins = [json.loads(arc.storage.get(one.key))["objects"] for one in arc.storage.scan("pins")]
    assert bool(pins) != copy
    assert {key for of in pins for key in of if key.startswith("journal/")} == (
        set() if copy else {layout.node_key("s", n, i) for n in range(2) for i in range(2)}
    )
    if copy:
        resharding.merge([arc.url], to=url, copy=True)  # nothing is there twice
        assert lines(other) == {"node-00000": 2, "node-00001": 2}
        assert verify(other, deep=True).sound


def test_they_are_compacted() -> None:
    arc = saved(ticks=6)
    resharding.compact(arc)
    arc = archive.open(arc.url)
    check(arc.checkpoints.latest, {f"tick-{tick}-{rank}" for tick in range(6) for rank in range(4)})
    assert not any(shard.startswith("journal/") for shard in arc.shards)
    assert verify(arc, deep=True).sound


@pytest.mark.parametrize("earlier", [False, True])
def test_a_redaction_leaves_no_object_with_what_is_gone(earlier: bool) -> None:
    """Also where a forgetting has left steps in an object that others lie in, too."""
    arc = fresh()
    ws = world(arc, 4, 2)
    for tick in range(2):
        for w in ws:
            add(w, f"tick-{tick}")
        for w in ws:
            w.sync()
    for w in ws:
        w.remove([f"tick-0-{w.rank}"])
    for one in [w.checkpoint(1) for w in ws]:
        one.result(60)
    die(*ws)
    share = resharding.plan(archive.open(arc.url).checkpoints.latest, world_size=1).share(0)
    with archive.open(arc.url).writer(resume=share, session="next") as w:
        w.checkpoint(2, wait=True)
    arc = archive.open(arc.url)
    gone = ["tick-0-1", "tick-0-2"]
    if earlier:
        arc.forget(ids=gone[:1], dry_run=False)
        arc = archive.open(arc.url)
    arc.forget(archive.Keep(last=1), ids=gone[earlier:], dry_run=False, redact=True)
    arc = archive.open(arc.url)
    assert names(arc) == EVERY - {*gone}
    check(arc.checkpoints.latest, {f"tick-1-{r}" for r in range(4)})
    arc.prune("0s", dry_run=False, force=True)
    left = [arc.storage.get(one.key) for one in arc.storage.scan("") if one.key.startswith(("journal/", "shards/"))]
    assert not [name for name in gone for data in left if name.encode() in data]
    assert {key for key in map(layout.object_of, archive.open(arc.url).shards) if key.startswith("journal/")} == {
        layout.node_key("s", n, 1) for n in range(2)
    }
    assert verify(archive.open(arc.url), deep=True).sound


def test_the_format_document_is_enough_to_read_them(tmp_path: Path) -> None:
    """By a reader that knows nothing of this library: tails in objects of nodes, and what a checkpoint has of such."""
    arc = archive.create(str(tmp_path / "a"))
    ws = world(arc, 4, 2)
    for name in ("saved", "beyond"):
        for w in ws:
            add(w, name)
        for w in ws:
            w.sync()
        if name == "saved":
            for one in [w.checkpoint(1, progress={}) for w in ws]:
                one.result(60)
    die(*ws)
    found = format_journal.read(tmp_path / "a")
    assert set(found["episodes"]) == {f"saved-{rank}" for rank in range(4)}
    tails = found["tails"]["main"]
    assert {rank: [*one["episodes"]] for rank, one in tails.items()} == {str(r): [f"beyond-{r}"] for r in range(4)}
    assert all((one["from"], one["next"]) == (1, 2) for one in tails.values())
