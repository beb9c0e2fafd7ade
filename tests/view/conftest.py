"""One browser for the tests of the viewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import chromium
from tests.support.viewing import Looked


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def look(browser: str) -> Looked:
    return Looked(browser)


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Path:
    """Where screenshots go, for people to look at: build/screenshots."""
    return Path(request.config.rootpath, "build", "screenshots")


@pytest.fixture
def archive_url(tmp_path: Path) -> str:
    """Where each test has an archive of its own."""
    return str(tmp_path / "arc")
