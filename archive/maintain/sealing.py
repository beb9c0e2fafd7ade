"""Rows of the ledger that say which episode is a rollout of a prompt, against the episodes there are; and
finished rollouts that nobody has trained on, which no buffer need hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from archive.ledger import LedgerView, names, of_run
from archive.manifest import Commit, Mark, read_of
from archive.store import Storage
from archive.tables import of_segments

if TYPE_CHECKING:
    import pyarrow as pa


def of_unknown(ledger: pa.Table, segments: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Ledger, key (JSON) and episode of rows that name one which has no row of the segments table."""
    import pyarrow as pa

    unknown = ledger["episode_id"].is_valid().to_numpy() & ~of_segments("ledger", ledger, segments)
    rows = ledger.filter(pa.array(unknown)).select(["ledger", "key", "episode_id"]).to_pylist()
    yield from ((row["ledger"], row["key"], row["episode_id"]) for row in rows)


def awaited(storage: Storage, head: Commit) -> Iterator[pa.ChunkedArray]:
    """Ids of episodes that are sealed and not trained on: as the newest session of each run sees it, and as one would
    that goes on from its newest checkpoint (which knows nothing of what was trained on since)."""
    if not head.ledger:
        return
    for name in names(storage, head):
        for run, entry in head.runs.items():
            yield of_run(storage, head, name, run).awaited
            for mark in {mark.commit: mark for mark in entry.marks.values()}.values():
                yield _of_mark(storage, head, name, mark).awaited


def _of_mark(storage: Storage, head: Commit, name: str, mark: Mark) -> LedgerView:
    """A ledger as of a checkpoint."""
    record = read_of(storage, mark.commit, head).checkpoint
    if record is None:
        return LedgerView(storage, head, name, mark.session, {})
    trained = None if record.recovered is None else record.recovered.trained
    return LedgerView(storage, head, name, mark.session, record.sequences, trained)
