"""Walks through the pages of the viewer with real clicks and keys: filter, sort, open, go back, link, compare, save."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

import archive
from tests.support.browser import Page
from tests.support.shown import looked_at
from tests.support.viewing import Looked, forgive

PICKED = "document.querySelector('[aria-selected=true]')"
FIRST = "document.querySelector('.grid-row:not(.waiting) .cell')?.innerText"
READY = "document.querySelector('.ready') !== null"


@pytest.fixture
def arc(archive_url: str) -> archive.Archive:
    return looked_at(archive_url).label({"e0": {"success": True}, "e1": {"success": False}})


async def condition(page: Page, text: str) -> None:
    """Write a condition instead of the one that is there, and let it hold."""
    await page.press("/")
    await page.type(text)
    await page.press("Enter")


async def counted(page: Page, text: str) -> None:
    await page.until(f"document.querySelector('.count')?.innerText === {json.dumps(text)}")


def test_filtering_and_sorting(arc: archive.Archive, look: Looked, pictures: Path) -> None:
    async def walk(page: Page) -> None:
        await counted(page, "6 episodes")
        await _completed(page, pictures)
        await _refused(page)
        await _bars(page)
        await _sorted(page)
        await _scoped(page)

    look(arc, walk)


async def _completed(page: Page, pictures: Path) -> None:
    """A name, then a value is completed; Escape takes the condition back."""
    await page.press("/")
    await page.type("ru")
    await page.until("document.querySelectorAll('#completions li').length > 0")
    await page.press("ArrowDown")
    await page.press("Enter")
    await page.type(" = 's")
    await page.until("document.querySelector('#completions li')?.innerText === \"'second'\"")
    await page.screenshot(pictures / "completion.png")
    await page.press("Tab")
    await page.press("Enter")
    await counted(page, "3 of 6 episodes")
    assert await page.evaluate("document.querySelector('.condition').value") == "run = 'second'"
    assert "where=run+%3D+%27second%27" in await page.evaluate("location.hash")
    await page.press("Escape")
    await page.press("Escape")
    await counted(page, "6 episodes")


async def _refused(page: Page) -> None:
    """A condition that is none says why, and the rows are there all the same."""
    await page.press("/")
    await page.type("return > ")
    await page.press("Enter")
    await page.until("document.querySelector('.why').innerText.includes('condition')")
    assert await page.evaluate("document.querySelector('.condition').getAttribute('aria-invalid')") == "true"
    assert forgive(page, "/api/") >= 1
    await page.press("Escape")
    await page.press("Escape")
    await page.until("document.querySelector('.why').innerText === ''")
    await page.until(f"{FIRST} === 'e5'")


async def _bars(page: Page) -> None:
    """A bar filters; "back" takes it back."""
    await page.click("[aria-label='return, spread'] .press[aria-label*=': 1 of 1']")
    await counted(page, "1 of 6 episodes")
    await page.evaluate("history.back()")
    await counted(page, "6 episodes")
    await page.click("[aria-label='label.success, spread'] button")
    await counted(page, "1 of 6 episodes")
    await page.click("[aria-label='return, spread'] .press[aria-label*=': 0 of 1']")
    await counted(page, "0 of 6 episodes")
    assert " and " in await page.evaluate("document.querySelector('.condition').value")
    await page.evaluate("history.go(-2)")
    await counted(page, "6 episodes")


async def _sorted(page: Page) -> None:
    """A press sorts by a head, downwards, upwards, and no longer."""
    for first, way in (("e3", "descending"), ("e0", "ascending"), ("e5", None)):
        await page.click("[role=columnheader]:nth-child(2) button")
        await page.until(f"{FIRST} === '{first}'")
        head = "document.querySelector('[role=columnheader]:nth-child(2)')"
        assert await page.evaluate(f"{head}.getAttribute('aria-sort')") == way


async def _scoped(page: Page) -> None:
    """A run, a checkpoint and weights say who is meant; each is taken back."""
    await page.evaluate("document.querySelector('[aria-label=Run]').focus()")
    await page.press("s")
    await counted(page, "3 of 6 episodes")
    for _ in range(2):
        await page.press("ArrowUp")
    await counted(page, "6 episodes")
    await page.evaluate("document.querySelector('[aria-label=Checkpoint]').focus()")
    await page.until("document.querySelectorAll('[aria-label=Checkpoint] option').length === 3")
    await page.press("ArrowDown")
    await page.until("location.hash.includes('checkpoint=')")
    await counted(page, "3 episodes")
    await page.evaluate("history.back()")
    await counted(page, "6 episodes")
    await page.click("[aria-label='weights, spread'] button")
    await counted(page, "2 of 6 episodes")
    await page.click(".chip")
    await counted(page, "6 episodes")


def test_opening_going_back_and_passing_on(arc: archive.Archive, look: Looked, pictures: Path, tmp_path: Path) -> None:
    async def walk(page: Page) -> None:
        await condition(page, "length > 3")
        await page.until("document.activeElement.className === 'grid-view'")
        await _opened(page)
        await _strip(page, pictures)
        await _help(page, pictures)
        await _passed_on(page, arc)
        await _saved(page, tmp_path)
        await _compared(page, pictures)

    look(arc, walk)


async def _opened(page: Page) -> None:
    """What is opened is the row that is picked; "back" comes back to it and its condition."""
    for key in ("Home", "ArrowDown", "j"):
        await page.press(key)
    await page.until(f"{PICKED}?.getAttribute('aria-rowindex') === '4'")
    await page.press("Enter")
    await page.until(READY)
    assert await page.text("h1") == "e3"
    assert await page.text(".place") == "3 of 6"
    await page.press("Escape")
    await page.until(f"{PICKED}?.querySelector('.cell').innerText === 'e3'")
    assert await page.evaluate("document.querySelector('.condition').value") == "length > 3"


async def _strip(page: Page, pictures: Path) -> None:
    """First pictures of those in sight; a press picks the row."""
    await page.press("p")
    await page.until("document.querySelectorAll('.strip canvas').length === 6")
    await page.click(".strip button:nth-child(5)")
    await page.until(f"{PICKED}?.querySelector('.cell').innerText === 'e1'")
    await page.screenshot(pictures / "strip.png")
    await page.press("p")
    await page.until("document.querySelector('.strip').hidden")


async def _help(page: Page, pictures: Path) -> None:
    await page.press("?", shift=True)
    listed = await page.text("#help")
    assert all(told in listed for told in ("this help", "next episode", "write a condition", "the last one"))
    await page.screenshot(pictures / "keys.png")
    await page.press("Escape")
    await page.until("!document.querySelector('#help').open")


async def _passed_on(page: Page, arc: archive.Archive) -> None:
    """The command that leads back has the commit and the condition, and no token."""
    await page.press("l")
    await page.until("document.querySelector('#status').innerText.includes('archive view')")
    told = await page.text("#status")
    assert f"commit={arc.head.number}" in told
    assert "where=length" in told
    token = await page.evaluate("document.querySelector('meta[name=token]').content")
    assert token
    assert token not in told
    assert token not in await page.evaluate("location.href")


async def _saved(page: Page, folder: Path) -> None:
    """What is on screen, as a single page."""
    await page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    await page.press("e")
    await page.until("document.querySelector('#status').innerText.includes('saved as archive-episodes.html')")
    file = folder / "archive-episodes.html"
    await page.until("true")
    text = await _written(page, file)
    assert text.startswith("<!doctype html>")
    assert "length &gt; 3" in text


async def _written(page: Page, file: Path) -> str:
    for _ in range(100):
        if file.exists() and file.read_text("utf-8").rstrip().endswith("</html>"):
            break
        await page.evaluate("new Promise((done) => setTimeout(done, 50))")
    return file.read_text("utf-8")


async def _compared(page: Page, pictures: Path) -> None:
    """Runs, checkpoints and weights side by side; a group leads to its episodes."""
    await page.click("#top nav a:nth-child(3)")
    await page.until(READY)
    await page.evaluate("document.querySelector('[aria-label=Groups]').focus()")
    for by, count in (("run", 2), ("checkpoint", 2), ("weights", 3)):
        await page.until(f"document.querySelectorAll('.compare section').length === {count}")
        await page.screenshot(pictures / f"compare-{by}.png")
        await page.press("ArrowDown")
    await page.until("location.hash.includes('buffer')")
    await page.evaluate("history.go(-3)")
    await page.until("!location.hash.includes('by=')")
    await page.until("document.querySelectorAll('.compare section a').length === 2")
    await page.click(".compare section:nth-child(2) a")
    await counted(page, "3 of 6 episodes")


def test_a_link_opens_exactly_what_it_says(arc: archive.Archive, look: Looked, pictures: Path) -> None:
    number = arc.checkpoints.of("first")[0].number
    where = quote("return >= 30 and length < 100")
    seen = {}

    async def walk(page: Page) -> None:
        await page.until(READY)
        seen["commit"] = await page.text("#top .commit")
        assert (await page.text("h1"), await page.text(".place")) == ("e1", "1 of 2")
        assert await page.evaluate("document.querySelector('.player input, input[type=range]').value") == "17"
        await page.click(".back")
        await counted(page, "2 of 3 episodes")

    look(arc, walk, at=f"#/episode?commit={number}&where={where}&id=e1&step=17")
    assert seen["commit"] == f"as of commit {number}"


def test_what_goes_wrong_is_said_and_the_page_goes_on(arc: archive.Archive, look: Looked, pictures: Path) -> None:
    async def walk(page: Page) -> None:
        await page.until("document.querySelector('.failed') !== null")
        assert "e77" in await page.text(".failed")
        await page.screenshot(pictures / "gone.png")
        await page.click(".failed a")
        await counted(page, "6 episodes")
        await page.evaluate("location.hash = '#/episodes?commit=99'")
        await page.until("document.querySelector('#status').innerText.includes('99')")
        await page.evaluate("location.hash = '#/episodes'")
        await counted(page, "6 episodes")
        assert await page.text("#status") == ""
        look.viewer.close()
        await page.click("#top nav a:nth-child(3)")
        await page.until("document.querySelector('#main').innerText.includes('archive view')")
        await page.click("#top nav a:nth-child(1)")
        await page.until("document.querySelector('#status').innerText.includes('archive view')")
        assert forgive(page, "/api/") + forgive(page, "/app/") >= 2

    look(arc, walk, at="#/episode?id=e77")
