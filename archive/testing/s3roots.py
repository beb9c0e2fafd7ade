"""Does I/O: moto's S3 server in this process, started when a test first asks for it, and places there."""

from __future__ import annotations

import os
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archive.base import package
from archive.testing.roots import EmptyRoot

BUCKET = "bucket"
KEY, SECRET, REGION = "testkey", "testsecret", "us-east-1"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
UNSET = (
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)


def s3fs_options(endpoint: str) -> dict[str, Any]:
    """The storage options of a server that takes KEY and SECRET."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint, "client_kwargs": {"region_name": REGION}}


@contextmanager
def moto_in_this_process() -> Iterator[str]:
    """moto's server in a thread; its endpoint. MissingPackageError where it is not installed."""
    moto = package("moto.server", "archive_s3", "'trajectory-archive[testing]'")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def fresh(endpoint: str) -> Iterator[EmptyRoot]:
    """A place in a bucket of moto's server, which forgets all of it at the end of the block."""
    _send("PUT", f"{endpoint}/{BUCKET}")
    yield EmptyRoot(f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}", s3fs_options(endpoint))
    _send("POST", f"{endpoint}/moto-api/reset")


def _send(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60):
        pass
