"""Shards of other archives: found wherever they lie, and nowhere that the caller did not allow."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import ByteRange
from archive.base.errors import MissingObjectError, UnsafePathError, UsageError
from archive.store.bases import Roots, as_allowed, join_key, split_key
from archive.store.storage import Storage
from archive.testing import steps
from tests.support.tampering import body, commit_files, same, write_some

ID = "0123456789abcdef" * 2
OTHER = "f" * 32


def roots(tmp_path: Path, url: Any, allowed: Any) -> Roots:
    own = Storage.connect(tmp_path / "own")
    own.allowed_bases = as_allowed(allowed)
    return Roots(own, {ID: str(url)})


def refused(tmp_path: Path, url: str, allowed: Any) -> bool:
    """Whether a base at this URL is refused, for its URL and not for what is there."""
    try:
        roots(tmp_path, url, allowed).get(f"base:{ID}:archive.json")
    except UnsafePathError:
        return True
    except MissingObjectError:
        return False
    raise AssertionError("there is an object where none was written")


@pytest.mark.parametrize("below", ["", "/a", "/a/b", "/with space", "/übung", "/a..b"])
@pytest.mark.parametrize(
    "given", ["file:///nowhere/ma", "/nowhere/ma", "file:///nowhere/ma/", Path("/nowhere/ma"), "/nowhere/x/../ma"]
)
def test_what_is_allowed_is_opened(tmp_path: Path, below: str, given: Any) -> None:
    assert not refused(tmp_path, f"file:///nowhere/ma{below}", [given])
    assert not refused(tmp_path, f"file:///nowhere/ma{below}", given)  # one need not be in a list


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file:///nowhere",
        "file:///nowhere/",
        "file:///nowhere/m",
        "file:///nowhere/ma-evil",
        "file:///nowhere/ma-evil/ma",
        "file:///nowhere/MA",
        "file:///nowhere/ma/..",
        "file:///nowhere/ma/../ma-evil",
        "file:///nowhere/ma/a/../../evil",
        "file:///nowhere/ma/./x",
        "file:///nowhere/ma//x",
        "file:///nowhere/ma/a\\..\\..\\evil",
        "file:///nowhere/ma/%2e%2e/evil",
        "file:///nowhere/ma/%2E./evil",
        "file:///nowhere/ma/a%2fb",
        "file:///nowhere/ma/x?y",
        "file:///nowhere/ma/x#y",
        "file:///nowhere/ma/x\n",
        "file:///nowhere/ma/::memory://x",
        "file:///nowhere/ma/x::memory://x",
        "FILE:///nowhere/ma",
        "local:///nowhere/ma",
        "/nowhere/ma",
        "memory://nowhere/ma",
        "s3://nowhere/ma",
        "zip::file:///nowhere/ma",
        "simplecache::file:///nowhere/ma",
    ],
)
def test_urls_that_only_look_allowed_are_refused(tmp_path: Path, url: str) -> None:
    assert refused(tmp_path, url, ["file:///nowhere/ma"])


@pytest.mark.parametrize(
    "url", ["s3://bucket-evil/x", "s3://bucket/../other/x", "s3://bucket.evil", "s3a://bucket/x", "s3://user@bucket/x"]
)
def test_a_bucket_allows_nothing_but_what_is_in_it(tmp_path: Path, url: str) -> None:
    assert refused(tmp_path, url, ["s3://bucket"])


def test_nothing_is_allowed_unless_said() -> None:
    assert as_allowed(()) == ()
    assert as_allowed(True) is True
    assert as_allowed(False) is False
    assert as_allowed("memory://a/") == ("memory://a",)
    with pytest.raises(UsageError):
        as_allowed([""])


@pytest.mark.parametrize("key", ["../secret", "/etc/passwd", "a/../../b", "a\\..\\b", "."])
def test_a_key_does_not_leave_an_allowed_base(tmp_path: Path, key: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    base = tmp_path / "base"
    base.mkdir()
    with pytest.raises(UnsafePathError):
        roots(tmp_path, base.as_uri(), True).get(f"base:{ID}:{key}")


def test_a_base_that_no_commit_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match=OTHER):
        roots(tmp_path, "file:///nowhere/ma", True).get(f"base:{OTHER}:x")


def test_keys() -> None:
    key = join_key(ID, "shards/x.zip")
    assert split_key(key) == (ID, "shards/x.zip")
    assert split_key("shards/x.zip") == (None, "shards/x.zip")
    assert join_key(OTHER, key) == key
    assert join_key(None, "shards/x.zip") == "shards/x.zip"
    assert split_key("base:short:shards/x.zip") == (None, "base:short:shards/x.zip")


def test_ranges_of_several_roots_come_in_order(tmp_path: Path) -> None:
    several = roots(tmp_path, (tmp_path / "base").as_uri(), [tmp_path / "base"])
    Storage.connect(tmp_path / "own").put("x", b"0123456789")
    Storage.connect(tmp_path / "base").put("x", b"abcdefghij")
    keys = ["x", f"base:{ID}:x", "x", f"base:{ID}:x", f"base:{ID}:x"]
    wanted = [ByteRange(key, i, i + 2) for i, key in enumerate(keys)]
    for one in (several, pickle.loads(pickle.dumps(several))):
        assert one.get_ranges(wanted) == [b"01", b"bc", b"23", b"de", b"ef"]
        assert list(one.iter_ranges(wanted, max_bytes=100)) == [b"01", b"bc", b"23", b"de", b"ef"]
    assert several.full_url(keys[1]).endswith("/base/x")


def test_credentials_are_for_the_same_kind_of_store_only() -> None:
    own = Storage.connect("s3://bucket/x", {"key": "testkey", "secret": "testsecret"})
    own.allowed_bases = True
    several = Roots(own, {ID: "memory://y", OTHER: "s3://bucket/y"})
    assert several.storage(ID).spec()[1] == {}
    assert several.storage(OTHER).spec()[1]["secret"] == "testsecret"


@pytest.mark.parametrize(
    ("own", "base", "given"),
    [
        ("http://mine.example/x", "http://mine.example/y", True),
        ("http://mine.example/x", "http://evil.example/x", False),
        ("http://mine.example/x", "http://mine.example:81/x", False),
        ("sftp://mine.example/x", "sftp://evil.example/x", False),
        ("s3://bucket/x", "s3://evil/x", True),  # the same server, which says who may do what
        ("s3://bucket/x", "s3a://bucket/x", False),
    ],
)
def test_credentials_go_to_no_other_host(own: str, base: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where any base is allowed."""
    storage = Storage.connect(own, {"password": "hunter22"})
    storage.allowed_bases = True
    connected: list[Any] = []
    real = Storage.connect

    def connect(url: object, options: Any = None, **settings: Any) -> Storage:
        connected.append((url, options))
        return real(url, options, **settings)

    monkeypatch.setattr(Storage, "connect", connect)
    Roots(storage, {ID: base}).storage(ID)
    assert connected == [(base, {"password": "hunter22"} if given else {})]


