"""A run that went on with fewer ranks, on the page of its checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import archive
import resharding
from tests.support.browser import Page
from tests.support.viewing import Looked


def _resumed(url: str) -> archive.Archive:
    """Two ranks that checkpoint, and one that goes on from there."""
    arc = archive.create(url)
    pending = []
    writers = [archive.open(url).writer(rank=rank, world_size=2, session="first") for rank in range(2)]
    for rank, w in enumerate(writers):
        w.add_episode({"x": np.zeros(5)}, episode_id=f"e{rank}")
        pending.append(w.checkpoint(1))
    saved = [one.result() for one in pending][-1]
    for w in writers:
        w.close()
    with arc.refresh().writer(resume=resharding.plan(saved, 1).share(0)) as w:
        w.checkpoint(2).result()
    return arc.refresh()


def test_who_got_what_in_a_resume_is_a_picture(archive_url: str, look: Looked, pictures: Path) -> None:
    async def walk(page: Page) -> None:
        await page.until("document.querySelector('.ready .resume-flow') !== null")
        assert "2 ranks → 1" in await page.text(".resumed")
        await page.click(".resume-flow summary")
        await page.until("document.querySelectorAll('.resume-flow svg.flow .band').length === 2")
        await page.screenshot(pictures / "resume.png")

    look(_resumed(archive_url), walk, at="#/checkpoints")
