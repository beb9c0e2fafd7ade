"""Does I/O: what all commits have named, read from the commits: each once, and those that come later as they come."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain

from archive.base import layout
from archive.manifest import Commit, FileRef, commits, files_there, tablefiles
from archive.store import Storage

_AT_ONCE = 256
_LOSES_ROWS = frozenset(("compact", "forget", "undo", "restore"))  # kinds that may name less than the one before


class Past:
    """All commits up to the newest that `follow` was told of."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._number = 0
        self._let_go: list[int | None] = [None]  # by number
        self._chunks: list[FileRef] = []
        self._read_chunks = 0
        self._lists: list[FileRef] = []
        self.named: dict[str, int] = {}  # manifest file or staged object -> the newest commit that names it
        self.lost_rows: list[int] = []  # commits with less rows than the one before
        self.pruned: set[str] = set()  # what prunes have listed
        self.shards: set[str] = set()  # what the chunk files have shards of; see `read_shards`

    def follow(self, head: Commit) -> None:
        """Read the commits since the last time."""
        for commit in self._since(head):
            self._note(commit)
        self._number = head.number
        table = tablefiles.load(self._storage, "pruned", self._lists, ["key"])
        self.pruned.update(table["key"].to_pylist())
        self._lists = []

    def let_go(self, settled: int) -> int:
        """The newest commit up to `settled` that let go of rows and is not undone as of the newest one; 0: none."""
        number = self._number
        while number and (number := min(self._let_go[number] or 0, number)) > settled:
            number -= 1
        return number

    def read_shards(self, there: Container[str]) -> None:
        """Learn which shards commits named, from those of their chunk files that are there."""
        new = [ref for ref in self._chunks[self._read_chunks :] if ref.path in there]
        self._read_chunks = len(self._chunks)
        for at in range(0, len(new), _AT_ONCE):
            table = tablefiles.load(self._storage, "chunks", new[at : at + _AT_ONCE], ["shard"])
            self.shards.update(table["shard"].cast("string").unique().to_pylist())

    def _since(self, head: Commit) -> Iterator[Commit]:
        numbers: Sequence[int] = range(self._number + 1, head.number + 1)
        for at in range(0, len(numbers), _AT_ONCE):
            some = numbers[at : at + _AT_ONCE]
            data = self._storage.get_all([layout.commit_key(number) for number in some])
            yield from (commits.loads_of(self._storage, one, n, head) for n, one in zip(some, data, strict=True))

    def _note(self, commit: Commit) -> None:
        self._let_go.append(commit.let_go)
        staged = () if commit.checkpoint is None else commit.checkpoint.ranks
        borrowed = () if commit.checkpoint is None else commit.checkpoint.borrowed
        keys = chain((ref.path for ref in files_there(commit)), (one.key for one in staged), borrowed)
        self.named.update(dict.fromkeys(keys, commit.number))
        if commit.chunks is not None:
            self._chunks.append(commit.chunks)
        if commit.pruned is not None:
            self._lists.append(commit.pruned)
        if commit.kind in _LOSES_ROWS:
            self.lost_rows.append(commit.number)
