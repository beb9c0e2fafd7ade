"""A fresh root on each kind of store."""

from __future__ import annotations

import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from archive.testing import EmptyRoot
from tests.support import servers
from tests.support.proxy import FaultProxy

BUCKET = "bucket"
BACKENDS = ("memory", "local", "moto", "seaweedfs", "s3fs", "obstore")


@dataclass
class Backend(EmptyRoot):
    """A fresh, empty root somewhere. `endpoint` is that of its S3 server, or empty."""

    name: str = ""
    endpoint: str = ""

    @property
    def is_s3(self) -> bool:
        return bool(self.endpoint)

    @property
    def place(self) -> tuple[str, str]:
        """Bucket and key of the root."""
        return bucket_and_key(self.url)

    def plant(self, key: str, data: bytes) -> None:
        """Makes an object without the code under test."""
        if self.is_s3:
            client = servers.s3_client(self.endpoint)
            bucket, folder = self.place
            client.put_object(Bucket=bucket, Key=f"{folder}/{key}", Body=data)
            client.close()
        elif self.name == "local":
            path = Path(self.url) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        else:
            import fsspec

            fsspec.filesystem("memory").pipe_file(f"{self.url}/{key}", data)


@dataclass
class Proxied(Backend):
    """A root behind a fault proxy of its own."""

    proxy: FaultProxy = field(default_factory=lambda: FaultProxy(""))


def make_backend(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Backend:
    """A fresh root on the store called `name`."""
    root = uuid.uuid4().hex[:12]
    if name == "memory":
        return Backend(f"memory://{root}", name=name)
    if name == "local":
        return Backend(str(tmp_path / "root"), name=name)
    endpoint = request.getfixturevalue("seaweedfs_endpoint" if name == "seaweedfs" else "moto_endpoint")
    scheme = "s3a" if name == "obstore" else "s3"
    if name == "obstore":
        register_obstore()
    return Backend(f"{scheme}://{_bucket(name, endpoint, root)}/{root}", s3_options(name, endpoint), name, endpoint)


def bucket_and_key(url: str) -> tuple[str, str]:
    """The bucket of an S3 URL, and the rest of it."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


def _bucket(name: str, endpoint: str, root: str) -> str:
    """A bucket for the root: of its own in moto, which looks at all objects of a bucket to list some of them."""
    if name == "seaweedfs":
        return BUCKET
    bucket = f"{BUCKET}-{root}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=60):
        return bucket


def s3_options(name: str, endpoint: str) -> dict[str, Any]:
    """Options of the backend called `name`: "s3fs" asks for that client, "moto" and "seaweedfs" take the usual one."""
    if name == "obstore":
        return servers.obstore_options(endpoint)
    return servers.s3fs_options(endpoint) | ({"transport": "s3fs"} if name == "s3fs" else {})


def register_obstore() -> None:
    """s3a:// is obstore's from now on; s3:// stays with s3fs."""
    from obstore.fsspec import register

    register("s3a")
