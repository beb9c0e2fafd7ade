"""The viewer for people who listen, or see little: axe finds nothing serious on any page, in both themes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import archive
from tests.support.browser import Page, grave
from tests.support.shown import looked_at
from tests.support.viewing import Looked

READY = "document.querySelector('.grid-row:not(.waiting), .ready') !== null"


@pytest.fixture
def arc(archive_url: str) -> archive.Archive:
    """Episodes with cameras, one that is a rollout, labels, checkpoints of two runs."""
    found = looked_at(archive_url)
    said = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": '{"to": 3}'}]
    rollout = {"token_ids": np.arange(12), "logprob": -np.ones(12), "mask": np.arange(12) > 4, "reward": np.zeros(12)}
    with found.writer(run="talks", schema=archive.Schema(json=["messages"])) as w:
        w.add_episode(rollout, episode_id="talk", metadata={"prompt": "Count."})
        w.add_episode({"messages": [said], "reward": np.ones(1)}, episode_id="said")
    return found.label({"e0": {"success": True, "quality": 0.5}, "e1": {"success": False}})


def _at(page: str, **given: Any) -> str:
    return f"#/{page}?{urlencode(given)}"


PLACES = {
    "episodes": _at("episodes", where="length > 3"),
    "pictures": _at("episodes", pictures=1, row=2),
    "episode": _at("episode", id="e1"),
    "rollout": _at("episode", id="talk"),
    "said": _at("episode", id="said"),
    "checkpoints": _at("checkpoints"),
    "compare": _at("compare", by="checkpoint"),
    "wall": _at("wall"),
    "together": _at("together", ids=json.dumps(["e0", "e1"])),
}


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_axe_finds_nothing_serious(theme: str, arc: archive.Archive, look: Looked, pictures: Path) -> None:
    found: dict[str, list[str]] = {}

    async def walk(page: Page) -> None:
        for name, place in PLACES.items():
            await page.evaluate("document.querySelectorAll('.ready, .grid-row').forEach((one) => one.remove())")
            await page.evaluate(f"location.hash = {json.dumps(place)}")
            await page.until(READY)
            found[name] = await grave(page)
            await page.screenshot(pictures / f"{name}-{theme}.png")
        await page.press("?", shift=True)
        found["help"] = await grave(page)

    look(arc, walk, theme=theme)
    assert {name: grave for name, grave in found.items() if grave} == {}
