"""A trace has every request, and says the same as the counters of the archive."""

from __future__ import annotations

import pytest

import archive
from archive.base.errors import NotFoundError, UsageError
from archive.testing import EmptyRoot, faults, small_archive, steps, trace
from tests.support.backends import Backend

VERBS = ("get", "put", "create", "list", "delete", "head", "copy")


def test_it_says_what_the_counters_say(backend: Backend) -> None:
    arc = small_archive(backend.url, storage_options=backend.storage_options)
    before = arc.io_stats()
    with trace(arc) as t:
        with arc.writer() as w:
            w.add_episode(steps(300, 9), episode_id="new")
            w.checkpoint(1, columns={"priority": [1.0] * 300}).result()
        assert len(arc.episodes.read()) == 4
        assert arc.episodes["new"].read(["obs"], start=3, stop=9)["obs"].shape == (6, 3)
        assert len(list(arc.storage.scan(""))) > 5
    counted = arc.io_stats() - before
    assert {verb: t.count(verb) for verb in VERBS} == {verb: getattr(counted, verb) for verb in VERBS}
    assert (t.bytes_in, t.bytes_out, t.requests) == (counted.bytes_in, counted.bytes_out, counted.requests)
    assert t.bytes == t.bytes_in + t.bytes_out > 0


def test_it_sees_whoever_opens_the_url_and_nobody_else() -> None:
    root, other = EmptyRoot("memory://traced"), EmptyRoot("memory://traced-not")
    with trace("memory://traced") as t:
        small_archive(root.url)
        small_archive(other.url)
        root.open().episodes.read()
    assert {row.url for row in t.rows} == {"memory://traced"}
    with trace() as everything:
        root.open()
        other.open()
    assert {row.url for row in everything.rows} == {"memory://traced", "memory://traced-not"}
    root.clear()
    other.clear()


def test_rows_say_what_was_asked_and_what_came_of_it() -> None:
    root = EmptyRoot("memory://rows")
    storage = root.connect()
    with trace(root) as t:
        storage.put("a/b", b"12345")
        storage.get("a/b", 1, 3)
        with pytest.raises(archive.ArchiveError):
            storage.get("nothing")
    assert [(row.verb, row.key, row.start, row.stop, row.bytes_in, row.bytes_out) for row in t.rows] == [
        ("put", "a/b", None, None, 0, 5),
        ("get", "a/b", 1, 3, 2, 0),
        ("get", "nothing", 0, None, 0, 0),
    ]
    assert [row.error for row in t.rows] == ["", "", "FileNotFoundError"]
    assert t.count("get", "a/") == 1
    assert t.of("get").bytes == 2
    assert str(t) == "1 put, 2 get; 2 bytes in, 5 out"
    table = t.to_pandas()
    assert table["bytes_out"].tolist() == [5, 0, 0]
    assert (table["seconds"] >= 0).all()
    with pytest.raises(UsageError, match="'write' is no operation"):
        t.count("write")
    root.clear()


def test_an_empty_trace() -> None:
    with trace("memory://nobody") as t, pytest.raises(NotFoundError):
        archive.open("memory://somebody-else")
    assert (t.requests, t.bytes, str(t), len(t.to_pandas())) == (0, 0, "no requests; 0 bytes in, 0 out", 0)


def test_around_faults_it_sees_tries_and_within_them_what_reaches_the_store() -> None:
    root = EmptyRoot("memory://nested")
    root.connect().put("a", b"1")
    with trace(root) as tries, faults.at(root, op="get", what="throttle", times=2), trace(root) as sent:
        assert root.connect().get("a") == b"1"
    assert [row.error for row in tries.rows] == ["ThrottledError", "ThrottledError", ""]
    assert [row.error for row in sent.rows] == [""]
    root.clear()
