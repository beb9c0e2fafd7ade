"""Saving in the background: what was copied stays as it was, every error is seen once, nothing is lost at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import DeadlineError, RanksMissingError, StorageError, StorageFullError
from archive.checkpoint.pending import PHASES, Bar, on_terminal
from archive.store.storage import Storage
from tests.support.archives import fresh, reopened
from tests.support.backends import Backend
from tests.support.checkpoints import serials, steps, value_of
from tests.support.places import ROOT


class Gate:
    """Holds up, or breaks, the writing of objects whose key contains a text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
        self.open, self.reached, self.wanted = threading.Event(), threading.Event(), wanted
        self.error: Exception | None = None
        for verb in ("put", "put_fresh", "create"):
            monkeypatch.setattr(Storage, verb, self._guarded(getattr(Storage, verb)))

    def _guarded(self, real: Any) -> Any:
        def write(storage: Storage, key: str, data: Any) -> None:
            if self.wanted in key:
                self.reached.set()
                if self.error is not None:
                    raise self.error
                assert self.open.wait(20)
            real(storage, key, data)

        return write


def test_what_is_mutated_after_the_call_is_saved_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "shards/")
    arc = fresh()
    with arc.writer() as w:
        data, priority = steps(range(50)), value_of(range(50))
        state: dict[str, Any] = {"rng": np.arange(4), "list": [1]}
        tags: dict[str, dict[str, Any]] = {"tag": {"a": 1}}
        progress, lost = {"done": [1]}, [1]
        w.add_episode(data, episode_id="a")
        pending = w.checkpoint(
            1, columns={"p": priority}, state=state, attributes=tags, progress=progress, unconsumed=lost
        )
        assert not pending.done()
        data["serial"][:], data["obs"]["image"][:], priority[:], state["rng"][:] = -1, -1, -1, -1
        for given in (state["list"], progress["done"], lost):
            given.append(2)
        tags["tag"].clear()
        w.append(steps([50]), env_ids=0)
        w.remove("a")
        gate.open.set()
        pending.result()
    ck = reopened(arc).checkpoints["step-1"]
    assert serials(ck) == list(range(50))
    assert (ck.column("p", 0) == value_of(range(50))).all()
    got = ck.state(0)
    assert (got["rng"].tolist(), got["list"]) == ([0, 1, 2, 3], [1])
    assert ck.episodes["a"].attributes == {"tag": 1}
    assert (ck.progress, ck.unconsumed) == ({"done": [1]}, [1])


def test_durable_is_the_step_of_the_newest_that_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with arc.writer() as w:
        first = w.checkpoint(10)
        first.result()
        gate = Gate(monkeypatch, "states/")
        second = w.checkpoint(20)
        assert gate.reached.wait(20)
        assert (second.done(), second.durable, first.durable) == (False, 10, 10)
        with pytest.raises(
            DeadlineError, match=r"'step-20' is not committed after 0 s; it goes on .* call result\(\) again"
        ):
            second.result(0.05)
        gate.open.set()
        assert second.result().step == 20
        assert second.durable == 20


@pytest.mark.parametrize("part", ["shards/", "states/", "manifest/", "commits/"])
def test_a_failure_surfaces_at_result_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(5)), env_ids=0)
        with monkeypatch.context() as patch:
            Gate(patch, part).error = StorageFullError("no space left; free some")
            pending = w.checkpoint(1, columns={"p": value_of(range(5))})
            with pytest.raises(StorageFullError, match="no space left"):
                pending.result()
            with pytest.raises(StorageFullError, match="no space left"):
                pending.result()
        if part != "shards/":
            w.append(steps(range(5, 8)), env_ids=0)  # seen already: not raised again
        w.checkpoint(2, columns={"p": value_of(w_live(w))}).result()
    latest = reopened(arc).checkpoints.latest
    assert latest is not None
    assert serials(latest) == list(range(5 if part == "shards/" else 8))
    assert (latest.column("p", 0) == value_of(serials(latest))).all()
    assert len(reopened(arc).checkpoints) == 1


def w_live(w: archive.Writer) -> range:
    return range(sum(w.live["length"].to_pylist()))


