"""Does I/O: the library's requirements of a store, as tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from archive.base import AlreadyExistsError, ByteRange, MissingObjectError, ShortReadError, UnsafePathError, UsageError
from archive.testing.roots import EmptyRoot

TEXT = bytes(range(256)) * 8
STRANGE = ["plain", "with space", "100%", "a%2Fb", "a%20b", "ü/é/日本"]
STRANGE += ["q?x", "h#x", "s*r", "b[1]", "+&=", "~x", "'\"", "{x}"]


class _Clock:
    """A clock on which nothing takes time but sleeping."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class StoreContract:
    """Tests of one kind of store with a create-only put. A subclass overrides `root`, and what differs of the rest."""

    names_a_page: int | None = None  # how many names an answer to LIST holds; None: all
    deletes_in_bulk = False  # whether a request deletes a thousand
    creators = 8  # threads that create one name at once
    races = 10

    @pytest.fixture
    def root(self) -> EmptyRoot:
        """Override: give a root that nothing lies below."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'root'")

    def test_put_get(self, root: EmptyRoot) -> None:
        storage = root.connect()
        storage.put("folder/object", TEXT)
        assert storage.get("folder/object") == TEXT
        assert storage.get("folder/object", 10, 20) == TEXT[10:20]
        assert storage.get("folder/object", 2000) == TEXT[2000:]
        assert storage.get("folder/object", 0, len(TEXT)) == TEXT
        assert storage.get("folder/object", 7, 7) == b""

    def test_put_replaces(self, root: EmptyRoot) -> None:
        storage = root.connect()
        storage.put("object", b"a long first version")
        storage.put("object", b"second")
        assert storage.get("object") == b"second"

    def test_put_fresh(self, root: EmptyRoot) -> None:
        storage = root.connect()
        for _ in range(2):  # as after an answer that was lost
            storage.put_fresh("fresh", b"first")
        assert storage.get("fresh") == b"first"
        with contextlib.suppress(AlreadyExistsError):
            storage.put_fresh("fresh", b"other")
        assert storage.get("fresh") in (b"first", b"other")
        storage.put_fresh_many((f"many/{i}", bytes([i])) for i in range(5))
        assert storage.get_all([f"many/{i}" for i in range(5)]) == [bytes([i]) for i in range(5)]

    @pytest.mark.parametrize(
        "data", [b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], [b"a", bytearray(b"bc")], (b"abc",)]
    )
    def test_put_takes_buffers(self, root: EmptyRoot, data: bytes) -> None:
        storage = root.connect()
        storage.put("put", data)
        storage.create("create", data)
        assert storage.get_all(["put", "create"]) == [b"abc", b"abc"]

    def test_an_object_does_not_share_memory_with_what_was_put(self, root: EmptyRoot) -> None:
        storage, data = root.connect(), bytearray(b"before")
        storage.put("put", data)
        storage.create("create", data)
        data[:] = b"after!"
        assert storage.get_all(["put", "create"]) == [b"before", b"before"]

    def test_zero_bytes(self, root: EmptyRoot) -> None:
        storage = root.connect()
        storage.put("empty", b"")
        storage.create("nothing", [])
        assert storage.get_all(["empty", "nothing"]) == [b"", b""]
        assert storage.list("") == ["empty", "nothing"]
        with pytest.raises(ShortReadError):
            storage.get("empty", 0, 1)

    def test_get_ranges(self, root: EmptyRoot) -> None:
        storage = root.connect(concurrency=4)
        storage.put_many((f"n/{i}", bytes([i]) * 100) for i in range(20))
        ranges = [ByteRange(f"n/{i % 20}", i, i + 3) for i in range(90)]
        assert storage.get_ranges(ranges) == [bytes([i % 20]) * 3 for i in range(90)]
        assert storage.get_ranges([]) == []
        assert list(storage.iter_ranges(iter(ranges), max_bytes=10)) == [bytes([i % 20]) * 3 for i in range(90)]

    def test_missing(self, root: EmptyRoot) -> None:
        storage = root.connect()
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

    def test_short_read(self, root: EmptyRoot) -> None:
        storage = root.connect()
        storage.put("ten", b"0123456789")
        for start, stop in ((5, 11), (10, 11), (50, 60), (10, None), (50, None)):
            with pytest.raises(ShortReadError, match=r"^get .*ten"):
                storage.get("ten", start, stop)
        with pytest.raises(ShortReadError):
            storage.get_ranges([ByteRange("ten", 0, 10), ByteRange("ten", 8, 11)])

    @pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2)])
    def test_a_range_that_is_none(self, root: EmptyRoot, start: int, stop: int) -> None:
        storage = root.connect()
        with pytest.raises(UsageError):
            storage.get("x", start, stop)
        with pytest.raises(UsageError):
            storage.get_ranges([ByteRange("x", start, stop)])

    def test_create_is_exclusive(self, root: EmptyRoot) -> None:
        storage = root.connect()
        assert storage.exclusive()
        storage.create("c/1", b"first")
        with pytest.raises(AlreadyExistsError, match="c/1: already there") as caught:
            storage.create("c/1", b"second")
        assert isinstance(caught.value, FileExistsError)
        assert storage.get("c/1") == b"first"
        assert storage.list("c") == ["1"]

    def test_create_after_put_and_after_delete(self, root: EmptyRoot) -> None:
        storage = root.connect()
        storage.put("x", b"1")
        with pytest.raises(AlreadyExistsError):
            storage.create("x", b"2")
        storage.delete(["x"])
        storage.create("x", b"3")
        assert storage.get("x") == b"3"

    def test_list(self, root: EmptyRoot) -> None:
        storage = root.connect()
        assert storage.list("") == []
        assert storage.list("nothing/here") == []
        storage.put_many((key, b"x") for key in ("b", "a/1", "a/2", "a/deep/er/3", "ab/1"))
        assert storage.list("") == ["a/", "ab/", "b"]
        assert storage.list("a") == storage.list("a/") == ["1", "2", "deep/"]
        assert storage.list("a/deep") == ["er/"]
        assert storage.list("b") == []  # an object is no folder
        assert storage.list("a/1") == []

    def test_list_is_never_stale(self, root: EmptyRoot) -> None:
        one, other = root.connect(), root.connect()
        one.put("f/1", b"")
        assert one.list("f") == ["1"]
        other.put("f/2", b"")
        assert one.list("f") == ["1", "2"]
        other.delete(["f/1"])
        assert one.list("f") == ["2"]

    def test_more_than_a_page(self, root: EmptyRoot) -> None:
        """Listed, scanned, and deleted while it is scanned: one test, as so many objects take long to make."""
        storage, told = root.connect(), list[int]()
        keys = [f"many/{i:05d}" for i in range(1100)]
        storage.put_many((key, b"") for key in keys)
        before = storage.stats.snapshot()
        assert storage.list("many") == [key.removeprefix("many/") for key in keys]
        assert (storage.stats - before).list == (-(-len(keys) // self.names_a_page) if self.names_a_page else 1)
        before = storage.stats.snapshot()
        assert sorted(found.key for found in storage.scan("many")) == keys
        assert (storage.stats - before).list <= 3  # the last may be empty
        scan = storage.scan("many")
        seen = [next(scan).key]
        before = storage.stats.snapshot()
        assert storage.delete_many([*keys[1:1051], "many/nope", "no/folder"], told=told.append) == {}
        assert told == [1000, 52]
        assert (storage.stats - before).delete == (2 if self.deletes_in_bulk else 1052)
        seen += [found.key for found in scan]
        assert len(seen) == len(set(seen))
        assert set(seen) <= set(keys)
        assert storage.list("many") == [key.removeprefix("many/") for key in (keys[0], *keys[1051:])]
        assert storage.delete_many(keys[:10]) == {}  # most are gone already
        assert storage.delete_many(iter(())) == {}
        assert storage.stats.errors == 0

    def test_delete(self, root: EmptyRoot) -> None:
        storage = root.connect()
        keys = [f"d/{i}" for i in range(30)]
        storage.put_many((key, b"x") for key in keys)
        storage.delete([*keys[:20], "d/nope", "no/folder"])
        assert storage.list("d") == sorted(key.removeprefix("d/") for key in keys[20:])
        storage.delete(keys[:20])
        storage.delete(iter(()))
        assert storage.stats.errors == 0

    def test_delete_many_no_faster_than_asked(self, root: EmptyRoot, monkeypatch: pytest.MonkeyPatch) -> None:
        storage, told, clock = root.connect(), list[int](), _Clock()
        keys = [f"d/{i}" for i in range(7)]
        storage.put_many((key, b"x") for key in keys)
        monkeypatch.setattr("archive.store.storage.time", clock)
        storage.delete_many(keys, per_second=20, told=told.append)
        assert clock.now_s == 0.0
        storage.delete_many(keys, per_second=3, told=told.append)
        assert clock.now_s == pytest.approx(2.0)  # 3 at once, 3 a second later, 1 another second later
        assert told == [7, 3, 3, 1]
        assert storage.list("d") == []
        with pytest.raises(UsageError, match="per_second=0"):
            storage.delete_many(keys, per_second=0)

    def test_delete_many_stays_below_the_root(self, root: EmptyRoot) -> None:
        storage = root.connect()
        with pytest.raises(UnsafePathError):
            storage.delete_many(["a", "../b"])

    def test_scan(self, root: EmptyRoot) -> None:
        storage = root.connect()
        assert list(storage.scan("")) == list(storage.scan("nothing/here")) == []
        keys = ["a.b/1", "a/1", "a/2", "a/deep/er/3", "ab/1", "b"]
        storage.put_many((key, key.encode()) for key in keys)
        now = storage.clock("a")
        found = sorted(storage.scan(""))
        assert [(one.key, one.bytes) for one in found] == [(key, len(key)) for key in keys]
        assert all(abs((now - one.modified).total_seconds()) < 60 for one in found)
        assert sorted(one.key for one in storage.scan("a")) == ["a/1", "a/2", "a/deep/er/3"]
        assert [one.key for one in storage.scan("a/deep/")] == ["a/deep/er/3"]
        assert list(storage.scan("b")) == list(storage.scan("a/1")) == []  # an object is no folder

    def test_scan_is_never_stale(self, root: EmptyRoot) -> None:
        one, other = root.connect(), root.connect()
        one.put("f/g/1", b"")
        assert [found.key for found in one.scan("f")] == ["f/g/1"]
        other.put("f/h/2", b"")
        other.delete(["f/g/1"])
        assert [found.key for found in one.scan("f")] == ["f/h/2"]

    def test_clock_writes_nothing(self, root: EmptyRoot) -> None:
        storage, second = root.connect(), timedelta(seconds=1)  # answers may leave out parts of one
        storage.put("f/1", b"")
        before, counted = list(storage.scan("")), storage.stats.snapshot()
        first = storage.clock("f")
        assert list(storage.scan("")) == before
        sent = storage.stats - counted
        assert sent.put + sent.create + sent.delete + sent.copy == 0
        storage.put("f/2", b"")
        made = max(found.modified for found in storage.scan(""))
        assert first.utcoffset() == made.utcoffset() == timedelta(0)
        assert first <= made + second
        assert made <= storage.clock("f") + second

    def test_versioned(self, root: EmptyRoot) -> None:
        assert not root.connect().versioned()

    @pytest.mark.parametrize("key", STRANGE)
    def test_strange_keys_are_found_and_deleted_together(self, root: EmptyRoot, key: str) -> None:
        storage = root.connect()
        storage.put_many((f"s/{key}{end}", b"x") for end in ("", "2"))
        assert sorted(one.key for one in storage.scan("s")) == [f"s/{key}", f"s/{key}2"]
        assert len(list(storage.scan(f"s/{key}".rpartition("/")[0]))) == 2
        assert storage.delete_many([f"s/{key}"]) == {}
        assert [one.key for one in storage.scan("")] == [f"s/{key}2"]

    @pytest.mark.parametrize("key", STRANGE)
    def test_strange_keys(self, root: EmptyRoot, key: str) -> None:
        storage = root.connect()
        storage.put(f"s/{key}", key.encode())
        assert storage.get(f"s/{key}") == key.encode()
        assert storage.get_ranges([ByteRange(f"s/{key}", 0, 2)]) == [key.encode()[:2]]
        first, slash, _ = key.partition("/")
        assert storage.list("s") == [first + slash]
        with pytest.raises(AlreadyExistsError):
            storage.create(f"s/{key}", b"")
        storage.delete([f"s/{key}"])
        assert not storage.exists(f"s/{key}")

    def test_stats(self, root: EmptyRoot) -> None:
        storage = root.connect()
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

    def test_put_many_takes_items_as_it_goes(self, root: EmptyRoot) -> None:
        storage, taken = root.connect(concurrency=2), []

        def items() -> Iterator[tuple[str, bytes]]:
            for number in range(12):
                taken.append(number - storage.stats.put)
                yield f"p/{number:02d}", b"x"

        storage.put_many(items())
        assert len(storage.list("p")) == 12
        assert max(taken) <= 4  # two writing, two about to

    def test_iter_ranges_reads_ahead_within_its_bound(self, root: EmptyRoot) -> None:
        storage = root.connect(concurrency=8)
        storage.put("x", bytes(1000))
        stream = storage.iter_ranges([ByteRange("x", i * 10, i * 10 + 10) for i in range(100)], max_bytes=45)
        for number, _ in enumerate(stream):
            assert storage.stats.get <= number + 1 + 4
        assert storage.stats.get == 100
        wide = storage.iter_ranges([ByteRange("x", 0, 1000)] * 3, max_bytes=1)
        assert [len(next(wide)) for _ in range(2)] == [1000, 1000]
        wide.close()

    def test_one_of_many_creators_wins(self, root: EmptyRoot) -> None:
        count = self.creators
        storages = [root.connect() for _ in range(count)]
        gate = threading.Barrier(count)

        def attempt(number: int) -> bool:
            gate.wait()
            try:
                storages[number].create("commit", f"writer {number}".encode() * 1000)
            except AlreadyExistsError:
                return False
            return True

        for _ in range(self.races):
            with ThreadPoolExecutor(count) as pool:
                won = list(pool.map(attempt, range(count)))
            assert sum(won) == 1
            assert storages[0].get("commit") == f"writer {won.index(True)}".encode() * 1000
            storages[0].delete(["commit"])

    def test_threads(self, root: EmptyRoot) -> None:
        storage = root.connect(concurrency=4)

        def work(number: int) -> list[bytes]:
            storage.put(f"t/{number}", bytes([number]) * 10)
            return storage.get_ranges([ByteRange(f"t/{number}", i, i + 1) for i in range(5)])

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(24))) == [[bytes([number])] * 5 for number in range(24)]
        assert storage.stats.get == 24 * 5

    def test_inside_a_running_event_loop(self, root: EmptyRoot) -> None:
        storage = root.connect()

        async def use() -> bytes:
            storage.put("x", b"1")
            return storage.get("x") + b"".join(storage.get_all(["x", "x"]))

        with asyncio.Runner() as runner:
            assert runner.run(use()) == b"111"
