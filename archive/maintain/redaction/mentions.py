"""Does I/O: whether tables and staged objects say anything of some episodes. Each is read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import chain
from typing import Any

from archive.base import jsontree
from archive.checkpoint import UNCONSUMED, StagedFile
from archive.manifest import Commit, FileRef, tablefiles
from archive.store import Storage
from archive.tables import LISTED, TABLES, mention


class Mentions:
    """Looks for ids of episodes, and for shards in which their steps lie."""

    def __init__(self, storage: Storage, ids: Set[str], shards: Set[str]) -> None:
        self._storage = storage
        self._names = {"episode_id": ids, "shard": shards}
        self._ids = ids
        self._files: dict[str, bool] = {}
        self._staged: dict[str, bool] = {}

    def in_tables(self, commit: Commit) -> bool:
        """Whether a row of the tables that a commit names is of them, or lies in these shards."""
        return any(self._in_file(kind, ref) for kind in LISTED for ref in commit.files(kind))

    def in_staged(self, commit: Commit) -> bool:
        """Whether the staged objects of a checkpoint, or those that it borrows columns from, name them."""
        record = commit.checkpoint
        if record is None:
            return False
        nonces: dict[str, str | None] = dict.fromkeys(record.borrowed)
        nonces |= {one.key: one.nonce for one in record.ranks}
        return any(self._in_object(key, nonce) for key, nonce in nonces.items())

    def _in_file(self, kind: str, ref: FileRef) -> bool:
        if ref.path not in self._files:
            names = [name for name in self._names if name in TABLES[kind].columns]
            table = tablefiles.load(self._storage, kind, [ref], names) if names else None
            self._files[ref.path] = table is not None and mention(table, self._names)
        return self._files[ref.path]

    def _in_object(self, key: str, nonce: str | None) -> bool:
        if key not in self._staged:
            file = StagedFile(self._storage, key, nonce)
            kinds = [kind for kind in ("segments", "ledger") if file.has(f"{kind}.parquet")]
            named = any(mention(table, {"episode_id": self._ids}) for table in file.tables(*kinds))
            self._staged[key] = named or any(_says(value, self._ids) for value in _values(file))
        return self._staged[key]


def _values(file: StagedFile) -> Iterator[Any]:
    """What a staged object says in JSON: of open episodes, attributes, progress, what was not consumed, states."""
    index = file.index
    yield from ([*one.open_episodes.values()] for one in index.buffers.values())
    yield from (dict(one.skeleton) for one in index.states.values())
    own = [one.member for of in index.attributes.values() for one in of.values() if one.object == file.key]
    members = file.files([*own, *([UNCONSUMED] if file.has(UNCONSUMED) else [])])
    texts = [data.decode() for data in members] + ([] if index.progress is None else [index.progress])
    yield from map(jsontree.loads, texts)


def _says(value: Any, ids: Set[str]) -> bool:
    """Whether a string anywhere in it, also a key, is one of the ids."""
    if isinstance(value, str):
        return value in ids
    if isinstance(value, Mapping):
        return any(_says(one, ids) for one in chain(value.keys(), value.values()))
    return isinstance(value, (list, tuple)) and any(_says(one, ids) for one in value)
