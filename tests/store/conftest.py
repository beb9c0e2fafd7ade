"""Files of stores lie on a disk, wherever those of other tests lie."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="store-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
