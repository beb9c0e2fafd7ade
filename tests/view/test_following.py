"""The viewer while others write: the table keeps its place, the wall shows the newest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from tests.support.browser import Page
from tests.support.sampling import one_in
from tests.support.shown import looked_at
from tests.support.viewing import Looked

PICKED = "document.querySelector('[aria-selected=true]')"
ROWS = 20_000
HEAD = 29  # pixels, as grid.js says


def _adds(url: str, name: str) -> None:
    with archive.open(url).writer(run="later") as w:
        w.add_episode({"image": np.zeros((3, 8, 8, 3), np.uint8), "reward": np.ones(3)}, episode_id=name)


async def _told(page: Page, css: str, text: str) -> None:
    await page.until(f"document.querySelector({json.dumps(css)})?.innerText.includes({json.dumps(text)})")


def test_new_commits_are_followed_without_losing_the_place(archive_url: str, look: Looked, pictures: Path) -> None:
    looked_at(archive_url)

    async def walk(page: Page) -> None:
        await _told(page, ".count", "6 episodes")
        for _ in range(3):
            await page.press("ArrowDown")
        await page.press("f")
        _adds(archive_url, "new-1")
        await _told(page, ".count", "7 episodes")
        assert "live" in await page.text("#top button[aria-pressed=true]")
        assert await page.evaluate(f"{PICKED}.querySelector('.cell').innerText") == "e3"
        assert await page.evaluate(f"{PICKED}.getAttribute('aria-rowindex')") == "5"
        await _told(page, ".grid-row .cell", "new-1")
        await page.press("f")
        await page.until("document.querySelector('#top button[aria-pressed=true]') === null")
        await _wall(page)

    async def _wall(page: Page) -> None:
        await page.click("#top nav a:nth-child(4)")
        await _told(page, ".tile strong", "new-1")
        await page.until("document.querySelectorAll('.tile').length === 7")
        _adds(archive_url, "new-2")
        await _told(page, ".tile strong", "new-2")
        await page.screenshot(pictures / "wall-new.png")
        await page.click("#top nav a:nth-child(1)")
        await _told(page, ".count", "8 episodes")
        await page.until("document.querySelector('#top button[aria-pressed=true]') === null")

    look(archive.open(archive_url), walk)


def _long(url: str, count: int) -> archive.Archive:
    arc = archive.create(url)
    with arc.writer() as w:
        for n in range(count):
            w.add_episode({"reward": np.full(1, float(n % 1000))}, episode_id=f"row-{n:05}")
    return arc


@pytest.mark.parametrize("part", one_in(20))
def test_a_long_table_shows_the_rows_one_goes_to(archive_url: str, look: Looked, part: int) -> None:
    count = ROWS // part

    async def walk(page: Page) -> None:
        await page.until(f"document.querySelector('.grid-row .cell')?.innerText === 'row-{count - 1:05}'")
        tall = await page.evaluate("Math.floor((document.querySelector('.grid-view').clientHeight - 29) / 26)")
        await page.press("End")
        await _picked(page, count - 1, count)
        await page.press("PageUp")
        await _picked(page, count - 1 - (tall - 1), count)
        await page.press("Home")
        for place in (tall - 1, 2 * (tall - 1)):
            await page.press("PageDown")
            await _picked(page, place, count)
        await _wheeled(page, count)
        await _dragged(page, count)

    look(_long(archive_url, count), walk)


async def _picked(page: Page, place: int, count: int) -> None:
    """The row that is picked is this one, is in sight, and shows its own values."""
    await page.until(f"{PICKED}?.getAttribute('aria-rowindex') === '{place + 2}'")
    name = f"row-{count - 1 - place:05}"  # the newest are first
    await page.until(f"{PICKED}.querySelector('.cell').innerText === '{name}'")
    boxes = f"[{PICKED}, document.querySelector('.grid-view')].map((one) => one.getBoundingClientRect())"
    row, view = await page.evaluate(f"{boxes}.map(({{top, bottom}}) => [top, bottom])")
    assert view[0] + HEAD <= row[0] < row[1] <= view[1] + 1


async def _wheeled(page: Page, count: int) -> None:
    """Rows in sight follow each other without a gap after a turn of the wheel, and are few in the document."""
    before = await _first(page)
    await page.wheel(".grid-view", 26 * 40)
    await page.until(f"Number(document.querySelector('.grid-row').getAttribute('aria-rowindex')) - 2 >= {before + 39}")
    await _whole(page, count)


async def _dragged(page: Page, count: int) -> None:
    await page.evaluate(
        "(() => { const v = document.querySelector('.grid-view'); v.scrollTop = v.scrollHeight / 2; })()"
    )
    await page.until(
        f"Math.abs(Number(document.querySelector('.grid-row').getAttribute('aria-rowindex')) - {count / 2}) < 40"
    )
    await _whole(page, count)


async def _first(page: Page) -> int:
    return int(await page.evaluate("Number(document.querySelector('.grid-row').getAttribute('aria-rowindex'))")) - 2


async def _whole(page: Page, count: int) -> None:
    await page.until("document.querySelector('.grid-row.waiting') === null")
    told = "row => [Number(row.getAttribute('aria-rowindex')) - 2, row.querySelector('.cell').innerText]"
    rows: list[Any] = await page.evaluate(f"[...document.querySelectorAll('.grid-row')].map({told})")
    assert rows == [[rows[0][0] + i, f"row-{count - 1 - rows[0][0] - i:05}"] for i in range(len(rows))]
    assert len(rows) < 40
