"""What fails is kept and said, memory is bounded, and no thread or half object is left by forks, exceptions, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import AmbiguousWriteError, NotDurableError, SessionInUseError, StorageError
from archive.store import Storage
from tests.support.archives import fresh, reopened
from tests.support.processes import until
from tests.support.ticks import NEVER_S, journal, steps


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[str], None]]:
    """What "before" and "after" do is done around each create-only put of an object of a journal."""
    hooks: dict[str, Callable[[str], None]] = {}
    create = Storage.create

    def watched(self: Storage, key: str, data: Any) -> None:
        for_journal = key.startswith("journal/")
        if for_journal and "before" in hooks:
            hooks["before"](key)
        create(self, key, data)
        if for_journal and "after" in hooks:
            hooks["after"](key)

    monkeypatch.setattr(Storage, "create", watched)
    return hooks


def refuse(key: str) -> None:
    raise StorageError(f"no space for {key}; free some")


def test_an_error_of_what_is_followed_is_told_to_who_calls_and_the_next_tick_takes_it_in() -> None:
    arc, fails, taken = fresh(), list[Exception](), list[str]()

    def take_in(w: archive.Writer) -> None:
        if fails:
            raise fails.pop()
        taken.append(w.add_episode(steps(1)))

    w = arc.writer(journal_s=0.05)
    w.follow("it", take_in)
    w.sync()  # takes it in, too: in this thread, which raises errors all the same afterwards
    fails.append(ValueError("not ready"))
    until(lambda: not fails)
    there = len(taken)
    until(lambda: len(taken) > there + 1)
    with pytest.raises(ValueError, match="not ready"):
        w.add_episode(steps(1))
    w.sync()
    assert sum(len(one.table("segments")) for one in journal(arc, w.session)) >= there + 2
    w.close()


def left_by_an_exception(w: Any) -> None:
    with pytest.raises(ZeroDivisionError), w:
        raise ZeroDivisionError


def journal_threads(before: Collection[threading.Thread] = ()) -> list[threading.Thread]:
    """Those of journals, but for those that were there before: other tests' writers may still be there."""
    return [one for one in threading.enumerate() if one.name == "archive-journal" and one not in before]


def test_what_could_not_be_stored_is_kept_said_and_tried_again(store: dict[str, Any]) -> None:
    arc = fresh()
    w = arc.writer(journal_s=0.1)
    store["before"] = refuse
    w.add_episode(steps(2), episode_id="a")
    with pytest.raises(StorageError, match="free some"):
        w.sync()
    until(lambda: w._pipeline.failure() is not None)
    with pytest.raises(StorageError, match="free some"):
        w.add_episode(steps(2), episode_id="refused")
    assert w.durable_until.positions == {}
    assert w.durable_until.seconds_behind > 0
    assert journal(arc, w.session) == []
    store.clear()
    until(lambda: w.durable_until.seconds_behind == 0)  # without anybody asking
    w.add_episode(steps(3), episode_id="b")
    w.close()
    assert {e.id: e.length for e in reopened(arc).episodes} == {"a": 2, "b": 3}
    assert [one.index.number for one in journal(arc, w.session)] == [0, 1]


def test_durability_advances_without_holes(store: dict[str, Any]) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    go = threading.Event()

    def slow(key: str) -> None:
        if key.endswith("000000000.zip"):
            go.wait(20)

    store["before"] = slow
    w.add_episode(steps(2))
    with w.together():
        w._send()
    w.add_episode(steps(3))
    with pytest.raises(NotDurableError, match=r"not durable within 0\.5 s: .* behind, object 2 of the journal is next"):
        w.sync(timeout_s=0.5)
    assert not arc.storage.exists(f"journal/{w.session}/rank-00000/000000000.zip")
    assert w.durable_until.positions == {}
    assert w.durable_until.number == 2
    go.set()
    assert w.sync().positions == {("replay", -1): 5}
    w.close()


def test_an_answer_that_was_lost_is_found_out(store: dict[str, Any]) -> None:
    lost: list[str] = []

    def lose(key: str) -> None:
        if not lost:
            lost.append(key)
            raise AmbiguousWriteError("no answer")

    store["after"] = lose
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(2))
        assert w.sync().number == 1
    assert lost
    assert len(reopened(arc).episodes) == 1


