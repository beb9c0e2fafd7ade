"""An episode in the viewer, walked through with real clicks and keys: played, scrubbed, labelled, compared, watched
while it grows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

import archive
from tests.support.browser import Page
from tests.support.shown import film
from tests.support.viewing import Looked

STEPS = 60
READY = "document.querySelector('.episode.ready') !== null"
STEP = "Number(document.querySelector('.slider')?.value)"


@pytest.fixture
def arc(archive_url: str) -> archive.Archive:
    """Four episodes of pictures, rewards and tokens, two of each group."""
    arc = archive.create(archive_url)
    with arc.writer() as w:
        for n in range(4):
            rng = np.random.default_rng(n)
            tokens = [rng.integers(0, 99, 3 + i % 3) for i in range(STEPS)]
            logprobs = [-rng.random(len(one)) for one in tokens]
            steps = {"image": film(STEPS, n), "reward": np.ones(STEPS), "action": rng.normal(size=(STEPS, 2, 3, 4, 3))}
            told = {"response_tokens": tokens, "logprobs": logprobs} if n == 3 else {}
            w.add_episode(steps | told, episode_id=f"e{n}", metadata={"group": n // 2, "deep": {"er": [1, None]}})
    return archive.open(archive_url)


async def at_step(page: Page, step: int) -> None:
    await page.until(f"{STEP} === {step} && document.querySelector('canvas.film').dataset.step === '{step}'")


async def shows(page: Page, name: str) -> None:
    await page.until(f"document.querySelector('.episode.ready h1')?.innerText === {json.dumps(name)}")


async def says(page: Page, text: str) -> None:
    await page.until(f"document.getElementById('status').innerText.includes({json.dumps(text)})")


def test_an_episode_is_played_labelled_and_compared(arc: archive.Archive, look: Looked, pictures: Path) -> None:
    async def walk(page: Page) -> None:
        await shows(page, "e1")
        await _played(page)
        await _scrubbed(page)
        await _valued(page, pictures)
        await _labelled(page)
        await _compared(page, pictures)

    look(arc, walk, at="#/episode?id=e1&sort=episode_id")
    found = archive.open(arc.url).episodes
    assert [found[f"e{n}"].labels for n in range(4)] == [{}, {"note": "slips"}, {"success": True}, {}]


async def _played(page: Page) -> None:
    assert "er" in await page.text(".beside")  # the metadata is a tree
    await at_step(page, 0)
    await page.press(" ")
    await page.until(f"{STEP} > 3")
    await page.press(" ")
    await page.until("document.querySelector('.play').getAttribute('aria-label') === 'Play'")
    for key, shift, step in (
        ("End", False, STEPS - 1), ("ArrowLeft", True, STEPS - 11), ("Home", False, 0), ("ArrowRight", True, 10),
        ("ArrowRight", False, 11), ("ArrowLeft", False, 10),
    ):  # fmt: skip
        await page.press(key, shift=shift)
        await at_step(page, step)


async def _scrubbed(page: Page) -> None:
    await page.click(".slider")
    await page.until(f"{STEP} > {STEPS * 0.4} && {STEP} < {STEPS * 0.6}")
    x, y = await page.evaluate(
        "(() => { const b = document.querySelector('.curve .u-over').getBoundingClientRect();"
        " return [b.x + b.width / 4, b.y + 9]; })()"
    )
    before, told = await page.evaluate(STEP), "document.querySelector('.chart .values').innerText"
    at_cursor = await page.evaluate(told)
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    await page.until("document.querySelector('.pointed').innerText.startsWith('step ')")
    pointed, at_mouse = await page.text(".pointed"), await page.evaluate(told)
    await page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    await page.until(f"document.querySelector('.pointed').innerText === '' && {told} === {json.dumps(at_cursor)}")
    assert await page.evaluate(STEP) == before
    await page.mouse(x, y)
    await page.until(f"Math.abs({STEP} - {STEPS / 4}) < 2")
    step = await page.evaluate(STEP)
    assert pointed == f"step {step}"
    await page.until(f"{told} === {json.dumps(at_mouse)}")
    await at_step(page, step)
    await page.until(f"location.hash.includes('step={step}')")


async def _valued(page: Page, pictures: Path) -> None:
    """A field as a table, which follows the cursor; another discount; both are in the address."""
    await page.press("t")
    await page.until("document.querySelectorAll('.raw-table tbody tr').length === 14")
    row = "document.querySelector('.raw-table [aria-current] button').innerText"
    await page.press("Home")
    await page.until(f"document.querySelector('.raw-table [aria-current]') && {row} === '0'")
    assert "of 72" in await page.text(".raw header")
    await page.evaluate("document.querySelector('.discount').select()")
    await page.type("0.5")
    await page.press("Enter")
    await page.until("document.querySelector('.charts').innerText.includes('discounted 0.5')")
    assert await page.evaluate("location.hash.includes('gamma=0.5') && location.hash.includes('field=action')")
    await page.screenshot(pictures / "episode.png")
    await page.press("t")
    await page.until("document.querySelector('.raw') === null")


async def _labelled(page: Page) -> None:
    """A flag and a note; what was said on one page is taken back on another; a pass goes on to who lacks the label."""
    await page.press("2")
    await page.until("document.querySelectorAll('.label-row button')[1]?.getAttribute('aria-pressed') === 'true'")
    await page.press("n")
    await page.type("slips")
    await page.press("Enter")
    await page.press("s")
    await says(page, "labels of 1 episode are saved")
    await page.press("ArrowDown")
    await shows(page, "e2")
    await page.press("1")
    await page.press("u")
    await page.press("u")
    await page.press("u")
    await says(page, "success of e1 is not said again")
    await page.press("1")
    await page.press("ArrowUp")
    await shows(page, "e1")
    await page.until("document.querySelector('.label-row[aria-label=note] input')?.value === ''")
    await page.press("n")
    await page.type("slips")
    await page.press("Enter")
    await page.press("ArrowDown")
    await shows(page, "e2")
    await page.press("m")
    await shows(page, "e3")
    assert "meanwhile" not in await page.text("#status")  # it was oneself


async def _compared(page: Page, pictures: Path) -> None:
    """The group by keys and side by side; tokens by keys; two that were marked; back."""
    await page.press(".")
    await page.press(".")
    assert "token 1" in await page.text(".token-told")
    await page.press("[")
    await shows(page, "e2")
    await page.press("g")
    await page.until("document.querySelectorAll('.together.ready .column').length === 2")
    await page.press("ArrowRight")
    await page.until("[...document.querySelectorAll('canvas.film')].every((one) => one.dataset.step === '1')")
    await page.screenshot(pictures / "group.png")
    await page.press("Escape")
    await shows(page, "e2")
    await page.press("x")
    await page.press("k")
    await shows(page, "e1")
    await page.press("x")
    await page.until("document.querySelectorAll('.together.ready .column').length === 2")
    assert (
        await page.evaluate("JSON.parse(new URLSearchParams(location.hash.split('?')[1]).get('ids')).join()") == "e2,e1"
    )


def test_an_open_episode_grows_while_it_is_watched(archive_url: str, look: Looked) -> None:
    arc = archive.create(archive_url)
    w = arc.writer()

    def grow(weights: str) -> None:
        w.append({"x": np.zeros(10)}, env_ids=0, episode_ids="open", model_weights_uuid=weights)
        w.commit()

    grow("first")

    async def walk(page: Page) -> None:
        await shows(page, "open")
        await page.press("End")
        assert await page.evaluate("document.querySelector('.weights-band') === null")
        await page.press("f")
        await asyncio.to_thread(grow, "second")
        await page.until("document.querySelector('.player')?.innerText.includes('of 20')")
        await page.until(f"{STEP} === 19")  # who stands at the end goes with it
        assert "second" in await page.text(".weights-band")

    look(archive.open(archive_url), walk, at="#/episode?id=open")
    w.close()
