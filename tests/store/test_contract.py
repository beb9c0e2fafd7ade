"""What the library relies on, on every kind of store that is tested here."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from archive.testing import EmptyRoot, StoreContract
from tests.support.backends import make_backend


class _Contract(StoreContract):
    backend: ClassVar[str]

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, self.backend, tmp_path)


class _Bucket(_Contract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators = 1  # moto looks, then puts


class _Seaweedfs(_Bucket):
    backend = "seaweedfs"
    creators, races = 3, 2  # it polls its lock once a second


class TestMemory(_Contract):
    backend = "memory"


class TestLocal(_Contract):
    backend = "local"


class TestS3fs(_Bucket):
    backend = "s3fs"


class TestS3fsOnSeaweedfs(_Seaweedfs):
    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        root = make_backend(request, "seaweedfs", tmp_path)
        root.storage_options["transport"] = "s3fs"
        return root


class TestMoto(_Bucket):
    backend = "moto"


class TestSeaweedfs(_Seaweedfs):
    pass


class TestObstore(_Bucket):
    backend = "obstore"
