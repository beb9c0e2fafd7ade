"""Which requests Storage sends, which names it refuses, and what it does where a store can't create."""

from __future__ import annotations

import pytest

from archive.base import ByteRange
from archive.base.errors import (
    AlreadyExistsError,
    NotExclusiveError,
    UnsafePathError,
)
from archive.store.root import check_key
from archive.store.storage import Storage
from tests.support.backends import Backend, Proxied

TEXT = bytes(range(256)) * 8
UNSAFE = ("", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\\b", "a\0b", "a\nb", "a\x7f", "a\ud800")


@pytest.mark.parametrize("key", UNSAFE)
def test_unsafe_keys_are_refused(key: str) -> None:
    storage = Storage.connect("memory://unsafe")
    with pytest.raises(UnsafePathError):
        check_key(key)
    for use in (storage.get, storage.exists, lambda bad: storage.put(bad, b""), lambda bad: storage.create(bad, b"")):
        with pytest.raises(UnsafePathError):
            use(key)
    for many in (
        lambda: storage.delete([key]),
        lambda: storage.get_all([key]),
        lambda: storage.get_ranges([ByteRange(key, 0, 1)]),
        lambda: storage.list(key or "/"),
    ):
        if key != "a/":
            with pytest.raises(UnsafePathError):
                many()
    assert storage.stats.requests == 0


@pytest.mark.parametrize("backend", ["memory", "local", "moto", "s3fs"], indirect=True)
def test_unsafe_names_in_the_bucket_are_refused(backend: Backend) -> None:
    backend.plant("f/good", b"")
    backend.plant("f/b\\ad", b"")
    with pytest.raises(UnsafePathError, match=r"list .*/f"):
        backend.connect().list("f")


@pytest.mark.parametrize("proxied", ["moto", "seaweedfs", "s3fs", "obstore"], indirect=True)
def test_each_call_is_one_request(proxied: Proxied) -> None:
    storage, proxy = proxied.connect(), proxied.proxy
    assert proxy.log == []  # connecting asks nothing

    def requests(call: object) -> list[str]:
        proxy.log.clear()
        assert callable(call)
        call()
        return proxy.verbs()

    assert requests(lambda: storage.put("f/x", b"0" * 1000)) == ["PUT"]
    assert requests(lambda: storage.put("f/empty", b"")) == ["PUT"]
    assert requests(lambda: storage.create("f/c", b"0" * 1000)) == ["PUT"]
    for start, stop in ((0, None), (0, 1000), (5, 10), (5, None)):
        assert requests(lambda start=start, stop=stop: storage.get("f/x", start, stop)) == ["GET"]
    assert requests(lambda: storage.get("f/empty")) == ["GET"]
    assert requests(lambda: storage.get_all(["f/x", "f/c"])) == ["GET"] * 2
    assert requests(lambda: storage.get_ranges([ByteRange("f/x", i, i + 1) for i in range(9)])) == ["GET"] * 9
    assert requests(lambda: storage.list("f")) == ["GET"]
    assert requests(lambda: storage.list("nothing")) == ["GET"]
    assert requests(lambda: storage.delete(["f/x"])) == [("POST" if proxied.name == "obstore" else "DELETE")]
    assert requests(lambda: storage.get("f/c", 3, 3)) == []


def test_ranges_ask_for_their_bytes_only(proxied: Proxied) -> None:
    storage = proxied.connect()
    storage.put("x", TEXT)
    storage.get("x", 100, 120)
    assert [(seen.range, seen.bytes_out) for seen in proxied.proxy.log if seen.method == "GET"] == [
        ("bytes=100-119", 20)
    ]


def test_a_store_without_create() -> None:
    url = "dir::memory://without-create"
    storage = Storage.connect(url)
    assert not storage.exclusive()
    with pytest.raises(NotExclusiveError, match="single_writer"):
        storage.create("x", b"1")
    assert storage.list("") == []
    alone = Storage.connect(url, single_writer=True)
    alone.create("x", b"1")
    with pytest.raises(AlreadyExistsError):
        alone.create("x", b"2")
    assert storage.get("x") == b"1"
    assert not alone.exclusive()
