"""Does I/O: S3 servers of one test run, started when a test first asks for them, and places there."""

from __future__ import annotations

import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from archive.base import MissingPackageError, UsageError
from archive.testing import servers
from archive.testing.roots import EmptyRoot

BUCKET = "bucket"


class S3Servers:
    """At most one server of each kind, until the end of the block."""

    def __init__(self) -> None:
        self._running: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def fresh(self, kind: str) -> Iterator[EmptyRoot]:
        """A place in a bucket of a server ("moto" or "seaweedfs"), emptied at the end of the block."""
        endpoint = self._endpoint(kind)
        root = EmptyRoot(f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}", servers.s3fs_options(endpoint))
        if kind == "moto":
            _send("PUT", f"{endpoint}/{BUCKET}")
        yield root
        if kind == "moto":
            _send("POST", f"{endpoint}/moto-api/reset")
        else:
            root.clear()

    def _endpoint(self, kind: str) -> str:
        if kind not in ("moto", "seaweedfs"):
            raise UsageError(f"archive_s3({kind!r}): the servers are moto and seaweedfs")
        if kind not in self._running:
            starting = servers.seaweedfs() if kind == "seaweedfs" else moto_in_this_process()
            self._running[kind] = self._stack.enter_context(starting)
            if kind == "seaweedfs":
                servers.make_bucket(self._running[kind], BUCKET)
        return self._running[kind]


@contextmanager
def moto_in_this_process() -> Iterator[str]:
    """moto's server in a thread; its endpoint. MissingPackageError where it is not installed."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise MissingPackageError(
            "archive_s3 needs moto's server: pip install 'trajectory-archive[testing]'"
        ) from error
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _send(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60):
        pass
