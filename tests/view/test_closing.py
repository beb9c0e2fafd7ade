"""A viewer that is closed leaves nobody waiting for an answer."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from archive.view.server import Server

WAIT_S = 1.0


async def empty(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def is_ended(client: socket.socket) -> bool:
    """Whether the other side answers, or is gone."""
    with client:
        client.settimeout(WAIT_S)
        try:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
    return True


def test_connections_that_come_while_it_closes_end() -> None:
    for _ in range(4):
        server, opened, over = Server(empty).start(), list[socket.socket](), threading.Event()

        def connect(port: int = server.port, into: list[socket.socket] = opened, end: threading.Event = over) -> None:
            while not end.is_set():
                try:
                    into.append(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                except OSError:
                    return

        threads = [threading.Thread(target=connect) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        server.close()
        over.set()
        for thread in threads:
            thread.join()
        assert all(is_ended(client) for client in opened[-20:])
        for client in opened:
            client.close()
