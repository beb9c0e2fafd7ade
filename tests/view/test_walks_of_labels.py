"""Labels beside the table of episodes, and checkpoints, walked through with real clicks and keys."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import archive
from archive.testing import faults
from tests.support.browser import Page
from tests.support.shown import looked_at
from tests.support.viewing import Looked, forgive


async def says(page: Page, text: str) -> None:
    await page.until(f"document.getElementById('status').innerText.includes({json.dumps(text)})")


async def counted(page: Page, text: str) -> None:
    await page.until(f"document.querySelector('.count')?.innerText === {json.dumps(text)}")


def test_rows_and_whole_conditions_are_labelled(archive_url: str, look: Looked, pictures: Path) -> None:
    arc = looked_at(archive_url, steps=3)

    async def walk(page: Page) -> None:
        await counted(page, "6 episodes")
        await _refused_and_kept(page, archive_url)
        await _passed(page, pictures)
        await _all(page, pictures)
        await _left(page)

    look(arc, walk)
    found = {ep.id: ep.labels for ep in archive.open(archive_url).episodes}
    assert found == {
        "e5": {"success": True},
        "e4": {"success": False},
        **{f"e{n}": {} for n in range(3)},
        "e3": {"flagged": True},
    }


async def _refused_and_kept(page: Page, url: str) -> None:
    """A store that refuses: what was said stays, and is saved when it can be."""
    await page.press("ArrowDown")
    with faults.at(url, op="create", what="deny", times=None):
        await page.until("document.querySelector('.label-many button:not(:disabled)') !== null")
        await page.press("1")
        await page.until("document.querySelector('.label-many .state')?.innerText === '1 not saved yet'")
        await page.press("s")
        await says(page, "not saved, but kept")
    assert forgive(page, "/api/labels") == 1  # the browser's own word for it
    await page.click("#status button")
    await says(page, "labels of 1 episode are saved")
    await page.until("document.querySelector('.grid').innerText.includes('label.success')")


async def _passed(page: Page, pictures: Path) -> None:
    """Only those without the label: who gets it leaves the table, and the next one is picked."""
    await page.click("[aria-label='Only episodes without success']")
    await counted(page, "5 of 6 episodes")
    await page.press("Home")
    await page.until("document.querySelector('.label-many button:not(:disabled)') !== null")
    await page.press("2")
    await page.press("s")
    await counted(page, "4 of 6 episodes")
    await page.until("document.querySelector('.whose').innerText === 'e3:'")
    await page.screenshot(pictures / "labels.png")


async def _all(page: Page, pictures: Path) -> None:
    """All that meet the condition, after a question, and taken back."""
    await page.press("a")
    await page.until("document.querySelector('dialog.many').open")
    assert "Label 4 episodes" in await page.text("dialog.many")
    await page.screenshot(pictures / "label-all.png")
    await page.click("dialog.many .sure")
    await says(page, "success of 4 episodes is yes now")
    await counted(page, "0 of 6 episodes")
    await page.press("u")
    await page.press("s")
    await counted(page, "4 of 6 episodes")


async def _left(page: Page) -> None:
    """What is not saved when the page is closed is saved by what closes it."""
    await page.press("Home")
    await page.until("document.querySelector('.whose').innerText === 'e3:'")
    await page.until("document.querySelector('.label-many button:not(:disabled)') !== null")
    await page.press("3")
    await page.until("document.querySelector('.label-many .state')?.innerText === '1 not saved yet'")
    await page.reload()
    await page.until("document.querySelector('.grid')?.innerText.includes('label.flagged')")


def test_checkpoints_are_picked_planned_and_followed(archive_url: str, look: Looked, pictures: Path) -> None:
    arc = archive.create(archive_url)
    with arc.writer() as w:
        for k in range(5):
            w.add_episode({"x": np.random.default_rng(k).normal(size=(30, 4))}, episode_id=f"e{k}")
            w.checkpoint(10 * k, metrics={"loss": 5.0 - k}, columns={"priority": np.arange(30.0 * (k + 1))}).result()

    async def walk(page: Page) -> None:
        await _picked(page)
        await _planned(page, pictures)
        await _forgotten(page, pictures)
        await page.press("Enter")
        await counted(page, "4 episodes")
        await page.evaluate("history.back()")
        await shown(page, "step-30")

    look(arc, walk, at="#/checkpoints")
    assert len(archive.open(archive_url).checkpoints) == 5


async def shown(page: Page, name: str) -> None:
    await page.until(f"document.querySelector('.checkpoints.ready .one h2')?.innerText.trim() === {json.dumps(name)}")


async def _picked(page: Page) -> None:
    await shown(page, "step-40")
    await page.click(".checkpoint-list tbody tr:nth-child(3) button")
    await shown(page, "step-20")
    await page.press("Home")
    await shown(page, "step-0")
    await page.press("End")
    await shown(page, "step-40")
    await page.press("k")
    await shown(page, "step-30")
    await page.click(".column-of summary")
    await page.until("document.querySelector('.column-of .histogram')?.ariaLabel.startsWith('priority: 120 numbers')")


async def _planned(page: Page, pictures: Path) -> None:
    await page.press("r")
    await page.type("3")
    await page.press("Enter")
    await page.until("document.querySelector('.flow')?.getAttribute('aria-label').endsWith('from 1 to 3 ranks')")
    assert await page.evaluate("location.hash.includes('ranks=3')")
    assert "Nothing is dropped." in await page.text(".planned")
    await page.screenshot(pictures / "checkpoints.png")
    await page.evaluate("document.activeElement.blur()")


async def _forgotten(page: Page, pictures: Path) -> None:
    await page.click(".forgetting summary")
    await page.click("[aria-label='Keep the best']")
    await page.type("loss:min:2")
    await page.click(".forgetting button")
    await page.until("document.querySelector('.forgetting').innerText.includes('3 checkpoints')")
    assert "--keep-best loss:min:2 --yes" in await page.text(".forgetting")
    await page.evaluate("document.activeElement.blur()")
