"""`archive view` and `arc.view()`: what is printed, served, and left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import http.server
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.base import MissingPackageError, UsageError
from archive.testing import small_archive
from archive.view import Viewer, routes, serve
from tests.support.browser import Page, visit
from tests.support.commands import call
from tests.support.places import ROOT

WAIT_S = 60.0
COMMITS = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("viewing") / "arc")
    small_archive(root, 2)
    return root


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was opened with; commands end as soon as they serve."""
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", urls.append)
    monkeypatch.setattr(Viewer, "wait", lambda self, *more: None)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return urls


def _answer(viewer_url: str, path: str = "api/about", host: str | None = None) -> Any:
    """What a viewer answers to who has its URL."""
    origin, _, token = viewer_url.partition("?token=")
    headers = {"Authorization": f"Bearer {token.partition('#')[0]}"} | ({"Host": host} if host else {})
    with urllib.request.urlopen(urllib.request.Request(origin + path, headers=headers), timeout=WAIT_S) as answer:
        return json.loads(answer.read())


def _refused(viewer_url: str, **how: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        _answer(viewer_url, **how)
    caught.value.close()
    return caught.value.code


def _port(viewer: Viewer) -> int:
    return int(viewer.origin.rpartition(":")[2])


# the command


@contextmanager
def _started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "archive.cli", "view", *(str(a) for a in arguments)]
    place = {**os.environ, "PYTHONPATH": str(ROOT), "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_prints_one_url_and_serves_until_ctrl_c(url: str) -> None:
    with _started(url, "--at", "#/checkpoints?run=main") as process:
        printed = _line(process).strip()
        assert printed.endswith("#/checkpoints?run=main")
        assert _answer(printed)["commit"] == COMMITS
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=WAIT_S)
        assert (process.returncode, complaints) == (0, "")
        assert "token" not in rest


