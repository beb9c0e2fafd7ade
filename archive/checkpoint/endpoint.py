"""Does I/O (a port): a small HTTP server that is asked for a checkpoint, by whoever knows its token."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from archive.base import UsageError, logger

_PATH = "/checkpoint"
_BODY_BYTES = 65536  # a request needs no body at all
_SILENT_S = 10.0  # a client that says nothing for so long is left
_TOKEN_BYTES = 32


class Endpoint:
    """A small HTTP server: POST /checkpoint asks this process for a checkpoint. On loopback unless told otherwise.

    A request must bear the token (`Authorization: Bearer <token>`), so that no page in a browser, no other user of the
    machine and nobody who finds the port can stop the job to save.
    """

    def __init__(
        self, host: str, port: int, ask: Callable[[], None], *, token: str | None = None, hosts: Sequence[str] = ()
    ) -> None:
        """ask: called for each request that is granted.  token: made anew unless given.  hosts: names by which
        clients may call this machine, beside its own, addresses and localhost. UsageError for a token that cannot be
        one."""
        self.token = _checked(token)
        self._server = _Server((host, port), self.token, {host, *hosts}, ask)
        self._thread = threading.Thread(target=self._server.serve_forever, name="archive-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to POST; the token is not in it."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}{_PATH}"

    def close(self) -> None:
        """Give up the port."""
        self._server.shutdown()
        self._server.server_close()


def _checked(token: str | None) -> str:
    if token is None:
        return secrets.token_urlsafe(_TOKEN_BYTES)
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("a token must be at least 16 printable ASCII characters without spaces; leave it out for one")
    return token


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], token: str, names: set[str], ask: Callable[[], None]) -> None:
        super().__init__(address, _Handler)
        self.expected = f"Bearer {token}".encode()
        self.names = {name.lower() for name in (*names, "localhost", socket.gethostname())}
        self.ask = ask

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not on stderr: a client that went away is no concern of the job's."""
        logger.debug("a request over HTTP broke off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENT_S

    def do_POST(self) -> None:
        status, answer = self._judge()
        if status == 202:
            self.server.ask()
        self._say(status, answer)

    def _judge(self) -> tuple[int, dict[str, Any]]:
        """The status and the answer to a request; its body is read, that the answer arrives."""
        size = self.headers.get("Content-Length") or "0"
        if not size.isdecimal() or int(size) > _BODY_BYTES:
            self.close_connection = True
            return 413, {"error": "a request for a checkpoint has no such body"}
        self.rfile.read(int(size))
        if not self._meant_here():
            return 403, {"error": "the Host of this request is not this machine"}
        if not self._bears_token():
            return 401, {"error": "send Authorization: Bearer <token>"}
        if self.path.rstrip("/") != _PATH:
            return 404, {"error": f"POST {_PATH}"}
        return 202, {"requested": True}

    def _meant_here(self) -> bool:
        """Whether Host is an address or a name of this machine: a page elsewhere can have its own name lead here."""
        host = (self.headers.get("Host") or "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        return name in self.server.names or _is_address(name.removeprefix("[").removesuffix("]"))

    def _bears_token(self) -> bool:
        given = (self.headers.get("Authorization") or "").encode("utf-8", "surrogateescape")
        return secrets.compare_digest(given, self.server.expected)

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: requests are the application's to log."""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
