"""Each text in each object of an archive that could name another place is made to: nothing outside is read or written.

What is opened is watched from below the library: by Python's own events of opening files, and by the connections made.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import archive
import resharding
from archive import cli
from archive.base.errors import ArchiveError
from archive.store.storage import Storage
from archive.testing import small_archive, steps
from tests.support.sampling import sampled

HOSTILE = (
    "../outside/secret.zip", "{outside}/secret.zip", "file://{outside}/secret.zip", "shards/../../outside/secret.zip",
    "shards/..%2f..%2foutside/secret.zip", "..\\outside\\secret.zip", "base:{id}:secret.zip",
    "base:{id}:../outside/secret.zip", "s3://evil-bucket/secret.zip", "http://127.0.0.1:9/secret.zip",
    "simplecache::file://{outside}/secret.zip", "memory://evil/secret.zip", "~/secret.zip", "\x00", "",
)  # fmt: skip
_watched: list[str] | None = None


def _event(name: str, arguments: tuple[Any, ...]) -> None:
    """Python cannot be told to stop calling it, so it does nothing unless somebody watches."""
    if _watched is not None and name in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir"):
        _watched.extend(str(one) for one in arguments[:2])


@contextmanager
def watching() -> Iterator[list[str]]:
    """The paths that are opened, listed, renamed, removed or made in the block."""
    global _watched
    if not hasattr(sys, "_archive_watched"):
        sys.addaudithook(_event)
        sys._archive_watched = True  # type: ignore[attr-defined]
    _watched = []
    try:
        yield _watched
    finally:
        _watched = None


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each root that the library connects to."""
    found: list[str] = []
    real = Storage.connect.__func__  # type: ignore[attr-defined]

    def connect(cls: type[Storage], url: object, *arguments: Any, **options: Any) -> Storage:
        found.append(str(url))
        made: Storage = real(cls, url, *arguments, **options)
        return made

    monkeypatch.setattr(Storage, "connect", classmethod(connect))
    return found


def made(root: Path) -> None:
    """An archive with something of all that names other objects: shards, tables, staged ones, tags, bases, journals."""
    small_archive(root.parent / "other", 2)
    archive.create(root)
    resharding.merge([root.parent / "other"], to=root, allow_bases=True)
    arc = archive.open(root, allow_bases=True)
    with arc.writer(journal_s=60.0) as w:
        w.add_episode(steps(4, 0), episode_id="own")
        w.append(steps(3, 9), env_ids=0)
        w.checkpoint(9, state={"n": 1}, wait=True)
        w.append(steps(3, 10), env_ids=0)
        w.sync()
    arc.refresh().tag("paper", arc.checkpoints.latest)
    arc.label({"own": {"success": True}})


def texts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON document there is text."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from texts(inner, (*path, i))


def changed(value: Any, path: tuple[Any, ...], text: str) -> Any:
    copy = json.loads(json.dumps(value))
    at = copy
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = text
    return copy


def sealed(data: bytes, new: Any) -> bytes:
    """A document with its checksum, where it has one, made right."""
    line = json.dumps(new, separators=(",", ":"), sort_keys=True).encode()
    rest = data.split(b"\n", 1)[1] if b"\n" in data else b""
    return line + (b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n" if len(rest) == 65 else b"")


def documents(root: Path) -> Iterator[tuple[Path, Any]]:
    for path in sorted(root.rglob("*.json")):
        with suppress(ValueError):
            yield path, json.loads(path.read_bytes().split(b"\n", 1)[0])


def uses(root: Path) -> list[Callable[[], Any]]:
    """What a reader does, and what a writer does."""

    def arc() -> archive.Archive:
        return archive.open(root, allow_bases=root.parent / "other")

    def go_on() -> None:
        with arc().writer() as w:
            w.append(steps(2, 20), env_ids=0)
            w.checkpoint(20, wait=True)

    return [
        lambda: arc().episodes.read(), lambda: arc().checkpoints.latest.state(0),  # type: ignore[union-attr]
        lambda: resharding.plan(arc().checkpoints.latest, world_size=2).share(0).read(),
        
        lambda: archive.open(root, commit="paper", allow_bases=root.parent / "other").episodes.read(),
        lambda: arc().tags, lambda: arc().labels, lambda: arc().episodes.filter(where="label.success = true").read(),
        lambda: CliRunner().invoke(cli.main, ["verify", str(root)]),

        lambda: arc().recover(), lambda: resharding.compact(arc()),
        lambda: arc().prune(older_than="0s", force=True, dry_run=False),
        go_on,
    ]  # fmt: skip


def leads_to(path: str, *folders: Path) -> bool:
    real = os.path.realpath(path) if path.startswith("/") else path
    return any(real.startswith(str(folder)) for folder in folders)


def every(root: Path) -> Iterator[tuple[Path, tuple[Any, ...], str]]:
    for path, document in documents(root):
        for where in texts(document):
            for hostile in HOSTILE:
                yield path, where, hostile


def objects_of(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def put_back(root: Path, whole: dict[Path, bytes]) -> None:
    for path in objects_of(root).keys() - whole.keys():
        path.unlink()
    for path, data in whole.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An archive; beside it one that it refers to, and a folder that nobody should look into."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.zip").write_bytes(b"secret")
    made(tmp_path / "root")
    return tmp_path / "root"


def check(root: Path, roots: list[str], path: Path, where: tuple[Any, ...], hostile: str, data: bytes) -> None:
    """Put a text into an object, and use the archive in all ways: whatever they say, nothing leads outside."""
    outside, other = root.parent / "outside", root.parent / "other"
    text = hostile.format(outside=outside, id=json.loads((other / "archive.json").read_bytes())["id"])
    path.write_bytes(sealed(data, changed(json.loads(data.split(b"\n", 1)[0]), where, text)))
    roots.clear()
    with watching() as seen:
        for use in uses(root):
            with suppress(ArchiveError, AttributeError):
                use()
    assert [one for one in seen if leads_to(one, outside)] == [], (path, where, text)
    assert set(roots) <= {str(root), str(other), other.as_uri(), root.as_uri()}, (path, where, text)
    assert sorted(one.name for one in root.parent.iterdir()) == ["other", "outside", "root"], (path, where, text)
    assert (outside / "secret.zip").read_bytes() == b"secret"


@pytest.mark.parametrize("name", ["segments", "labels", "bases"])
def test_what_the_newest_commit_says_leads_nowhere_else(root: Path, roots: list[str], name: str) -> None:
    path, document = max(documents(root / "commits"), key=lambda found: found[0].name)
    (where, *_) = [one for one in texts(document) if one[0] == name]
    check(
        root, roots, path, where, "file://{outside}" if name == "bases" else "../outside/secret.zip", path.read_bytes()
    )


@pytest.mark.soak
@pytest.mark.parametrize("count", [20, 1])
def test_what_objects_say_leads_nowhere_else(root: Path, roots: list[str], count: int) -> None:
    whole = objects_of(root)
    for path, where, hostile in sampled(list(every(root)), count):
        check(root, roots, path, where, hostile, whole[path])
        put_back(root, whole)


def test_what_leads_out_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with watching() as seen:
        (tmp_path / "x").read_bytes()
        list(tmp_path.iterdir())
    assert str(tmp_path / "x") in seen
    assert str(tmp_path) in seen
