"""Answers that come late: a key lands on the episode that it was pressed for, and what comes for a page that was left
is not shown. Each question is delayed in turn."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest

import archive
from archive.view import answers, routes
from archive.view.shown import Shown
from archive.view.wire import Query, Reply
from tests.support.browser import Page
from tests.support.sampling import few_of
from tests.support.shown import looked_at
from tests.support.viewing import Looked

DELAY_S = 0.3
COUNT = 6
OF_EPISODES = ["episode", "neighbours", "group", "curves", "pictures", "steps", "labels"]
OF_ROWS = ["episodes", "said", "labels", "histograms", "about"]
LABELLED = {f"e{n}": {"success": n % 2 == 0} for n in range(COUNT)}


class Gate:
    """Holds back the answers about one episode until it is opened."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self.asked, self.opened = threading.Event(), threading.Event()

    def __call__(self, shown: Shown, query: Query) -> Reply:
        if query.text("id") == self.wanted:
            self.asked.set()
            self.opened.wait(60)
        return answers.episode(shown, query)


@pytest.fixture
def arc(archive_url: str) -> archive.Archive:
    return looked_at(archive_url, COUNT, steps=3)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate("e2")
    monkeypatch.setitem(routes.QUESTIONS, "episode", made)
    yield made
    made.opened.set()


def _labels(url: str) -> dict[str, object]:
    return {ep.id: ep.labels for ep in archive.open(url).episodes if ep.labels}


def _slow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answer = routes.QUESTIONS[name]

    def slowly(shown: Shown, query: Query) -> Reply:
        time.sleep(DELAY_S)
        return answer(shown, query)

    monkeypatch.setitem(routes.QUESTIONS, name, slowly)


async def _saved(page: Page, text: str) -> None:
    await page.press("s")
    await page.until(f"document.getElementById('status').innerText.includes({json.dumps(text)})", 30)


async def _shows(page: Page, name: str) -> None:
    await page.until(f"document.querySelector('.episode.ready h1')?.innerText === {json.dumps(name)}")


@pytest.mark.parametrize("name", few_of(OF_EPISODES, 3))
def test_a_pass_without_a_pause_labels_each_episode(
    archive_url: str, arc: archive.Archive, look: Looked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _slow(monkeypatch, name)

    async def walk(page: Page) -> None:
        for n in range(COUNT):
            await page.press("1" if n % 2 == 0 else "2")
            await page.press("ArrowDown")
        await _saved(page, f"labels of {COUNT} episodes are saved")

    look(arc, walk, at="#/episode?id=e0&sort=episode_id")
    assert _labels(archive_url) == LABELLED


@pytest.mark.parametrize("name", few_of(OF_ROWS, 2))
def test_a_pass_over_rows_without_a_pause_labels_each(
    archive_url: str, arc: archive.Archive, look: Looked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _slow(monkeypatch, name)

    async def walk(page: Page) -> None:
        for n in range(COUNT):
            await page.press("ArrowDown")
            await page.press("1" if n % 2 == 0 else "2")
        await _saved(page, f"labels of {COUNT} episodes are saved")

    look(arc, walk, at="#/episodes?sort=episode_id")
    assert _labels(archive_url) == LABELLED


def test_what_is_typed_while_an_episode_loads_is_a_note_and_no_keys(
    archive_url: str, arc: archive.Archive, look: Looked, gate: Gate
) -> None:
    async def walk(page: Page) -> None:
        await _shows(page, "e1")
        for key in ("ArrowDown", "n", *"slips now", "Enter", "4"):
            await page.press(key)
        gate.opened.set()
        await _shows(page, "e2")
        await _saved(page, "labels of 1 episode are saved")

    look(arc, walk, at="#/episode?id=e1&sort=episode_id")
    assert _labels(archive_url) == {"e2": {"note": "slips now", "flagged": False}}


def test_ranks_that_are_typed_while_a_plan_is_on_its_way_are_planned_for(
    archive_url: str, arc: archive.Archive, look: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    with arc.writer() as w:
        w.add_episode({"reward": [1.0]}, episode_id="last")
        w.checkpoint(1).result()
    _slow(monkeypatch, "plan")

    async def walk(page: Page) -> None:
        await page.until("document.getElementById('target-ranks') !== null")
        for key in ("r", "3", "Enter"):
            await page.press(key)
        await page.until("document.querySelector('.flow')?.getAttribute('aria-label').endsWith('from 1 to 3 ranks')")

    look(archive.open(archive_url), walk, at="#/checkpoints")


def test_keys_of_a_page_that_was_left_while_it_loaded_are_gone(
    archive_url: str, arc: archive.Archive, look: Looked, gate: Gate
) -> None:
    async def walk(page: Page) -> None:
        await page.press("ArrowDown")
        assert await asyncio.to_thread(gate.asked.wait, 20)
        await page.press("4")
        await page.click("#top nav a:nth-child(2)")
        await page.until("document.querySelector('.checkpoints.ready') !== null")
        assert "typed for a page that is not shown" in await page.text("#status")
        gate.opened.set()
        await _quiet(page)
        assert await page.evaluate("document.querySelector('.episode')") is None
        await page.press("4")
        await page.press("s")
        await _quiet(page)

    look(arc, walk, at="#/episode?id=e1&sort=episode_id")
    assert _labels(archive_url) == {}


def test_back_during_a_load_shows_and_labels_what_the_address_names(
    archive_url: str, arc: archive.Archive, look: Looked, gate: Gate
) -> None:
    async def walk(page: Page) -> None:
        await _shows(page, "e1")
        await page.press("ArrowDown")
        assert await asyncio.to_thread(gate.asked.wait, 20)
        await page.press("1")
        await page.evaluate("history.back()")
        await _shows(page, "e1")
        gate.opened.set()
        await _quiet(page)
        assert await page.text(".episode h1") == "e1"
        await page.press("3")
        await _saved(page, "labels of 1 episode are saved")

    look(arc, walk, at="#/episode?id=e1&sort=episode_id")
    assert _labels(archive_url) == {"e1": {"flagged": True}}


def test_a_note_that_is_being_written_outlasts_what_comes_meanwhile(
    archive_url: str, arc: archive.Archive, look: Looked
) -> None:
    async def walk(page: Page) -> None:
        await _shows(page, "e1")
        await page.press("f")
        await page.press("n")
        await page.until("document.activeElement.type === 'text'")
        await page.type("half a ")
        await asyncio.to_thread(lambda: archive.open(archive_url).label({"e1": {"success": True}}))
        await page.until("document.getElementById('status').innerText.includes('is there')")
        await _quiet(page)
        await page.type("note")
        await page.press("Enter")
        await page.until("document.querySelector('.label-row button')?.getAttribute('aria-pressed') === 'true'")
        await _saved(page, "labels of 1 episode are saved")

    look(arc, walk, at="#/episode?id=e1&sort=episode_id")
    assert _labels(archive_url) == {"e1": {"note": "half a note", "success": True}}


async def _quiet(page: Page) -> None:
    """Once what was let through has come, and was drawn."""
    await page.evaluate("new Promise((done) => setTimeout(done, 400))")
