"""Does I/O: the check that an archive keeps its promises, whatever happened to its writers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from archive.base import ArchiveError, layout
from archive.jobs import is_record, is_result
from archive.maintain import verify

if TYPE_CHECKING:
    from archive import Archive, Episodes

READ_BYTES = 64 * 1024 * 1024
_OTHERS = ("commits/", "sessions/", "requests/", "pins/", "damaged/")  # beside what a prune may delete


def assert_whole(arc: Archive) -> None:
    """Check all that an archive promises: each byte that commits name is as it was written, each step of its
    checkpoints and of all its episodes can be read, and whatever else lies there was made by this library (as what
    crashes leave behind, until a prune). AssertionError with a line for each problem."""
    found = list(_problems(arc))
    if found:
        raise AssertionError("\n".join([f"{arc.url} is not whole:", *(f"- {problem}" for problem in found)]))


def _problems(arc: Archive) -> Iterator[str]:
    report = verify(arc, deep=True)
    for one in report.findings:
        yield f"{one.object}: {one.problem}"
    for url, shards in report.not_allowed.items():
        yield f"{url}: {shards} shards of another archive were not looked at: open with allow_bases"
    yield from _unreadable("the episodes", lambda: [arc.episodes])
    saved = lambda: [ck.episodes for ck in arc.checkpoints if ck.replay_saved]  # noqa: E731
    yield from _unreadable("the checkpoints", saved)
    for found in arc.storage.scan(""):
        if not _made(found.key):
            yield f"{found.key}: nothing that this library makes, so nothing explains it"


def _unreadable(what: str, find: Callable[[], list[Episodes]]) -> Iterator[str]:
    try:
        for episodes in find():
            for _ in episodes.stream(missing="skip", max_bytes=READ_BYTES):
                pass
    except ArchiveError as error:
        yield f"{what} cannot be read: {type(error).__name__}: {error}"


def _made(key: str) -> bool:
    """True if this library gives an object such a name."""
    if key == layout.ARCHIVE_KEY or key.startswith(_OTHERS) or key.endswith(layout.PRUNED) or layout.is_temporary(key):
        return True
    if is_result(key) or is_record(key):
        return True
    shard = "/".join(key.split("/")[:2]) if key.startswith("shards/") else key  # one that is a folder
    return layout.session_of(shard) is not None
