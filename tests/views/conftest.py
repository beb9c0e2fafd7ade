"""A browser for pages to be looked at in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser.chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running
