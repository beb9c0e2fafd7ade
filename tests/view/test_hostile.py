"""An archive that means harm stays text in the viewer: nothing acts, every page opens, what is shown is bounded."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode

import numpy as np
import pytest

import archive
from archive.base import jsontree
from archive.view import answers
from archive.view.shown import Shown
from archive.view.wire import Query
from tests.support.browser import Page
from tests.support.sampling import one_in
from tests.support.viewing import Looked

SCRIPT = "<script>window.hacked = 1</script>"
PICTURE = "<img src=x onerror='window.hacked = 2'>"
LINK = "javascript:window.hacked = 3"
ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\x00\x7f"
TURNED = "\u202egnp.exe\u2066"
EVIL = f"\"'{SCRIPT}{PICTURE}{LINK}{ESCAPES}{TURNED}\u2028{{{{token}}}}"
FIELD = f"<img onerror=window.hacked=4>\x1b[2J\x00{TURNED}'"  # names of fields are short
LONG = "a long text " * 90_000  # more than 1 MB
MANY = 10_000
DEEP = 500
OBJECT_NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty")


def nested(depth: int) -> Any:
    """Metadata so deep."""
    found: Any = EVIL
    for _ in range(depth):
        found = {"in": found}
    return found


def hostile(url: str, fields: int = MANY) -> archive.Archive:
    """Of each kind of harm an episode: evil, long, empty, one, infinite, deep, wide (fields), talk (a rollout)."""
    arc = archive.create(url)
    about = {"model_weights_uuid": f"w{EVIL}", "update_count": 3}
    with _deeper(), arc.writer(run=EVIL, schema=archive.Schema(json=["messages"])) as w:
        w.add_episode(_steps(4), episode_id=f"evil{EVIL}", terminated=True, metadata={EVIL: EVIL}, **about)
        w.add_episode({"text": [LONG, "b"], "x": np.ones(2)}, episode_id="long", metadata={"text": LONG}, **about)
        w.add_episode({"x": np.zeros(0)}, episode_id="empty")
        w.add_episode({"image": np.zeros((1, 8, 8, 3), np.uint8), "reward": np.ones(1)}, episode_id="one")
        w.add_episode({"reward": np.array([np.nan, np.inf, -np.inf, 1e308])}, episode_id="infinite")
        w.add_episode({"reward": np.array([1e308, 1e308]), "x": np.full((2, 3), np.nan)}, episode_id="overflow")
        w.add_episode({"x": np.zeros(2)}, episode_id="deep", metadata=nested(DEEP))
        w.add_episode({"x": np.zeros(2)}, episode_id="many", metadata={f"{EVIL}{n}": n for n in range(MANY)})
        w.add_episode({"x": np.zeros(2)}, episode_id="names", metadata={name: name for name in OBJECT_NAMES})
        w.add_episode({"group_id": [0, 0], **_talk()}, episode_id="talk", metadata={"prompt": EVIL})
        w.add_episode(_talk(LONG[:200_000]), episode_id="long talk")
        w.add_episode({f"f{n}": np.zeros(2, np.float32) for n in range(fields)}, episode_id="wide")
        w.checkpoint(1, metrics={EVIL: float("nan"), "loss": 1.0}, name="first").result()
        w.add_episode({"x": np.zeros(2)}, episode_id="last")
        w.checkpoint(2, state={EVIL: [EVIL, LONG[:1000]]}, metrics={"loss": float("inf")}).result()
    said = {f"evil{EVIL}": {"quality": EVIL, "note": LONG[:10_000]}, "one": {"success": True}, "deep": {"score": 0.5}}
    arc.label(said, by=EVIL)
    return arc


@contextmanager
def _deeper() -> Iterator[None]:
    """Write what the library itself would refuse to write."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100 * DEEP)
    try:
        with patch.object(jsontree, "MAX_DEPTH", 2 * DEEP):
            yield
    finally:
        sys.setrecursionlimit(before)


def _steps(count: int) -> dict[str, Any]:
    return {
        "obs": {FIELD: np.arange(float(count)), "image": np.zeros((count, 8, 8, 3), np.uint8)},
        "text": [EVIL] * count, "reward": np.ones(count, np.float32),
    }  # fmt: skip


def _talk(text: str = EVIL) -> dict[str, Any]:
    call = f'tool_calls: [{{"name": "{SCRIPT}", "arguments": {"[" * 300 + "]" * 300}}}]'
    said = [{"role": EVIL, "content": text}, {"role": "assistant", "content": call}]
    return {"messages": [said, said], "reward": np.ones(2)}


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
            assert (scripts, hacked, wide) == (2, None, 1280), name  # the viewer's own, and the charts'
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
