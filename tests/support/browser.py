"""A page in headless Chromium, spoken to over its debugging protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0


def installed() -> str:
    """The browser's path; skips the test where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser ({', '.join(NAMES)}); on Debian: apt install chromium")
    return found


class Page:
    """One page: `evaluate` runs an expression in it; `complaints` are errors, warnings, and requests it made."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive(timeout=START_S)).data)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        out = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in out, out
        return out["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> None:
        for _ in range(int(timeout_s / 0.05)):
            if await self.evaluate(expression):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{expression} did not become true; {self.complaints}")


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """A running browser's debugging address."""
    command = [
        installed(), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
        "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", f"--user-data-dir={folder}",
        "about:blank",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield _address(folder / "DevToolsActivePort", process)
    finally:
        process.kill()
        process.wait()


def _address(path: Path, process: subprocess.Popen[bytes]) -> str:
    import time

    end = time.monotonic() + START_S
    while not (path.exists() and path.read_text().count("\n") >= 1):
        assert process.poll() is None, "the browser ended"
        assert time.monotonic() < end, "the browser did not start"
        time.sleep(0.05)
    return f"http://127.0.0.1:{path.read_text().split()[0]}"


async def visit(address: str, file: Path, look: Any) -> Page:
    """Open a file and `await look(page)`; the page, for what it complained of."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            await page.open(file.as_uri())
            await look(page)
            return page
