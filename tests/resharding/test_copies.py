"""Copies that a store makes by itself: counted at the server, compared afterwards,
left out where they are not wanted."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.base.errors import CorruptChunkError, IntegrityError, MissingObjectError
from archive.maintain import verify
from archive.store.storage import Storage
from archive.tables import loads
from tests.support import servers
from tests.support.backends import Proxied, bucket_and_key, make_backend
from tests.support.transfers import Place, holds

BOTH = pytest.mark.parametrize("proxied", ["moto", "seaweedfs"], indirect=True)


@pytest.fixture
def place(proxied: Proxied) -> Place:
    return Place(proxied)


def of_shards(proxied: Proxied) -> list[Any]:
    return [seen for seen in proxied.proxy.log if "/shards/" in seen.path]


def chunk_tables(arc: archive.Archive) -> set[str]:
    return set(arc.snapshot.columns(["chunks"])["chunks"].to_pylist())


def as_stored(storage: Storage, shards: list[str]) -> dict[str, bytes]:
    return {key: storage.get(key) for key in shards}


def damage(proxied: Proxied, arc: archive.Archive, key: str, change: Any) -> None:
    """Change an object of an archive behind its back."""
    client = servers.s3_client(proxied.endpoint)
    bucket, name = bucket_and_key(f"{arc.url}/{key}")
    data = client.get_object(Bucket=bucket, Key=name)["Body"].read()
    client.put_object(Bucket=bucket, Key=name, Body=change(data))
    client.close()


@BOTH
@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_no_byte_of_a_shard_passes_this_machine(place: Place, proxied: Proxied, layout: str) -> None:
    sources = [place.source("a", 0, 4, layout), place.source("b", 4, 2, layout)]
    proxied.proxy.log.clear()
    merged = resharding.merge([place.url("a"), place.url("b")], to=place.url("to"), copy=True, **place.options)
    seen = of_shards(proxied)
    assert {s.method for s in seen} == {"HEAD", "PUT"}
    assert sum(s.bytes_in for s in seen) == 0
    assert merged.storage.stats.copy == sum(s.method == "PUT" for s in seen) >= 3
    assert holds(place.open("to"), range(6))
    if layout == "packed":
        stored = [as_stored(arc.storage, arc.shards) for arc in sources]
        assert as_stored(merged.storage, merged.shards) == stored[0] | stored[1]


@BOTH
def test_split_and_filter_into_another_bucket(place: Place, proxied: Proxied) -> None:
    other = f"other-{uuid.uuid4().hex[:8]}"
    servers.make_bucket(proxied.endpoint, other)
    place.source("a", 0, 6)
    proxied.proxy.log.clear()
    resharding.split(place.url("a"), f"s3://{other}/half", 2, copy=True, **place.options)
    some = resharding.filter(place.url("a"), f"s3://{other}/some", update_count=(4, None), copy=True, **place.options)
    assert "GET" not in {s.method for s in of_shards(proxied)}
    assert holds(archive.open(f"s3://{other}/half", **place.options), range(2))
    assert holds(some, (4, 5))


def test_verify_reads_every_byte(place: Place, proxied: Proxied) -> None:
    source = place.source("a", 0, 2)
    damage(proxied, source, source.shards[0], lambda data: data[:2000] + bytes(b ^ 255 for b in data[2000:]))
    proxied.proxy.log.clear()
    with pytest.raises(CorruptChunkError, match="archive verify"):
        resharding.merge([place.url("a")], to=place.url("to"), copy=True, verify=True, **place.options)
    assert "GET" in {s.method for s in of_shards(proxied)}
    assert len(place.open("to").episodes) == 0
    merged = resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    with pytest.raises(IntegrityError):  # copied as it was: an error there as here
        merged.episodes.read()


def test_a_source_that_is_cut_short_is_not_copied(place: Place, proxied: Proxied) -> None:
    source = place.source("a", 0, 2)
    damage(proxied, source, source.shards[0], lambda data: data[: len(data) // 2])
    with pytest.raises(CorruptChunkError, match="was not copied"):
        resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert place.open("to").storage.list("shards") == []
    assert len(place.open("to").episodes) == 0


def test_a_copy_that_differs_is_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from archive.store.drivers.s3 import S3Driver

    place.source("a", 0, 2)
    copy = S3Driver.copy

    def wrong(self: S3Driver, source: str, key: str, timeout_s: float) -> None:
        copy(self, source, key, timeout_s)
        self.put(key, [b"x" * self.head(key, timeout_s).size], timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(S3Driver, "copy", wrong)
        with pytest.raises(CorruptChunkError, match="is not the same"):
            resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert place.open("to").storage.list("shards") == []
    resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert holds(place.open("to"), range(2))


@BOTH
def test_a_failed_run_leaves_the_target_and_is_resumed(
    place: Place, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resharding.archives.AT_ONCE", 1)
    place.source("a", 0, 8)
    place.source("to", 8, 2)
    number = place.open("to").head.number
    proxied.proxy.add("status", method="PUT", path="/to/shards/", skip=2, times=1, status=507, code="QuotaExceeded")
    with pytest.raises(archive.errors.StorageFullError):
        resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert place.open("to").head.number == number
    assert holds(place.open("to"), range(8, 10))
    proxied.proxy.log.clear()
    resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert [s.method for s in of_shards(proxied)].count("PUT") in (1, 2)  # of four; the last may have been under way
    assert holds(place.open("to"), range(10))


def test_a_lost_answer_is_asked_for_again(place: Place, proxied: Proxied) -> None:
    place.source("a", 0, 2)
    proxied.proxy.add("reset_after", method="PUT", path="/to/shards/", times=1)
    merged = resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert holds(merged, range(2))


def test_a_store_that_does_not_copy_is_streamed_to(place: Place, proxied: Proxied) -> None:
    place.source("a", 0, 4)
    proxied.proxy.add("status", method="PUT", path="/to/shards/", times=1, status=501, code="NotImplemented")
    merged = resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    methods = [s.method for s in of_shards(proxied)]
    assert methods.count("GET") == 1
    assert holds(merged, range(4))


def test_what_is_gone_from_the_source_is_an_error(place: Place) -> None:
    source = place.source("a", 0, 2)
    source.storage.delete(source.shards)
    with pytest.raises(MissingObjectError):
        resharding.merge([place.url("a")], to=place.url("to"), copy=True, **place.options)
    assert len(place.open("to").episodes) == 0


def test_other_stores_are_streamed_to(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> None:
    """Between kinds of stores, or with other credentials, no store could copy."""
    place.source("a", 0, 2)
    source = place.open("a").storage
    for name in ("local", "memory"):
        assert not make_backend(request, name, tmp_path).connect().copies_from(source)
    here = make_backend(request, "local", tmp_path).connect()
    assert not here.copies_from(here)
    options = {**place.options["storage_options"], "key": "another"}
    assert not Storage.connect(place.url("to"), options).copies_from(source)
    assert Storage.connect(place.url("to"), place.options["storage_options"]).copies_from(source)


def test_a_shard_in_two_chunk_tables_is_copied_once(place: Place, proxied: Proxied) -> None:
    """Two transfers that took other episodes of one shard each list its chunks; who takes both has them once."""
    place.source("a", 0, 2)  # one shard
    for i in range(2):
        resharding.filter(place.url("a"), place.url("both"), update_count=i, copy=True, **place.options)
    both = place.open("both")
    assert len(both.shards) == 1
    assert len(chunk_tables(both)) == 2
    assert holds(both, range(2))
    proxied.proxy.log.clear()
    merged = resharding.merge([place.url("both")], to=place.url("to"), copy=True, **place.options)
    assert [s.method for s in of_shards(proxied)].count("PUT") == 1
    assert holds(merged, range(2))
    (path,) = chunk_tables(merged)
    chunks = loads(merged.storage.get(path), "chunks", where=path)
    assert chunks.num_rows == len(set(zip(*(chunks[n].to_pylist() for n in ("shard", "member")), strict=True)))
    assert verify(merged, deep=True).findings == []
