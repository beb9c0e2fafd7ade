"""Pages that were saved, in a real browser: they open, play, complain of nothing, load nothing, and hostile names stay
text."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import numpy as np
import pytest

import archive
import resharding
from archive.view import bundle
from tests.support.browser import HOSTILE, Page, grave, visit, visited

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
  copy.drawImage(document.querySelector("canvas.film"), 0, 0);
  return [...copy.getImageData(3, 3, 1, 1).data].slice(0, 3).join();
})()"""
READY = "document.querySelector('.episode.ready') !== null"
STEP = "Number(document.querySelector('.slider').value)"
VALUE = "document.querySelector('.chart[aria-label=reward] .key b').textContent"


def told(field: str) -> str:
    """What the page says of a field at the step."""
    rows = "[...document.querySelectorAll('.at-step tr')]"
    mine = f"{rows}.find((tr) => tr.querySelector('th').textContent === {json.dumps(field)})"
    return f"{mine}?.querySelector('td').innerText"


async def at_step(page: Page, step: int) -> None:
    """The step, as somebody types it, with its picture."""
    await page.evaluate("document.querySelector('.at').select()")
    await page.type(str(step))
    await page.press("Enter")
    await page.until(f"{STEP} === {step}")


async def pressed(page: Page, part: float) -> None:
    """A press on the curve of rewards, so far from its left end."""
    box = "document.querySelector('.chart[aria-label=reward] .u-over').getBoundingClientRect()"
    await page.evaluate("document.querySelector('.chart[aria-label=reward]').scrollIntoView({block: 'center'})")
    x, y = await page.evaluate(f"(({{x, y, width, height}}) => [x + width * {part}, y + height / 2])({box})")
    await page.mouse(x, y)


def test_an_episode_plays(browser: str, arc: archive.Archive, tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        await page.until(READY)
        await page.until(f"{PIXEL} === {json.dumps(','.join(map(str, frame_color(0))))}")
        await at_step(page, 5)
        await page.until(f"{PIXEL} === {json.dumps(','.join(map(str, frame_color(5))))}")
        await page.until(f"{told('says')} === {json.dumps(f'{HOSTILE} 5')}")
        assert await page.evaluate(told("tokens")) == "6 values\n0 1 2 3 4 5"
        assert "45.4" in await page.evaluate("document.querySelector('.curve-cursor').style.left")
        assert await page.evaluate(VALUE) == "-0.090909"
        await pressed(page, 0.999)
        await page.until(f"{STEP} === 11")
        assert await page.evaluate(VALUE) == "1"
        await page.press("ArrowLeft")
        await page.until(f"{STEP} === 10")
        await page.press("Home")
        await page.press(" ")
        await page.until(f"{STEP} >= 3")
        await page.press(" ")
        await page.until("document.querySelector('.play').getAttribute('aria-label') === 'Play'")
        stopped = await page.evaluate(STEP)
        await asyncio.sleep(0.3)
        assert await page.evaluate(STEP) == stopped
        assert await page.text("h1") == HOSTILE
        # two of what was written, two of what follows from rewards
        assert await page.evaluate("document.querySelectorAll('.chart .uplot').length") == 4
        await page.press("t")
        await page.until("document.querySelectorAll('.raw-table tbody tr').length > 3")
        assert await grave(page) == []

    visited(browser, arc.episodes[HOSTILE].to_html(), tmp_path, look)


def test_nothing_but_its_own_script_runs_and_nothing_is_asked(
    browser: str, arc: archive.Archive, tmp_path: Path
) -> None:
    text = arc.episodes[HOSTILE].to_html()
    file = tmp_path / "page.html"
    file.write_text(text, "utf-8")
    attempts = """(() => {
      const script = document.createElement("script");
      script.textContent = "window.hacked = 1";
      const button = document.createElement("button");
      button.setAttribute("onclick", "window.hacked = 2");
      document.body.append(script, button);
      button.click();
      setTimeout("window.hacked = 3");
      return fetch("http://127.0.0.1:9/").then(() => "asked", () => "refused");
    })()"""

    async def look(page: Page) -> None:
        await page.until(READY)
        assert page.complaints == []
        assert await page.evaluate(attempts) == "refused"
        assert await page.evaluate("window.hacked ?? null") is None

    asked = asyncio.run(visit(browser, file, look)).requests
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert "unsafe" not in text.partition("</title>")[0]


def test_a_page_takes_modules_in_the_form_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "fine.js": 'import { a as b } from "./other.js";\nexport const c = b;\n', "other.js": "export const a = 1;\n",
        "default.js": "export default 3;\n", "far.js": 'import { a } from "./far/other.js";\n',
        "lazy.js": "const more = () => import(name);\n", "round.js": 'import { c } from "./round.js";\n',
    }  # fmt: skip
    monkeypatch.setattr(bundle, "_own", files.__getitem__)
    made = list(bundle._modules("fine", {}))
    assert made == [
        "const $other = (() => {\nconst a = 1;\nreturn { a };\n})();",
        "const $fine = (() => {\nconst { a: b } = $other;\nconst c = b;\nreturn { c };\n})();",
    ]
    for name in ("default", "far", "lazy", "round"):
        with pytest.raises(ValueError, match=rf"app/{name}\.js"):
            list(bundle._modules(name, {}))


