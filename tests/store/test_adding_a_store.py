"""A store of one's own, made as CONTRIBUTING.md says: a driver, a line of the registry, a class over the contract."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
import pytest

import archive
from archive.base.errors import NotExclusiveError
from archive.store.drivers import Buffer, Driver, Listed, Location, ObjectInfo, register, registry
from archive.store.storage import Storage
from archive.testing import EmptyRoot, StoreContract
from tests.support.places import ROOT

_objects: dict[str, dict[str, bytes]] = defaultdict(dict)  # by root
_times: dict[str, dict[str, datetime]] = defaultdict(dict)
_lock = threading.Lock()


class ShelfDriver(Driver):
    """Objects in a dictionary that can't be created."""

    remote = False

    def __init__(self, place: Location) -> None:
        self._held = _objects[place.target]
        self._made = _times[place.target]

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        return self._found(key)[start:stop]

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._held[key] = b"".join(parts)
        self._made[key] = datetime.now(UTC)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        return ObjectInfo(len(self._found(key)), "", self._made[key])

    def delete(self, key: str, timeout_s: float) -> None:
        self._held.pop(key, None)

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        stem = f"{prefix}/" if prefix else ""
        inside = [key.removeprefix(stem).partition("/") for key in list(self._held) if key.startswith(stem)]
        return sorted({name + slash for name, slash, _ in inside}), 1

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        stem = f"{prefix}/" if prefix else ""
        keys = sorted(key for key in list(self._held) if key.startswith(stem) and key > after)
        for at in range(0, len(keys), 1000):
            yield [
                Listed(key, len(self._held[key]), self._made[key]) for key in keys[at : at + 1000] if key in self._held
            ]

    def _found(self, key: str) -> bytes:
        if key not in self._held:
            raise FileNotFoundError(key)
        return self._held[key]


class ToyDriver(ShelfDriver):
    """The same, with a create of its own."""

    exclusive = True

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with _lock:
            if key in self._held:
                raise FileExistsError(key)
            self.put(key, parts, timeout_s)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_DRIVERS", dict(registry._DRIVERS))
        register("toy", ToyDriver)
        register("shelf", ShelfDriver)
        yield


class TestToy(StoreContract):
    @pytest.fixture
    def root(self) -> EmptyRoot:
        return EmptyRoot(f"toy://{uuid.uuid4().hex}")


def test_an_archive_lies_on_it() -> None:
    url = f"toy://{uuid.uuid4().hex}/archive"
    with archive.create(url).writer() as w:
        w.add_episode({"x": np.arange(5)})
    assert archive.open(url).episodes.read()[0]["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_store_without_create_serves_a_single_writer() -> None:
    url = f"shelf://{uuid.uuid4().hex}"
    with pytest.raises(NotExclusiveError, match="no create-only put is known for 'shelf'"):
        archive.create(url)
    with archive.create(url, single_writer=True).writer() as w:
        w.add_episode({"x": np.arange(5)})
    assert len(archive.open(url).episodes) == 1
    assert not Storage.connect(url, single_writer=True).exclusive()


def test_the_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Adding a store")[2].partition("\n## ")[0]
    named = [word for word in text.split("`") if word.endswith(".py")]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