@pytest.mark.parametrize("verb", ["append", "checkpoint", "commit", "flush"])
def test_a_failure_that_nobody_asked_for_surfaces_at_the_next_call_once(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(3)), env_ids=0)
        with monkeypatch.context() as patch:
            Gate(patch, "states/").error = StorageFullError("no space left; free some")
            pending = w.checkpoint(1)
            while not pending.done():
                time.sleep(0.01)
        calls = {"append": lambda: w.append(steps([9]), env_ids=0), "checkpoint": lambda: w.checkpoint(2)}
        call = calls.get(verb) or getattr(w, verb)
        with pytest.raises(StorageFullError):
            call()
        call()
        serial = serials(w.checkpoint(3).result())
    assert serial == [0, 1, 2] + [9] * (verb == "append")


def test_a_failed_checkpoint_is_noted_on_the_error_that_ends_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    Gate(monkeypatch, "states/").error = StorageFullError("no space left; free some")

    def ends_badly() -> None:
        with arc.writer() as w:
            w.checkpoint(1)
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        ends_badly()
    assert caught.value.__notes__ == ["a checkpoint that was under way failed too: no space left; free some"]


def test_leaving_the_block_waits_for_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    gate = Gate(monkeypatch, "states/")
    threading.Timer(0.2, gate.open.set).start()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        w.checkpoint(1)
    assert serials(reopened(arc).checkpoints["step-1"]) == [1]


def test_missing_ranks_are_named_and_asking_again_completes() -> None:
    arc = fresh()
    writers = [arc.writer(r, 4, session="s") for r in (0, 1, 3)]
    writers[0].append(steps([0]), env_ids=0)
    pendings = [w.checkpoint(1, timeout_s=0.3) for w in writers]
    for pending in pendings:
        with pytest.raises(RanksMissingError, match="rank 2 of 4 has not staged; nothing was committed"):
            pending.result()
    assert len(reopened(arc).checkpoints) == 0
    late = arc.writer(2, 4, session="s")
    late.append(steps([2]), env_ids=0)
    pendings.append(late.checkpoint(1, timeout_s=20))
    numbers = {p.result(20).number for p in pendings}
    assert len(numbers) == 1
    assert serials(reopened(arc).checkpoints["step-1"]) == [0, 2]
    for w in (*writers, late):
        w.close()


def test_an_error_is_raised_before_the_wait_is_taken_up_again() -> None:
    arc = fresh()
    one, two = (arc.writer(r, 2, session="s") for r in (0, 1))
    pending = one.checkpoint(1, timeout_s=0.05)
    while not pending.done():
        time.sleep(0.01)
    other = two.checkpoint(1, timeout_s=20)
    with pytest.raises(RanksMissingError):
        pending.result()
    assert pending.result(20).number == other.result().number
    one.close()
    two.close()


def test_rows_written_since_a_late_checkpoint_are_not_taken_for_committed() -> None:
    arc = fresh()
    one, two = (arc.writer(r, 2, session="s") for r in (0, 1))
    one.append(steps([0]), env_ids=0)
    first = one.checkpoint(1, timeout_s=0.05)
    with pytest.raises(RanksMissingError):
        first.result()
    one.append(steps([1]), env_ids=0)
    one.flush()
    two.checkpoint(1, timeout_s=20)
    assert serials(first.result(20)) == [0]
    one.append(steps([2]), env_ids=0)
    pendings = [w.checkpoint(2, timeout_s=20) for w in (one, two)]
    assert [serials(p.result()) for p in pendings] == [[0, 1, 2]] * 2
    one.close()
    two.close()


def test_a_late_rank_cannot_complete_an_older_checkpoint_after_a_newer() -> None:
    arc = fresh()
    one, two = (arc.writer(r, 2, session="s") for r in (0, 1))
    with pytest.raises(RanksMissingError):
        one.checkpoint(1, timeout_s=0.05).result()
    newer = [w.checkpoint(2, timeout_s=20) for w in (one, two)]
    assert [p.result().step for p in newer] == [2, 2]
    late = two.checkpoint(1, timeout_s=20)
    with pytest.raises(
        archive.errors.CheckpointError, match=r"'step-1' was not committed: 'step-2', which is newer, is commit"
    ):
        late.result()
    assert [c.name for c in reopened(arc).checkpoints] == ["step-2"]
    assert [w.checkpoint(3, timeout_s=20).done() for w in (one, two)] == [False, False]
    one.close()
    two.close()
    assert [c.name for c in reopened(arc).checkpoints] == ["step-2", "step-3"], "ranks that counted apart still agree"


def test_progress_is_told_phase_by_phase() -> None:
    arc = fresh()
    events: list[dict[str, Any]] = []
    with arc.writer() as w:
        w.append(steps(range(10)), env_ids=0)
        ck = w.checkpoint(1, on_progress=events.append).result()
    assert [e["phase"] for e in events] == list(PHASES)
    assert {(e["name"], e["step"]) for e in events} == {("step-1", 1)}
    assert events[-1]["commit"] == ck.number
    assert events[1]["bytes"] > 0