ODD = {
    "none": {"image": np.zeros((0, 16, 16), np.uint8), "reward": np.zeros(0), "says": []},
    "one": {"image": np.zeros((1, 16, 16), np.uint8), "reward": np.ones(1), "says": ["x"]},
    "missing": {"reward": np.full(5, np.nan), "endless": np.array([np.inf, 1, 2, -np.inf, 0])},
    "many": {"reward": np.arange(5000.0), "wide": np.ones((5000, 100)), "huge": np.full(5000, 2**62)},
    "whole": {"goal": np.arange(3), "obs": np.zeros((5, 2)), "reward": np.ones(4)},
}


@pytest.mark.parametrize("name", ODD)
def test_episodes_of_any_shape_open(name: str, browser: str, tmp_path: Path) -> None:
    arc = archive.create(f"memory://odd-{uuid.uuid4().hex}")
    with arc.writer(schema=archive.Schema(axes={"goal": "free"} | ({"obs": "offset"} if name == "whole" else {}))) as w:
        w.add_episode(ODD[name], episode_id=name)
    episode = arc.refresh().episodes[name]

    async def look(page: Page) -> None:
        await page.until(READY)
        if episode.length:
            await at_step(page, episode.length - 1)
            shown = await page.evaluate(VALUE)
            assert shown == {"missing": "\u2013", "many": "4999"}.get(name, "1")
            await page.until(f"document.querySelector('.at-step h3').textContent === 'Step {episode.length - 1}'")
            await page.until(f"{told('reward')} === {json.dumps(shown)}")
        text = await page.evaluate("document.body.textContent")
        assert ("Of the whole episode" in text) == (name == "whole")
        assert (str(2**62) in text) == (name == "many")
        assert await page.text("h1") == name

    visited(browser, episode.to_html(), tmp_path, look)


def test_a_checkpoint_and_a_plan_open(browser: str, arc: archive.Archive, tmp_path: Path) -> None:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None
    drawn = "document.querySelector('.checkpoints .ready, .checkpoints.ready') !== null"

    async def ranks(page: Page) -> None:
        await page.until(drawn)
        assert await page.evaluate("document.querySelectorAll('.rank-bar').length") == 1
        assert HOSTILE in await page.evaluate("document.body.textContent")
        assert await page.evaluate("document.querySelector('.planned').childElementCount") == 0
        await page.evaluate("document.querySelector('.one a').click()")
        await page.until("document.querySelector('.count')?.innerText === '2 episodes'")
        assert await page.text("#status") == ""

    async def bands(page: Page) -> None:
        await page.until("document.querySelectorAll('svg.flow path').length === 2")
        assert HOSTILE in await page.evaluate("document.title")
        assert await grave(page) == []

    visited(browser, checkpoint.to_html(), tmp_path, ranks)
    visited(browser, resharding.plan(checkpoint, world_size=2).to_html(), tmp_path, bands)


def test_a_notebook_shows_the_page_in_a_frame_that_reaches_nothing(
    browser: str, arc: archive.Archive, tmp_path: Path
) -> None:
    episode = arc.episodes[HOSTILE]

    async def look(page: Page) -> None:
        frame = "document.querySelector('iframe')"
        assert await page.evaluate(f"{frame}.srcdoc") == episode.to_html()
        assert await page.evaluate(f"[...{frame}.sandbox]") == ["allow-scripts"]
        assert await page.evaluate(f"{frame}.contentDocument") is None
        assert await page.evaluate(f"{frame}.clientHeight") == 300

    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
    visited(browser, head + episode.watch(height=300)._repr_html_(), tmp_path, look)


def test_what_a_notebook_shows_runs_nothing(browser: str, arc: archive.Archive, tmp_path: Path) -> None:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None
    things = [arc, checkpoint, arc.episodes, arc.episodes[0], resharding.plan(checkpoint, world_size=2)]

    async def look(page: Page) -> None:
        assert await page.evaluate("document.querySelectorAll('.trajectories').length") == len(things)
        assert await page.evaluate("document.querySelectorAll('img, script').length") == 0

    body = "".join(thing._repr_html_() for thing in things)
    visited(browser, f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{body}', tmp_path, look)
