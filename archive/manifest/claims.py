"""What somebody has claimed: a rank of a session, by its writer; and episode ids that users give, of which none is
committed twice, whoever gives it and whenever."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from archive.base import CorruptStateError, DuplicateEpisodeError, layout
from archive.manifest import tablefiles
from archive.manifest.commit import Commit
from archive.manifest.records import Claim
from archive.store import Storage, smallfiles

if TYPE_CHECKING:
    import pyarrow as pa

_CLAIM = re.compile(r"rank-[0-9]{5,}\.json")


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


def read_claim(storage: Storage, key: str) -> Claim:
    """The claim of a writer; CorruptStateError if it does not say of itself what its name says."""
    claim = smallfiles.read_small(storage, key, Claim, CorruptStateError)
    if layout.rank_key(claim.session, claim.rank) != key:
        raise CorruptStateError(
            f"{storage.full_url(key)} is the claim of rank {claim.rank} of session {claim.session!r}: it does not "
            "belong there; put the right one back from a copy"
        )
    return claim


def claim_keys(storage: Storage) -> list[str]:
    """The claims of all writers that there have been."""
    folders = [f"sessions/{name.rstrip('/')}" for name in storage.list("sessions") if name.endswith("/")]
    return [f"{folder}/{name}" for folder in folders for name in storage.list(folder) if _CLAIM.fullmatch(name)]
