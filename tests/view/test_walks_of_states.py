"""What there is to see where there is little: no episodes, no rewards, one step; and what keys leave where it was."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import archive
from tests.support.browser import Page
from tests.support.sampling import few_of
from tests.support.shown import looked_at
from tests.support.viewing import Looked

PICKED = "document.querySelector('[aria-selected=true]')"
PLACES = [
    ("#/compare", "There is nothing to compare."), ("#/episodes", "There are no episodes yet."),
    ("#/wall", "There are no episodes yet"), ("#/checkpoints", "There are no checkpoints yet."),
]  # fmt: skip


async def _says(page: Page, text: str) -> None:
    await page.until(f"document.querySelector('#main').innerText.includes({json.dumps(text)})")


@pytest.mark.parametrize(("at", "told"), few_of(PLACES, 1))
def test_an_empty_archive_says_so(archive_url: str, look: Looked, at: str, told: str) -> None:
    look(archive.create(archive_url), lambda page: _says(page, told), at=at)


@pytest.mark.soak
def test_what_is_missing_is_left_out(archive_url: str, look: Looked) -> None:
    arc = archive.create(archive_url)
    with arc.writer() as w:
        w.add_episode({"x": np.ones(1)}, episode_id="only")

    async def walk(page: Page) -> None:
        await page.until("document.querySelector('.count')?.innerText === '1 episode'")
        await page.click(".condition")
        await page.type("length > 3")
        await page.press("Enter")
        await _says(page, "No episode meets the condition.")
        await page.evaluate("location.hash = '#/wall'")
        await page.until("document.querySelector('.wall.ready .tile') !== null")
        assert "1 step" in await page.text(".tile")
        assert await page.evaluate("document.querySelector('.wall .chart') === null")

    look(arc, walk)


@pytest.mark.soak
def test_keys_alone_sort_open_label_and_come_back(archive_url: str, look: Looked) -> None:
    arc = looked_at(archive_url, steps=3)

    async def walk(page: Page) -> None:
        await _sorted(page)
        await _left_and_kept(page)
        await page.press("ArrowDown")
        await page.until("document.querySelector('h1')?.innerText === 'e2'")
        await page.until("document.querySelector('.back')?.hash.includes('row=2')")
        await page.press("Escape")  # the table, at the episode that was shown last
        await page.until(f"{PICKED}?.querySelector('.cell').innerText === 'e2'")
        await _says(page, "label.flagged")
        await _of_another(page, archive_url)

    look(arc, walk)


async def _sorted(page: Page) -> None:
    await page.until("document.querySelector('.grid-row:not(.waiting)') !== null")
    for _ in range(12):
        await page.press("Tab")
        if await page.evaluate("document.activeElement.innerText") == "episode":
            break
    await page.press("Enter")
    await page.until("document.querySelector('[aria-sort=descending]')?.innerText === 'episode'")
    await page.press("Enter")  # the head has the focus still
    await page.until("document.querySelector('[aria-sort=ascending]')?.innerText === 'episode'")
    await page.evaluate("document.querySelector('.grid-view').focus()")
    await page.press("ArrowDown")
    await page.press("ArrowDown")


async def _left_and_kept(page: Page) -> None:
    """Escape leaves a note that is being written, or a number, not the episode."""
    await page.press("Enter")
    await page.until("document.querySelector('.label-row') !== null && document.querySelector('.ready') !== null")
    await page.press("3")
    await page.press("n")
    await page.type("never mind")
    await page.press("Escape")
    assert await page.text("h1") == "e1"
    assert await page.evaluate("document.querySelector('.label-row[aria-label=note] input').value") == ""
    await page.click(".at")
    await page.press("Escape")
    assert await page.evaluate("location.hash.startsWith('#/episode?') && document.activeElement === document.body")
    await page.press("s")
    await page.until("document.querySelector('#status').innerText.includes('are saved')")


async def _of_another(page: Page, url: str) -> None:
    """A label that somebody else sets becomes a column while one looks."""
    await page.press("f")
    await asyncio.to_thread(lambda: archive.open(url).label({"e3": {"elsewhere": 1.0}}))
    await _says(page, "label.elsewhere")
