"""The viewer from a store 20 ms away, in Chromium: from the command to the table; sort, filter, open, scrub."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    from tests.benchmarks import bench_index, common
except ImportError:  # run as a script
    import bench_index  # type: ignore[import-not-found,no-redef]
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "view: SeaweedFS behind 20 ms, Chromium"
DELAY_S = 0.02
BUCKET = "view"
STEPS, SIDE = 1000, 224
FIELDS = ("front", "wrist")
EPISODES = int(os.environ.get("BENCH_EPISODES", 1_000_000))


def film(seed: int) -> np.ndarray[Any, Any]:
    """A disc that moves over a gradient with some noise: as compressible as a simulator's pictures."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    noise = rng.integers(0, 12, (SIDE, SIDE, 3))
    out = np.empty((STEPS, SIDE, SIDE, 3), np.uint8)
    for t in range(STEPS):
        far = np.hypot(x - SIDE * (0.5 + 0.3 * np.cos(t / 20 + seed)), y - SIDE * (0.5 + 0.3 * np.sin(t / 15)))
        picture = np.stack([np.clip(250 - 4 * far, 0, 240), x * 240 // SIDE, (y + t) % 240], -1)
        out[t] = picture + np.roll(noise, t, 0)
    return out


def fill(endpoint: str) -> None:
    """A million episodes without steps, and some of two cameras."""
    import archive
    from tests.support import servers

    servers.make_bucket(endpoint, BUCKET)
    bench_index.fill(f"s3://{BUCKET}/many", EPISODES, 10)
    arc = archive.create(f"s3://{BUCKET}/films", storage_options=servers.s3fs_options(endpoint))
    with arc.writer() as w:
        for n in range(4):
            w.add_episode({name: film(2 * n + i) for i, name in enumerate(FIELDS)} | {"reward": np.ones(STEPS)},
                          episode_id=f"e{n}")  # fmt: skip


@contextmanager
def viewer(url: str, endpoint: str) -> Iterator[tuple[str, float]]:
    """`archive view` in a process of its own: its URL, and when it was called."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "archive.cli", "view", url, "--endpoint-url", endpoint, "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), began
    finally:
        process.terminate()
        process.wait(20)


_SORT = """(async () => {
  const began = performance.now();
  const head = [...document.querySelectorAll('[role=columnheader] button')].find((one) => one.textContent === %s);
  head.click();
  while (!document.querySelector('[aria-sort]') || document.querySelector('.grid-row.waiting')
    || document.querySelector('[aria-sort]').textContent !== %s) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()"""
_FILTER = """(async () => {
  const began = performance.now();
  const before = document.querySelector('.count').textContent;
  const given = new URLSearchParams(location.hash.split('?')[1] ?? '');
  given.set('where', %s);
  location.hash = '#/episodes?' + given;
  while (document.querySelector('.count').textContent === before) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()"""
_OPEN = """(async () => {
  const began = performance.now();
  location.hash = '#/episode?id=%s';
  const drawn = () => [...document.querySelectorAll('canvas.film')].filter((one) => one.dataset.step === '0').length;
  const shown = () => document.querySelector('.episode h1')?.textContent === 'e%d'; // and no longer the one before
  while (!shown() || drawn() < 2) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()"""
_SCRUB = """(async () => {
  const slider = document.querySelector('.slider');
  const began = performance.now();
  slider.value = %d;
  slider.dispatchEvent(new Event('input'));
  slider.dispatchEvent(new Event('change'));
  const drawn = () => [...document.querySelectorAll('canvas.film')].filter((one) => one.dataset.step === '%d').length;
  while (drawn() < 2) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()"""


def table(browser: str, endpoint: str) -> dict[str, Any]:
    """From the command to the first rows; sorts and filters of a million."""
    from tests.support.browser import visit

    found: dict[str, Any] = {}

    async def walk(page: Any) -> None:
        await page.until("document.querySelector('.grid-row:not(.waiting)') !== null", 60)
        found["table_s"] = time.perf_counter() - began
        await page.until("document.querySelectorAll('.bars').length > 3", 60)  # the histograms are there, too
        found["histograms_s"] = time.perf_counter() - began
        await asyncio.sleep(3)  # somebody looks at it
        sorts = [await page.evaluate(_SORT % (json.dumps(name), json.dumps(name))) for name in ("return", "length")]
        wheres = ("return > 1", "return > 1 and update_count >= 500", "update_count < 100")
        found["sort_ms"], found["filter_ms"] = sorts, [await page.evaluate(_FILTER % json.dumps(w)) for w in wheres]

    with viewer(f"s3://{BUCKET}/many", endpoint) as (url, began):
        asyncio.run(visit(browser, url, walk))
    return found


def episode(browser: str, endpoint: str, proxy: Any) -> dict[str, Any]:
    """An episode of two cameras: the first frames, scrubbing to random steps, and what that read."""
    from tests.support.browser import visit

    found: dict[str, Any] = {"open_ms": [], "scrub_ms": [], "asked": [], "read": 0}
    steps = np.random.default_rng(0).choice(np.arange(20, STEPS), 12, replace=False).tolist()

    async def walk(page: Any) -> None:
        await page.until("document.querySelector('.grid-row:not(.waiting)') !== null", 60)
        for n in range(4):
            found["open_ms"].append(await page.evaluate(_OPEN % (f"e{n}", n)))
        await page.until("document.querySelector('.ready') !== null", 60)
        await asyncio.sleep(0.5)
        proxy.log.clear()
        for step in steps:
            found["scrub_ms"].append(await page.evaluate(_SCRUB % (step, step)))
        await asyncio.sleep(1)
        found["read"] = sum(seen.bytes_out for seen in proxy.log if "/shards/" in seen.path)

    with viewer(f"s3://{BUCKET}/films", endpoint) as (url, _):
        asyncio.run(visit(browser, url, walk))
    found["chunks"] = _chunk_bytes(endpoint, steps)
    return found


def _chunk_bytes(endpoint: str, steps: Sequence[int]) -> int:
    """Stored bytes of the chunks that hold these steps, each once."""
    import archive
    from archive.read import Gather
    from tests.support import servers

    arc = archive.open(f"s3://{BUCKET}/films", storage_options=servers.s3fs_options(endpoint))
    gather = Gather(arc.episodes.filter(episode_id="e3"), list(FIELDS), cache_bytes=2**30)
    gather.rows([0], [0])
    before = arc.io_stats()
    for step in steps:
        gather.rows([0], [step])
    return int((arc.io_stats() - before).bytes_in)


def measure() -> Sequence[common.Row]:
    from tests.support import servers
    from tests.support.browser import chromium
    from tests.support.proxy import FaultProxy

    servers.set_environment()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, servers.seaweedfs() as endpoint:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        fill(endpoint)
        with FaultProxy(endpoint) as proxy, chromium(Path(folder)) as browser:
            proxy.add("delay", times=-1, seconds=DELAY_S)
            many, few = table(browser, proxy.endpoint), episode(browser, proxy.endpoint, proxy)
    return [
        common.bounded("from the command to the table", many["table_s"], most=2.0, unit="s", **many),
        common.bounded("sort by a column", max(many["sort_ms"]), most=150, unit="ms"),
        common.bounded("filter by a condition", max(many["filter_ms"]), most=150, unit="ms"),
        common.bounded("open an episode, both cameras", max(few["open_ms"]), most=500, unit="ms", **few),
        common.bounded("scrub to a random step, both", max(few["scrub_ms"]), most=300, unit="ms"),
        common.bounded("bytes read to the chunks shown", few["read"] / few["chunks"], most=1.2),
    ]


@pytest.mark.bench
def test_view() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {})
