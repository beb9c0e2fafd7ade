"""Does I/O: objects of journals in which steps of others lie, and which name an episode that goes: in rows that end it,
rows of ledgers, or attributes."""

from __future__ import annotations

from collections.abc import Iterable, Set

from archive.base import CorruptStateError, jsontree, layout
from archive.journal import Read, parse
from archive.maintain import Decided, Journaled
from archive.manifest import Branches, Commit
from archive.store import Storage
from archive.tables import mention

_AT_ONCE = 32  # objects in memory


def naming(decided: Decided) -> set[str]:
    """Shards of kept rows that name an episode whose rows go. Those of sessions that may have heard of it are read."""
    import pyarrow as pa

    table = decided.snapshot.columns(["shard", "session", "episode_id"])
    kept, gone = table.filter(pa.array(decided.rows)), table.filter(pa.array(~decided.rows))
    ids = set(gone["episode_id"].to_pylist())
    sessions = _hearing(decided.snapshot.branches, gone["session"].unique().to_pylist())
    found = zip(kept["shard"].to_pylist(), kept["session"].to_pylist(), strict=True)
    keys = sorted({key for key, session in found if session in sessions and key and layout.journal_place(key)})
    return _naming(decided.snapshot.storage, keys, ids)


def _hearing(branches: Branches, sessions: Iterable[str]) -> set[str]:
    """These sessions, and those that went on from them: what is in a buffer is spoken of later, too."""
    out = set(sessions)
    for session, origin in branches.origins.items():  # in the order in which they were opened
        if origin.session in out:
            out.add(session)
    return out


def beyond(storage: Storage, head: Commit, ids: Set[str]) -> set[str]:
    """Objects that can still be recovered, and name one of these episodes, or are damaged."""
    if not any(entry.journal for entry in head.runs.values()):
        return set()
    awaited = Journaled.of(head)
    return _naming(storage, sorted(one.key for one in storage.scan("journal/") if awaited.awaited(one.key)), ids)


def _naming(storage: Storage, keys: list[str], ids: Set[str]) -> set[str]:
    """Those of these objects that name one of the episodes, or are damaged."""
    out = set()
    for at in range(0, len(keys), _AT_ONCE):
        some = keys[at : at + _AT_ONCE]
        objects = zip(some, storage.get_all(some), strict=True)
        out |= {key for key, data in objects if _is_named(data, key, storage.full_url(key), ids)}
    return out


def _is_named(data: bytes, key: str, where: str, ids: Set[str]) -> bool:
    try:
        return _names(parse(data, key, where), ids, key)
    except CorruptStateError:  # nobody knows what it says
        return True


def _names(found: Read, ids: Set[str], where: str) -> bool:
    """Whether what it says is of one of these episodes."""
    rows = [found.table(kind, where) for kind in ("segments", "ledger")]
    texts = [jsontree.loads(text, where=where) for of in found.entry.attributes.values() for text in of.values()]
    return any(mention(table, {"episode_id": ids}) for table in rows) or any(
        name in ids for text in texts for name in text
    )
