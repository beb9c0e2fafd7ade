"""What a writer with `journal_s=` was given is durable at each tick, by one object, before any commit."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import layout
from archive.checkpoint import saver
from tests.support import format_reader
from tests.support.archives import contents, fresh, identical, reopened
from tests.support.backends import Backend
from tests.support.processes import until
from tests.support.ticks import NEVER_S, group, journal, steps


def test_a_tick_is_one_create_and_nothing_else(backend: Backend) -> None:
    arc = archive.create(backend.url, storage_options=backend.storage_options)
    w = arc.writer(journal_s=NEVER_S)
    for i in range(3):
        before = arc.io_stats()
        ids = [w.add_episode(steps(4, 10 * i + k)) for k in range(3)]
        w.journal(attributes={"status": {ids[0]: "new"}})
        w.sync()
        done = arc.io_stats() - before
        assert (done.create, done.put, done.get, done.list, done.head, done.delete) == (1, 0, 0, 0, 0, 0)
    objects = journal(arc, w.session)
    assert [one.index.number for one in objects] == [0, 1, 2]
    assert [one.index.rows for one in objects] == [{"segments": 3}] * 3
    assert [one.index.sequence for one in objects] == [3, 6, 9]
    assert not any(one.index.goes_on for one in objects)
    assert len(archive.open(backend.url, storage_options=backend.storage_options).episodes) == 0
    w.close()
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    assert len(arc.episodes) == 9
    assert all(key.startswith("journal/") for key in arc.shards)
    assert [e.read()["obs"].tolist() for e in arc.episodes][4] == [11, 12, 13, 14]


def test_what_is_added_is_durable_by_itself_and_read_back_without_a_commit() -> None:
    arc = fresh()
    w = arc.writer(journal_s=0.2)
    began = time.monotonic()
    w.add_episode(steps(5), episode_id="a")
    assert 0 < w.durable_until.seconds_behind <= time.monotonic() - began
    until(lambda: not w.durable_until.seconds_behind)
    state = w.durable_until
    assert (state.positions, state.number, state.pending_bytes) == ({("replay", -1): 5}, 1, 0)
    assert repr(state) == "<durable: all, next object 1>"
    table = journal(arc, w.session)[0].table("segments")
    assert table["episode_id"].to_pylist() == ["a"]
    found = group(arc, w.session, 0)
    np.testing.assert_array_equal(found["obs"][:], np.arange(5, dtype=np.float32))
    w.close()


def test_a_commit_and_a_checkpoint_upload_no_step_again() -> None:
    arc = fresh()
    big = {"x": np.random.default_rng(0).integers(0, 255, (200, 2000), np.uint8).astype(np.uint8)}
    w = arc.writer(journal_s=NEVER_S)
    for _ in range(5):
        w.add_episode(big)
    w.sync()
    before = arc.io_stats()
    w.commit()
    assert (arc.io_stats() - before).bytes_out < 64 * 1024
    w.add_episode(big)
    ck = w.checkpoint(1, columns={"p": np.zeros(1200)}).result()
    assert arc.head.runs["main"].journal == {0: 2}
    for _ in range(20):
        w.add_episode(big)
        w.sync()
    before = arc.io_stats()
    again = w.checkpoint(2, columns={"p": np.zeros(5200)}).result()
    assert (arc.io_stats() - before).bytes_out < 64 * 1024
    assert arc.head.runs["main"].journal == {0: 22}
    w.close()
    assert not any(found.key.startswith("shards/") for found in arc.storage.scan(""))
    assert (len(ck.episodes), len(again.episodes)) == (6, 26)
    assert all(identical(e.read(), big) for e in reopened(arc).episodes)


def test_a_checkpoint_takes_the_number_of_its_cut_and_not_of_later_ticks() -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.checkpoint(0).result()
        assert arc.head.runs["main"].journal == {0: 0}
        w.add_episode(steps(2))
        pending = w.checkpoint(1)
        w.add_episode(steps(2))
        w.sync()
        pending.result()
        assert arc.head.runs["main"].journal == {0: 1}
        assert w.durable_until.number == 2
        w.checkpoint(2, save_replay=False).result()
        assert arc.head.runs["main"].journal == {0: 1}
        w.checkpoint(3).result()
        assert arc.head.runs["main"].journal == {0: 2}


def test_a_commit_does_not_move_where_a_tail_begins() -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(2))
        w.commit()
        assert arc.head.runs["main"].journal == {0: 0}
        assert len(arc.episodes) == 1


def test_ranks_say_together_whether_there_is_a_journal() -> None:
    arc = fresh()
    plain = arc.writer(rank=0, world_size=2, session="s")
    assert arc.head.runs["main"].journal is None
    assert layout.JOURNAL not in arc.head.format["features"]
    kept = arc.writer(rank=1, world_size=2, session="s", journal_s=NEVER_S)
    assert arc.head.kind == "session"
    assert (arc.head.runs["main"].journal, arc.head.format["features"]) == ({0: 0, 1: 0}, ["journal"])
    plain.add_episode(steps(1))
    kept.add_episode(steps(2))
    kept.sync()
    assert len(journal(arc, "s", 1)) == 1
    pendings = [w.checkpoint(1) for w in (plain, kept)]
    assert pendings[0].result().number == pendings[1].result().number
    assert arc.refresh().head.runs["main"].journal == {0: 0, 1: 1}
    plain.close()
    kept.close()
    arc.writer(session="t").close()
    assert arc.head.runs["main"].journal is None


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "2", True, float("inf")])
def test_nonsense_is_refused_before_anything_is_opened(wrong: Any) -> None:
    arc = fresh()
    with pytest.raises(archive.UsageError, match="journal_s="):
        arc.writer(journal_s=wrong)
    assert arc.refresh().head.number == 0


def test_without_a_journal_its_verbs_say_what_is_missing() -> None:
    with fresh().writer() as w:
        for call in (w.sync, lambda: w.durable_until, lambda: w.journal(progress=1)):
            with pytest.raises(archive.UsageError, match="journal_s="):
                call()
        with w.together():
            w.add_episode(steps(1))


def test_packed_objects_also_where_shards_are_folders(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a", layout="directory")
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(3), episode_id="a")
        w.sync()
        w.checkpoint(1).result()
    assert reopened(arc).shards == [f"journal/{w.session}/rank-00000/000000000.zip"]
    assert identical(contents(arc)["a"], steps(3))
    with reopened(arc).writer() as w:
        w.add_episode(steps(3), episode_id="b")
    assert identical(contents(arc)["b"], steps(3))


def test_several_buffers_and_schemas_make_one_tick_of_several_objects() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    with w.together():
        w.add_episode(steps(3), episode_id="a")
        w.add_episode({"text": np.array(["x", "y"])}, episode_id="b")
        w.buffer("demo").add_episode(steps(2), episode_id="c")
        w.append(steps(4), env_ids=2, first=True)
        w.close_episodes([2])
        w.evict(2, before=1)
    w.sync()
    objects = journal(arc, w.session)
    assert [one.index.goes_on for one in objects] == [True, True, False]
    assert [bool(one.index.gone) for one in objects] == [False, False, True]
    assert sum(one.index.rows.get("segments", 0) for one in objects) >= 4
    (tail,) = arc.refresh().tails().ranks
    assert "is not complete" not in tail.why
    key = layout.journal_key(w.session, 0, 2)
    last = arc.storage.get(key)
    arc.storage.delete([key])
    (tail,) = arc.refresh().tails().ranks
    assert (tail.steps, "the tick that begins with number 0 is not complete" in tail.why) == (0, True)
    arc.storage.put(key, last)
    w.close()
    assert sorted(e.length for e in reopened(arc).episodes) == [2, 2, 3, 4]


def test_what_is_said_together_is_in_one_tick() -> None:
    arc = fresh()
    w = arc.writer(journal_s=0.05)
    for i in range(5):
        with w.together():
            w.add_episode(steps(2, i), episode_id=f"a{i}")
            threading.Event().wait(0.12)
            w.journal(attributes={"status": {f"a{i}": i}})
    w.sync()
    for one in journal(arc, w.session):
        ids = set(one.table("segments")["episode_id"].to_pylist())
        said = one.index.attributes.get("replay", {}).get("status", "{}")
        assert all(name in said for name in ids)
    w.close()


def test_a_full_slab_comes_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.write.slabs.SHARD_BYTES", 4000)
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for i in range(30):
        w.add_episode(steps(40, i))
    until(lambda: len(journal(arc, w.session)) > 0)
    w.close()
    assert len(reopened(arc).episodes) == 30
    assert journal(arc, w.session)[-1].index.sequence == 30


def test_a_call_that_is_larger_than_memory_allows_is_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.write.slabs.SHARD_BYTES", 20_000)
    monkeypatch.setattr("archive.write.changes.MAX_HELD_BYTES", 40_000)
    monkeypatch.setattr("archive.write.pipeline.MAX_UNDER_WAY_BYTES", 30_000)
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    with w.together():
        w.append({"x": np.arange(20_000, dtype=np.float64)}, env_ids=0, first=True, last=True)
        until(lambda: len(journal(arc, w.session)) > 1)
        assert all(one.index.goes_on for one in journal(arc, w.session))
        assert w.durable_until.seconds_behind > 0
    w.sync()
    objects = journal(arc, w.session)
    assert len(objects) > 5
    assert [one.index.goes_on for one in objects] == [True] * (len(objects) - 1) + [False]
    w.close()
    assert reopened(arc).episodes[0].read()["x"].tolist() == list(range(20_000))


def test_ticks_go_on_while_others_add_without_a_pause() -> None:
    arc = fresh()
    w = arc.writer(journal_s=0.1)
    stop = time.monotonic() + 60
    count = 0
    while count % 200 or len(journal(arc, w.session)) < 3:
        assert time.monotonic() < stop
        w.add_episode(steps(2, count))
        count += 1
    w.close()
    assert len(reopened(arc).episodes) == count


def test_the_rows_of_many_ticks_are_kept_as_one_and_those_of_a_checkpoint_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("archive.write.pipeline.FOLD_FROM", 4)
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    staged = threading.Event()
    stage = saver.stage
    monkeypatch.setattr(saver, "stage", lambda *given, **more: staged.wait(20) and stage(*given, **more))
    pending = None
    for i in range(60):
        w.add_episode(steps(2, i), episode_id=f"e{i:02}")
        w.sync()
        if i == 20:
            assert len(w._pipeline._works) < 12
            pending = w.checkpoint(1)
    assert pending is not None
    staged.set()
    ck = pending.result()
    assert ck.episodes.table["episode_id"].to_pylist() == [f"e{i:02}" for i in range(21)]
    assert arc.head.runs["main"].journal == {0: 21}
    w.close()
    found = reopened(arc).episodes
    assert [e.id for e in found] == [f"e{i:02}" for i in range(60)]
    assert [e.read()["obs"].tolist() for e in found] == [[i, i + 1] for i in range(60)]


def test_what_a_ledger_is_told_lies_with_its_episodes() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    ledger = w.ledger("prompts")
    ledger.draw(["p", "q"])
    with w.together():
        ledger.start("p")
        w.add_episode(steps(2), episode_id="a")
        ledger.seal("p", episode_id="a")
    w.sync()
    (one,) = journal(arc, w.session)
    assert one.index.rows["segments"] == 1
    rows = one.table("ledger").to_pylist()
    assert [row["state"] for row in rows if row["key"] == '"p"'][-1] == "sealed"
    assert [row["state"] for row in rows if row["key"] == '"q"'] == ["drawn"]
    numbers = [row["sequence"] for row in rows] + one.table("segments")["sequence"].to_pylist()
    assert sorted(set(numbers)) == list(range(one.index.sequence))
    w.close()
    assert len(reopened(arc).episodes) == 1


def test_the_document_is_enough_to_read_what_was_journaled(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(3), episode_id="a")
        w.sync()
        w.journal(columns={"priority": {"a": [1.0, 2.0, 3.0]}})
        w.add_episode(steps(2, 7), episode_id="b")
        w.checkpoint(1, progress={"n": 1}).result()
    read = format_reader.read(tmp_path / "a")["episodes"]
    wanted = {"a": steps(3), "b": steps(2, 7)}
    assert {n: e["fields"]["obs"]["data"] for n, e in read.items()} == {
        n: given["obs"].tobytes().hex() for n, given in wanted.items()
    }
