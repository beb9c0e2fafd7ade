"""A child that a rank forks, such as a worker that reads data, keeps nothing of its part in the journal of a node."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest

from archive.journal.node import Node, NodeJournal
from archive.journal.rendezvous import Rendezvous
from archive.log import Place
from tests.support.archives import fresh
from tests.support.processes import until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def forked(work: Any) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of any fork with threads
        pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def test_another_rank_takes_the_place_of_one_that_died_and_left_a_child() -> None:
    storage, (ready, is_ready), (held, let_go) = fresh().storage, os.pipe(), os.pipe()

    def rank() -> None:
        os.close(let_go)
        journal = NodeJournal(storage, Place(0, 1, "main", "s"), "opening", Node(0, 1), 2.0, lambda: None)
        until(lambda: journal._carrier is not None and journal._link is not None)
        forked(lambda: os.read(held, 1))  # until the test is over
        os.write(is_ready, b".")
        signal.pause()

    pid = forked(rank)
    try:
        assert os.read(ready, 1) == b"."
        meeting = Rendezvous(storage.url, "opening", "main", "s", 0)
        assert meeting.listen() is None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        until(meeting.listen).close()  # once the child has run what comes first in it
        meeting.leave()
    finally:
        for one in (ready, is_ready, held, let_go):
            os.close(one)
