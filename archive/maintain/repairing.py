"""Going on after a damaged newest commit. Deletes nothing."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from archive.base import CorruptCommitError, NotFoundError, UsageError, layout
from archive.manifest import about, commits
from archive.store import Storage


@dataclass(frozen=True)
class Repaired:
    """What `repair` did."""

    commit: int
    kept_as: str


def damaged_commit(storage: Storage) -> int:
    """Number of the newest commit, if it is damaged; UsageError if there is nothing to repair."""
    try:
        newest = commits.newest(storage)
    except CorruptCommitError:
        folder = [n for n in storage.list("commits") if n.endswith("/")][-1].rstrip("/")
        return int(
            [n for n in storage.list(layout.commit_folder(folder)) if n.endswith(".json")][-1].removesuffix(".json")
        )
    if newest.number == 0:
        raise NotFoundError(f"there are no commits at {storage.url}; nothing to repair")
    raise UsageError(f"the newest commit at {storage.url}, {newest.number}, is sound; nothing to repair")


def repair(storage: Storage) -> Repaired:
    """Put a commit without changes in the place of a damaged newest one,
    so that the archive opens as of the one before.

    What only the damaged commit made visible is no longer; nothing is deleted, and the damaged bytes are kept beside.
    Nobody must be writing. For any other damage, `verify` says what is affected.
    """
    number = damaged_commit(storage)
    damaged_commit(storage)  # raises if it is sound after all: one answer that came damaged must cost no commit
    key = layout.commit_key(number)
    parent = commits.read(storage, number - 1)
    kept_as = f"damaged/commit-{number:09d}-{secrets.token_hex(4)}.json"
    found = about.find(storage)
    if found is None:
        raise NotFoundError(f"there is no {layout.ARCHIVE_KEY} at {storage.url}: put it back from a copy first")
    data = storage.get_head(key, commits.MAX_OBJECT_BYTES + 1)
    if len(data) > commits.MAX_OBJECT_BYTES:
        raise UsageError(
            f"{storage.full_url(key)} is larger than any commit, so it is not kept beside: move it away yourself; "
            f"without it the archive opens as of commit {number - 1}"
        )
    storage.put(kept_as, data)  # a name of its own; unlike a create, it can be sent again where the answer is lost
    made = commits.completed(parent.after("repair", damaged=kept_as), parent, found[0].id, f"repair/{kept_as}")
    storage.put(key, commits.dumps(made))
    return Repaired(number, kept_as)
