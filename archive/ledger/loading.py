"""Engine: the rows of a ledger that a session sees, as of one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from archive.ledger.folding import Seen
from archive.ledger.terms import TRAINED
from archive.manifest import Commit, Rows, Sequences, Snapshot, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa


def names(storage: Storage, commit: Commit) -> list[str]:
    """The ledgers of which there are rows, by name."""
    table = tablefiles.load(storage, "ledger", commit.files("ledger"), ["ledger"])
    return sorted(table["ledger"].unique().to_pylist())


def seen(
    storage: Storage, commit: Commit, name: str, session: str, own: Sequences | None, trained: Sequences | None = None
) -> Seen:  # fmt: skip
    """What a session sees of a ledger, in order; own: of its own rows those below these numbers, all if None; trained:
    and of those "trained" only the ones below these, if given."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = tablefiles.load(storage, "ledger", commit.files("ledger"))
    table = table.filter(pc.equal(table["ledger"].cast(pa.string()), name))
    if not table.num_rows:
        return Seen(table, table)
    branches = Snapshot(storage, commit).branches
    rows, sight = Rows.of(table), branches.sight(session, own)
    inside = rows.seen(sight)
    told = pc.equal(table["state"].cast(pa.string()), TRAINED).combine_chunks().to_numpy(zero_copy_only=False)
    counts = inside & (~told | rows.seen(branches.sight_trained(session, own if trained is None else trained)))
    order = {one: place for place, one in enumerate(reversed(sight))}
    return Seen(_in_order(table, counts, order), table.filter(pa.array(inside & ~counts)))


def _in_order(table: pa.Table, mask: np.ndarray[tuple[int], np.dtype[np.bool_]], order: dict[str, int]) -> pa.Table:
    """Some rows: later sessions after earlier ones, and within a session as they were said."""
    import pyarrow as pa

    table = table.filter(pa.array(mask)).unify_dictionaries().combine_chunks()
    session = table["session"].combine_chunks()
    places = np.array([order.get(name, -1) for name in session.dictionary.to_pylist()], np.int64)
    keys = (table["sequence"].to_numpy(), table["created_at"].cast(pa.int64()).to_numpy())
    return table.take(pa.array(np.lexsort((*keys, places[session.indices.to_numpy()]))))
