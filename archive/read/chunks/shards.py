"""Chunks of shards: where they lie, fetched with few requests, each compared with the chunk table, decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from archive import tables
from archive.arrays import Ints
from archive.base import ArchiveError, CorruptChunkError, CorruptManifestError, StorageError
from archive.fields import Array
from archive.index import METADATA, ShardIndex, ShardReads, Snapshot, chunkindex
from archive.log import StoredFile, tablefiles
from archive.read.chunks.segments import Segments
from archive.shard import ShardView, inflate
from archive.store import Buffer, Roots, join_key, split_key

MAX_AHEAD_BYTES = 64 * 1024 * 1024  # on their way at once, in order
MAX_FILLING_BYTES = 128 * 1024 * 1024  # in any order: 16 of the largest requests, where each waits 20 ms
REMOTE_GAP_BYTES = 256 * 1024  # between chunks of a batch: these bytes come sooner than the answer to another request
MAX_VIEWS = 1024  # shards whose metadata is kept
Owners = Mapping[str, str]  # shard -> an episode that lies in it, for errors
Owner = Callable[[], str]  # names what lies in a shard


@dataclass(frozen=True)
class ReadPlan:
    """The requests of a read, by shard."""

    shards: Mapping[str, ShardReads]

    @property
    def requests(self) -> int:
        return sum(len(s.requests) for s in self.shards.values())

    @property
    def fetched_bytes(self) -> int:
        return sum(s.fetched_bytes for s in self.shards.values())


class Shards:
    """The shards of one snapshot. Keeps what is small and immutable: chunk indexes and metadata."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.url = snapshot.storage.url
        self._full_url = snapshot.storage.full_url
        self.roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._files: set[str] = set()
        self.indexes: dict[str, ShardIndex] = {}
        self.views: dict[str, ShardView] = {}

    def index(self, shard: str) -> ShardIndex:
        """The places of the chunks of a shard, once `load_indexes` has fetched it."""
        if shard not in self.indexes:
            raise CorruptManifestError(
                f"the segments table of {self.url} names shard {shard!r}, which the chunk table of "
                "its commit does not have; run `archive verify`"
            )
        return self.indexes[shard]

    def load_indexes(self, segments: Segments, shards: list[int]) -> None:
        """Fetch the chunk tables that have these shards (by their numbers among the segments'), once each."""
        unknown = [n for n in shards if segments.shards[n] not in self.indexes]
        refs = [ref for ref in segments.chunk_tables(unknown) if ref.path not in self._files] if unknown else []
        for path, found in indexes_of(self.roots, refs):
            self.indexes.update(found)
            self._files.add(path)

    def shard_bytes(self, shard: str) -> int:
        """Bytes of all members of a shard whose index is loaded."""
        return sum(int(chunks.size.sum()) for chunks in self.indexes[shard].arrays.values())

    def plan(
        self,
        wanted: Mapping[str, chunkindex.Wanted],
        known: Mapping[str, ShardView],
        held: Mapping[str, dict[str, int]],
    ) -> ReadPlan:
        """The byte ranges of rows of arrays, and of the metadata of shards that is not known;
        chunks held are left out."""
        return ReadPlan({
            shard: self.index(shard).plan(arrays, metadata=shard not in known, held=held.get(shard))
            for shard, arrays in wanted.items()
        })  # fmt: skip

    def fetched(
        self, plan: ReadPlan, owners: Owners, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, dict[str, bytes | memoryview]]]:
        """The chunks of each shard, in order, as they are stored; each was compared with the chunk table.

        At most `max_bytes` (and always one request) are fetched ahead.
        """
        for shard, reads, blocks in self.blocks(plan, owners, max_bytes):
            yield shard, reads, members_of(shard, reads, blocks, partial(episode_in, owners, shard))
            del blocks  # so that the next shard is read into the same memory

    def blocks(
        self, plan: ReadPlan, owners: Owners, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, list[Buffer]]]:
        """The bytes of the requests of each shard, in order, fetched ahead."""
        requests = [r for reads in plan.shards.values() for r in reads.requests]
        blocks = self.roots.iter_ranges(requests, max_bytes=max_bytes)
        for shard, reads in plan.shards.items():
            with self.blaming(plan.shards, owners, shard):
                found = [next(blocks) for _ in reads.requests]
            yield shard, reads, found
            del found

    @contextmanager
    def blaming(self, names: Iterable[str], owners: Owners, shard: str | None = None) -> Iterator[None]:
        """Have an error of the store say which of these shards cannot be read, and which episode lies there. It may be
        of any that is read ahead, so it is looked for by name; `shard`: the one meant if it names none."""
        try:
            yield
        except StorageError as e:
            culprit = next((name for name in names if name in str(e)), shard)
            if culprit is None:
                raise
            raise type(e)(
                f"shard {culprit} of the archive at {self.url}, where episode {owners[culprit]!r} "
                f"lies, cannot be read: {e}; run `archive verify`"
            ) from e

    def stored_chunks(
        self, wanted: Mapping[str, Mapping[str, Ints]], owners: Owners, *, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, dict[str, bytes | memoryview]]]:
        """These chunks of arrays of shards, by their numbers, without metadata; the shards' indexes must be loaded."""
        reads = {
            shard: self.index(shard).plan_chunks(chunks, REMOTE_GAP_BYTES if self.roots.is_remote([shard]) else None)
            for shard, chunks in wanted.items()
        }
        yield from self.fetched(ReadPlan(reads), owners, max_bytes)

    def add_view(self, shard: str, metadata: bytes) -> ShardView:
        """Keep the metadata of a shard."""
        view = self.views[shard] = ShardView(metadata)
        for old in list(self.views)[: max(0, len(self.views) - MAX_VIEWS)]:  # at once, as other threads add theirs
            self.views.pop(old, None)
        return view

    def decoded(
        self, view: ShardView, shard: str, owners: Owners, array: str, data: bytes | memoryview, number: int,
        out: Array | None = None,
    ) -> Array:  # fmt: skip
        """The rows of a chunk of an array that was checked, as `ShardView.chunk` gives them."""
        try:
            return view.chunk(array, number, data, out)
        except ArchiveError as e:
            raise self._undecodable(e, shard, array, owners) from e

    def check(
        self, view: ShardView, shard: str, array: str, like: Array, ranges: Sequence[tuple[int, int]], owners: Owners
    ) -> None:
        """CorruptChunkError if a shard's metadata says otherwise of an array than its schema and the chunk table."""
        try:
            view.check_rows(array, ranges)
            self._check_alike(view, shard, array, like)
        except ArchiveError as e:
            raise self._undecodable(e, shard, array, owners) from e

    def chunk(
        self, shard: str, array: str, number: int, like: Array, data: bytes | memoryview, owners: Owners
    ) -> Array:
        """The rows of one chunk, by the shard's metadata, which is fetched if it is not at hand."""
        view = self.views.get(shard) or self._fetched_view(shard, owners)
        first = number * self.index(shard).array(array).rows
        self.check(view, shard, array, like, [(first, first + 1)], owners)
        return self.decoded(view, shard, owners, array, data, number)

    def _fetched_view(self, shard: str, owners: Owners) -> ShardView:
        ((_, _, chunks),) = self.fetched(ReadPlan({shard: self.index(shard).plan({})}), owners)
        return self.add_view(shard, bytes(chunks["zarr.json"]))

    def _check_alike(self, view: ShardView, shard: str, array: str, like: Array) -> None:
        found, rows = view.describe(array), self.index(shard).array(array).rows
        if found.dtype != like.dtype or found.shape[1:] != like.shape[1:] or found.chunk_rows != rows:
            raise CorruptChunkError(
                f"it holds {found.dtype}{list(found.shape[1:])} in chunks of {found.chunk_rows} rows, where its schema "
                f"and the chunk table say {like.dtype}{list(like.shape[1:])} in chunks of {rows}"
            )

    def _undecodable(self, error: ArchiveError, shard: str, array: str, owners: Owners) -> CorruptChunkError:
        return CorruptChunkError(
            f"array {array!r} of shard {self._full_url(shard)}, where episode {owners[shard]!r} "
            f"lies, cannot be decoded: {error}; the bytes are damaged, run `archive verify`"
        )


