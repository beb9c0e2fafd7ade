"""The rows of a ledger that a session sees, as of one commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.arrays import Mask
from archive.ledger import folding
from archive.ledger.folding import Seen
from archive.ledger.terms import TRAINED
from archive.manifest import Commit, Rows, Sequences, Snapshot, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa


# what folding looks at
FOLDED = ("key", "round", "sibling", "state", "siblings", "episode_id", "cursor", "rank", "session")
_PLACES = ("ledger", "session", "rank", "sequence", "commit", "state")


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
    columns: Sequence[str] | None = None, fresh: pa.Table | None = None,
) -> Seen:  # fmt: skip
    """What a session sees of a ledger, in order; own: of its own rows those below these numbers, all if None; trained:
    and of those "trained" only the ones below these, if given. columns: all if None. fresh: rows of its own that are to
    be committed next."""
    wanted = None if columns is None else list(dict.fromkeys((*columns, *_PLACES)))
    table = tablefiles.load(storage, "ledger", commit.files("ledger"), wanted)
    table = (table if fresh is None else _together(table, fresh, commit.number + 1)).unify_dictionaries()
    table = _those(table, _is(table["ledger"], name))
    if not table.num_rows:
        return Seen(table, table)
    branches = Snapshot(storage, commit).branches
    rows, sight = Rows(table), branches.sight(session, own)
    inside = rows.seen(sight)
    counts = inside & (
        ~_is(table["state"], TRAINED) | rows.seen(branches.sight_trained(session, own if trained is None else trained))
    )
    order = {one: place for place, one in enumerate(reversed(sight))}
    found, undone = _in_order(_those(table, counts), order), _those(table, inside & ~counts)
    if columns is not None:
        found, undone = found.select(columns), undone.select(columns)
    return Seen(found, undone, _worlds(commit, session, sight))


def _worlds(
    commit: Commit, session: str, sight: Mapping[str, Sequences | None]
) -> dict[str, Collection[int]]:  # fmt: skip
    """The ranks of the sessions that one sees, itself the last: of itself those that are known to have begun."""
    out: dict[str, Collection[int]] = {name: set(sight[name] or ()) for name in reversed([*sight])}
    known = (commit.own_runs, commit.runs)  # those that it says itself first: the others are read
    begun = next(filter(None, ([one for one in runs.values() if one.session == session] for runs in known)), [])
    out[session] = {*out[session], *(rank for one in begun for rank in (*one.sequences, *(one.journal or ())))}
    return out


def taken_back(
    storage: Storage, commit: Commit, session: str, trained: Sequences, fresh: pa.Table
) -> set[str]:  # fmt: skip
    """Ids of the episodes, of all ledgers, that a session has trained on, and that count as sealed, as its weights know
    of its rows "trained" below these numbers alone. fresh: rows of its own that are to be committed next."""
    import pyarrow.compute as pc

    out: set[str] = set()
    for name in {*names(storage, commit), *fresh["ledger"].unique().to_pylist()}:
        found = seen(storage, commit, name, session, None, trained, FOLDED, fresh)
        own = found.undone.filter(pc.equal(found.undone["session"].cast("string"), session))
        if own.num_rows:
            out |= set(folding.awaited(found, own).to_pylist())
    return out


def _together(table: pa.Table, fresh: pa.Table, number: int) -> pa.Table:
    """All of them, the fresh ones as if that commit had brought them."""
    import pyarrow as pa

    return pa.concat_tables([table, tables.set_column(fresh, "commit", number).select(table.column_names)])


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
    """Later sessions after earlier ones, within a session by commit, and of a rank as it said them. No clock has a say
    in it: that of a machine may be set back."""
    import pyarrow as pa

    if not table.num_rows:
        return table
    session = table["session"].unify_dictionaries()
    places = np.array([order.get(name, -1) for name in session.chunk(0).dictionary.to_pylist()], np.int64)
    place = places[np.concatenate([part.indices.to_numpy() for part in session.chunks])]
    ordered = np.lexsort((*(table[name].to_numpy() for name in ("sequence", "rank", "commit")), place))
    return table if (ordered[1:] > ordered[:-1]).all() else table.take(pa.array(ordered))
