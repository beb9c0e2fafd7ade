"""Steps that a recovery keeps although they were removed, for their training is taken back with the weights.

What was trained on after a checkpoint counts as not trained on, for its weights do not know of it; so the removal of
its episodes does not count either. Of env rows they are gone: a ring has used their places again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.journal.bases import Base
from archive.journal.tails import RankTail
from archive.ledger import taken_back
from archive.manifest import ByWriter, Commit, RunEntry, Snapshot, chains
from archive.saved import Stretch
from archive.store import Storage
from archive.tables import NO_ENV, among

if TYPE_CHECKING:
    import pyarrow as pa

_WHERE = ("buffer", "session", "rank", "env_id", "position", "length")
_COLUMNS = tuple(dict.fromkeys((*_WHERE, "shard", *chains.COLUMNS, *chains.DETAIL)))


def awaited_steps(
    storage: Storage, head: Commit, entry: RunEntry, base: Base, found: Mapping[int, RankTail]
) -> dict[str, list[Stretch]]:  # fmt: skip
    """Buffer -> steps, without an env row, of episodes that were trained on and are to be trained on again."""
    if not any(tail.held.gone for tail in found.values()):
        return {}
    known = {rank: base.trained(rank) for rank in found}
    waiting = taken_back(storage, head, entry.session, known, fresh_rows("ledger", entry, found))
    return _steps(storage, head, entry, found, waiting) if waiting else {}


def fresh_rows(kind: str, entry: RunEntry, found: Mapping[int, RankTail]) -> pa.Table:
    """The rows of a table that are in the tails, and in no commit."""
    import pyarrow.compute as pc

    parts = ((rank, tail.held.table(kind)) for rank, tail in found.items())
    return tables.concat(
        kind, [rows.filter(pc.greater_equal(rows["sequence"], entry.sequences.get(rank, 0))) for rank, rows in parts]
    )


def _steps(
    storage: Storage, head: Commit, entry: RunEntry, found: Mapping[int, RankTail], waiting: set[str]
) -> dict[str, list[Stretch]]:  # fmt: skip
    """Those of the newest revision of each of these episodes, as the session sees it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    snapshot = Snapshot(storage, head)
    fresh = tables.set_column(fresh_rows("segments", entry, found), "commit", head.number + 1)
    every = pa.concat_tables([snapshot.columns(_COLUMNS), fresh.select(_COLUMNS)]).unify_dictionaries()
    rows = every.filter(among(every["episode_id"], waiting))
    sight = snapshot.branches.sight(entry.session)
    chained = chains.resolve(rows, lambda: rows, None, lambda part, _: ByWriter(part).seen(sight))
    out: dict[str, list[Stretch]] = {}
    current = rows.take(np.sort(chained.rows))
    for row in current.filter(pc.is_valid(current["shard"])).select(_WHERE).to_pylist():
        if row["env_id"] == NO_ENV:
            span = row["position"], row["position"] + max(1, row["length"])
            out.setdefault(row["buffer"], []).append((row["session"], row["rank"], NO_ENV, *span))
    return out
