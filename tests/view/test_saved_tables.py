"""Saved pages of archives, runs and episodes, in a real browser: rows are sorted and filtered, any number of them, as
the viewer does it, and stay text."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import archive
from archive.index.episodes import COLUMNS
from archive.view import answers, bundle, pages
from archive.view.shown import Shown
from tests.support.browser import HOSTILE, Page, grave, held, visited
from tests.support.shown import ask, looked_at

MANY = 100_000
COUNT = "document.querySelector('.count')?.innerText"
FIRST = "document.querySelector('.grid-row:not(.waiting) .cell')?.innerText"


class Listed:
    """The table of so many episodes, without an archive."""

    def __init__(self, count: int) -> None:
        number = np.arange(count)
        names = [f"20260101-000000-abcdef-00000-{i:09d}" for i in range(count)]
        given: dict[str, Any] = {
            "episode_id": names, "length": number % 97, "return": number / 7, "complete": number % 3 > 0,
            "model_weights_uuids": [[f"weights-{i // 1000}"] for i in range(count)],
            "update_count_min": number // 10, "update_count_max": number // 10,
            "run": [f"job{i % 2}" for i in range(count)], "buffer": ["replay"] * count, "rank": number % 4,
            "metadata.task": ["push"] * count, "commit": number // 1000,
        }  # fmt: skip
        self.table = pa.table({name: given.get(name, pa.nulls(count)) for name in {**dict.fromkeys(COLUMNS), **given}})
        self.names = [name for name in self.table.column_names if not name.startswith("metadata.")]
        self.metadata_names = ["metadata.task"]

    def __len__(self) -> int:
        return self.table.num_rows

    def values(self, name: str, places: pa.Array) -> pa.ChunkedArray:
        return self.table[name].take(places)


def page_of(listing: Any) -> str:
    """The page of a table alone."""
    kinds = dict.fromkeys(listing.names, "number") | dict.fromkeys(("episode_id", "run", "buffer"), "text")
    kinds |= {"complete": "flag", "model_weights_uuids": "list", "created_at": "time"}
    about = {"url": "here", "id": "x", "commit": 1, "newest": 1, "pinned": True, "runs": ["job0", "job1"]}
    labels = {"labels": [], "by": None, "why_not": "saved", "count": 0, "labelled": {}}
    replies = {"about": about | {"columns": kinds}, "labels": labels}
    return bundle.page(
        "many", {"at": "#/episodes", "pages": ["episodes"], "answers": replies, **pages.table_of(listing)}
    )


async def condition(page: Page, text: str) -> None:
    await page.press("/")
    await page.evaluate("document.querySelector('.condition').select()")
    await page.type(text)
    await page.press("Enter")


async def counted(page: Page, text: str) -> None:
    await page.until(f"{COUNT} === {json.dumps(text)}")


def test_a_hundred_thousand_episodes_are_sorted_and_filtered(browser: str, tmp_path: Path) -> None:
    text = page_of(Listed(MANY))
    assert len(text) < 4_000_000
    loop_s: list[float] = []

    async def look(page: Page) -> None:
        await counted(page, "100\u202f000 episodes")
        await page.until(f"{FIRST}?.endsWith('000099999')")  # the newest first
        assert await page.evaluate("document.querySelectorAll('.grid-row').length") < 100
        await page.evaluate("document.querySelector('.grid-view').scrollTop = 26 * 50000")
        await page.until("[...document.querySelectorAll('.cell')].some((one) => one.textContent.endsWith('000049990'))")
        await page.evaluate("document.querySelector('.grid-view').scrollTop = 0")
        await page.until(f"{FIRST}?.endsWith('000099999')")
        started = asyncio.get_running_loop().time()
        for wanted in ("000099999", "000000000"):
            await page.click("[role=columnheader]:nth-child(2) button")
            await page.until(f"{FIRST}?.endsWith('{wanted}')")
        loop_s.append(asyncio.get_running_loop().time() - started)
        for wanted, count in [
            ("return >= 10 and return <= 20", 71), ("update_count >= 9990", 100), ("run = 'job1'", 50000),
            ("length = 5", 1031), ("id = '20260101-000000-abcdef-00000-000000123'", 1), ("not complete", 33334),
            ("rank < 1", 25000), ("rank in (1, 2) or metadata.task != 'push'", 50000),
        ]:  # fmt: skip
            await condition(page, wanted)
            await page.until(f"{COUNT}?.replaceAll('\u202f', '') === {json.dumps(f'{count} of {MANY} episodes')}")
            await page.press("Escape")
            await counted(page, "100\u202f000 episodes")
        await condition(page, "return > many")
        await page.until("document.querySelector('.why').innerText.includes('many')")
        await page.press("Escape")
        await page.press("Escape")
        await counted(page, "100\u202f000 episodes")
        await page.click("[aria-label='weights, spread'] button")
        await page.until(f"{COUNT}?.startsWith('1\u202f000 of')")
        await page.click(".chip")
        await counted(page, "100\u202f000 episodes")
        press = "document.querySelectorAll('.histogram')[1].querySelectorAll('.press')[3]"
        told = await page.evaluate(f"{press}.ariaLabel")
        await page.evaluate(f"{press}.click()")
        await page.until(f"{COUNT}?.startsWith({json.dumps(told.rpartition(' ')[2] + ' of ')})")

    visited(browser, text, tmp_path, look)
    assert loop_s[0] < 20, "sorted while others use the machine; else in a fraction of a second"


SCOPES: tuple[dict[str, str], ...] = (
    {}, {"where": "return >= 30"}, {"where": "not (length > 3 and complete)"}, {"where": "label.success is null"},
    {"where": "metadata.seed in (1, 2, 5) or label.success"}, {"where": "run = 'second' and update_count < 50"},
    {"run": "first"}, {"weights": "weights-1"}, {"run": "second", "where": "label.success is not null"},
    {"where": "not label.success = true"}, {"where": "created_at is null"},
)  # fmt: skip
ASKED: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("check", answers.check, {}),
    ("histograms", answers.histograms, {"columns": ["return", "length", "run", "label.success", "metadata.seed"]}),
    ("distributions", answers.distributions, {"column": "return", "by": "run"}),
    ("distributions", answers.distributions, {"column": "length", "by": "label.success"}),
    ("episodes", answers.rows, {"columns": ["episode_id", "return", "label.success"], "start": 0, "stop": 9}),
    ("episodes", answers.rows, {"columns": ["episode_id"], "start": 1, "stop": 3, "sort": "return", "descending": "1"}),
    ("episodes", answers.rows, {"columns": ["episode_id"], "start": 0, "stop": 9, "sort": "label.success"}),
)


def test_a_saved_page_answers_as_the_viewer_does(browser: str, tmp_path: Path) -> None:
    arc = looked_at(str(tmp_path / "arc")).label({"e1": {"success": True}, "e4": {"success": False}})
    shown = Shown(arc)

    async def look(page: Page) -> None:
        await page.until(f"{FIRST} === 'e5'")
        for scope in SCOPES:
            for name, answer, more in ASKED:
                given = scope | more
                wanted = ask(answer, shown, **given)
                found = await page.evaluate(f"$saved.answer({json.dumps(name)}, {json.dumps(given)})")
                if name == "check":  # who is left out for lack of a value is told by the library alone
                    found, wanted = found["count"], wanted["count"]
                elif name == "episodes":
                    found = found["columns"]
                assert found == wanted, (name, given)

    visited(browser, arc.episodes.to_html(), tmp_path, look)


def test_an_archive_and_its_runs_open(browser: str, tmp_path: Path) -> None:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    found: Any = None
    for run in ("first", HOSTILE):
        with arc.writer(run=run, **({} if found is None else {"fork_from": found})) as w:
            for i in range(4):
                w.add_episode(
                    {"reward": np.full(3, i / 2)}, episode_id=f"{run}{i}", update_count=i, model_weights_uuid=HOSTILE,
                    metadata={HOSTILE: HOSTILE},
                )  # fmt: skip
            found = w.checkpoint(1).result()
    arc.refresh()

    async def look(page: Page) -> None:
        await page.until("document.querySelector('.compare.ready') !== null")
        await page.until("document.querySelectorAll('.trend .uplot').length === 1")
        assert await page.evaluate("document.querySelectorAll('.trend-figure .key').length") == 2
        assert HOSTILE in await page.evaluate("document.body.textContent")
        assert await grave(page) == []
        await page.click("#top nav a:nth-child(2)")
        await page.until("document.querySelector('#main').innerText.includes('went on from step-1 of first')")
        assert await grave(page) == []
        await page.click("#top nav a:nth-child(1)")
        await counted(page, "8 episodes")
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        await page.evaluate("history.back()")
        await page.until("document.querySelector('.checkpoints') !== null")
        await page.theme("dark")
        assert await grave(page) == []

    for text in (arc.to_html(), arc.runs.to_html("first", HOSTILE)):
        visited(browser, text, tmp_path, look)

    async def few(page: Page) -> None:
        await counted(page, "2 episodes")
        await page.press("1")  # nothing is labelled here
        await page.press("ArrowDown")
        await page.press("Enter")
        await page.until("document.querySelector('.failed')?.innerText.includes('archive view')")
        assert await page.evaluate("document.title") == HOSTILE

    visited(browser, arc.episodes.filter(run=HOSTILE, update_count=(1, 3)).to_html(HOSTILE), tmp_path, few)


def test_a_page_of_nothing_opens(browser: str, tmp_path: Path) -> None:
    arc = archive.create(f"memory://{uuid.uuid4().hex}")

    async def look(page: Page) -> None:
        await counted(page, "0 episodes")

    for text in (arc.to_html(), arc.episodes.to_html(), arc.runs.to_html()):
        visited(browser, text, tmp_path, look)


def rows_of(page: str) -> pa.Table:
    return pa.ipc.open_stream(zlib.decompress(base64.b64decode(held(page)["table"]))).read_all()


def test_rows_keep_to_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Listed(3000)
    assert rows_of(page_of(listing)).num_rows == 3000
    monkeypatch.setattr(pages, "MAX_BYTES", 10_000)
    page = page_of(listing)
    kept = rows_of(page)
    assert len(held(page)["table"]) <= 10_000
    assert 0 < kept.num_rows < 3000
    assert kept["episode_id"][-1].as_py().endswith("000002999"), "the newest"
    assert f"the newest {kept.num_rows} of 3000" in held(page)["left"]
