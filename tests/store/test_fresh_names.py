"""Objects under fresh names: made by one request, never in the place of others, and one that was made before an answer
was lost is taken for what it is."""

from __future__ import annotations

import uuid

import pytest

import archive
from archive import tables
from archive.base.errors import AlreadyExistsError
from archive.log import tablefiles
from archive.shard import ShardWriter
from archive.store import Storage, under_fresh_name, writes
from archive.store.drivers import s3
from archive.testing import small_archive
from archive.write.works import ShardObjects
from tests.support.backends import Backend, Proxied

everywhere = pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore", "seaweedfs"], indirect=True)


@everywhere
def test_a_fresh_name_costs_one_request_and_replaces_nothing(proxied: Proxied) -> None:
    storage, log = proxied.connect(), proxied.proxy.log
    storage.put_fresh("shards/x", b"first")
    assert [(seen.method, seen.conditional) for seen in log] == [("PUT", True)]
    with pytest.raises(AlreadyExistsError, match=r"^put .*shards/x: already there; it was not overwritten"):
        storage.put_fresh("shards/x", b"second")
    storage.put_fresh_many((f"shards/y/{i}", b"y") for i in range(3))
    with pytest.raises(AlreadyExistsError):
        storage.put_fresh_many([("shards/z", b"z"), ("shards/y/1", b"other")])
    assert storage.get_all(["shards/x", "shards/y/1"]) == [b"first", b"y"]


@everywhere
def test_a_lost_answer_is_no_collision(proxied: Proxied) -> None:
    storage, proxy = proxied.connect(), proxied.proxy
    proxy.add("reset_after", method="PUT")
    storage.put_fresh("x", b"1")
    assert proxy.verbs() == ["PUT", "PUT", "GET"]  # it looks if that is its own
    assert (storage.stats.put, storage.stats.retries) == (2, 1)
    proxy.add("status", method="PUT", status=503, code="SlowDown")  # nothing was made: the object is another's
    with pytest.raises(AlreadyExistsError):
        storage.put_fresh("x", b"2")
    assert storage.get("x") == b"1"


@pytest.mark.parametrize("backend", ["memory", "local"], indirect=True)
def test_without_a_server_it_holds_as_well(backend: Backend) -> None:
    storage = backend.connect()
    storage.put_fresh("x", b"1")
    with pytest.raises(AlreadyExistsError):
        storage.put_fresh("x", b"2")
    assert storage.get("x") == b"1"


def test_a_single_writer_sends_no_condition(proxied: Proxied) -> None:
    """The store may not know it; and nothing is looked for."""
    alone = Storage.connect(proxied.url, proxied.storage_options, single_writer=True)
    alone.put_fresh("x", b"1")
    assert [(seen.method, seen.conditional) for seen in proxied.proxy.log] == [("PUT", False)]
    other = Storage.connect("dir::memory://fresh-names")  # a store that knows no condition at all
    other.put_fresh("x", b"1")
    assert other.get("x") == b"1"


def test_a_taken_name_is_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 random bits each, two of a hundred thousand files of a session have the same sooner or later."""
    storage = Storage.connect("memory://taken-names")
    ids = iter([uuid.UUID(int=1), uuid.UUID(int=1), uuid.UUID(int=2 << 96)])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(ids))
    made = [tables.from_columns("batches", {"batch": [0], "number": [number]}) for number in (7, 8)]
    one, two = (tablefiles.write(storage, "s", "batches", table) for table in made)
    assert one.path != two.path
    found = [tablefiles.load(storage, "batches", [file])["number"].to_pylist() for file in (one, two)]
    assert found == [[7], [8]]
    with pytest.raises(AlreadyExistsError):
        under_fresh_name(lambda: one.path, lambda key: storage.put_fresh(key, b""))


def test_no_shard_of_a_writer_has_the_name_of_another() -> None:
    """Ten thousand random names of 32 bits collide in one of a hundred sessions."""
    objects = ShardObjects(ShardWriter(Storage.connect("memory://names"), "packed"), "s", 0)
    keys = [objects.key(i) for i in range(100_000)]
    assert len({*keys}) == len(keys)
    firsts = {key.removeprefix("shards/")[:2] for key in keys[:512]}
    assert len(firsts) > 200  # the store spreads load by these


def test_all_that_an_archive_writes_is_created(proxied: Proxied) -> None:
    small_archive(proxied.url, 2, checkpoints=True, storage_options=proxied.storage_options)
    arc = archive.open(proxied.url, storage_options=proxied.storage_options)
    arc.label({"e0": {"good": True}})
    written = [seen for seen in proxied.proxy.log if seen.method in ("PUT", "POST")]
    assert written
    assert [seen.path for seen in written if not seen.conditional] == []


@pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
def test_what_is_too_large_for_one_put_is_completed_on_condition(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "LARGEST_PUT_BYTES", 1024)
    monkeypatch.setattr(s3, "_PART_BYTES", 5 * 1024**2)
    storage, large = proxied.connect(), b"x" * (10 * 1024**2)
    storage.create("large", large)
    completed = [seen for seen in proxied.proxy.log if seen.method == "POST" and "uploadId" in seen.path]
    assert [seen.conditional for seen in completed] == [True]
    assert storage.get("large") == large
    proxied.proxy.log.clear()
    storage.create("small", b"x" * 1024)
    assert [(seen.method, seen.conditional) for seen in proxied.proxy.log] == [("PUT", True)]