def test_a_callback_that_fails_is_logged_and_the_checkpoint_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: dict[str, Any]) -> None:
        raise LookupError(event["phase"])

    with fresh().writer() as w:
        assert w.checkpoint(1, on_progress=broken).result().step == 1
    assert [r.getMessage() for r in caplog.records] == [
        "on_progress of checkpoint 'step-1' failed; it is not called again"
    ]


def test_a_failure_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    Gate(monkeypatch, "states/").error = StorageFullError("no space left")
    events: list[dict[str, Any]] = []
    with fresh().writer() as w, pytest.raises(StorageFullError):
        w.checkpoint(1, on_progress=events.append).result()
    assert events[-1] == {"phase": "failed", "name": "step-1", "step": 1, "error": "no space left"}


def test_a_bar_is_drawn_on_a_terminal_by_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert on_terminal(0) is None, "stderr of a test is no terminal"
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert on_terminal(1) is None
    with fresh().writer() as w:
        w.checkpoint(1).result()
    drawn = terminal.getvalue()
    assert "checkpoint step-1" in drawn
    assert isinstance(on_terminal(0), Bar)


_AT_EXIT = """
import sys, archive
options = {options!r}
w = archive.open({url!r}, storage_options=options).writer()
w.append({{"x": list(range(100))}}, env_ids=0)
pending = w.checkpoint(5, state={{"a": 1}})
w.append({{"x": [1, 2]}}, env_ids=0)
"""


@pytest.mark.parametrize("backend", ["local", "moto", "s3fs", "obstore"], indirect=True)
def test_a_process_that_ends_right_after_the_call_leaves_a_checkpoint(backend: Backend) -> None:
    archive.create(backend.url, storage_options=backend.storage_options)
    code = _AT_EXIT.format(url=backend.url, options=backend.storage_options)
    if backend.name == "obstore":
        code = "from obstore.fsspec import register\nregister('s3a')\n" + code
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    (said,) = done.stderr.splitlines()
    assert "closed with 2 uncommitted steps" in said
    latest = archive.open(backend.url, storage_options=backend.storage_options).checkpoints.latest
    assert latest is not None
    assert (latest.step, latest.state(0)) == (5, {"a": 1})
    assert [e.length for e in latest.episodes] == [100], "what nobody asked to commit is not committed"


def test_a_failure_while_the_process_ends_is_printed(tmp_path: Path) -> None:
    archive.create(str(tmp_path / "root"))
    code = _AT_EXIT.format(url=str(tmp_path / "root"), options={}) + (
        "import shutil; pending.result(); from archive.store.storage import Storage\n"
        "def broken(self, key, data): raise archive.StorageFullError('no space left; free some')\n"
        "Storage.create = broken; w.checkpoint(6)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "a checkpoint failed while the interpreter was ending" in done.stderr
    assert "no space left; free some" in done.stderr


def test_the_caller_may_go_on_in_a_forked_child_and_the_parent_still_commits() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        pending = w.checkpoint(1)
        pid = os.fork()
        if pid == 0:
            try:
                w.append(steps([2]), env_ids=0)
            except archive.UsageError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert serials(pending.result()) == [1]


def test_an_error_of_the_store_keeps_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    Gate(monkeypatch, "shards/").error = StorageError("odd")
    with fresh().writer() as w:
        w.append(steps([1]), env_ids=0)
        with pytest.raises(StorageError, match="odd"):
            w.checkpoint(1, wait=True)
        w.clear()
        monkeypatch.undo()


def test_what_the_writer_lists_is_changed_under_its_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    with arc.writer() as w:
        forget = w._pipeline.forget
        locked: list[bool] = []

        def watched(works: Any) -> None:
            locked.append(w._changes.lock._is_owned())  # type: ignore[attr-defined]
            forget(works)

        monkeypatch.setattr(w._pipeline, "forget", watched)
        w.add_episode(steps(range(5)), episode_id="a")
        w.checkpoint(1).result()
        assert arc.checkpoints.latest is not None, "the archive shows it at once"
        w.append(steps([7]), env_ids=0)
        w.checkpoint(2).result()
        w.commit()
        assert w._pipeline.uncommitted() == []
    assert locked
    assert all(locked)
    assert len(reopened(arc).episodes) == 2