def episode_in(owners: Owners, shard: str) -> str:
    """The name that errors give to what lies in a shard."""
    return f"episode {owners[shard]!r}"


def members_of(shard: str, reads: ShardReads, blocks: Sequence[Buffer], owner: Owner) -> dict[str, bytes | memoryview]:
    """Member -> its bytes. `owner` names what lies there, for the error."""
    views = [memoryview(b) for b in blocks]
    out: dict[str, bytes | memoryview] = {}
    for piece in reads.pieces:
        data = views[piece.request][piece.start : piece.start + piece.size]
        out[piece.member] = checked(shard, piece, data, owner)
    return out


def checked(shard: str, piece: chunkindex.Piece, data: memoryview, owner: Owner) -> bytes | memoryview:
    """The bytes of a member, if they are those that the chunk table means, else CorruptChunkError."""
    if chunkindex.stored_checksum(data, piece) != piece.crc32c:
        raise CorruptChunkError(
            f"{shard} is damaged: {piece.member!r} (array {piece.array!r}, chunk {piece.chunk}), where {owner()} "
            "lies, does not match its checksum; run `archive verify`"
        )
    return _plain(data) if piece.array == METADATA else data


def indexes_of(roots: Roots, refs: Sequence[StoredFile]) -> Iterator[tuple[str, dict[str, ShardIndex]]]:
    """The path of each chunk table and the shards in it, named as the archive's own tables name them."""
    for data, ref in zip(tablefiles.fetch(roots, refs), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(ref.path))
        base = split_key(ref.path)[0]
        named = {join_key(base, shard): index for shard, index in chunkindex.from_table(table).items()}
        yield ref.path, {shard: replace(index, shard=shard) for shard, index in named.items()}


def _plain(data: memoryview) -> bytes:
    """A zarr.json, deflated in a packed shard and plain in a directory."""
    return bytes(data) if data[0] == ord("{") else inflate(bytes(data))
