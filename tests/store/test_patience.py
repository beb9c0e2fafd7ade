"""A store that does not answer: the log says so after seconds, a wrong address is given up soon,
a wrong scheme at once."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import archive
from archive import opening
from archive.base.errors import DeadlineError, StorageError
from archive.store import retry
from archive.store.drivers import plain
from archive.store.retry import Patience
from archive.store.storage import Storage
from tests.support import servers


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(("transport", "cause"), [("s3fs", "EndpointConnectionError"), ("obstore", "error sending")])
@pytest.mark.parametrize("call", [archive.open, archive.create])
def test_nobody_listens(
    call: Callable[..., Any],
    transport: str,
    cause: str,
    closed_port: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opening, "FIRST_ANSWER_S", 3.0)  # making a client takes a while, too
    monkeypatch.setattr(retry, "TELL_S", 0.2)
    options = servers.s3fs_options(closed_port) | {"transport": transport}
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"nothing can be reached there: check the address \(endpoint_url\)"):
        call("s3://bucket/x", storage_options=options)
    assert time.monotonic() - started < 10
    (told,) = [r for r in caplog.records if r.name == "archive" and r.levelno == logging.WARNING]
    for word in ("tried again for up to", cause):
        assert word in told.getMessage()
    first = {"s3://bucket/x/archive.json"}
    if call is archive.open:  # asks for both at once, and either may be the first to fail
        first.add("s3://bucket/x/commits/000000")
    assert any(name in told.getMessage() for name in first)
    assert options["secret"] not in told.getMessage()


def test_who_says_how_long_is_waited_for(closed_port: str) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        archive.open("s3://bucket/x", storage_options=servers.s3fs_options(closed_port), deadline_s=0.5)
    assert time.monotonic() - started < 5


def test_a_store_that_answered_once_is_waited_for() -> None:
    patience = Patience(10.0)
    refused = ConnectionRefusedError("refused")
    assert not patience.failed("get x", "refused", refused, 9.0, 120.0)
    assert patience.failed("get x", "refused", refused, 10.5, 120.0)
    patience.answered()
    assert not patience.failed("get x", "refused", refused, 10.5, 120.0)


def test_an_answer_that_says_no_is_an_answer() -> None:
    patience = Patience(10.0)
    assert not patience.failed("get x", "503", TimeoutError("slow down"), 11.0, 120.0)


def test_it_is_told_after_seconds_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience()
    for elapsed in (1.0, 2.9, 3.1, 4.0, 9.0):
        patience.failed("put s3://b/x", "SlowDown", TimeoutError(), elapsed, 120.0)
    assert [r.getMessage() for r in caplog.records] == [
        "put s3://b/x has failed for 3 s (SlowDown); it is tried again for up to 117 s more"
    ]


@pytest.mark.parametrize(("url", "meant"), [("s4://bucket/x", "s3://"), ("gcss://bucket/x", "gcs://")])
def test_a_scheme_that_nobody_knows_is_told_at_once(url: str, meant: str) -> None:
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"did you mean .*known: .*memory"):
        archive.open(url)
    with pytest.raises(StorageError, match=meant):
        Storage.connect(url).get("x")
    assert time.monotonic() - started < 2


def test_the_loop_of_an_older_fsspec_is_renewed_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    stand_in: Any = SimpleNamespace(reset_lock=lambda: made.append(os.getpid()))
    monkeypatch.setitem(sys.modules, "fsspec.asyn", stand_in)
    plain._renew_loop()
    assert made == [os.getpid()]
    newer: Any = SimpleNamespace(reset_lock=made.clear, reset_after_fork=None)
    monkeypatch.setitem(sys.modules, "fsspec.asyn", newer)
    plain._renew_loop()
    assert made
