"""What Storage does when the store, the network or the disk fails."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from archive.base import ByteRange
from archive.base.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AmbiguousWriteError,
    DeadlineError,
    MissingObjectError,
    NotExclusiveError,
    ShortReadError,
    StorageError,
    StorageFullError,
)
from archive.store import retry
from archive.store.reads import Filling
from archive.store.storage import Storage
from tests.support import servers
from tests.support.backends import Proxied, s3_options
from tests.support.sampling import few_of

DATA = bytes(range(250)) * 4
everywhere = pytest.mark.parametrize("proxied", ["moto", "seaweedfs", "s3fs", "obstore"], indirect=True)
clients = pytest.mark.parametrize("proxied", ["moto", "s3fs", "obstore"], indirect=True)

PASSING = (
    *((500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"), (429, "TooManyRequests"), (502, "")),
    *((504, ""), (409, "OperationAborted"), (408, "RequestTimeout"), (400, "RequestTimeout")),
)
FINAL: tuple[tuple[int, str, type[StorageError]], ...] = (
    (403, "AccessDenied", AccessDeniedError),
    (403, "SignatureDoesNotMatch", AccessDeniedError),
    (404, "NoSuchKey", MissingObjectError),
    (507, "InsufficientStorage", StorageFullError),
    (501, "NotImplemented", StorageError),
    (400, "InvalidArgument", StorageError),
)


def with_object(proxied: Proxied, **settings: Any) -> Storage:
    """A storage with DATA at "x", put past the proxy."""
    proxied.plant("x", DATA)
    return proxied.connect(**settings)


class Hundredths:
    """Draws the pauses between tries: a hundredth of the longest that may be drawn, which it notes."""

    def __init__(self) -> None:
        self.longest_s: list[float] = []

    def uniform(self, low_s: float, high_s: float) -> float:
        assert low_s == 0
        self.longest_s.append(high_s)
        return high_s / 100


@clients
def test_twenty_slowdowns(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_jitter", drawn := Hundredths())
    storage = with_object(proxied)
    proxied.proxy.add("status", status=503, code="SlowDown", times=20)
    assert storage.get("x", 0, 10) == DATA[:10]
    assert len(drawn.longest_s) == 20
    assert sum(drawn.longest_s) < 15  # seconds at the worst, and half of that on average
    assert proxied.proxy.verbs() == ["GET"] * 21
    assert storage.stats.as_dict() | {"bytes_in": 0} == {
        **dict.fromkeys(storage.stats.as_dict(), 0),
        "get": 21,
        "retries": 20,
    }


@everywhere
def test_passing_errors_are_retried(proxied: Proxied) -> None:
    storage = with_object(proxied)
    for status, code in PASSING:
        before = storage.stats.snapshot()
        for method in ("GET", "PUT"):
            proxied.proxy.add("status", method=method, status=status, code=code)
        assert storage.get("x") == DATA
        storage.put("y", b"1")
        asked = storage.stats - before
        assert (asked.get, asked.put, asked.retries, asked.errors) == (2, 2, 2, 0)


@everywhere
def test_broken_connections_are_retried(proxied: Proxied) -> None:
    storage, proxy = with_object(proxied), proxied.proxy
    for action in ("reset", "truncate", "reset_after"):
        before = storage.stats.snapshot()
        proxy.add(action, method="GET", times=2, keep=100)
        assert storage.get("x") == DATA
        proxy.add(action, method="GET", times=1, keep=10)
        assert storage.get_ranges([ByteRange("x", 0, 500), ByteRange("x", 500, 1000)]) == [DATA[:500], DATA[500:]]
        proxy.add(action if action != "truncate" else "reset", method="PUT", times=2)
        storage.put("y", b"1")
        assert (storage.stats - before).retries == 5
    sent = storage.stats
    assert len(proxy.log) == sent.requests  # no layer below sends anything again on its own


@everywhere
def test_what_the_caller_handles_is_no_cause_of_what_fails_then(proxied: Proxied) -> None:
    storage = with_object(proxied)
    for action in ("reset", "reset_after"):
        try:
            storage.create("x", b"")
        except AlreadyExistsError:
            proxied.proxy.add(action, method="GET")
            assert storage.get("x") == DATA
            proxied.proxy.add(action, method="GET")
            assert storage.list("") == ["x"]


@everywhere
def test_a_short_answer_is_retried_then_told(proxied: Proxied) -> None:
    storage = with_object(proxied)
    proxied.proxy.add("shorten", method="GET", keep=30)
    assert storage.get("x", 100, 200) == DATA[100:200]
    proxied.proxy.add("shorten", method="GET", keep=30, times=-1)
    with pytest.raises(ShortReadError, match="30 of the 100 bytes"):
        storage.get("x", 100, 200)
    assert len(proxied.proxy.log) == 2 + 4


@pytest.mark.parametrize("proxied", few_of(["moto", "s3fs", "seaweedfs", "obstore"], 2), indirect=True)
def test_an_answer_that_ends_before_what_the_store_has_said_is_broken(proxied: Proxied) -> None:
    """Also where nobody knows how much there is: a whole object, the first bytes of one, a list."""
    storage, proxy = with_object(proxied), proxied.proxy
    calls: list[tuple[Callable[[], Any], Any]] = [
        (lambda: storage.get("x"), DATA), (lambda: storage.get("x", 990), DATA[990:]),
        (lambda: storage.get_head("x", 5000), DATA), (lambda: storage.get_all(["x"]), [DATA]),
        (lambda: storage.list(""), ["x"]), (lambda: [one.key for one in storage.scan("")], ["x"]),
    ]  # fmt: skip
    for call, expected in calls:
        for keep in (0, 5, 150):
            proxy.reset()
            proxy.add("shorten", method="GET", keep=keep)
            assert call() == expected
    assert storage.stats.errors == 0
    proxy.reset()
    proxy.add("shorten", method="GET", keep=5, times=-1)
    with pytest.raises(StorageError, match=r"5 of the 1000 bytes that the store|FlexibleChecksumError"):
        storage.get("x")  # botocore compares a checksum first, where the server has one
    assert len(proxy.log) == 4
    proxy.reset()
    proxy.add("shorten", method="GET", keep=0, times=-1)
    with pytest.raises(StorageError, match="damaged answers, or none"):
        storage.list("")
    assert len(proxy.log) == 4


@clients
def test_memory_is_filled_whatever_happens_on_the_way(proxied: Proxied) -> None:
    storage, memory = with_object(proxied), bytearray(len(DATA))
    room, done = memoryview(memory), list[int]()
    fillings = [Filling("x", 0, [room[:7], room[7:400]]), Filling("x", 400, [room[400:]])]
    for action in ("reset", "truncate", "shorten"):
        room[:] = bytes(len(DATA))
        proxied.proxy.add(action, method="GET", keep=30)
        storage.fill(fillings, done.append, max_bytes=len(DATA))
        assert memory == DATA
    assert sorted(done) == [0, 0, 0, 1, 1, 1]
    assert len(proxied.proxy.log) == storage.stats.requests == 6 + 3
    proxied.proxy.add("shorten", method="GET", keep=30, times=-1)
    with pytest.raises(ShortReadError, match="30 of the 600 bytes"):
        storage.fill(fillings[1:], done.append, max_bytes=len(DATA))
    with pytest.raises(MissingObjectError):
        storage.fill([Filling("nope", 0, [room])], done.append, max_bytes=len(DATA))


@pytest.mark.parametrize("proxied", ["moto", "seaweedfs", "s3fs"], indirect=True)
def test_a_server_that_ignores_ranges(proxied: Proxied) -> None:
    storage = with_object(proxied)
    proxied.proxy.add("ignore_range", method="GET", times=-1)
    with pytest.raises(StorageError, match="ignores byte ranges"):
        storage.get("x", 100, 200)
    with pytest.raises(StorageError, match="ignores byte ranges"):
        storage.get_ranges([ByteRange("x", 1, 2), ByteRange("x", 3, 4)])
    assert storage.get("x") == DATA


@everywhere
def test_final_errors_are_told_at_once(proxied: Proxied) -> None:
    storage = with_object(proxied)
    for status, code, expected in FINAL:
        proxied.proxy.reset()
        proxied.proxy.add("status", status=status, code=code, times=-1)
        created = NotExclusiveError if status == 501 else expected  # the store does not know the condition
        calls = ((lambda: storage.get("x"), expected), (lambda: storage.put("y", b""), expected))
        for call, kind in (*calls, (lambda: storage.create("z", b""), created)):
            proxied.proxy.log.clear()
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            assert caught.value.__cause__ is not None
            assert len(proxied.proxy.log) == 1


def test_delete_and_list_tell_errors(proxied: Proxied) -> None:
    storage = with_object(proxied)
    proxied.proxy.add("status", status=403, code="AccessDenied", times=-1)
    with pytest.raises(AccessDeniedError, match="delete"):
        storage.delete(["x", "y"])
    with pytest.raises(AccessDeniedError, match="list"):
        storage.list("folder")
    with pytest.raises(AccessDeniedError, match="head"):
        storage.exists("x")


@clients
def test_the_deadline(proxied: Proxied) -> None:
    storage = with_object(proxied)
    assert storage.exists("x")  # making the client takes a while too
    storage.deadline_s = 0.7
    proxied.proxy.add("status", status=503, code="SlowDown", times=-1)
    for call in (lambda: storage.get("x"), lambda: storage.put("y", b"1"), lambda: storage.list("")):
        proxied.proxy.log.clear()
        started = time.monotonic()
        with pytest.raises(DeadlineError, match=r"gave up after \d+ attempts in ") as caught:
            call()
        assert time.monotonic() - started < 2.5
        assert f"after {len(proxied.proxy.log)} attempts" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.__cause__ is not None


@clients
def test_nobody_listens(proxied: Proxied) -> None:
    (port,) = servers.free_ports(1)
    dead = f"http://127.0.0.1:{port}"
    proxied.storage_options.update(s3_options(proxied.name, dead))
    storage = proxied.connect(deadline_s=2.0)
    with pytest.raises(DeadlineError):
        storage.get("x")
    with pytest.raises(DeadlineError):  # it cannot have been made: nothing was sent
        storage.create("y", b"")


def test_a_stalled_answer_is_asked_for_again(proxied: Proxied) -> None:
    storage = with_object(proxied, deadline_s=8.0)  # a quarter of it without a byte ends an attempt
    proxied.proxy.add("stall", method="GET", seconds=6.0)
    started = time.monotonic()
    assert storage.get("x") == DATA
    assert 1.5 < time.monotonic() - started < 5
    assert storage.stats.retries == 1


@clients
def test_a_stall_ends_at_the_deadline(proxied: Proxied) -> None:
    storage = with_object(proxied, deadline_s=0.8)
    proxied.proxy.add("delay", seconds=5.0, times=-1)
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        storage.get("x")
    with pytest.raises(AmbiguousWriteError):
        storage.create("y", b"1")
    assert time.monotonic() - started < 5


@everywhere
def test_a_lost_answer_makes_create_ambiguous(proxied: Proxied) -> None:
    storage = proxied.connect()
    proxied.proxy.add("reset_after", method="PUT")
    with pytest.raises(AmbiguousWriteError, match=r"^create .*/c: no answer whether it was made"):
        storage.create("c", b"mine")
    assert storage.get("c") == b"mine"
    with pytest.raises(AlreadyExistsError):
        storage.create("c", b"other")


@everywhere
def test_a_lost_request_to_create_is_made_good(proxied: Proxied) -> None:
    storage = proxied.connect()
    proxied.proxy.add("reset", method="PUT", times=2)
    storage.create("c", b"mine")
    assert storage.get("c") == b"mine"


@everywhere
def test_somebody_else_created_it_while_our_request_was_lost(proxied: Proxied) -> None:
    storage = proxied.connect()
    proxied.plant("c", b"theirs")
    proxied.proxy.add("reset", method="PUT")
    with pytest.raises(AmbiguousWriteError):
        storage.create("c", b"ours")
    assert storage.get("c") == b"theirs"


@everywhere
def test_a_refused_create_is_not_ambiguous(proxied: Proxied) -> None:
    storage = proxied.connect()
    proxied.plant("c", b"theirs")
    proxied.proxy.add("status", status=503, code="SlowDown", method="PUT", times=2)
    with pytest.raises(AlreadyExistsError):
        storage.create("c", b"ours")
    proxied.proxy.add("status", status=409, code="ConditionalRequestConflict", method="PUT", times=2)
    storage.create("d", b"ours")
    assert storage.get("d") == b"ours"


@everywhere
def test_create_is_ambiguous_when_the_store_fails_until_the_deadline(proxied: Proxied) -> None:
    storage = proxied.connect()
    assert storage.list("") == []  # making the client takes a while too
    storage.deadline_s = 1.0
    proxied.proxy.add("status", status=500, code="InternalError", method="PUT", times=-1)
    with pytest.raises(AmbiguousWriteError, match="attempts"):
        storage.create("c", b"1")


class Road(Storage):
    """The way to a store: what becomes of each request to create, and whether the look after it is refused."""

    coming: Iterator[Any]
    under_way: list[bytes]

    def arrive(self, data: bytes) -> None:
        with contextlib.suppress(AlreadyExistsError):
            super().create("x", data)

    def create(self, key: str, data: Any) -> None:
        while self.under_way:
            self.arrive(self.under_way.pop())
        match next(self.coming, "made"):
            case "theirs":
                self.arrive(THEIRS)
            case "lost":
                raise AmbiguousWriteError("no answer")
            case "late":
                self.under_way.append(b"".join(data))
                raise AmbiguousWriteError("no answer")
            case "no answer":
                self.arrive(b"".join(data))
                raise AmbiguousWriteError("no answer")
        super().create(key, data)

    def get_head(self, key: str, max_bytes: int, cancelled: Any = None) -> bytes:
        if next(self.coming, False):
            raise AccessDeniedError("refused")
        return super().get_head(key, max_bytes, cancelled)


OURS, THEIRS = (b"the same head of " + who for who in (b"ours", b"theirs"))
FATES = ("made", "theirs", "lost", "late", "no answer")


@pytest.mark.parametrize("look_bytes", [8, 1000])
def test_created_once_whatever_becomes_of_each_request(monkeypatch: pytest.MonkeyPatch, look_bytes: int) -> None:
    """Against a plain model: the bytes that arrive first stay, and who sent them, and nobody else, is told so."""
    monkeypatch.setattr("archive.store.writes.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("archive.store.writes.LOOK_BYTES", look_bytes)
    for fates in itertools.product(FATES, (False, True), FATES, (False, True), FATES):
        road = Road.connect(f"memory://{uuid.uuid4().hex}", deadline_s=5.0)
        road.coming, road.under_way = iter(fates), []
        made = True
        try:
            road.create_once("x", [OURS[:5], OURS[5:]])
        except AlreadyExistsError:
            made = False
        assert road.get("x") == (OURS if made else THEIRS), fates


def test_a_question_that_nothing_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, sent = Storage.connect(f"memory://{uuid.uuid4().hex}", deadline_s=0.05), []

    def create(self: Storage, key: str, data: Any) -> None:
        sent.append(data)
        raise AmbiguousWriteError("no answer")

    monkeypatch.setattr(Storage, "create", create)
    with pytest.raises(AmbiguousWriteError, match="no answer whether it is there"):
        storage.create_once("x", b"ours")
    assert len(sent) > 1
    assert set(sent) == {b"ours"}
    monkeypatch.setattr(Storage, "get_head", lambda *args: (_ for _ in ()).throw(DeadlineError("gone")))
    del sent[:]
    with pytest.raises(KeyError, match="whatever"):
        storage.create_once("x", b"ours", unclear=KeyError("whatever"))
    assert len(sent) == 1


def test_the_first_error_cancels_the_rest(proxied: Proxied) -> None:
    storage = with_object(proxied, concurrency=2)
    proxied.proxy.add("delay", method="GET", ranged=True, path="/x", seconds=0.05, times=-1)
    ranges = [ByteRange("x", i, i + 1) for i in range(5)] + [ByteRange("nope", 0, 1)]
    ranges += [ByteRange("x", i, i + 1) for i in range(200)]
    with pytest.raises(MissingObjectError):
        storage.get_ranges(ranges)
    time.sleep(0.3)
    assert len(proxied.proxy.log) < 20


def test_an_error_is_told_though_an_earlier_request_waits(proxied: Proxied) -> None:
    storage = with_object(proxied, concurrency=4)
    proxied.proxy.add("delay", path="/x", seconds=4.0)
    started = time.monotonic()
    with pytest.raises(MissingObjectError):
        storage.get_all(["x", "nope"])
    assert time.monotonic() - started < 3


def test_after_an_error_nothing_more_is_written(proxied: Proxied) -> None:
    storage = proxied.connect(concurrency=2)
    proxied.proxy.add("delay", path="/p/2", seconds=0.5)
    proxied.proxy.add("status", status=403, code="AccessDenied", path="/p/3", times=-1)
    with pytest.raises(AccessDeniedError):
        storage.put_many((f"p/{i}", b"x") for i in range(100))
    written = storage.list("p")
    assert len(written) < 10
    time.sleep(0.7)
    assert storage.list("p") == written


def test_a_reader_that_stops_early_cancels(proxied: Proxied) -> None:
    storage = with_object(proxied, concurrency=2)
    stream = storage.iter_ranges([ByteRange("x", i, i + 1) for i in range(500)], max_bytes=10)
    assert next(stream) == DATA[:1]
    stream.close()
    time.sleep(0.2)
    assert len(proxied.proxy.log) <= 11


def _everything_said(call: Callable[[], object], caplog: pytest.LogCaptureFixture) -> str:
    try:
        call()
    except Exception as error:
        return "".join(traceback.format_exception(error)) + caplog.text
    return caplog.text


@everywhere
def test_credentials_are_never_shown(proxied: Proxied, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="archive")
    storage = with_object(proxied, deadline_s=0.3)
    proxied.proxy.add("status", status=403, code=servers.SECRET, times=1)
    said = _everything_said(lambda: storage.get("x"), caplog)
    proxied.proxy.add("status", status=500, code=servers.SECRET, times=-1)
    said += _everything_said(lambda: storage.create("x", b""), caplog)
    said += f"{storage!r} {storage} {storage.url} {storage.full_url('x')} {storage.stats} {vars(storage)}"
    assert "archive.base.errors" in said
    assert servers.SECRET not in said
    assert servers.KEY not in said