def test_another_writer_of_the_same_rank_is_noticed() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    arc.storage.create(f"journal/{w.session}/rank-00000/000000000.zip", b"another's")
    w.add_episode(steps(2))
    with pytest.raises(SessionInUseError, match="another process writes"):
        w.sync()
    with pytest.raises(SessionInUseError):
        w.close()
    assert len(reopened(arc).episodes) == 0


def test_who_adds_waits_while_the_store_does_not_take_more(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archive.write.slabs.SHARD_BYTES", 20_000)
    monkeypatch.setattr("archive.write.pipeline.MAX_UNDER_WAY_BYTES", 200_000)
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    go, added = threading.Event(), []
    store["before"] = lambda key: go.wait(20)

    def add() -> None:
        for i in range(40):
            w.add_episode({"x": np.full(1000, i, np.float64)})
            added.append(i)

    thread = threading.Thread(target=add)
    thread.start()
    until(lambda: len(added) > 3)
    thread.join(0.5)
    assert thread.is_alive()
    assert len(added) * 32_000 < 300_000  # with 24 bytes a step beside its own
    go.set()
    thread.join()
    w.close()
    assert len(reopened(arc).episodes) == 40


def test_an_exception_commits_nothing_but_journals_what_is_pending(caplog: pytest.LogCaptureFixture) -> None:
    arc, before = fresh(), journal_threads()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(steps(2), episode_id="a")
    left_by_an_exception(w)
    assert len(reopened(arc).episodes) == 0
    assert journal(arc, w.session)[0].table("segments")["episode_id"].to_pylist() == ["a"]
    assert not caplog.records
    until(lambda: not journal_threads(before))


def test_an_exception_is_not_hidden_by_a_store_that_fails(
    store: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    store["before"] = refuse
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(steps(2), episode_id="a")
    left_by_an_exception(w)
    assert "could not be flushed" in caplog.text


def test_the_thread_ends_with_the_writer_and_with_who_forgets_it() -> None:
    arc, before = fresh(), journal_threads()
    w = arc.writer(journal_s=1.0)
    assert len(journal_threads(before)) == 1
    w.close()
    assert not journal_threads(before)
    forgotten = arc.writer(journal_s=1.0)
    del forgotten
    import gc

    gc.collect()
    until(lambda: not journal_threads(before))


def test_a_forked_child_writes_nothing_and_the_parent_goes_on() -> None:
    arc = fresh()
    w = arc.writer(journal_s=0.2)
    w.add_episode(steps(1), episode_id="a")
    pid = os.fork()
    if pid == 0:
        code = 0
        for call in (lambda: w.add_episode(steps(1)), lambda: w.sync(), lambda: w.durable_until):
            try:
                call()
            except archive.UsageError:
                code += 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    until(lambda: len(journal(arc, w.session)) == 1)
    w.add_episode(steps(1), episode_id="b")
    w.close()
    assert sorted(e.id for e in reopened(arc).episodes) == ["a", "b"]


def run(code: str, root: Path) -> subprocess.Popen[str]:
    head = (
        "import sys, os, archive, numpy as np\nfrom tests.support.ticks import steps\narc = archive.open(sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), str(root)], stdout=subprocess.PIPE, text=True
    )


def test_an_interpreter_that_ends_without_a_commit_journals_the_rest(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    code = """
    w = arc.writer(journal_s=60.0, session="s")
    w.add_episode(steps(3), episode_id="a")
    """
    with run(code, tmp_path / "a") as child:
        assert child.wait(60) == 0
    assert [one.index.rows for one in journal(arc, "s")] == [{"segments": 1}]


def test_a_killed_process_has_lost_no_more_than_the_time_it_was_given(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    code = """
    w = arc.writer(journal_s=0.2, session="s")
    for i in range(10**9):
        w.add_episode(steps(50, i), episode_id=f"e{i}")
        print(i, w.durable_until.positions.get(("replay", -1), 0) // 50, flush=True)
    """
    with run(code, tmp_path / "a") as child:
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if int(line.split()[1]) > 300:
                break
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.readlines()
    said_durable = int([line for line in lines if line.endswith("\n")][-1].split()[1])
    ids = [i for one in journal(arc, "s") for i in one.table("segments")["episode_id"].to_pylist()]
    assert ids == [f"e{i}" for i in range(len(ids))]
    assert len(ids) >= said_durable > 300
