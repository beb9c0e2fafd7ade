"""The pages of the viewer, walked around in with real clicks and keys."""

from __future__ import annotations

from pathlib import Path

import archive
from archive.testing import small_archive
from tests.support.browser import Page
from tests.support.viewing import Looked


def test_the_episodes_are_there_and_help_lists_the_keys(tmp_path: Path, look: Looked, pictures: Path) -> None:
    small_archive(str(tmp_path / "arc"), 5)

    async def walk(page: Page) -> None:
        await page.until("document.body.innerText.includes('e4')")
        assert "token" not in await page.evaluate("location.href")
        await page.press("?", shift=True)
        assert "this help" in await page.text("#help")
        await page.screenshot(pictures / "help.png")

    look(archive.open(str(tmp_path / "arc")), walk)
