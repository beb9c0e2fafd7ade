"""Forked children, while other threads of the parent read and checkpoint: each goes on by itself,
or is told why not."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import cached_property, forking
from archive.checkpoint import requests
from archive.read.chunks.diskcache import DiskCache
from tests.support.backends import make_backend

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CHILD_S = 90  # so long only where others use the machine; else a fraction of a second


def forked(work: Callable[[], Any]) -> int:
    """The exit code of a child that does this; 1 if it failed or had to be stopped, with tracebacks on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of any fork with threads
        pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(CHILD_S, exit=True)  # to stderr, where pytest shows it
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            faulthandler.dump_traceback()
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuses(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(archive.UsageError, match=words):
        call()


def a_step(i: int) -> dict[str, Any]:
    return {"obs": np.full((2, 3), i, np.float32), "reward": np.full(2, i, np.float64)}


@contextlib.contextmanager
def busy(*works: Callable[[int], Any]) -> Iterator[list[int]]:
    """Each in a thread of its own, again and again; how often so far. What goes wrong there is raised in the end."""
    stop, counts = threading.Event(), [0] * len(works)
    failed: list[BaseException] = []

    def run(k: int) -> None:
        try:
            while not stop.is_set():
                works[k](counts[k])
                counts[k] += 1
                time.sleep(0.02)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failed, failed


@pytest.mark.parametrize(
    ("name", "forks"), [("local", 30), ("moto", 8), ("s3fs", 8), pytest.param("moto", 60, marks=pytest.mark.soak)]
)
def test_children_read_while_the_parent_reads_and_checkpoints(
    name: str, forks: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backend = make_backend(request, name, tmp_path)
    with archive.create(backend.url, storage_options=backend.storage_options).writer() as w:
        for i in range(4):
            w.add_episode(
                {"obs": np.full((6, 3), i, np.float32), "reward": np.full(6, i, np.float64)},
                episode_id=f"e{i}",
                update_count=i,
            )
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    with arc.writer(run="other") as w:
        w.append(a_step(0))
        w.checkpoint(0).result()
        arc.refresh()
        plan = resharding.plan(arc.checkpoints.latest, 1)
        share = plan.share(0)

        def checkpoint(k: int) -> None:
            w.append(a_step(k))
            w.checkpoint(k + 1).result(60)

        def read(k: int) -> None:
            found = arc.episodes.filter(update_count=k % 4)
            assert found.read()[0]["reward"][0] == k % 4
            assert len(share.read()) == 2
            assert arc.episodes["e1"].fields

        def child(k: int) -> None:
            assert (arc.episodes[f"e{k % 4}"].read()["obs"] == k % 4).all()
            assert len(plan.share(0).read()) == 2
            refuses(lambda: w.append(a_step(1)), "open one in each process")

        with busy(checkpoint, read) as counts:
            codes = []
            for k in range(forks):
                codes.append(forked(lambda k=k: child(k)))  # type: ignore[misc]
                time.sleep(0.007 * (k % 5))
        assert codes == [0] * forks
        assert min(counts) > 0


def test_a_cached_property_holds_no_lock() -> None:
    class Slow:
        def __init__(self, wait: Callable[[], Any]) -> None:
            self.wait = wait

        @cached_property
        def value(self) -> object:
            """Of an instance."""
            self.wait()
            return object()

    go, begun = threading.Event(), threading.Event()

    def waits() -> None:
        begun.set()
        go.wait(30)

    one = Slow(waits)
    thread = threading.Thread(target=lambda: one.value)
    thread.start()
    assert begun.wait(30)
    assert forked(lambda: Slow(lambda: None).value) == 0
    go.set()
    thread.join()
    assert one.value is one.value
    assert Slow.value.__doc__ == "Of an instance."


def test_nothing_of_the_library_uses_the_property_that_locks() -> None:
    root = Path(archive.__file__).parent.parent
    users = [
        path.relative_to(root).as_posix()
        for package in ("archive", "resharding")
        for path in (root / package).rglob("*.py")
        if path.name != "values.py" and "functools" in (text := path.read_text("utf-8")) and "cached_property" in text
        if any("functools" in line and "cached_property" in line for line in text.splitlines())
    ]
    assert users == []


def test_locks_are_made_anew_in_a_child() -> None:
    class Held:
        def __init__(self) -> None:
            self.lock = forking.lock(self, "lock")

    held, taken, go = Held(), threading.Event(), threading.Event()

    def hold() -> None:
        with held.lock:
            taken.set()
            go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30)
    assert forked(lambda: held.lock.acquire(timeout=5) or sys.exit(1)) == 0
    go.set()
    thread.join()


def test_a_child_does_not_keep_the_lock_of_a_disk_cache(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 10_000)
    with cache._locked():
        assert forked(lambda: os.posix_spawn("/bin/sleep", ["sleep", "0"], {})) == 0
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
    try:
        began = time.monotonic()
        cache.put("a", b"12345678", 0)
        assert time.monotonic() - began < 10
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_child_cannot_use_says_so() -> None:
    arc = archive.create("memory://forks-refused")
    with arc.writer(rank=0, world_size=2, session="s") as w:
        w.append(a_step(0))
        pending = w.checkpoint(1, timeout_s=30)  # rank 1 never comes

        def child() -> None:
            refuses(pending.result, "by the process that asked for it")
            refuses(pending.done, "by the process that asked for it")
            assert "another process" in repr(pending)
            refuses(w.close, "open one in each process")
            for call in (w.flush, w.commit, w.clear, lambda: w.checkpoint(2), lambda: w.live):
                refuses(call, "open one in each process")

        def leaves() -> None:
            with w:
                raise KeyError("the child's own")

        assert forked(child) == 0
        assert forked(leaves) == 1  # at once, by its own error
        pending._saver.give_up()
        with pytest.raises(archive.RanksMissingError):
            pending.result()


def test_signals_in_a_child_do_what_they_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    requests.listen()
    begun, begin = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.write(begin, b"x")
            time.sleep(300)
            os._exit(0)
        assert os.read(begun, 1) == b"x"
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert not requests._asked.flag.is_set()
    finally:
        os.close(begun)
        os.close(begin)
        for number, previous in requests._asked.previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        requests._asked.previous.clear()
    assert signal.getsignal(signal.SIGTERM) is before
