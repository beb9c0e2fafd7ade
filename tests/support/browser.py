"""A page in headless Chromium, spoken to over its debugging protocol; and what axe finds in it: parts that people who
listen, or see little, cannot use."""

from __future__ import annotations

import asyncio
import base64
import importlib.resources
import json
import re
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
KEY_CODES = {
    "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
    "ArrowDown": 40, "Tab": 9, "PageUp": 33, "PageDown": 34, "/": 191, "?": 191,
}  # fmt: skip


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
        self._loads = 0

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
        elif event["method"] == "Page.loadEventFired":
            self._loads += 1

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def reload(self) -> None:
        """The page anew, once it is loaded: what is evaluated before that may go with the old one."""
        before = self._loads
        await self.call("Page.reload")
        while self._loads == before:
            self._note(json.loads((await self._socket.receive(timeout=START_S)).data))

    async def click(self, selector: str) -> None:
        """A real click in the middle of the first element that the selector finds, once it is there."""
        await self.until(f"document.querySelector({json.dumps(selector)})?.getClientRects().length > 0")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        box = await self.evaluate(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        await self.mouse(*box)

    async def mouse(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def wheel(self, selector: str, pixels: int) -> None:
        """A real turn of the wheel over the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = await self.evaluate(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({box})")
        await self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=pixels)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """A real key: "ArrowRight", "Enter", "a", " "."""
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        code = KEY_CODES.get(key, ord(key.upper()[0]))
        given = {"key": key, "modifiers": 8 if shift else 0, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def type(self, text: str) -> None:
        """Text into the field that has the focus, once one has it: a key that leads there may still be waiting."""
        await self.until("document.activeElement?.matches('input, textarea, select')")
        await self.call("Input.insertText", text=text)

    async def text(self, selector: str = "body") -> str:
        """What a reader sees there."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def size(self, width: int, height: int) -> None:
        given = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **given)

    async def theme(self, name: str) -> None:
        """ "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, file: Path) -> None:
        """What is on screen, as PNG."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))

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


async def visit(address: str, place: Path | str, look: Any) -> Page:
    """Open a file or a URL and `await look(page)`; the page, for what it complained of."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            await page.open(place if isinstance(place, str) else place.as_uri())
            await look(page)
            return page


GRAVE = ("serious", "critical")


async def grave(page: Page) -> list[str]:
    """Each serious or critical violation of what is shown now: its rule, why, and where."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_source())  # by the debugging protocol, which the page's policy does not concern
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)")
    return [_told(one) for one in found if one["impact"] in GRAVE]


def _source() -> str:
    pytest.importorskip("axe_core_python", reason="needs axe-core-python, which has axe.min.js")
    return (importlib.resources.files("axe_core_python") / "axe.min.js").read_text("utf-8") + "\n;undefined"


def _told(violation: dict[str, Any]) -> str:
    first = violation["nodes"][0]
    place = f"{json.dumps(first['target'])}: {first['html'][:160]}: {first['failureSummary']}"
    return f"{violation['id']} ({violation['impact']}), {len(violation['nodes'])} places, such as {place}"


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def held(page: str) -> Any:
    """What a page that was saved holds, as its script reads it."""
    found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def visited(address: str, text: str, tmp_path: Path, look: Any) -> Page:
    file = tmp_path / "page.html"
    file.write_text(text, "utf-8")

    async def looking(page: Page) -> None:
        await look(page)
        assert await page.evaluate("window.hacked") is None

    page = asyncio.run(visit(address, file, looking))
    assert page.complaints == []
    assert page.requests == [file.as_uri()], "a page loads nothing but itself"
    return page
