"""Does no I/O: who may ask: the right Host, no other Origin, the token. And what the browser may do with answers."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

SAFE_METHODS = ("GET", "HEAD")
OPEN = "/app/"  # what is in the wheel: the same for everybody, and nothing of the archive

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {ancestors}"
)


@dataclass(frozen=True)
class Place:
    """Where it is served: the hosts by which it may be asked for, its token, and who may frame it."""

    hosts: frozenset[str]  # "127.0.0.1:8642": exactly what a Host header says
    token: str
    ancestors: str = "'self'"

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(f"http://{host}" for host in self.hosts)

    @property
    def cookie(self) -> str:
        """The name of its cookie: browsers send a host's cookies to all of its ports."""
        return f"archive-view-{next(iter(self.hosts)).rpartition(':')[2]}"

    def __repr__(self) -> str:
        return f"<Place {', '.join(sorted(self.hosts))}>"  # never the token


class Guard:
    """An ASGI application around another: refuses what does not come from the page itself, on a guarded path.

    Everything needs the exact Host, and an Origin, where there is one, of its own. All but OPEN needs the token: as
    `Authorization: Bearer`, as `?token=` of the first page, or by the cookie that this has set; only the first of
    these may change anything, as a browser never sends it by itself.
    """

    def __init__(self, app: Any, place: Place) -> None:
        self._app, self._place = app, place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets here
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        why = self._refused(scope, headers)
        answer = _Headers(send, self._added(scope)).send
        if why is None:
            await self._app(scope, receive, answer)
        else:
            await _refuse(answer, *why)

    def _refused(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and reason, or None for what may go on."""
        if headers.get("host") not in self._place.hosts:
            return 421, "this host is not served here"
        if headers.get("origin", next(iter(self._place.origins))) not in self._place.origins:
            return 403, "another site's page may not ask"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and scope["path"] != "/":
            return 403, "another site's page may not ask"
        if scope["path"].startswith(OPEN) and scope["method"] in SAFE_METHODS:
            return None
        if self._same(_bearer(headers)):
            return None
        if scope["method"] not in SAFE_METHODS:
            return 403, "a change needs the token as Authorization: Bearer"
        if self._same(_cookie(headers, self._place.cookie)) or (scope["path"] == "/" and self._same(_asked(scope))):
            return None
        return 403, "the token is missing: open the URL that `archive view` printed"

    def _same(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._place.token.encode())

    def _added(self, scope: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-security-policy": _POLICY.format(ancestors=self._place.ancestors),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache" if scope["path"].startswith(OPEN) else "no-store",
        }
        if scope["path"] == "/" and self._same(_asked(scope)):
            headers["set-cookie"] = f"{self._place.cookie}={self._place.token}; Path=/; HttpOnly; SameSite=Strict"
        return [(name.encode(), value.encode()) for name, value in headers.items()]


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


def _asked(scope: Mapping[str, Any]) -> str:
    given: dict[str, list[str]] = parse_qs(scope["query_string"].decode("latin-1"))
    return given.get("token", [""])[0]
