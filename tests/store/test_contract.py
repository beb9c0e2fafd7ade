"""What the library relies on, on every kind of store that is tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from archive.testing import EmptyRoot, StoreContract
from tests.support.backends import make_backend


class TestMemory(StoreContract):
    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "memory", tmp_path)


class TestLocal(StoreContract):
    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "local", tmp_path)


class TestS3fs(StoreContract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators = 1  # moto looks, then puts

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "s3fs", tmp_path)


class TestS3fsOnSeaweedfs(StoreContract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators, races = 3, 2  # it polls its lock once a second

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        root = make_backend(request, "seaweedfs", tmp_path)
        root.storage_options["transport"] = "s3fs"
        return root


class TestMoto(StoreContract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators = 1  # moto looks, then puts

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "moto", tmp_path)


class TestSeaweedfs(StoreContract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators, races = 3, 2  # it polls its lock once a second

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "seaweedfs", tmp_path)


class TestObstore(StoreContract):
    names_a_page = 1000
    deletes_in_bulk = True
    creators = 1  # moto looks, then puts

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest, tmp_path: Path) -> EmptyRoot:
        return make_backend(request, "obstore", tmp_path)
