"""Storage in threads, event loops, forked and spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from archive.base import ByteRange
from archive.base.errors import ArchiveError, StorageError
from archive.store.storage import Storage
from tests.support.backends import Backend, register_obstore
from tests.support.places import ROOT


def test_pickle(backend: Backend) -> None:
    storage = backend.connect(concurrency=3, deadline_s=9.0, single_writer=True)
    storage.put("x", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert (copy.url, copy.concurrency, copy.deadline_s) == (storage.url, 3, 9.0)
    assert copy.stats.requests == 0
    assert copy.get("x") == b"1"
    assert copy.stats.get == 1


def _read_in_child(storage: Storage, answers: multiprocessing.Queue[object], register: bool) -> None:
    try:
        if register:
            register_obstore()
        answers.put(
            (storage.get("x"), storage.get_ranges([ByteRange("x", i, i + 1) for i in range(4)]), storage.list(""))
        )
    except ArchiveError as error:
        answers.put(error)


def _in_child(backend: Backend, method: str) -> object:
    storage = backend.connect()
    storage.put("x", b"data")
    assert storage.get_all(["x", "x"]) == [b"data"] * 2  # the parent's connections and threads exist
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(storage, answers, backend.name == "obstore"))
    child.start()
    try:
        answer = answers.get(timeout=40)
        child.join(20)
        assert child.exitcode == 0
        assert storage.get("x") == b"data"
        return answer
    finally:
        child.kill()
        child.join()
        child.close()
        answers.close()
        answers.join_thread()


@pytest.mark.parametrize("backend", ["memory", "local", "moto", "seaweedfs", "s3fs"], indirect=True)
def test_a_forked_child_reads(backend: Backend) -> None:
    assert _in_child(backend, "fork") == (b"data", [b"d", b"a", b"t", b"a"], ["x"])


@pytest.mark.parametrize("backend", ["obstore"], indirect=True)
def test_a_forked_child_is_told_that_obstore_cannot(backend: Backend) -> None:
    answer = _in_child(backend, "fork")
    assert isinstance(answer, StorageError)
    assert "spawn" in str(answer)


@pytest.mark.parametrize("backend", ["local", "moto", "s3fs", "obstore"], indirect=True)
def test_a_spawned_child_reads(backend: Backend) -> None:
    assert _in_child(backend, "spawn") == (b"data", [b"d", b"a", b"t", b"a"], ["x"])


# A thread that is not Python's own, and calls into Python to hand over an answer, is not done when Python begins to
# end.
SLOW_CALLBACKS = """
import asyncio, sys, threading, time

wake = asyncio.selector_events.BaseSelectorEventLoop._write_to_self

def wake_slowly(self):
    wake(self)
    if isinstance(threading.current_thread(), threading._DummyThread):
        time.sleep(0.2)

asyncio.selector_events.BaseSelectorEventLoop._write_to_self = wake_slowly

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(1)

sys.last_of_all = Last()

from archive.store import Storage
from tests.support.backends import register_obstore
from tests.support.servers import obstore_options

register_obstore()
storage = Storage.connect(sys.argv[1], obstore_options(sys.argv[2]))
storage.put("x", b"data")
storage.create("y", b"data")
print(storage.get("x"), storage.get("x", 1, 3), storage.get_all(["x", "y"]), storage.exists("z"), storage.list(""))
storage.delete(["y"])
"""


@pytest.mark.parametrize("backend", ["obstore"], indirect=True)
def test_a_process_that_used_obstore_ends_whenever_it_likes(backend: Backend) -> None:
    """Its coroutines are answered by such threads, and Rust aborts the process when Python ends one of them."""
    command = [sys.executable, "-c", SLOW_CALLBACKS, backend.url, backend.endpoint]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "b'data' b'at' [b'data', b'data'] False ['x', 'y']"


def _pool_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("archive-storage")}


def test_retries_stop_with_the_caller(backend: Backend) -> None:
    """No thread is left behind that would keep a process from ending."""
    before = set(threading.enumerate())
    storage = backend.connect()
    storage.put_many((str(i), b"x") for i in range(8))
    assert _pool_threads() - before
    del storage
    for _ in range(100):
        if not _pool_threads() - before:
            return
        time.sleep(0.05)
    pytest.fail("a pool thread outlived its storage")
