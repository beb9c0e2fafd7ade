"""A KeyboardInterrupt at any line of a call: what it had taken is in or out as a whole,
and nothing waits without end."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import archive
from archive.write import changes, slabs, works
from tests.support.archives import fresh
from tests.support.journals import NEVER_S, die

LIBRARY = str(Path(archive.__file__).parent)
STUCK_S = 120
SAMPLED = 12  # lines of each call by default; all of them as a soak


class At:
    """Raises KeyboardInterrupt once, before the k-th line of the library that this thread runs."""

    def __init__(self, k: int) -> None:
        self.left, self.where = k, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self


def interrupted(call: Callable[[], Any], k: int) -> str:
    """Where the call was interrupted, "" if it has fewer than k lines."""
    at = At(k)
    before = sys.gettrace()
    sys.settrace(at)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return at.where


def lines_of(call: Callable[[], Any]) -> int:
    at = At(10**9)
    before = sys.gettrace()
    sys.settrace(at)
    try:
        call()
    finally:
        sys.settrace(before)
    return 10**9 - at.left


def values(*numbers: int) -> dict[str, Any]:
    return {"x": np.array(numbers, np.int64)}


def prepared(arc: archive.Archive) -> archive.Writer:
    """A writer with something of everything: committed, sent off and pending steps, an open episode, holes."""
    w = arc.writer(chunk_bytes=1 << 12)
    w.add_episode(values(1, 2), episode_id="old")
    w.append(values(10, 20), env_ids=[0, 1])
    w.commit()
    w.append(values(11, 21), env_ids=[0, 1])
    w.flush()
    w.append(values(12, 22), env_ids=[0, 1])
    w.evict(1, positions=[0])
    w.close_episodes([1])
    return w


BEFORE = {"old": [1, 2], "env 0": [10, 11, 12], "env 1": [20, 21, 22]}
CALLS: dict[str, tuple[Callable[[archive.Writer], Any], dict[str, list[int]]]] = {
    "append": (lambda w: w.append(values(13, 23), env_ids=[0, 1]), {"env 0": [10, 11, 12, 13], "later": [23]}),
    "append with ids": (
        lambda w: w.append(values(13, 31), env_ids=[0, 7], episode_ids=[None, "new"], last=[True, True]),
        {"env 0": [10, 11, 12, 13], "new": [31]},
    ),
    "add_episode": (lambda w: w.add_episode(values(5, 6, 7), episode_id="new", env_id=9), {"new": [5, 6, 7]}),
    "replace": (lambda w: w.add_episode(values(8), episode_id="old", replace=True), {"old": [8]}),
    "large episode": (lambda w: w.add_episode(values(*range(700)), episode_id="new"), {"new": list(range(700))}),
    "close_episodes": (lambda w: w.close_episodes(), {}),
    "evict": (lambda w: w.evict(0, before=2), {}),
    "evict some": (lambda w: w.evict(0, positions=[1]), {}),
    "remove": (lambda w: w.remove("old"), {}),
    "weights": (lambda w: w.weights("w", 3), {}),
    "flush": (lambda w: w.flush(), {}),
    "commit": (lambda w: w.commit(), {}),
    "checkpoint": (lambda w: w.checkpoint(1, state={"a": np.arange(3)}, progress={"n": 1}).result(60), {}),
    "next checkpoint": (lambda w: (w.checkpoint(1), w.checkpoint(2).result(60)), {}),
}


@pytest.fixture(autouse=True)
def not_stuck() -> Iterator[None]:
    faulthandler.dump_traceback_later(20 * STUCK_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def one(name: str, k: int, number: int) -> str:
    call, added = CALLS[name]
    arc = archive.create(f"memory://interrupts-{name.replace(' ', '-')}-{number}-{k}")
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    w = prepared(arc)
    where = interrupted(lambda: call(w), k)
    checked(arc, w, added, f"{name}, line {k} ({where})")
    faulthandler.cancel_dump_traceback_later()
    return where


def checked(arc: archive.Archive, w: archive.Writer, added: dict[str, list[int]], what: str) -> None:
    if w._changes.broken:
        with pytest.raises(archive.ClosedError, match="close it"):
            w.append(values(40))
        w.close()
        return
    w.append(values(40), env_ids=[4], episode_ids=["last"], last=[True])
    steps = sum(w.live["length"].to_pylist())
    made = w.checkpoint(77, columns={"p": np.arange(steps)}).result(60)
    w.add_episode(values(50, 51), episode_id="after")
    w.close()
    found = {}
    for ep in arc.refresh().episodes:
        data = ep.read()["x"].tolist()
        name = (
            ep.id
            if ep.id in ("old", "new", "last", "after")
            else {10: "env 0", 20: "env 1"}.get((data or [0])[0], "later")
        )
        assert name not in found, (what, name, found, data)
        found[name] = data
    assert found.pop("last") == [40], what
    assert found.pop("after") == [50, 51], what
    assert found in (BEFORE, BEFORE | added), (what, found)
    assert made.column("p", 0).tolist() == list(range(steps)), what
    assert made.episodes["last"].read()["x"].tolist() == [40], what


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_is_in_or_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_lines(name, SAMPLED, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_at_any_line_is_in_or_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_lines(name, None, monkeypatch)


def _check_lines(name: str, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", 1 << 11)
    monkeypatch.setattr(changes, "MAX_HELD_BYTES", 1 << 12)
    w = prepared(archive.create(f"memory://interrupts-{name.replace(' ', '-')}-count-{most}"))
    count = lines_of(lambda: CALLS[name][0](w))
    w.close()
    ks = range(1, count + 1) if most is None else sorted({1 + i * (count - 1) // (most - 1) for i in range(most)})
    for k in ks:
        one(name, k, most or 0)


JOURNALED: dict[str, Callable[[archive.Writer], Any]] = {
    "whole": lambda w: w.journal(columns={"p": np.array([9.0, 1, 2, 9])}),
    "changes": lambda w: w.journal(changes={"p": (0, [0, 3], [9.0, 9.0])}),
    "sync": lambda w: (w.journal(changes={"p": (0, [0, 3], [9.0, 9.0])}), w.sync()),
    "checkpoint": lambda w: w.checkpoint(1, columns={"p": np.array([9.0, 1, 2, 9])}).result(60),
    "checkpoint without it": lambda w: w.checkpoint(1).result(60),
    "checkpoint without buffers": lambda w: w.checkpoint(1, save_replay=False).result(60),
}


@pytest.mark.parametrize("name", JOURNALED)
def test_after_an_interrupted_call_the_journal_has_the_values_that_were_said_last(name: str) -> None:
    call = JOURNALED[name]
    w = journaling()
    count = lines_of(lambda: call(w))
    die(w)
    for k in sorted({1 + i * (count - 1) // (SAMPLED - 1) for i in range(SAMPLED)}):
        w = journaling()
        where = interrupted(lambda w=w: call(w), k)  # type: ignore[misc]
        for last in ([9.0, 1, 2, 3], [0.0, 1, 2, 9]):
            w.journal(columns={"p": np.array(last)})
            w.sync()
            recovered = archive.open(w._storage.url).recover()
            assert recovered is not None
            assert recovered.column("p", 0).tolist() == last, f"line {k} ({where})"
        die(w)


def journaling() -> archive.Writer:
    """A writer whose journal has a column."""
    w = fresh().writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(4)}, env_ids=0)
    w.journal(columns={"p": np.array([0.0, 1, 2, 3])})
    w.sync()
    return w


def test_an_upload_that_closing_cancelled_is_no_failure() -> None:
    work = works.rows_alone("segments", lambda: None)
    upload = works.Upload()
    upload.future = works.Future()
    work.laid_out.set_result(upload)
    assert work.error() is None
    upload.future.cancel()
    assert work.error() is None
