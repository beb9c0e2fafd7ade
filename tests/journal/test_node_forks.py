"""A child that a rank forks, such as a worker that reads data, keeps nothing of its part in the journal of a node."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.journal.rendezvous import Rendezvous
from tests.support.nodes import carries, writer
from tests.support.processes import FORKSERVER, end, until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def _rank(url: str, tell: Any) -> None:
    """A rank that carries, and has a child; it tells what its node meets by, and the child's number."""
    w = writer(archive.open(url), 0, 1, 1)
    until(lambda: carries(w) and w._node is not None and w._node._link is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python >= 3.12 warns of any fork with threads
        child = os.fork()
    if child and w._node is not None:
        tell.send((w._node._names, child))
    signal.pause()


def test_another_rank_takes_the_place_of_one_that_died_and_left_a_child(tmp_path: Path) -> None:
    archive.create(str(tmp_path / "root"))
    told, tell = FORKSERVER.Pipe(duplex=False)
    rank = FORKSERVER.Process(target=_rank, args=(str(tmp_path / "root"), tell))
    rank.start()
    assert told.poll(60)
    names, child = told.recv()
    try:
        meeting = Rendezvous(*names)
        assert meeting.listen() is None
        rank.kill()
        rank.join()
        until(meeting.listen).close()  # once the child has run what comes first in it
        meeting.leave()
    finally:
        os.kill(child, signal.SIGKILL)
        end(rank)
        told.close()
        tell.close()
