"""Does I/O: an application on a port of this machine, served by a thread until it is closed: by which names a browser
may ask for it, who may ask (the right Host, no other Origin, the token), and what the browser may do with answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from archive.base import UsageError, in_child

SAFE_METHODS = ("GET", "HEAD")
_HERE = ("localhost", "127.0.0.1", "::1")
OPEN = "/app/"  # what is in the wheel: the same for everybody, and nothing of the archive

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)


@dataclass(frozen=True)
class Place:
    """A place to serve at: the hosts by which it may be asked for, and what opens it.

    token: what every question needs, and nobody but the page is given.  session: what the cookie holds, which opens the
    page again, without the token.  codes: each opens the page once, for what others can see, as a command line.
    """

    hosts: frozenset[str]  # "127.0.0.1:8642": exactly what a Host header says
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    codes: dict[str, None] = field(default_factory=dict)

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(f"http://{host}" for host in self.hosts)

    @property
    def cookie(self) -> str:
        """The name of its cookie: browsers send a host's cookies to all of its ports."""
        return f"archive-view-{next(iter(self.hosts)).rpartition(':')[2]}"

    def code(self) -> str:
        """A code that opens the page once."""
        made = secrets.token_urlsafe(24)
        self.codes[made] = None
        return made

    def __repr__(self) -> str:
        return f"<Place {', '.join(sorted(self.hosts))}>"  # never a secret


class Guard:
    """An ASGI application around another: refuses what does not come from the page itself, on a guarded path.

    Everything needs the exact Host, and an Origin, where there is one, of its own. All but OPEN and the page itself
    needs the token as `Authorization: Bearer`, which a browser never sends by itself. The page is opened by `?token=`,
    or once by a `?code=`: then scope["token"] has the token that it is to ask with, it sets the cookie, and it may be
    framed by the notebook of this machine that asked for it. Opened by the cookie it has none of these.
    """

    def __init__(self, app: Any, place: Place) -> None:
        self._app, self._place = app, place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets here
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        why = self._foreign(scope, headers)
        opened = why is None and self._opens(scope)
        if why is None and not opened:
            why = self._unknown(scope, headers)
        answer = _Headers(send, self._added(scope, headers, opened)).send
        if why is None:
            await self._app({**scope, "token": self._place.token if opened else ""}, receive, answer)
        else:
            await _refuse(answer, *why)

    def _foreign(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and reason for what is asked by another name, or by another site's page."""
        if headers.get("host") not in self._place.hosts:
            return 421, "this host is not served here"
        if headers.get("origin", next(iter(self._place.origins))) not in self._place.origins:
            return 403, "another site's page may not ask"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and scope["path"] != "/":
            return 403, "another site's page may not ask"
        return None

    def _opens(self, scope: Mapping[str, Any]) -> bool:
        """Return whether it asks for the page by what opens it; a code is good no more."""
        if scope["path"] != "/" or scope["method"] != "GET":
            return False
        code = _asked(scope, "code")
        return _same(_asked(scope, "token"), self._place.token) or self._place.codes.pop(code, code) is None

    def _unknown(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and reason for what nobody let in, or None for what may go on."""
        if scope["path"].startswith(OPEN) and scope["method"] in SAFE_METHODS:
            return None
        if _same(_bearer(headers), self._place.token):
            return None
        if scope["path"] == "/" and _same(_cookie(headers, self._place.cookie), self._place.session):
            return None
        return 403, "the token is missing, or the link was used before: open the URL that `archive view` printed"

    def _added(self, scope: Mapping[str, Any], headers: Mapping[str, str], opened: bool) -> list[tuple[bytes, bytes]]:
        added = {
            "content-security-policy": _POLICY.format(ancestors=_framer(headers) if opened else "'none'"),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache" if scope["path"].startswith(OPEN) else "no-store",
        }
        if opened:
            added["set-cookie"] = f"{self._place.cookie}={self._place.session}; Path=/; HttpOnly; SameSite=Strict"
        return [(name.encode(), value.encode()) for name, value in added.items()]


class _Headers:
    """Sends what it is given, with these headers added to the answer's own."""

    def __init__(self, send: Any, added: Iterable[tuple[bytes, bytes]]) -> None:
        self._send, self._added = send, list(added)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._added]}
        await self._send(message)


