"""A page in a real browser, and a name that would do harm in one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support import browser

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def visited(address: str, text: str, tmp_path: Path, look: Any) -> browser.Page:
    file = tmp_path / "page.html"
    file.write_text(text, "utf-8")

    async def looking(page: browser.Page) -> None:
        await look(page)
        assert await page.evaluate("window.hacked") is None

    page = asyncio.run(browser.visit(address, file, looking))
    assert page.complaints == []
    assert page.requests == [file.as_uri()], "a page loads nothing but itself"
    return page
