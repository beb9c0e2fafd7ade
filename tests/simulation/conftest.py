"""Histories run on greenlets; what they leave in the library's modules is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A thread of a party that was killed ends where it stands: its generators say so to nobody."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    """The library sees simulated threads, time and chance."""
    from tests.support.simulation.library import replaced

    with replaced():
        yield
    gc.collect()  # or they end while another module's test runs
