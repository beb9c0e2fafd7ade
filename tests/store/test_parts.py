"""The pure parts below Storage: roots, what failures mean, pauses, ordered jobs, counts."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archive.base.errors import AlreadyExistsError, StorageError, UsageError
from archive.base.parallel import Task, in_order
from archive.store.counts import IOStats, count, totals
from archive.store.drivers.failures import Cause, judge
from archive.store.retry import CAP_S, longest_delay
from archive.store.root import parse_root
from archive.store.storage import Storage
from tests.support.places import ROOT


@pytest.mark.parametrize(
    ("url", "shown", "key"),
    [
        ("s3://bucket/runs/42", "s3://bucket/runs/42", "s3://bucket/runs/42/a"),
        ("s3://bucket/runs/42///", "s3://bucket/runs/42", "s3://bucket/runs/42/a"),
        ("S3://Bucket//a//b/", "s3://Bucket/a/b", "s3://Bucket/a/b/a"),
        ("s3://bucket", "s3://bucket", "s3://bucket/a"),
        ("memory://", "memory://", "memory://a"),
        ("/tmp/x/", "file:///tmp/x", "file:///tmp/x/a"),
        ("file:///tmp//x/../y", "file:///tmp/y", "file:///tmp/y/a"),
        ("local:///tmp/y", "file:///tmp/y", "file:///tmp/y/a"),
        ("/", "file:///", "file:///a"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x", None),
        ("sftp://me:hunter22@host/x", "sftp://host/x", "sftp://host/x/a"),
        ("https://tokentoken@host/x?sig=hunter22", "https://host/x", "https://host/x/a"),
        ("simplecache::https://me:hunter22@host/x?sig=hunter22", "simplecache::https://host/x", None),
    ],
)
def test_roots(url: str, shown: str, key: str | None) -> None:
    storage = Storage.connect(url)
    assert storage.url == shown
    assert repr(storage) == f"Storage({shown!r})"
    assert storage.full_url("a") == (key or f"{shown}/a")
    assert "hunter22" not in repr(vars(storage))
    if "hunter22" in url:
        assert storage.root.scrub("get hunter22 and hunter22") == "get *** and ***"


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Storage.connect("some/where").url == f"file://{tmp_path}/some/where"
    assert Storage.connect("~/where").url == f"file://{tmp_path}/home/where"
    assert Storage.connect(tmp_path / "a::b").url == f"file://{tmp_path}/a::b"
    assert Storage.connect(tmp_path).spec() == (f"file://{tmp_path}", {})


def test_upath_like() -> None:
    @dataclass
    class Like:
        protocol: str
        path: str
        storage_options: dict[str, Any]

    storage = Storage.connect(Like("s3", "bucket/x/", {"key": "from-path", "anon": True}), {"key": "given"})
    assert storage.url == "s3://bucket/x"
    assert storage.spec() == ("s3://bucket/x", {"key": "given", "anon": True})
    assert Storage.connect(Like("", "/tmp/x", {})).url == "file:///tmp/x"


@pytest.mark.parametrize("url", ["", None, 3, "s3://", "s3://bucket/x?versionId=hunter22"])
def test_roots_that_are_none(url: object) -> None:
    with pytest.raises(UsageError) as caught:
        Storage.connect(url)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"deadline_s": 0}])
def test_settings_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Storage.connect("memory://x", **settings)


def test_a_protocol_that_nobody_serves() -> None:
    storage = Storage.connect("nosuch://bucket/x", {"secret": "hunter22"})
    with pytest.raises(StorageError, match="nosuch") as caught:
        storage.get("x")
    assert "hunter22" not in str(caught.value)


def test_secrets_deep_in_options_are_scrubbed() -> None:
    options = {
        "client_kwargs": {"aws_secret_access_key": "sEcret/+1"},
        "credentials": {"x": "deeply"},
        "endpoint": "http://h",
    }
    root = parse_root("s3://bucket", options)
    assert root.scrub("sEcret/+1 sEcret%2F%2B1 deeply http://h bucket") == "*** *** *** http://h bucket"
    assert "sEcret" not in repr(root)
    assert pickle.loads(pickle.dumps(root)) == root


def test_connecting_imports_no_client() -> None:
    code = (
        "import sys; from archive.store.storage import Storage; s = Storage.connect('s3://b/x', {'key': 'k'}); repr(s);"
        "Storage.connect('/tmp/none').list('');"
        "print(sorted({'fsspec', 's3fs', 'aiobotocore', 'obstore', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


class _AnswerError(Exception):
    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class _HttpError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "landed"),
    [
        (_caused(OSError(22, "x"), _AnswerError("PreconditionFailed", 412)), Cause.EXISTS, False),
        (_caused(OSError(22, "x"), _AnswerError("ConditionalRequestConflict", 409)), Cause.TRANSIENT, False),
        (_AnswerError("412", 412), Cause.EXISTS, False),
        (_AnswerError("404", 0), Cause.MISSING, False),
        (_AnswerError("SlowDown", 503), Cause.TRANSIENT, False),
        (_AnswerError("InternalError", 500), Cause.TRANSIENT, True),
        (_HttpError(503), Cause.TRANSIENT, True),
        (_HttpError(429), Cause.TRANSIENT, False),
        (_HttpError(403), Cause.DENIED, False),
        (_HttpError(400), Cause.OTHER, False),
        (FileExistsError("x"), Cause.EXISTS, False),
        (NotADirectoryError("x"), Cause.MISSING, False),
        (IsADirectoryError("x"), Cause.MISSING, False),
        (PermissionError("x"), Cause.DENIED, False),
        (TimeoutError("x"), Cause.TRANSIENT, True),
        (ConnectionResetError("x"), Cause.TRANSIENT, True),
        (BrokenPipeError("x"), Cause.TRANSIENT, True),
        (ConnectionRefusedError("x"), Cause.TRANSIENT, False),
        (_caused(RuntimeError("x"), ConnectionRefusedError("y")), Cause.TRANSIENT, False),
        (_caused(RuntimeError("x"), ConnectionResetError("y")), Cause.TRANSIENT, True),
        (OSError(28, "full"), Cause.FULL, False),
        (OSError(5, "broken"), Cause.OTHER, False),
        (ValueError("x"), Cause.OTHER, False),
    ],
)
def test_what_failures_mean(error: Exception, kind: Cause, landed: bool) -> None:
    assert (judge(error).kind, judge(error).landed) == (kind, landed)


def test_pauses_grow_to_the_cap() -> None:
    pauses = [longest_delay(attempt) for attempt in range(1, 200)]
    assert pauses[0] == pytest.approx(0.05)
    assert pauses == sorted(pauses)
    assert max(pauses) == CAP_S
    assert sum(pauses[:20]) / 2 < 6


@pytest.mark.parametrize(("max_ahead", "max_bytes", "bound"), [(5, None, 5), (9, 25, 2), (9, 1, 1)])
def test_jobs_come_in_order_and_within_bounds(max_ahead: int, max_bytes: int | None, bound: int) -> None:
    held, most, lock = [0], [0], threading.Lock()

    def work(number: int, _: threading.Event) -> int:
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        time.sleep(0.002 * (number % 3))
        return number

    jobs = (Task(functools.partial(work, number), size=10) for number in range(40))
    with ThreadPoolExecutor(8) as pool:
        for expected, number in enumerate(in_order(pool, jobs, max_ahead=max_ahead, max_bytes=max_bytes)):
            with lock:
                held[0] -= 1
            assert number == expected
    assert most[0] <= bound + 1  # the one given out was still counted when its successor started


def test_stopping_early_starts_nothing_more_and_tells_what_runs() -> None:
    ran: list[int] = []
    started, told = threading.Event(), threading.Event()

    def work(number: int, cancelled: threading.Event) -> int:
        ran.append(number)
        if number:
            started.set()
            if cancelled.wait(5):
                told.set()
        return number

    jobs = [Task(functools.partial(work, number)) for number in range(9)]
    with ThreadPoolExecutor(1) as pool:
        results = in_order(pool, jobs, max_ahead=9)
        assert next(results) == 0
        assert started.wait(4)
        results.close()
        assert told.wait(4)
    assert ran == [0, 1]


def test_memory_looks_and_writes_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a thread is stopped between the look and the write."""
    from fsspec.implementations.memory import MemoryFileSystem

    info = MemoryFileSystem.info

    def slow_info(self: Any, path: str) -> Any:
        try:
            return info(self, path)
        finally:
            time.sleep(0.05)

    monkeypatch.setattr(MemoryFileSystem, "info", slow_info)

    def won(number: int) -> bool:
        try:
            Storage.connect("memory://one-step").create("x", bytes([number]))
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(won, range(4))) == 1


def test_stats_add_up_across_threads() -> None:
    stats, others = IOStats(), IOStats()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: count(stats, "of a test", get=1, bytes_in=3), range(4000)))
    before = stats.snapshot()
    count(stats, "of a test", put=2, head=1)
    count(others, "of a test", put=1)
    assert before.as_dict() | {"put": 0} == before.as_dict()
    assert (before.get, before.bytes_in, before.requests) == (4000, 12000, 4000)
    assert (stats - before) == IOStats(put=2, head=1)
    assert stats.requests == 4003
    assert totals()["of a test"] == IOStats(get=4000, bytes_in=12000, put=3, head=1)