def test_it_ends_by_sigterm_and_prints_one_document(url: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.json"
    labels.write_text('[{"key": "grade", "kind": "choice", "values": ["bad", "good"]}]')
    with _started(url, "--json", "--labels", labels, "--by", "anna", "--read-only", "--no-browser") as process:
        document = json.loads("".join(iter(functools.partial(_line, process), "}\n")) + "}")
        assert list(document) == ["url"]
        assert "grade" in json.dumps(_answer(document["url"], "api/labels"))
        assert "--read-only" in _answer(document["url"], "api/writable")["why_not"]
        process.terminate()
        assert process.communicate(timeout=WAIT_S) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize(("name", "value"), [("DISPLAY", ":0"), ("WAYLAND_DISPLAY", "wayland-0")])
@pytest.mark.skipif(sys.platform != "linux", reason="asks what Linux has")
def test_a_browser_is_opened_on_a_desktop_alone(
    url: str, opened: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert call("view", url).exit_code == 0
    assert opened == []
    monkeypatch.setenv(name, value)
    printed = call("view", url, "--at", "/wall").stdout.splitlines()[0]
    call("view", url, "--no-browser")
    (once,) = opened
    assert once.endswith("#/wall")
    assert printed.endswith("#/wall")
    token = printed.partition("?token=")[2].partition("#")[0]
    assert token not in once  # every user of the machine sees a browser's command line


def test_all_addresses_are_listened_on_with_a_warning(url: str, opened: list[str]) -> None:
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        result = call("view", url, "--host", host)
        assert ("other machines can come in" in result.stderr) == warned
        assert ("nothing is encrypted" in result.stderr) == warned
        assert len(result.stdout.splitlines()) == 2


def test_exact_hosts_hold_on_all_addresses(url: str) -> None:
    with serve(archive.open(url), host="0.0.0.0") as viewer:
        port = _port(viewer)
        assert "0.0.0.0" not in viewer.url
        assert _answer(viewer.url)["commit"] == COMMITS
        here = viewer.url.replace(viewer.origin, f"http://127.0.0.1:{port}")
        assert _answer(here)["commit"] == COMMITS
        assert _answer(here, host=f"{socket.gethostname().lower()}:{port}")["commit"] == COMMITS
        assert _refused(here, host=f"evil.example:{port}") == 421
        assert _refused(here, host=f"0.0.0.0:{port}") == 421


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_addresses_of_ipv6_are_written_as_browsers_do(url: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as e:
        pytest.skip(f"needs ::1 ({e})")
    with serve(archive.open(url), host="::1") as viewer:
        assert viewer.url.startswith("http://[::1]:")
        assert _answer(viewer.url)["commit"] == COMMITS


def test_what_cannot_be_is_refused_in_one_line(url: str, opened: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases: dict[str, tuple[object, ...]] = {
            "there is no archive": (tmp_path / "nothing",),
            "give another --host or --port": (url, "--port", taken.getsockname()[1]),
            "nowhere.invalid": (url, "--host", "nowhere.invalid"),
            "cannot be read as JSON": (url, "--labels", tmp_path / "missing.json"),
        }
        for said, arguments in cases.items():
            result = call("view", *arguments)
            assert result.exit_code != 0
            assert said in result.stderr
            assert len(result.stderr.splitlines()) == 1
            assert result.stdout == ""
    assert opened == []


def test_the_signals_are_as_before(url: str, opened: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert call("view", url).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("package", ["uvicorn", "starlette.applications"])
def test_it_says_what_to_install(url: str, opened: list[str], monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arc = archive.open(url)
    with pytest.raises(MissingPackageError, match=r"trajectory-archive\[view\]"):
        arc.view()
    assert "pip install 'trajectory-archive[view]'" in call("view", url).stderr


# in a program


def _held() -> tuple[set[str], set[str]]:
    """The threads and the sockets of this process."""
    gc.collect()
    names = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
    files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return names, {target for file in files if (target := _target(file)).startswith("socket:")}


def _target(file: Path) -> str:
    try:
        return os.readlink(file)  # noqa: PTH115
    except OSError:
        return ""  # of the folder itself


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_closed_it_leaves_neither_threads_nor_sockets(url: str) -> None:
    with serve(archive.open(url)) as viewer:  # whatever is made once in a process is there
        _answer(viewer.url)
    threads, sockets = _held()
    viewers = [serve(archive.open(url)) for _ in range(3)]
    assert len({viewer.url for viewer in viewers}) == 3
    for viewer in viewers:
        assert len(_answer(viewer.url, "api/about")["runs"]) == 1
        idle = socket.create_connection(("127.0.0.1", _port(viewer)))  # a browser that keeps its connection
        viewer.close()
        idle.close()
        viewer.close()
    for thread in threading.enumerate():  # those of a loop that was closed end a moment after it
        if f"{thread.name} {thread.ident}" not in threads and not thread.name.startswith("archive-io"):
            thread.join(WAIT_S)
    now, still = _held()
    assert {name for name in now - threads if not name.startswith("archive-io")} == set()
    assert still - sockets == set()


def test_several_viewers_do_not_open_each_other(url: str) -> None:
    with serve(archive.open(url)) as one, serve(archive.open(url)) as other:
        token = one.url.partition("token=")[2]
        assert _refused(f"{other.origin}/?token={token}") == 403
        cookies = set()
        for viewer in (one, other):
            with urllib.request.urlopen(viewer.url, timeout=WAIT_S) as page:
                cookies.add(page.headers["set-cookie"].partition("=")[0])
        assert len(cookies) == 2  # browsers send all cookies of a host to all of its ports


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_viewer_of_its_own_and_not_its_parents_port(url: str) -> None:
    arc = archive.open(url)
    here, there = socket.socketpair()
    with serve(arc) as viewer:
        if not (child := os.fork()):
            here.close()
            _child(arc, viewer, there)
        there.close()
        try:
            assert here.recv(1) == b"x"
            assert _answer(viewer.url)["commit"] == COMMITS
            viewer.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", _port(viewer)))
        finally:
            here.close()  # which ends the child
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0


def _child(arc: archive.Archive, viewer: Viewer, told: socket.socket) -> None:
    """Looks at the archive by a viewer of its own, says so, and waits for its parent."""
    code = 1
    try:
        with serve(arc) as own:
            code = 0 if _answer(own.url)["commit"] == COMMITS else 2
        told.send(b"x")
        told.recv(1)
        viewer.close()
    finally:
        os._exit(code)


def test_labels_are_offered_in_a_program_as_by_the_command(url: str) -> None:
    arc = archive.open(url)
    with arc.view(labels=[{"key": "grade", "kind": "number"}], by="anna") as viewer:
        assert "grade" in json.dumps(_answer(viewer.url, "api/labels"))
    with pytest.raises(UsageError, match="kind"):
        arc.view(labels=[{"key": "grade", "kind": "odd"}])


def test_the_token_is_in_no_log_no_name_and_no_traceback(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(shown: object, query: object) -> None:
        raise RuntimeError("something is wrong")

    monkeypatch.setitem(routes.QUESTIONS, "about", failing)  # type: ignore[arg-type]
    caplog.set_level(logging.DEBUG)
    with serve(archive.open(url)) as viewer:
        token = viewer.url.partition("token=")[2]
        assert _refused(viewer.url) == 500
        assert _refused(viewer.url, host="evil.example") == 421
        assert _refused(viewer.url, path=f"app/{token}") == 404
        with pytest.raises(UsageError) as caught:
            serve(archive.open(url), port=_port(viewer))
        said = [*traceback.format_exception(caught.value), repr(vars(viewer)), repr(vars(viewer._server)["_place"])]
        assert "RuntimeError" in caplog.text
        assert [text for text in (caplog.text, repr(viewer), str(viewer), *said) if token in text] == []


# in a notebook


class _Page(http.server.BaseHTTPRequestHandler):
    """A notebook: what a cell shows; and, at /bare, somebody's page without the token."""

    def __init__(self, html: dict[str, str], *given: Any) -> None:
        self._html = html
        super().__init__(*given)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self._html.get(self.path, "").encode())

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture
def framing(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, threading.Semaphore]]:
    """The port of a page that shows a viewer as a cell would; what counts how often the page in it came to life."""
    alive, about = threading.Semaphore(0), routes.QUESTIONS["about"]
    monkeypatch.setitem(routes.QUESTIONS, "about", lambda shown, query: (alive.release(), about(shown, query))[1])
    with archive.open(url).view(read_only=True) as viewer:
        icon = '<link rel="icon" href="data:,">'
        bare = f'{icon}<iframe src="{viewer.origin}/"></iframe>'
        page = functools.partial(_Page, {"/": icon + viewer._repr_html_(), "/bare": bare})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), page) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield server.server_port, alive
            server.shutdown()
            thread.join()


def test_notebooks_of_this_machine_may_frame_it_and_nobody_else(
    browser: str, framing: tuple[int, threading.Semaphore]
) -> None:
    port, alive = framing

    async def lives(page: Page) -> None:
        assert await asyncio.to_thread(alive.acquire, timeout=WAIT_S)

    async def is_refused(page: Page) -> None:
        await page.until("document.readyState === 'complete'")
        assert not alive.acquire(blocking=False)

    for host in ("localhost", "127.0.0.1"):
        asyncio.run(visit(browser, f"http://{host}:{port}/", lives))
    for place in (f"evil.localhost:{port}/", f"127.0.0.1:{port}/bare"):  # where the browser has its cookie
        refused = asyncio.run(visit(browser, f"http://{place}", is_refused))
        assert any("frame-ancestors" in text for text in refused.complaints)


def test_who_was_let_in_by_a_code_goes_on(url: str, browser: str) -> None:
    async def lives(page: Page) -> None:
        await page.until("document.querySelector('.count')?.innerText.endsWith('episodes')")

    async def reloads(page: Page) -> None:
        await lives(page)
        await page.reload()
        await lives(page)

    with serve(archive.open(url)) as viewer:
        once = viewer.url_once()
        asyncio.run(visit(browser, once, reloads))
        asyncio.run(visit(browser, f"{viewer.origin}/#/episodes", lives))  # a link that was opened in a tab of its own
