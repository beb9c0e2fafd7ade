"""What is counted as an error is one: not the probes and lost races of healthy work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import archive
from archive.base.errors import AccessDeniedError
from tests.support.backends import Backend, Proxied


@pytest.mark.parametrize("backend", ["memory", "local"], indirect=True)
def test_forty_good_commits_are_no_errors(backend: Backend) -> None:
    arc = archive.create(backend.url)
    for session in ("one", "two"):
        with arc.writer(session=session) as w:
            for number in range(20):
                w.add_episode({"x": np.arange(number + 1)})
                w.commit()
    assert len(archive.open(backend.url).commits) >= 40
    stats = arc.io_stats()
    assert stats.errors == 0
    assert stats.answered_no > 0  # is there a newer commit?


@pytest.mark.parametrize("backend", ["memory", "local"], indirect=True)
def test_checkpoints_journals_and_a_recovery_are_no_errors(backend: Backend) -> None:
    arc = archive.create(backend.url)
    w = arc.writer(journal_s=3600)
    for step in range(5):
        w.add_episode({"x": np.arange(step + 1)})
        w.sync()
        if step < 4:
            w.checkpoint(step=step, wait=True)
    again = archive.open(backend.url)
    assert again.recover() is not None
    assert len(again.checkpoints) == 5
    for one in (arc, again):
        stats = one.io_stats()
        assert (stats.errors, stats.retries) == (0, 0)
        assert stats.answered_no > 0  # is there a newer commit, one more object of the journal?


def test_a_refusal_is_an_error(proxied: Proxied, tmp_path: Path) -> None:
    storage = proxied.connect()
    proxied.proxy.add("status", status=403, code="AccessDenied")
    with pytest.raises(AccessDeniedError):
        storage.get("x")
    assert (storage.stats.errors, storage.stats.answered_no) == (1, 0)
