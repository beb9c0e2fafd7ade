"""Scans and many deletes when the store fails, and how many requests they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from archive.base.errors import AccessDeniedError, DeadlineError, StorageError
from archive.store import Storage
from tests.support import servers
from tests.support.backends import Proxied, s3_options
from tests.support.sampling import few_of

clients = pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
a_client = pytest.mark.parametrize("proxied", few_of(["moto", "s3fs"], 1), indirect=True)  # for thousands of objects
KEYS = [f"d/{i:05d}" for i in range(2500)]


@a_client
def test_a_scan_goes_on_where_a_page_failed_and_deletes_of_2500_are_three_requests(proxied: Proxied) -> None:
    storage = proxied.connect()
    past_the_proxy = Storage.connect(proxied.url, s3_options(proxied.name, proxied.endpoint))
    past_the_proxy.put_many((key, b"x") for key in KEYS)
    before = storage.stats.snapshot()
    scan = storage.scan("d")
    seen = [next(scan).key]
    proxied.proxy.add("status", method="GET", status=503, code="SlowDown", times=2)
    seen += [found.key for found in scan]
    assert seen == KEYS
    assert storage.stats.retries == 2
    assert (storage.stats - before).list <= 6
    before = storage.stats.snapshot()
    assert storage.delete_many(KEYS) == {}
    assert (storage.stats - before).requests == 3
    assert list(storage.scan("d")) == []
    assert proxied.proxy.verbs().count("POST") == 3


@clients
def test_passing_errors_of_a_batch_are_retried(proxied: Proxied) -> None:
    storage = proxied.connect()
    storage.put_many((key, b"x") for key in KEYS[:20])
    proxied.proxy.add("status", method="POST", status=503, code="SlowDown", times=3)
    assert storage.delete_many(KEYS[:20]) == {}
    assert (storage.stats.delete, storage.stats.retries, storage.stats.errors) == (4, 3, 0)


@clients
def test_a_store_without_such_a_request_is_asked_one_by_one(proxied: Proxied) -> None:
    storage = proxied.connect()
    storage.put_many((key, b"x") for key in KEYS[:20])
    proxied.proxy.add("status", method="POST", status=501, code="NotImplemented", times=1)
    assert storage.delete_many(KEYS[:20]) == {}
    assert storage.stats.delete == 21
    assert list(storage.scan("d")) == []


@clients
def test_each_object_that_stays_has_its_error(proxied: Proxied) -> None:
    storage = proxied.connect()
    storage.put_many((key, b"x") for key in KEYS[:3])
    proxied.proxy.add("status", method="POST", status=403, code="AccessDenied", times=1)
    refused = storage.delete_many(KEYS[:3])
    assert {key: type(error) for key, error in refused.items()} == dict.fromkeys(KEYS[:3], AccessDeniedError)
    proxied.proxy.add("status", method="POST", status=501, code="NotImplemented", times=1)
    proxied.proxy.add("status", method="DELETE", status=400, code="InvalidArgument", times=1)
    (error,) = storage.delete_many(KEYS[:3]).values()
    assert isinstance(error, StorageError)
    assert len(list(storage.scan("d"))) == 1


@clients
def test_a_store_that_is_gone_ends_it(proxied: Proxied) -> None:
    storage = proxied.connect(deadline_s=1)
    proxied.proxy.add("status", method="POST", status=503, code="SlowDown", times=1000)
    with pytest.raises(DeadlineError):
        storage.delete_many(KEYS)


@pytest.mark.parametrize("proxied", ["moto", "s3fs"], indirect=True)
def test_a_versioned_bucket_says_so(proxied: Proxied) -> None:
    assert proxied.connect().versioned() is False
    proxied.proxy.add("status", method="GET", status=403, code="AccessDenied", times=1)
    assert proxied.connect().versioned() is None
    client = servers.s3_client(proxied.endpoint)
    bucket = "versioned"
    client.create_bucket(Bucket=bucket)
    for status in ("Enabled", "Suspended"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
        assert Storage.connect(f"s3://{bucket}/x", proxied.storage_options).versioned() is True
    client.delete_bucket(Bucket=bucket)
    client.close()


def test_a_scan_does_not_follow_links_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"x")
    storage = Storage.connect(tmp_path / "root")
    storage.put("shards/mine", b"x")
    (tmp_path / "root" / "shards" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "shards" / "link").symlink_to(tmp_path / "elsewhere" / "file")
    assert [one.key for one in storage.scan("")] == ["shards/mine"]
