"""Threads that share a writer and an archive, and children forked meanwhile, which end as interpreters do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import archive
from archive.testing import assert_whole
from tests.support.backends import make_backend
from tests.support.places import ROOT
from tests.support.sampling import few_of

WRITERS, READERS, CALLS, STEPS = 6, 3, 25, 4
SIZES = [(WRITERS, CALLS), (2 * WRITERS, 10 * CALLS)]


def all_at_once(works: list[Callable[[], None]]) -> None:
    """Each in a thread of its own; the first error is raised once all have ended."""
    failed: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


@pytest.mark.parametrize(("writers", "calls"), few_of(SIZES, 1))
def test_threads_append_to_one_writer_and_read_one_archive(tmp_path: Path, writers: int, calls: int) -> None:
    """Each env row has the steps of its thread in their order, whoever commits; readers see a first part of them."""
    arc = archive.create(tmp_path / "a")
    left = threading.Semaphore(0)

    def append(w: archive.Writer, env: int) -> None:
        for call in range(calls):
            w.append(
                {"serial": np.arange(STEPS) + STEPS * call}, env_ids=env, first=[call == 0, *[False] * (STEPS - 1)]
            )
            if call % 10 == env:
                w.commit()
        left.release()

    def checkpoint(w: archive.Writer) -> None:
        step = 0
        while not all_done():
            step += 1
            w.checkpoint(step, state={"step": step}).result()

    def all_done() -> bool:
        return left._value >= writers

    def read() -> None:
        while not all_done():
            for ep in arc.refresh().episodes:
                serial = ep.read()["serial"]
                np.testing.assert_array_equal(serial, np.arange(len(serial)))

    with arc.writer() as w:
        appending = [lambda env=env: append(w, env) for env in range(writers)]  # type: ignore[misc]
        all_at_once([*appending, lambda: checkpoint(w), *[read] * READERS])
    found = {int(ep.env_id or 0): ep.read()["serial"] for ep in arc.refresh().episodes}
    assert sorted(found) == list(range(writers))
    for serial in found.values():
        np.testing.assert_array_equal(serial, np.arange(calls * STEPS))
    assert_whole(arc)


# The store is slow, so that the checkpoint is under way when the child begins and when it ends.
FORKS = """
import json, os, sys, threading, time, warnings
import numpy as np
import archive
from archive.store import Storage

warnings.simplefilter("ignore")
url, options = sys.argv[1], json.loads(sys.argv[2])
arc = archive.open(url, storage_options=options)
w = arc.writer(journal_s=0.05)
w.append({"x": np.arange(3)}, env_ids=0)
w.commit()
request, begun, go = Storage.request, threading.Event(), threading.Event()

def slow(storage, *given, **more):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        go.wait(60)
    return request(storage, *given, **more)

Storage.request = slow
w.append({"x": np.arange(3)}, env_ids=0)
pending = w.checkpoint(1)
begun.wait(60)
child = os.fork()
if child == 0:
    Storage.request = request
    assert archive.open(url, storage_options=options).episodes[0].read()["x"].tolist() == [0, 1, 2]
    assert arc.refresh().episodes[0].read()["x"].tolist() == [0, 1, 2]
    try:
        w.append({"x": np.arange(3)}, env_ids=0)
    except archive.UsageError:
        print("refused", flush=True)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
go.set()
print(pending.result(60).step, flush=True)
w.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", few_of(["s3fs", "local", "moto"], 1))
def test_a_child_that_is_forked_while_a_checkpoint_is_under_way_ends_by_itself(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backend = make_backend(request, name, tmp_path)
    archive.create(backend.url, storage_options=backend.storage_options)
    command = [sys.executable, "-c", FORKS, backend.url, json.dumps(backend.storage_options)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "refused\n1\n")
    assert_whole(archive.open(backend.url, storage_options=backend.storage_options))
