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


def test_a_refusal_is_an_error(proxied: Proxied, tmp_path: Path) -> None:
    storage = proxied.connect()
    proxied.proxy.add("status", status=403, code="AccessDenied")
    with pytest.raises(AccessDeniedError):
        storage.get("x")
    assert (storage.stats.errors, storage.stats.answered_no) == (1, 0)
