"""Creating an archive, and opening one that is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from archive.base import AlreadyExistsError, CorruptCommitError, NothingThereError, layout
from archive.facade import Archive, at_commit
from archive.log import About, Commit, about, commits
from archive.observe import timed
from archive.store import Storage, as_allowed

FIRST_ANSWER_S = 10.0  # tells a wrong address from a store that restarts


def create(
    url: Any,
    *,
    storage_options: Mapping[str, Any] | None = None,
    layout: str = "packed",
    single_writer: bool = False,
    deadline_s: float | None = None,
) -> Archive:
    """Make a new archive; AlreadyExistsError if there is one.

    layout: "packed" (a shard is one ZIP object) or "directory" (an object a chunk, for a bare zarr.open_group).
    single_writer: promise that one process alone writes here, for stores that cannot refuse to overwrite an object
    (some answer 501 to If-None-Match, some ignore it). It has a price: two writers at once are no longer kept apart, so
    the later one may overwrite the other's commit, and a session that was replaced may still commit. It is not stored
    in the archive: every open() that writes must repeat it.  deadline_s: the time for which a request is retried;
    default 120, but 10 while nothing at that address could be reached at all.
    """
    storage = _connected(url, storage_options, single_writer, deadline_s)
    body, raw = about.new(layout)
    # looked for first: some stores ignore the condition of a put
    if about.is_there(storage) or not about.create(storage, raw):
        raise AlreadyExistsError(f"there is an archive at {storage.url} already; open it with archive.open()")
    return Archive(storage, body, raw, commits.empty(body), pinned=False, single_writer=single_writer)


@timed("open")
def open(
    url: Any,
    *,
    commit: int | str | None = None,
    create: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    layout: str = "packed",
    single_writer: bool = False,
    allow_bases: bool | Sequence[str] = (),
    deadline_s: float | None = None,
) -> Archive:
    """Open an archive; NothingThereError (a FileNotFoundError) without one, unless `create` makes it (as any number of
    processes may).

    commit: as of that commit (its number, or a tag), read only.  allow_bases: URLs (or beginnings of URLs) of other
    archives that may be read where this one refers to their shards; True for any.  single_writer: as for create().
    deadline_s: the time for which a request is retried; default 120, but 10 while nothing there could be reached at
    all.
    """
    storage = _connected(url, storage_options, single_writer, deadline_s)
    storage.allowed_bases = as_allowed(allow_bases)

    def first_listed(cancelled: threading.Event) -> list[int]:
        return [] if commit is not None else commits.first_numbers(storage, cancelled)

    with storage.meanwhile(first_listed) as listed:
        found = about.find(storage)
        if found is None:
            if not create or commit is not None:
                raise NothingThereError(
                    f"there is no archive at {storage.url}; make one with archive.create(), or check the URL"
                )
            body, raw = about.new(layout)
            if about.create(storage, raw):
                return Archive(storage, body, raw, commits.empty(body), pinned=False, single_writer=single_writer)
            found = about.find(storage) or (body, raw)
            listed = partial(commits.first_numbers, storage)
        head = commits.newest(storage, listed) if commit is None else at_commit(storage, commit)
    _check_same(storage, found[0], head)
    head = head if head.number else commits.empty(found[0])
    return Archive(storage, *found, head, pinned=commit is not None, single_writer=single_writer)


def _connected(
    url: Any, storage_options: Mapping[str, Any] | None, single_writer: bool, deadline_s: float | None
) -> Storage:
    first_answer_s = FIRST_ANSWER_S if deadline_s is None else None
    return Storage.connect(
        url, storage_options, single_writer=single_writer, deadline_s=deadline_s, first_answer_s=first_answer_s
    )


def _check_same(storage: Storage, about: About, head: Commit) -> None:
    if head.number and head.archive != about.id:
        raise CorruptCommitError(
            f"commit {head.number} at {storage.full_url(layout.commit_key(head.number))} belongs to archive "
            f"{head.archive!r:.40}, {layout.ARCHIVE_KEY} names {about.id!r:.40}: one of them is damaged or comes from "
            "elsewhere; run `archive repair`"
        )
