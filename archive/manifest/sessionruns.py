"""Engine: which run each session of the segments table belongs to.

A commit names each run's newest session and the hundred before it. Of others, and of sessions that came along with
the episodes of another archive, the claim of one of their ranks says it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from archive.base import MissingObjectError, layout
from archive.manifest.commit import Commit
from archive.manifest.sessions import read_claim
from archive.manifest.tablefiles import Snapshot
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CONCURRENT = 16


def run_of_session(snapshot: Snapshot) -> dict[str, str | None]:
    """Session -> run, for all sessions that have rows; None where nothing says it."""
    known: dict[str, str | None] = {**_named(snapshot.commit)}
    table = snapshot.columns(["session", "rank"])
    sessions = [s for s in _distinct(table["session"]) if s not in known]
    if sessions:
        claims = [(s, _a_rank(table, s)) for s in sessions]
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            found = pool.map(lambda claim: _claimed(snapshot.storage, *claim), claims)
            known |= dict(zip(sessions, found, strict=True))
    return known


def _named(commit: Commit) -> dict[str, str]:
    """What the commit itself says."""
    out: dict[str, str] = {}
    for run, entry in commit.runs.items():
        out |= dict.fromkeys(entry.sessions, run)
    return out


def _distinct(column: pa.ChunkedArray) -> list[str]:
    return [s for s in column.unique().to_pylist() if s is not None]


def _a_rank(table: pa.Table, session: str) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    return int(table["rank"][pc.index(table["session"].cast(pa.string()), session).as_py()].as_py())


def _claimed(storage: Storage, session: str, rank: int) -> str | None:
    """What a rank of the session said when it began; None if that is gone, or says nothing of a run."""
    try:
        return read_claim(storage, layout.rank_key(session, rank)).run or None
    except MissingObjectError:
        return None
