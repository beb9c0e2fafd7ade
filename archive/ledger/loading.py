"""Engine: the rows of a ledger that a session sees, as of one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from archive.arrays import Mask
from archive.ledger.folding import Seen
from archive.ledger.terms import TRAINED
from archive.manifest import Commit, Rows, Sequences, Snapshot, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


FOLDED = ("key", "round", "sibling", "state", "siblings", "episode_id", "cursor", "rank")  # what folding looks at
_PLACES = ("ledger", "session", "rank", "sequence", "created_at", "state")


def names(storage: Storage, commit: Commit) -> list[str]:
    """The ledgers of which there are rows, by name."""
    table = tablefiles.load(storage, "ledger", commit.files("ledger"), ["ledger"])
    return sorted(table["ledger"].unique().to_pylist())


def sessions(storage: Storage, commit: Commit) -> set[str]:
    """Those that said something of a ledger, or went on from a checkpoint."""
    table = tablefiles.load(storage, "ledger", commit.files("ledger"), ["session"])
    return {*table["session"].unique().to_pylist(), *Snapshot(storage, commit).branches.origins}


def seen(
    storage: Storage, commit: Commit, name: str, session: str, own: Sequences | None, trained: Sequences | None = None,
    columns: Sequence[str] | None = None,
) -> Seen:  # fmt: skip
    """What a session sees of a ledger, in order; own: of its own rows those below these numbers, all if None; trained:
    and of those "trained" only the ones below these, if given. columns: all if None."""
    wanted = None if columns is None else list(dict.fromkeys((*columns, *_PLACES)))
    table = tablefiles.load(storage, "ledger", commit.files("ledger"), wanted).unify_dictionaries()
    table = _those(table, _is(table["ledger"], name))
    if not table.num_rows:
        return Seen(table, table)
    branches = Snapshot(storage, commit).branches
    rows, sight = Rows.of(table), branches.sight(session, own)
    inside = rows.seen(sight)
    counts = inside & (
        ~_is(table["state"], TRAINED) | rows.seen(branches.sight_trained(session, own if trained is None else trained))
    )
    order = {one: place for place, one in enumerate(reversed(sight))}
    found, undone = _in_order(_those(table, counts), order), _those(table, inside & ~counts)
    return Seen(found, undone) if columns is None else Seen(found.select(columns), undone.select(columns))


def _is(column: pa.ChunkedArray, word: str) -> Mask:
    """Which rows of a column of repeated words, with one dictionary, are this word."""
    parts = [part.indices.to_numpy() for part in column.chunks]
    words = column.chunk(0).dictionary.to_pylist() if parts else []
    out: Mask = np.concatenate([np.zeros(0, np.int32), *parts]) == (words.index(word) if word in words else -1)
    return out


def _those(table: pa.Table, mask: Mask) -> pa.Table:
    """Some rows; the table itself if it is all, as a copy of millions takes long."""
    import pyarrow as pa

    return table if mask.all() else table.filter(pa.array(mask))


def _in_order(table: pa.Table, order: dict[str, int]) -> pa.Table:
    """Later sessions after earlier ones, and within a session as they were said."""
    import pyarrow as pa

    if not table.num_rows:
        return table
    session = table["session"].unify_dictionaries()
    places = np.array([order.get(name, -1) for name in session.chunk(0).dictionary.to_pylist()], np.int64)
    place = places[np.concatenate([part.indices.to_numpy() for part in session.chunks])]
    ordered = np.lexsort((table["sequence"].to_numpy(), table["created_at"].cast(pa.int64()).to_numpy(), place))
    return table if (ordered[1:] > ordered[:-1]).all() else table.take(pa.array(ordered))
