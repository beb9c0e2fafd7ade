"""Episode ids that users give: none is committed twice, whoever gives it and whenever."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from archive.base import DuplicateEpisodeError
from archive.manifest import tablefiles
from archive.manifest.commit import Commit
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa


def check(storage: Storage, parent: Commit, fresh: pa.Table, session: str, known_at: int) -> None:
    """Refuse rows that begin an episode of an id that is taken.

    known_at: the commit up to which the ids were checked when they were given; only newer files are looked at.
    """
    given = Counter(_given(fresh, session))
    if not given:
        return
    clash = sorted(name for name, count in given.items() if count > 1) or sorted(
        given.keys() & _taken(storage, parent, known_at)
    )
    if clash:
        raise DuplicateEpisodeError(
            f"two ranks or writers gave an episode the id {clash[0]!r} at the same time ({len(clash)} such ids in "
            "all); nothing was committed: give other ids, or write new revisions with replace=True"
        )


def _given(fresh: pa.Table, session: str) -> list[str]:
    """Ids of the episodes that begin in these rows, but for those that this session makes itself, and replacements."""
    import pyarrow.compute as pc

    begins = fresh.filter(pc.and_(pc.is_null(fresh["predecessor"]), pc.invert(pc.fill_null(fresh["replaces"], False))))
    return [name for name in begins["episode_id"].to_pylist() if not name.startswith(f"{session}-")]


def _taken(storage: Storage, parent: Commit, known_at: int) -> set[str]:
    files = [f for f in parent.files("segments") if f.commit is None or f.commit[1] > known_at]
    return set(tablefiles.load(storage, "segments", files, ["episode_id"])["episode_id"].to_pylist())
