"""The viewer in a browser: an archive is served, opened at the size of a laptop, and walked around in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from archive import Archive
from archive.view import Settings, Viewer, serve
from tests.support.browser import Page, visit

Walk = Callable[[Page], Awaitable[None]]


class Looked:
    """`look(arc, walk, at="#/...")`: serve an archive, open it, and `await walk(page)`. Whatever the console says, or
    asks of another host, is a failure."""

    def __init__(self, browser: str) -> None:
        self._browser = browser
        self.viewer: Viewer  # the one that is shown, for walks that end it

    def __call__(
        self, arc: Archive, walk: Walk, *, at: str = "", theme: str = "light", **settings: Any
    ) -> Page:  # fmt: skip
        async def sized(page: Page) -> None:
            await page.size(1280, 800)
            await page.theme(theme)
            await page.until("document.querySelector('#main').childElementCount > 0")
            await walk(page)

        with serve(arc, settings=Settings(**settings)) as viewer:
            self.viewer = viewer
            page = asyncio.run(visit(self._browser, viewer.url + at, sized))
            assert page.complaints == []
            assert [url for url in page.requests if not url.startswith((viewer.origin, "data:", "blob:"))] == []
        return page


def forgive(page: Page, path: str) -> int:
    """Strikes what the browser says of refused requests to a path off its complaints; how many there were."""
    left = [one for one in page.complaints if "'source': 'network'" not in one or path not in one]
    count = len(page.complaints) - len(left)
    page.complaints[:] = left
    return count
