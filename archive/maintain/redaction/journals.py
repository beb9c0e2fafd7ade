"""Does I/O: objects of journals in which steps of others lie, and which name an episode that goes: in rows that end it,
rows of ledgers, or attributes."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from archive.base import jsontree, layout
from archive.journal import Read, parse
from archive.maintain import Decided
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 32  # objects in memory


def naming(decided: Decided) -> set[str]:
    """Shards of kept rows that name an episode whose rows go. Of the sessions that wrote those, each is read."""
    import pyarrow as pa

    table = decided.snapshot.columns(["shard", "session", "episode_id"])
    kept, gone = table.filter(pa.array(decided.rows)), table.filter(pa.array(~decided.rows))
    ids = set(gone["episode_id"].to_pylist())
    sessions = set(gone["session"].unique().to_pylist())
    found = zip(kept["shard"].to_pylist(), kept["session"].to_pylist(), strict=True)
    keys = sorted({key for key, session in found if session in sessions and key and layout.journal_place(key)})
    out = set()
    for at in range(0, len(keys), _AT_ONCE):
        out |= _naming(decided.snapshot.storage, keys[at : at + _AT_ONCE], ids)
    return out


def _naming(storage: Storage, keys: list[str], ids: Set[str]) -> set[str]:
    objects = zip(keys, storage.get_all(keys), strict=True)
    return {key for key, data in objects if _names(parse(data, key, storage.full_url(key)), ids, key)}


def _names(found: Read, ids: Set[str], where: str) -> bool:
    """Whether what it says is of one of these episodes."""
    rows = [found.table(kind, where)["episode_id"] for kind in ("segments", "ledger")]
    texts = [jsontree.loads(text, where=where) for of in found.entry.attributes.values() for text in of.values()]
    return any(_has(column, ids) for column in rows) or any(name in ids for text in texts for name in text)


def _has(column: pa.ChunkedArray, ids: Set[str]) -> bool:
    return not ids.isdisjoint(column.unique().to_pylist())
