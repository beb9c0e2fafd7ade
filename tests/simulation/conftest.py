"""Histories run on greenlets; what they leave in the library's modules is put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    """The library sees simulated threads, time and chance."""
    from tests.support.simulation.library import replaced

    with replaced():
        yield
