"""Histories run on greenlets; what they leave in the library's modules is put back."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("greenlet") else ["test_*"]


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    """The library sees simulated threads, time and chance."""
    from tests.support.simulation.library import replaced

    with replaced():
        yield
