"""A fresh root on each kind of store."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from archive.store.storage import Storage
from tests.support import servers
from tests.support.fault_proxy import FaultProxy

BUCKET = "bucket"
BACKENDS = ("memory", "local", "moto", "seaweedfs", "obstore")


@dataclass
class Backend:
    """A fresh, empty root somewhere. `endpoint` is that of its S3 server, or empty."""

    name: str
    url: str
    storage_options: dict[str, Any] = field(default_factory=dict)
    endpoint: str = ""

    @property
    def is_s3(self) -> bool:
        return bool(self.endpoint)

    def connect(self, **settings: Any) -> Storage:
        return Storage.connect(self.url, self.storage_options, **settings)

    def plant(self, key: str, data: bytes) -> None:
        """Makes an object without the code under test."""
        if self.is_s3:
            client = servers.s3_client(self.endpoint)
            client.put_object(Bucket=BUCKET, Key=f"{self.url.partition(BUCKET + '/')[2]}/{key}", Body=data)
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
        return Backend(name, f"memory://{root}")
    if name == "local":
        return Backend(name, str(tmp_path / "root"))
    endpoint = request.getfixturevalue("seaweedfs_endpoint" if name == "seaweedfs" else "moto_endpoint")
    if name == "obstore":
        register_obstore()
        return Backend(name, f"s3a://{BUCKET}/{root}", servers.obstore_options(endpoint), endpoint)
    return Backend(name, f"s3://{BUCKET}/{root}", servers.s3fs_options(endpoint), endpoint)


def register_obstore() -> None:
    """s3a:// is obstore's from now on; s3:// stays with s3fs."""
    from obstore.fsspec import register

    register("s3a")
