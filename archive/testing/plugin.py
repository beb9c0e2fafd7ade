"""Does I/O: fixtures that pytest finds by itself if this library is installed. Nothing is imported before a test asks.

`archive_url`: an `EmptyRoot`, in memory and in a local folder in turn. `archive_s3`: one on an S3 server of this run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from archive.testing.roots import EmptyRoot


@pytest.fixture(params=("memory", "local"))
def archive_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmptyRoot]:
    """A place for an archive that nobody has used, in memory and in a local folder in turn; cleared afterwards."""
    import uuid

    from archive.testing.roots import EmptyRoot

    root = EmptyRoot(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "archive"))
    yield root
    root.clear()


@pytest.fixture(scope="session")
def _archive_s3_endpoint() -> Iterator[str]:
    from archive.testing.s3roots import moto_in_this_process

    with moto_in_this_process() as endpoint:
        yield endpoint


@pytest.fixture
def archive_s3(monkeypatch: pytest.MonkeyPatch, _archive_s3_endpoint: str) -> Iterator[EmptyRoot]:
    """A place for an archive that nobody has used, in a bucket of an S3 server that runs during the tests; reset
    after each test. No credentials, profiles or proxies of this machine are seen meanwhile."""
    from archive.testing import s3roots

    for name, value in s3roots.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in s3roots.UNSET:
        monkeypatch.delenv(name, raising=False)
    with s3roots.fresh(_archive_s3_endpoint) as root:
        yield root
