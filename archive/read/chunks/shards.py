"""Chunks of shards: their places, fetched with few requests, each compared with the chunk table, decoded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from archive import tables
from archive.base import CorruptChunkError, CorruptManifestError, StorageError
from archive.index import METADATA, ShardIndex, ShardReads, Snapshot, chunkindex
from archive.log import StoredFile, tablefiles
from archive.read.chunks.segments import Segments
from archive.shard import ShardView, inflate
from archive.store import Buffer, Roots, join_key, split_key

MAX_AHEAD_BYTES = 128 * 1024 * 1024  # in flight at once: 16 of the largest requests, where each waits 20 ms
MAX_VIEWS = 1024  # shards whose metadata is kept
Owner = Callable[[str], str]  # shard -> the name of its content, for errors


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
    """The shards of one snapshot. It keeps what is small and immutable: chunk indexes and metadata."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.url = snapshot.storage.url
        self.roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._files: set[str] = set()
        given = snapshot.chunk_rows
        self.indexes: dict[str, ShardIndex] = {} if given is None else chunkindex.from_table(given)
        self.views: dict[str, ShardView] = {}

    def index(self, shard: str) -> ShardIndex:
        """The chunks of a shard, once `load_indexes` has fetched them."""
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

    def sizes(self, segments: Segments) -> dict[str, int]:
        """The bytes of all members of each shard that has some of these segments."""
        self.load_indexes(segments, list(range(len(segments.shards))))
        found = {shard: self.index(shard).arrays.values() for shard in segments.shards}
        return {shard: sum(int(chunks.size.sum()) for chunks in arrays) for shard, arrays in found.items()}

    def plan(
        self,
        wanted: Mapping[str, chunkindex.Wanted],
        known: Container[str] = (),
        held: Mapping[str, Mapping[str, int]] | None = None,
    ) -> ReadPlan:
        """The byte ranges of rows of arrays, and of the metadata of shards that is not known. Chunks held are left out:
        shard -> array -> the number of one."""
        reads = {}
        for shard, arrays in wanted.items():
            at_hand = None if held is None else held.get(shard)
            reads[shard] = self.index(shard).plan(arrays, metadata=shard not in known, held=at_hand)
        return ReadPlan(reads)

    def blocks(
        self, plan: ReadPlan, owner: Owner, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, list[Buffer]]]:
        """The bytes of the requests of each shard, in order; at most `max_bytes` (and always one request) are fetched
        ahead."""
        requests = [r for reads in plan.shards.values() for r in reads.requests]
        blocks = self.roots.iter_ranges(requests, max_bytes=max_bytes)
        for shard, reads in plan.shards.items():
            with self.blaming(plan.shards, owner, shard):
                found = [next(blocks) for _ in reads.requests]
            yield shard, reads, found
            del found

    @contextmanager
    def blaming(self, names: Iterable[str], owner: Owner, shard: str | None = None) -> Iterator[None]:
        """Let an error of the store name the shard that cannot be read, and its episode. It may be any that is read
        ahead, so it is looked for by name; `shard`: the one to blame if the error names none."""
        try:
            yield
        except StorageError as e:
            culprit = next((name for name in names if name in str(e)), shard)
            if culprit is None:
                raise
            raise type(e)(
                f"shard {culprit} of the archive at {self.url}, where {owner(culprit)} "
                f"lies, cannot be read: {e}; run `archive verify`"
            ) from e

    def add_view(self, shard: str, metadata: bytes) -> ShardView:
        """Keep the metadata of a shard."""
        view = self.views[shard] = ShardView(metadata)
        for old in list(self.views)[: max(0, len(self.views) - MAX_VIEWS)]:  # at once, as other threads add theirs
            self.views.pop(old, None)
        return view

    def view(self, shard: str, owner: Owner) -> ShardView:
        """The metadata of a shard, fetched by this thread if it is not in memory."""
        if (found := self.views.get(shard)) is not None:
            return found
        reads = self.index(shard).plan({})
        base, key = split_key(reads.requests[0].key)
        with self.blaming([shard], owner, shard):
            data = self.roots.storage(base).get(key, reads.requests[0].start, reads.requests[0].stop)
        return self.add_view(shard, bytes(members_of(shard, reads, [data], owner)["zarr.json"]))


def members_of(shard: str, reads: ShardReads, blocks: Sequence[Buffer], owner: Owner) -> dict[str, bytes | memoryview]:
    """Member -> its bytes. `owner` names the content, for errors."""
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
            f"{shard} is damaged: {piece.member!r} (array {piece.array!r}, chunk {piece.chunk}), where {owner(shard)} "
            "lies, does not match its checksum; run `archive verify`"
        )
    return _inflated(data) if piece.array == METADATA else data


def indexes_of(roots: Roots, refs: Sequence[StoredFile]) -> Iterator[tuple[str, dict[str, ShardIndex]]]:
    """The path of each chunk table and the shards in it, named as the archive's own tables name them."""
    for data, ref in zip(tablefiles.fetch(roots, refs), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(ref.path))
        base = split_key(ref.path)[0]
        named = {join_key(base, shard): index for shard, index in chunkindex.from_table(table).items()}
        yield ref.path, {shard: replace(index, shard=shard) for shard, index in named.items()}


def _inflated(data: memoryview) -> bytes:
    """A zarr.json, deflated in a packed shard and plain in a directory."""
    return bytes(data) if bytes(data[:1]) == b"{" else inflate(bytes(data))
