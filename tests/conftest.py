"""Fixtures for all tests: servers are started when the first test asks for them, each test gets a root of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import servers
from fault_proxy import FaultProxy

from archive.store.storage import Storage

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


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in servers.UNSET:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def moto_endpoint(_environment: None) -> Iterator[str]:
    with servers.moto() as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(scope="session")
def seaweedfs_endpoint(_environment: None) -> Iterator[str]:
    with servers.seaweedfs() as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh root on each kind of store in turn."""
    return make_backend(request, request.param, tmp_path)


@pytest.fixture(params=("moto", "seaweedfs"))
def s3_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh root on each S3 server in turn."""
    return make_backend(request, request.param, tmp_path)


@pytest.fixture(params=("moto",))
def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxied]:
    """A fresh root on an S3 server behind a fault proxy; `indirect` parameters choose "seaweedfs" or "obstore"."""
    direct = make_backend(request, request.param, tmp_path)
    with FaultProxy(direct.endpoint) as proxy:
        options = servers.obstore_options if request.param == "obstore" else servers.s3fs_options
        yield Proxied(direct.name, direct.url, options(proxy.endpoint), direct.endpoint, proxy)


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
