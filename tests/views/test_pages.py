"""Pages in a real browser: they open, play, complain of nothing, load nothing, and hostile names stay text."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest

import archive
import resharding
from tests.support import browser
from tests.support.browser import HOSTILE, visited

T = 12


def frame_color(step: int) -> list[int]:
    return [10 + step, 20 + 2 * step, 30 + 3 * step]


@pytest.fixture(scope="module")
def arc() -> archive.Archive:
    out = archive.create(f"memory://pages-{id(object())}")
    pictures = np.broadcast_to(np.array([frame_color(t) for t in range(T)], np.uint8)[:, None, None], (T, 16, 24, 3))
    steps = {
        "obs": {"image": pictures, HOSTILE: np.arange(T, dtype=np.float32)},
        "reward": np.linspace(-1, 1, T), "says": [f"{HOSTILE} {t}" for t in range(T)],
        "tokens": [np.arange(t + 1) for t in range(T)],
    }  # fmt: skip
    with out.writer(run=HOSTILE) as w:
        w.add_episode(
            steps, episode_id=HOSTILE, model_weights_uuid=HOSTILE, update_count=3, metadata={HOSTILE: HOSTILE}
        )
        w.add_episode(steps, episode_id="plain", model_weights_uuid="weights", update_count=4)
        w.checkpoint(7, HOSTILE, progress={HOSTILE: HOSTILE}, columns={"priority": np.ones(2 * T)}, wait=True)
    return out.refresh()


# Of a copy of the canvas, as the browser warns of reading one that is meant to be shown.
PIXEL = """(() => {
  const copy = new OffscreenCanvas(24, 16).getContext("2d", {willReadFrequently: true});
  copy.drawImage(document.querySelector("canvas"), 0, 0);
  return [...copy.getImageData(3, 3, 1, 1).data].slice(0, 3);
})()"""

VALUE = "document.querySelector('.curve[data-field=reward]').parentNode.querySelector('.keys b').textContent"
# Of a mouse at the right end of a curve.
POINTER = """(() => {
  const box = document.querySelector(".curve[data-field=reward]");
  box.dispatchEvent(new PointerEvent("KIND", {clientX: box.getBoundingClientRect().right}));
})()"""


def test_an_episode_plays(address: str, arc: archive.Archive, tmp_path: Path) -> None:
    async def look(page: browser.Page) -> None:
        await page.until("document.body.dataset.ready === 'yes'")
        assert await page.evaluate(PIXEL) == frame_color(0)
        await page.evaluate("slider.value = 5; slider.dispatchEvent(new Event('input'))")
        assert await page.evaluate(PIXEL) == frame_color(5)
        assert await page.evaluate("document.querySelector('pre[data-field=says]').textContent") == f"{HOSTILE} 5"
        assert (
            await page.evaluate("document.querySelector('pre[data-field=tokens]').textContent")
            == "6 values\n0 1 2 3 4 5"
        )
        assert "45.4" in await page.evaluate("document.querySelector('.cursor').style.left")
        assert await page.evaluate(VALUE) == "-0.090909"
        await page.evaluate(POINTER.replace("KIND", "pointermove"))
        assert (await page.evaluate(VALUE), await page.evaluate("slider.value")) == ("1", "5"), "told, not gone there"
        await page.evaluate(POINTER.replace("KIND", "pointerleave"))
        assert await page.evaluate(VALUE) == "-0.090909"
        await page.evaluate(POINTER.replace("KIND", "pointerdown"))
        assert await page.evaluate("slider.value") == "11"
        await page.evaluate(
            "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}))"
        )
        assert await page.evaluate("slider.value") == "10"
        await page.evaluate("speed.value = 60; slider.value = 0; play.click()")
        await page.until("Number(slider.value) >= 3")
        await page.evaluate("play.click()")
        stopped = await page.evaluate("slider.value")
        await asyncio.sleep(0.3)
        assert await page.evaluate("slider.value") == stopped
        assert await page.evaluate("document.querySelectorAll('svg.lines').length") == 2
        assert await page.evaluate("document.querySelector('h1').textContent") == HOSTILE

    visited(address, arc.episodes[HOSTILE].to_html(), tmp_path, look)


ODD = {
    "none": {"image": np.zeros((0, 16, 16), np.uint8), "reward": np.zeros(0), "says": []},
    "one": {"image": np.zeros((1, 16, 16), np.uint8), "reward": np.ones(1), "says": ["x"]},
    "missing": {"reward": np.full(5, np.nan), "endless": np.array([np.inf, 1, 2, -np.inf, 0])},
    "many": {"reward": np.arange(5000.0), "wide": np.ones((5000, 100)), "huge": np.full(5000, 2**62)},
    "whole": {"goal": np.arange(3), "obs": np.zeros((5, 2)), "reward": np.ones(4)},
}


@pytest.mark.parametrize("name", ODD)
def test_episodes_of_any_shape_open(name: str, address: str, tmp_path: Path) -> None:
    arc = archive.create(f"memory://odd-{uuid.uuid4().hex}")
    with arc.writer(schema=archive.Schema(axes={"goal": "free"} | ({"obs": "offset"} if name == "whole" else {}))) as w:
        w.add_episode(ODD[name], episode_id=name)
    episode = arc.refresh().episodes[name]

    async def look(page: browser.Page) -> None:
        if episode.length:
            await page.until("document.body.dataset.ready === 'yes'")
            await page.evaluate(f"slider.value = {episode.length - 1}; slider.dispatchEvent(new Event('input'))")
            shown = await page.evaluate(VALUE)
            assert shown == {"missing": "NaN", "many": "4999"}.get(name, "1")
        assert await page.evaluate("document.querySelector('h1').textContent") == name
        text = await page.evaluate("document.body.textContent")
        assert ("Of the whole episode" in text) == (name == "whole")
        assert (str(2**62) in text) == (name == "many")

    visited(address, episode.to_html(), tmp_path, look)


def test_a_checkpoint_and_a_plan_open(address: str, arc: archive.Archive, tmp_path: Path) -> None:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None

    async def ranks(page: browser.Page) -> None:
        assert await page.evaluate("document.querySelectorAll('table.bars tr').length") == 1
        assert HOSTILE in await page.evaluate("document.body.textContent")

    async def bands(page: browser.Page) -> None:
        assert await page.evaluate("document.querySelectorAll('svg.flow path').length") == 2
        assert HOSTILE in await page.evaluate("document.querySelector('h1').textContent")

    visited(address, checkpoint.to_html(), tmp_path, ranks)
    visited(address, resharding.plan(checkpoint, world_size=2).to_html(), tmp_path, bands)


def test_a_notebook_shows_the_page_in_a_frame_that_reaches_nothing(
    address: str, arc: archive.Archive, tmp_path: Path
) -> None:
    episode = arc.episodes[HOSTILE]

    async def look(page: browser.Page) -> None:
        frame = "document.querySelector('iframe')"
        assert await page.evaluate(f"{frame}.srcdoc") == episode.to_html()
        assert await page.evaluate(f"[...{frame}.sandbox]") == ["allow-scripts"]
        assert await page.evaluate(f"{frame}.contentDocument") is None
        assert await page.evaluate(f"{frame}.clientHeight") == 300

    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
    visited(address, head + episode.watch(height=300)._repr_html_(), tmp_path, look)


def test_what_a_notebook_shows_runs_nothing(address: str, arc: archive.Archive, tmp_path: Path) -> None:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None
    things = [arc, checkpoint, arc.episodes, arc.episodes[0], resharding.plan(checkpoint, world_size=2)]

    async def look(page: browser.Page) -> None:
        assert await page.evaluate("document.querySelectorAll('.trajectories').length") == len(things)
        assert await page.evaluate("document.querySelectorAll('img, script').length") == 0

    body = "".join(thing._repr_html_() for thing in things)
    visited(address, f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{body}', tmp_path, look)