def test_a_tampered_url_in_a_commit_opens_nothing(tmp_path: Path) -> None:
    """A commit with a right seal that names a place next to the one allowed."""
    write_some(tmp_path / "ma")
    write_some(tmp_path / "ma-evil")
    allowed = [(tmp_path / "ma").as_uri()]
    resharding.merge([tmp_path / "ma"], to=tmp_path / "to", allow_bases=allowed)
    assert len(archive.open(tmp_path / "to", allow_bases=allowed).episodes.read()) == 3
    (path,) = commit_files(tmp_path / "to")
    evil = body(path)
    (name,) = evil["bases"]
    evil["bases"][name]["url"] += "-evil"
    line = json.dumps(evil, separators=(",", ":"), sort_keys=True).encode()
    import hashlib

    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
    arc = archive.open(tmp_path / "to", allow_bases=allowed)
    assert len(arc.episodes) == 3
    with pytest.raises(UnsafePathError, match="ma-evil"):
        arc.episodes[0].read()


def test_the_message_says_how_to_allow(tmp_path: Path) -> None:
    write_some(tmp_path / "ma")
    resharding.merge([tmp_path / "ma"], to=tmp_path / "to")
    with pytest.raises(UnsafePathError, match="allow_bases") as raised:
        archive.open(tmp_path / "to").episodes[0].read()
    assert (tmp_path / "ma").as_uri() in str(raised.value)
    for allowed in (True, tmp_path / "ma", [tmp_path], str(tmp_path)):
        assert same(archive.open(tmp_path / "to", allow_bases=allowed).episodes["e1"].read(), steps(5, 1))


def test_pickled_episodes_keep_what_was_allowed(tmp_path: Path) -> None:
    write_some(tmp_path / "ma")
    resharding.merge([tmp_path / "ma"], to=tmp_path / "to")
    allowed = archive.open(tmp_path / "to", allow_bases=tmp_path).episodes["e2"]
    assert np.array_equal(pickle.loads(pickle.dumps(allowed)).read()["obs"], steps(6, 2)["obs"])
    with pytest.raises(UnsafePathError):
        pickle.loads(pickle.dumps(archive.open(tmp_path / "to").episodes["e2"])).read()
