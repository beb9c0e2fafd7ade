"""Does I/O: an application on a port of this machine, served by a thread until it is closed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from archive.base import UsageError, in_child
from archive.view.web import ports
from archive.view.web.guard import Guard, Place

START_S = 30.0
STOP_S = 5.0


class Server:
    """Serves an application to who has the token: `with Server(app) as s: print(s.url)`. On a port of its choice, or
    the one given."""

    def __init__(self, app: Any, *, host: str = ports.LOOPBACK, port: int = 0) -> None:
        import uvicorn

        self._socket = ports.listening(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.origin = f"http://{ports.reached(host)}:{self.port}"
        self._place = Place(frozenset(f"{name}:{self.port}" for name in ports.names(host)))
        config = uvicorn.Config(
            Guard(app, self._place), log_config=None, log_level="critical", access_log=False, lifespan="off",
            server_header=False, date_header=False, timeout_graceful_shutdown=1, ws="none",
            h11_max_incomplete_event_size=65536,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._run, name="archive-view", daemon=True)
        self._failed: list[BaseException] = []
        _servers.add(self)

    @property
    def url(self) -> str:
        """What to open in a browser; whoever has it may look."""
        return f"{self.origin}/?token={self._place.token}"

    def url_once(self) -> str:
        """The same for one look: for a command line, which others see."""
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
        """Until it is closed, or Ctrl-C."""
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
