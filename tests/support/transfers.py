"""What the tests of transfers and compactions share: sources to take from, and what an archive holds, by value."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import archive
from archive.store.storage import Storage
from archive.testing import steps
from tests.support.backends import Backend
from tests.support.tampering import same


class Place:
    """A store with room for several archives."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.backend = backend.name, backend

    def url(self, name: str) -> str:
        return f"{self.backend.url}/{name}"

    @property
    def options(self) -> dict[str, Any]:
        return {"storage_options": self.backend.storage_options}

    def open(self, name: str, **options: Any) -> archive.Archive:
        return archive.open(self.url(name), **self.options, **options)

    def source(self, name: str, first: int, count: int, layout: str = "packed") -> archive.Archive:
        """Episodes `first` up to `first + count`: `steps(4 + i, i)`, a commit for each two."""
        arc = archive.create(self.url(name), layout=layout, **self.options)
        with arc.writer() as w:
            for i in range(first, first + count):
                w.add_episode(
                    steps(4 + i, i), episode_id=f"e{i}", model_weights_uuid=f"w{i % 3}", update_count=i,
                    terminated=i % 2 == 0, metadata={"trajectory_id": i * 10},
                )  # fmt: skip
                if i % 2:
                    w.commit()
        return arc


def holds(arc: archive.Archive, numbers: Any) -> bool:
    """Whether the archive has these episodes of sources and no others, each as it was made."""
    wanted = {f"e{i}": i for i in numbers}
    found = dict(zip(list(arc.episodes), arc.episodes.read(), strict=True))
    return {e.id for e in found} == wanted.keys() and all(
        same(data, steps(4 + (i := wanted[e.id]), i))
        and (e.update_count, e.model_weights_uuid, e.terminated) == (i, f"w{i % 3}", i % 2 == 0)
        and e.metadata["trajectory_id"] == i * 10
        for e, data in found.items()
    )


@contextmanager
def failing_put(monkeypatch: pytest.MonkeyPatch, at: int, part: str = "shards/") -> Iterator[list[str]]:
    """The store refuses put number `at` (from 0) of the keys with `part` in them; which keys were put. Of a shard that
    is a directory the last object counts."""
    done, lock = list[str](), threading.Lock()

    def breaking(verb: str) -> Callable[..., None]:
        send = getattr(Storage, verb)

        def broken(self: Storage, key: str, data: Any, **how: Any) -> None:
            if part in key and (".zarr/" not in key or key.endswith(".zarr/zarr.json")):
                with lock:
                    done.append(key)
                    count = len(done)
                if count > at >= 0:
                    raise OSError("the store is gone")
            send(self, key, data, **how)

        return broken

    with monkeypatch.context() as patch:
        for verb in ("put", "put_fresh", "create_once"):
            patch.setattr(Storage, verb, breaking(verb))
        yield done


@contextmanager
def others_within(
    monkeypatch: pytest.MonkeyPatch, part: str, act: Callable[[], Any], times: int = 1
) -> Iterator[list[str]]:
    """`act` is done just before each of the first so many tries to create a commit of a transaction that has `part` in
    its name: so each of them is lost. Gives the transactions, one for each try."""
    create, tried = Storage.create, list[str]()

    def late(self: Storage, key: str, data: Any) -> None:
        transaction = str(json.loads(data.partition(b"\n")[0])["transaction"]) if key.startswith("commits/") else ""
        if part in transaction:
            tried.append(transaction)
            if tried.count(transaction) <= times:
                act()
        create(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "create", late)
        yield tried


@contextmanager
def before_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> Iterator[None]:
    """`act` is done once, just before the next commit would be created: so it gets that number."""
    create, left = Storage.create, [act]

    def late(self: Storage, key: str, data: Any) -> None:
        if key.startswith("commits/") and left:
            left.pop()()
        create(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "create", late)
        yield
    assert not left, "nothing was committed"