async def _refuse(send: Any, status: int, reason: str) -> None:
    body = f"{reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _bearer(headers: Mapping[str, str]) -> str:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token if kind == "Bearer" else ""


def _cookie(headers: Mapping[str, str], name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _asked(scope: Mapping[str, Any], name: str) -> str:
    given: dict[str, list[str]] = parse_qs(scope["query_string"].decode("latin-1"))
    return given.get(name, [""])[0]


def _same(secret: str, known: str) -> bool:
    return hmac.compare_digest(secret.encode(), known.encode())


def _framer(headers: Mapping[str, str]) -> str:
    """The origin of the page that asks, if it is one of this machine, as a notebook's; else nobody."""
    with contextlib.suppress(ValueError):  # of a port that is none
        found = urlsplit(headers.get("referer", ""))
        if found.scheme in ("http", "https") and found.hostname in _HERE:
            name = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
            return f"{found.scheme}://{name}" + (f":{found.port}" if found.port else "")
    return "'none'"


LOOPBACK = "127.0.0.1"
_OWN = frozenset({LOOPBACK, "localhost"})
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104  whoever asks for all addresses gives one of these
_FAR = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104  of documents: nobody has them, and nothing is sent


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, or on a free port for 0; UsageError where that cannot be had."""
    found = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two have the same port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(socket.SOMAXCONN)
    except (OSError, OverflowError) as e:
        found.close()
        raise UsageError(f"{_written(host)}:{port} cannot be listened on ({e}): give another host= or port=") from e
    return found


def reached(host: str) -> str:
    """The host as a browser writes it: an address that leads here, for those that only listen."""
    return _written(_outward(host) if host in _ANY else host)


def names(host: str) -> frozenset[str]:
    """Exactly those names by which it may be asked for, as a browser writes them."""
    if host in _ANY:
        found = {_outward(host), _ANY[host], socket.gethostname(), *_OWN}
    elif host in _OWN:
        found = set(_OWN)
    else:
        found = {host}
    return frozenset(_written(name).lower() for name in found)


def alone(host: str) -> bool:
    """Return whether only this machine can come in there."""
    return host in _OWN or host == "::1" or host.startswith("127.")


def _outward(host: str) -> str:
    """The address by which this machine speaks to others; its own where there are none."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_FAR[host], 9))
        except OSError:
            return _ANY[host]
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


START_S = 30.0
STOP_S = 5.0


class Server:
    """Serves an application to who has the token: `with Server(app) as s: print(s.url)`. On a port of its choice, or
    the one given."""

    def __init__(self, app: Any, *, host: str = LOOPBACK, port: int = 0) -> None:
        import uvicorn

        self._socket = listening(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.origin = f"http://{reached(host)}:{self.port}"
        self._place = Place(frozenset(f"{name}:{self.port}" for name in names(host)))
        config = uvicorn.Config(
            Guard(app, self._place),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
            ws="none",
            h11_max_incomplete_event_size=65536,
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, name="archive-view", daemon=True)
        self._failed: list[BaseException] = []
        _servers.add(self)

    @property
    def url(self) -> str:
        """The URL to open in a browser; everybody who has it may look."""
        return f"{self.origin}/?token={self._place.token}"

    def url_once(self) -> str:
        """A URL for one look: for a command line, which others see."""
        return f"{self.origin}/?code={self._place.code()}"

    def start(self) -> Self:
        """Serve from now on, in the background."""
        self._thread.start()
        for _ in range(int(START_S / 0.005)):
            if self._server.started:
                return self
            if not self._thread.is_alive():
                break
            self._thread.join(0.005)
        self.close()
        raise UsageError(f"nothing can be served at {self.origin}: {self._failed or 'it did not start'}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._failed.append(e)

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        await asyncio.sleep(
            0
        )  # connections that came at the last moment are known after this; nobody would answer them
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Block until it is closed, or Ctrl-C."""
        while self._thread.is_alive() and not interrupted():
            self._thread.join(0.2)

    def close(self) -> None:
        """Serve no more."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._socket.close()

    def let_go(self) -> None:
        """In a forked child, which serves nothing: the port is its parent's alone."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server at {self.origin}>"


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _let_go() -> None:
    for server in list(_servers):
        server.let_go()


in_child(_let_go)
