"""Which commits an archive retains, and what they lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from archive.checkpoint import StagedFile
from archive.manifest import CheckpointRecord, Commit, Reach, Walk, commits, tablefiles
from archive.store import Storage


def retained(storage: Storage, head: Commit) -> list[Commit]:
    """The newest commit, and those that tags name."""
    named = tablefiles.load(storage, "tags", head.files("tags"), ["target"])["target"].to_pylist()
    return [head, *(commits.read_of(storage, number, head) for number in sorted({*named} - {head.number}))]


def walk(storage: Storage) -> Walk:
    """Finds what commits lead to, also in archives whose commits do not say which objects a checkpoint borrows."""
    return Walk(storage, borrowed(storage))


def retained_reach(storage: Storage, head: Commit) -> Reach:
    """What the retained commits lead to, together."""
    out, finds = Reach(), walk(storage)
    for commit in retained(storage, head):
        out.add(finds.reach(commit))
    return out


def borrowed(storage: Storage) -> Callable[[CheckpointRecord], Iterable[str]]:
    """The staged objects in which a checkpoint's columns lie: as its commit says or, in early archives, its ranks."""

    def of(record: CheckpointRecord) -> Iterable[str]:
        if record.borrowed is not None:
            return record.borrowed
        files = [StagedFile(storage, one.key, one.nonce) for one in record.ranks]
        return {key for file in files for key in file.index.objects}

    return of
