"""An archive that means harm stays text in the viewer: nothing acts, every page opens, what is shown is bounded."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlencode

import pytest

import archive
from archive.view import answers
from archive.view.answers import Shown
from archive.view.web import Query
from tests.support.browser import Page
from tests.support.hostile import EVIL, LONG, MANY, hostile
from tests.support.sampling import one_in
from tests.support.viewing import Looked

MOST_NODES = 8000
OPEN_S = 5.0
READY = "document.querySelector('.grid-row:not(.waiting), .ready') !== null"
CALM = "new Promise((done) => requestIdleCallback(done, {timeout: 300}))"


def places(arc: archive.Archive) -> dict[str, str]:
    """Each page, with each of the episodes."""
    ids = [ep.id for ep in arc.episodes]
    given = [
        ("episodes", {}), ("episodes", {"pictures": 1}), ("episodes", {"sort": "return"}), ("checkpoints", {}),
        ("wall", {}),
        *(("compare", {"by": by}) for by in ("run", "model_weights_uuids", "checkpoint", "session")),
        *(("episode", {"id": name}) for name in ids),
        *(("together", {"ids": json.dumps(pair)}) for pair in ([ids[0], "empty"], ["wide", "long"], ["deep", "talk"])),
    ]  # fmt: skip
    return {f"{page} {json.dumps(about)[:30]}": f"#/{page}?{urlencode(about)}" for page, about in given}


@pytest.mark.parametrize("part", one_in(10))
def test_nothing_acts_and_every_page_opens(archive_url: str, look: Looked, pictures: Path, part: int) -> None:
    arc = hostile(archive_url, MANY // part)
    slow: dict[str, float] = {}

    async def walk(page: Page) -> None:
        for name, place in places(arc).items():
            slow[name] = await _opened(page, place)
            nodes, scripts, hacked, wide = await page.evaluate(
                "[document.querySelectorAll('*').length, document.scripts.length, window.hacked ?? null,"
                " document.documentElement.scrollWidth]"
            )
            assert (scripts, hacked, wide) == (1, None, 1280), name
            assert nodes <= MOST_NODES, name
        await page.screenshot(pictures / "hostile.png")
        await _usable(page)

    look(arc, walk)
    assert {name: taken for name, taken in slow.items() if taken > OPEN_S} == {}


async def _opened(page: Page, place: str) -> float:
    other = "episode" if "#/compare" in place else "compare"  # each page is shown anew
    await page.evaluate(f"location.hash = '#/{other}?id=last'")
    await page.until(f"document.querySelector('.{other}.ready') !== null")
    begun = time.monotonic()
    await page.evaluate(f"document.querySelector('.ready').remove(); location.hash = {json.dumps(place)}")
    await page.until(READY)
    taken = time.monotonic() - begun
    await page.evaluate(CALM)
    return taken


async def _usable(page: Page) -> None:
    """Bars of evil texts filter by them, and the row opens."""
    await page.evaluate("location.hash = '#/episodes'")
    await page.click("[aria-label='label.quality, spread'] button")
    await page.until("document.querySelector('.count')?.innerText.startsWith('1 of ')")
    await page.click(".grid-row")
    await page.press("Enter")
    await page.until("document.querySelector('.episode.ready') !== null")
    assert await page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('id')") == f"evil{EVIL}"
    await page.evaluate("location.hash = '#/episodes'")
    await page.click("[aria-label='weights, spread'] button")
    await page.until("document.querySelector('.count')?.innerText.startsWith('2 of ')")
    await page.click(".chip")
    await page.until("document.querySelector('.count')?.innerText.endsWith('3 episodes')")


def test_answers_are_bounded(archive_url: str) -> None:
    arc = archive.create(archive_url)
    with arc.writer() as w:
        for n in range(3):
            w.add_episode({"text": [LONG], "reward": [1.0]}, episode_id=f"e{n}", metadata={LONG: n, "key": LONG})
    shown = Shown(arc.label({f"e{n}": {"note": f"{n}{LONG}"} for n in range(3)}))
    asked = [
        (answers.rows, {"columns": json.dumps(["episode_id", "label.note", "metadata"])}),
        (answers.histograms, {"columns": json.dumps(["label.note"])}),
        (answers.values, {"name": "label.note"}),
        (answers.names, {}),
        (answers.steps, {"id": "e1", "start": "0", "stop": "1"}),
        (answers.distributions, {"column": "return", "by": "label.note"}),
    ]
    sizes = {answer.__name__: len(answer(shown, Query(given)).body) for answer, given in asked}
    assert {name: size for name, size in sizes.items() if size > 64 * 1024} == {}
