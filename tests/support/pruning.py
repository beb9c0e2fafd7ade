"""What the tests of pruning share: objects that are made older, and all that an archive holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.log import CommitLog
from archive.maintain import verify
from tests.support.kills import die_at
from tests.support.processes import FORKSERVER, end

NOW: dict[str, Any] = {"older_than": "0s", "force": True}


def aged(root: str | Path, hours: float, below: str = "") -> None:
    """Every object below a folder on disk is as if it had been put so much earlier."""
    for path in (Path(root) / below).rglob("*"):
        if path.is_file():
            made = path.stat().st_mtime - hours * 3600
            os.utime(path, (made, made))


def keys_of(arc: archive.Archive, *folders: str) -> set[str]:
    """All objects below these folders; by default all that a prune may delete."""
    return {one.key for folder in folders or ("manifest", "shards", "states") for one in arc.storage.scan(folder)}


def left_behind(arc: archive.Archive, session: str = "crashed", count: int = 1) -> list[str]:
    """Objects as a writer that died leaves them."""
    keys = [f"shards/{i:08x}-{session}-00000.zip" for i in range(count)]
    keys += [f"manifest/0000000a-{session}.segments.parquet", f"states/{session}/step-1/rank-00000.zip"]
    arc.storage.put_many((key, b"left behind") for key in keys)
    return keys


def before_its_commit(monkeypatch: pytest.MonkeyPatch, kind: str, happens: Callable[[], Any]) -> None:
    """Something happens once just before a commit of this kind is made, when all that it names was looked up."""
    create, done = CommitLog._create, [False]

    def create_after(self: CommitLog, number: int, data: bytes) -> bool:
        if f'"kind":"{kind}"'.encode() in data and not done[0]:
            done[0] = True
            happens()
        return create(self, number, data)

    monkeypatch.setattr(CommitLog, "_create", create_after)


def why(plan: Any) -> dict[str, int]:
    """Reason -> objects, of what goes and of what stays."""
    out: dict[str, int] = {}
    for group in plan.groups:
        out[group.why] = out.get(group.why, 0) + group.objects
    return out


def sound(arc: archive.Archive) -> bool:
    """Whether the archive verifies, to the byte."""
    report = verify(archive.open(arc.url, storage_options=arc.storage.root.options), deep=True)
    assert report.findings == []
    return report.sound


SIGKILLED = -9


def prune_and_die(url: str, k: int) -> None:
    """Plan a prune, then carry it out up to its k-th operation."""
    plan = archive.open(url).prune(**NOW)
    die_at(k)
    plan.commit()


def killed_at(url: str, k: int, task: Callable[[str, int], None] = prune_and_die) -> bool:
    """Whether a prune, or another task, that is to die at its k-th operation came to that."""
    child = FORKSERVER.Process(target=task, args=(url, k))
    child.start()
    try:
        child.join(60)
        assert child.exitcode in (0, SIGKILLED)
        return child.exitcode == SIGKILLED
    finally:
        end(child)
