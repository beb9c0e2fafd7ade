"""What Storage promises, on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from archive.base.byterange import ByteRange
from archive.base.errors import (
    AlreadyExistsError,
    MissingObjectError,
    NotExclusiveError,
    ShortReadError,
    UnsafePathError,
    UsageError,
)
from archive.store.root import check_key
from archive.store.storage import Storage
from tests.support.backends import Backend, Proxied

TEXT = bytes(range(256)) * 8
UNSAFE = ("", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\\b", "a\0b", "a\nb", "a\x7f", "a\ud800")
STRANGE = (
    "plain",
    "with space",
    "100%",
    "a%2Fb",
    "a%20b",
    "ü/é/日本",
    "q?x",
    "h#x",
    "s*r",
    "b[1]",
    "+&=",
    "~x",
    "'\"",
    "{x}",
)


def test_put_get(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("folder/object", TEXT)
    assert storage.get("folder/object") == TEXT
    assert storage.get("folder/object", 10, 20) == TEXT[10:20]
    assert storage.get("folder/object", 2000) == TEXT[2000:]
    assert storage.get("folder/object", 0, len(TEXT)) == TEXT
    assert storage.get("folder/object", 7, 7) == b""


def test_put_replaces(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("object", b"a long first version")
    storage.put("object", b"second")
    assert storage.get("object") == b"second"


@pytest.mark.parametrize(
    "data", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], [b"a", bytearray(b"bc")], (b"abc",)]
)
def test_put_takes_buffers(backend: Backend, data: bytes) -> None:
    storage = backend.connect()
    storage.put("put", data)
    storage.create("create", data)
    assert storage.get_all(["put", "create"]) == [b"abc", b"abc"]


def test_an_object_does_not_share_memory_with_what_was_put(backend: Backend) -> None:
    storage, data = backend.connect(), bytearray(b"before")
    storage.put("put", data)
    storage.create("create", data)
    data[:] = b"after!"
    assert storage.get_all(["put", "create"]) == [b"before", b"before"]


def test_zero_bytes(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("empty", b"")
    storage.create("nothing", [])
    assert storage.get_all(["empty", "nothing"]) == [b"", b""]
    assert storage.list("") == ["empty", "nothing"]
    with pytest.raises(ShortReadError):
        storage.get("empty", 0, 1)


def test_get_ranges(backend: Backend) -> None:
    storage = backend.connect(concurrency=4)
    storage.put_many((f"n/{i}", bytes([i]) * 100) for i in range(20))
    ranges = [ByteRange(f"n/{i % 20}", i, i + 3) for i in range(90)]
    assert storage.get_ranges(ranges) == [bytes([i % 20]) * 3 for i in range(90)]
    assert storage.get_ranges([]) == []
    assert list(storage.iter_ranges(iter(ranges), max_bytes=10)) == [bytes([i % 20]) * 3 for i in range(90)]


def test_missing(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("there", b"x")
    for read in (
        lambda: storage.get("nope"),
        lambda: storage.get("nope", 0, 3),
        lambda: storage.get("no/such/folder", 1),
        lambda: storage.get_all(["there", "nope"]),
        lambda: storage.get_ranges([ByteRange("there", 0, 1), ByteRange("nope", 0, 1)]),
        lambda: list(storage.iter_ranges([ByteRange("nope", 0, 1)], max_bytes=9)),
    ):
        with pytest.raises(MissingObjectError, match=r"^get .*(nope|no/such/folder): not there") as caught:
            read()
        assert isinstance(caught.value, FileNotFoundError)
    assert storage.exists("there")
    assert not storage.exists("nope")


def test_short_read(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("ten", b"0123456789")
    for start, stop in ((5, 11), (10, 11), (50, 60), (10, None), (50, None)):
        with pytest.raises(ShortReadError, match=r"^get .*ten"):
            storage.get("ten", start, stop)
    with pytest.raises(ShortReadError):
        storage.get_ranges([ByteRange("ten", 0, 10), ByteRange("ten", 8, 11)])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2)])
def test_a_range_that_is_none(backend: Backend, start: int, stop: int) -> None:
    storage = backend.connect()
    with pytest.raises(UsageError):
        storage.get("x", start, stop)
    with pytest.raises(UsageError):
        storage.get_ranges([ByteRange("x", start, stop)])


def test_create_is_exclusive(backend: Backend) -> None:
    storage = backend.connect()
    assert storage.exclusive()
    storage.create("c/1", b"first")
    with pytest.raises(AlreadyExistsError, match="c/1: already there") as caught:
        storage.create("c/1", b"second")
    assert isinstance(caught.value, FileExistsError)
    assert storage.get("c/1") == b"first"
    assert storage.list("c") == ["1"]


def test_create_after_put_and_after_delete(backend: Backend) -> None:
    storage = backend.connect()
    storage.put("x", b"1")
    with pytest.raises(AlreadyExistsError):
        storage.create("x", b"2")
    storage.delete(["x"])
    storage.create("x", b"3")
    assert storage.get("x") == b"3"


def test_list(backend: Backend) -> None:
    storage = backend.connect()
    assert storage.list("") == []
    assert storage.list("nothing/here") == []
    storage.put_many((key, b"x") for key in ("b", "a/1", "a/2", "a/deep/er/3", "ab/1"))
    assert storage.list("") == ["a/", "ab/", "b"]
    assert storage.list("a") == storage.list("a/") == ["1", "2", "deep/"]
    assert storage.list("a/deep") == ["er/"]
    assert storage.list("b") == []  # an object is no folder
    assert storage.list("a/1") == []


def test_list_is_never_stale(backend: Backend) -> None:
    one, other = backend.connect(), backend.connect()
    one.put("f/1", b"")
    assert one.list("f") == ["1"]
    other.put("f/2", b"")
    assert one.list("f") == ["1", "2"]
    other.delete(["f/1"])
    assert one.list("f") == ["2"]


def test_list_more_than_a_page(backend: Backend) -> None:
    storage = backend.connect()
    keys = [f"many/{i:05d}" for i in range(1100)]
    if backend.is_s3:
        storage.put_many((key, b"") for key in keys)
    else:
        for key in keys:
            backend.plant(key, b"")
    before = storage.stats.snapshot()
    assert storage.list("many") == [key.removeprefix("many/") for key in keys]
    assert (storage.stats - before).list == (2 if backend.is_s3 else 1)


def test_delete(backend: Backend) -> None:
    storage = backend.connect()
    keys = [f"d/{i}" for i in range(30)]
    storage.put_many((key, b"x") for key in keys)
    storage.delete([*keys[:20], "d/nope", "no/folder"])
    assert storage.list("d") == sorted(key.removeprefix("d/") for key in keys[20:])
    storage.delete(keys[:20])
    storage.delete(iter(()))
    assert storage.stats.errors == 0


@pytest.mark.parametrize("key", STRANGE)
def test_strange_keys(backend: Backend, key: str) -> None:
    storage = backend.connect()
    storage.put(f"s/{key}", key.encode())
    assert storage.get(f"s/{key}") == key.encode()
    assert storage.get_ranges([ByteRange(f"s/{key}", 0, 2)]) == [key.encode()[:2]]
    first, slash, _ = key.partition("/")
    assert storage.list("s") == [first + slash]
    with pytest.raises(AlreadyExistsError):
        storage.create(f"s/{key}", b"")
    storage.delete([f"s/{key}"])
    assert not storage.exists(f"s/{key}")


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


@pytest.mark.parametrize("backend", ["memory", "local", "moto"], indirect=True)
def test_unsafe_names_in_the_bucket_are_refused(backend: Backend) -> None:
    backend.plant("f/good", b"")
    backend.plant("f/b\\ad", b"")
    with pytest.raises(UnsafePathError, match=r"list .*/f"):
        backend.connect().list("f")


def test_stats(backend: Backend) -> None:
    storage = backend.connect()
    storage.put_many((f"s/{i}", b"12345") for i in range(3))
    storage.create("c", b"123")
    with pytest.raises(AlreadyExistsError):
        storage.create("c", b"123")
    storage.get("c", 1, 2)
    storage.get_ranges([ByteRange("s/0", 0, 2), ByteRange("s/1", 2, 4), ByteRange("s/1", 0, 0)])
    storage.get_all(["s/0", "s/1", "s/2"])
    storage.list("s")
    storage.delete(["c"])
    storage.exists("c")
    assert storage.stats.as_dict() == {
        "get": 6,
        "put": 3,
        "create": 2,
        "list": 1,
        "delete": 1,
        "head": 1,
        "copy": 0,
        "bytes_in": 20,
        "bytes_out": 21,
        "retries": 0,
        "answered_no": 1,
        "errors": 0,
    }


@pytest.mark.parametrize("proxied", ["moto", "seaweedfs", "obstore"], indirect=True)
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


def test_put_many_takes_items_as_it_goes(backend: Backend) -> None:
    storage, taken = backend.connect(concurrency=2), []

    def items() -> Iterator[tuple[str, bytes]]:
        for number in range(12):
            taken.append(number - storage.stats.put)
            yield f"p/{number:02d}", b"x"

    storage.put_many(items())
    assert len(storage.list("p")) == 12
    assert max(taken) <= 4  # two writing, two about to


def test_iter_ranges_reads_ahead_within_its_bound(backend: Backend) -> None:
    storage = backend.connect(concurrency=8)
    storage.put("x", bytes(1000))
    stream = storage.iter_ranges([ByteRange("x", i * 10, i * 10 + 10) for i in range(100)], max_bytes=45)
    for number, _ in enumerate(stream):
        assert storage.stats.get <= number + 1 + 4
    assert storage.stats.get == 100
    wide = storage.iter_ranges([ByteRange("x", 0, 1000)] * 3, max_bytes=1)
    assert [len(next(wide)) for _ in range(2)] == [1000, 1000]
    wide.close()


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
