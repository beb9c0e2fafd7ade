"""One browser for the tests of the viewer, and how they look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from archive import Archive
from archive.view import serve
from archive.view.answers import Settings
from tests.support.browser import Page, chromium, visit

Look = Callable[[Page], Awaitable[None]]
Looked = Callable[..., Page]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def look(browser: str) -> Looked:
    """`look(arc, walk, at="#/...")`: serve an archive, open it at 1280x800, and `await walk(page)`. Whatever the
    console says, or asks of another host, is a failure."""

    def looked(
        arc: Archive, walk: Look, *, at: str = "", theme: str = "light", settings: Settings | None = None
    ) -> Page:
        async def sized(page: Page) -> None:
            await page.size(1280, 800)
            await page.theme(theme)
            await page.until("document.querySelector('#main').childElementCount > 0")
            await walk(page)

        with serve(arc, settings=settings) as viewer:
            page = asyncio.run(visit(browser, viewer.url + at, sized))
            assert page.complaints == []
            others = [url for url in page.requests if not url.startswith((viewer.origin, "data:", "blob:"))]
            assert others == []
        return page

    return looked


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Path:
    """Where screenshots go, for people to look at: build/screenshots."""
    return Path(request.config.rootpath, "build", "screenshots")
