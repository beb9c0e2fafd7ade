"""Chunks of shards: where they lie, fetched with few requests, each compared with the chunk table, decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from archive.arrays import Ints
from archive.base import ArchiveError, CorruptChunkError, CorruptManifestError, StorageError
from archive.fields import Array
from archive.manifest import ShardIndex, ShardReads, Snapshot, chunkindex
from archive.read.chunks import fetching, landing
from archive.read.chunks.landing import Landed, Rooms
from archive.read.chunks.segments import Segments
from archive.shard import ShardView
from archive.store import Buffer, Filling, Roots

MAX_AHEAD_BYTES = 64 * 1024 * 1024
MAX_FILLING_BYTES = 128 * 1024 * 1024  # under way to their places: 16 of the largest requests, where each waits 20 ms
REMOTE_GAP_BYTES = 256 * 1024  # between chunks of a batch: these bytes come sooner than the answer to another request
MAX_VIEWS = 1024  # shards whose metadata is kept
Owners = Mapping[str, str]  # shard -> an episode that lies in it, for errors
Chunks = Mapping[str, bytes | memoryview]  # member -> its bytes
Decode = Callable[[int, Array | None], Array]


def episode_in(owners: Owners, shard: str) -> str:
    """What lies in a shard, as errors say it."""
    return f"episode {owners[shard]!r}"


@dataclass(frozen=True)
class ReadPlan:
    """What a read takes: per shard its requests."""

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
        self._roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._files: set[str] = set()
        self.indexes: dict[str, ShardIndex] = {}
        self.views: dict[str, ShardView] = {}

    def index(self, shard: str) -> ShardIndex:
        """Where the chunks of a shard lie, once `load_indexes` has fetched it."""
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
        for path, found in fetching.indexes(self._roots, refs):
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
        for shard, reads, blocks in self._blocks(plan, owners, max_bytes):
            yield shard, reads, fetching.members(shard, reads, blocks, partial(episode_in, owners, shard))
            del blocks  # so that the next shard is read into the same memory

    def _blocks(self, plan: ReadPlan, owners: Owners, max_bytes: int) -> Iterator[tuple[str, ShardReads, list[Buffer]]]:
        requests = [r for reads in plan.shards.values() for r in reads.requests]
        blocks = self._roots.iter_ranges(requests, max_bytes=max_bytes)
        for shard, reads in plan.shards.items():
            try:
                yield shard, reads, [next(blocks) for _ in reads.requests]
            except StorageError as e:  # of any shard that is read ahead, so it is looked for by name
                culprit = next((name for name in plan.shards if name in str(e)), shard)
                raise self._unreadable(e, culprit, owners) from e

    def is_remote(self, names: Iterable[str]) -> bool:
        """Whether these shards lie beyond a network."""
        return self._roots.is_remote(names)

    def fill(
        self, fillings: Iterable[Filling], use: Callable[[int], None], names: Iterable[str], owners: Owners
    ) -> None:
        """Fill memory from shards of these names, and call `use` with the number of each filling that is done."""
        try:
            self._roots.fill(fillings, use, max_bytes=MAX_FILLING_BYTES)
        except StorageError as e:
            culprit = next((name for name in names if name in str(e)), None)
            if culprit is None:
                raise
            raise self._unreadable(e, culprit, owners) from e

    def scatters(self, names: Iterable[str]) -> bool:
        """Whether `landed` is to be had, of these shards."""
        return self._roots.scatters(names)

    def landed(
        self, shard: str, reads: ShardReads, into: Mapping[str, Rooms], owners: Owners, cores: int | None
    ) -> Landed:
        """The members of a shard; those are in their place that have one. cores: how many share it, None for all."""
        try:
            return landing.read(self._roots, shard, reads, into, partial(episode_in, owners, shard), cores)
        except StorageError as e:
            raise self._unreadable(e, shard, owners) from e

    def _unreadable(self, error: StorageError, shard: str, owners: Owners) -> StorageError:
        return type(error)(
            f"shard {shard} of the archive at {self.url}, where episode {owners[shard]!r} "
            f"lies, cannot be read: {error}; run `archive verify`"
        )

    def stored_chunks(
        self, wanted: Mapping[str, Mapping[str, Ints]], owners: Owners, *, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, dict[str, bytes | memoryview]]]:
        """These chunks of arrays of shards, by their numbers, without metadata; the shards' indexes must be loaded."""
        reads = {
            shard: self.index(shard).plan_chunks(chunks, REMOTE_GAP_BYTES if self._roots.remote(shard) else None)
            for shard, chunks in wanted.items()
        }
        yield from self.fetched(ReadPlan(reads), owners, max_bytes)

    def add_view(self, shard: str, metadata: bytes) -> ShardView:
        """Keep the metadata of a shard."""
        view = self.views[shard] = ShardView(metadata)
        for old in list(self.views)[: max(0, len(self.views) - MAX_VIEWS)]:  # at once, as other threads add theirs
            self.views.pop(old, None)
        return view

    def decoder(
        self, view: ShardView, shard: str, array: str, like: Array, ranges: Sequence[tuple[int, int]], chunks: Chunks,
        owners: Owners,
    ) -> Decode:  # fmt: skip
        """What gives the rows of each chunk, of the dtype and shape of `like`, that holds these ranges of rows."""
        self.check(view, shard, array, like, ranges, owners)
        decode = view.decoder(array, ranges, chunks)

        def decoded(number: int, out: Array | None = None) -> Array:
            try:
                rows: Array = decode(number, out)
                return rows
            except ArchiveError as e:
                raise self._undecodable(e, shard, array, owners) from e

        return decoded

    def check(
        self, view: ShardView, shard: str, array: str, like: Array, ranges: Sequence[tuple[int, int]], owners: Owners
    ) -> None:
        """CorruptChunkError if a shard's metadata says otherwise of an array than its schema and the chunk table."""
        try:
            view.check_rows(array, ranges)
            self._check_alike(view, shard, array, like)
        except ArchiveError as e:
            raise self._undecodable(e, shard, array, owners) from e

    def chunk(self, shard: str, array: str, number: int, like: Array, chunks: Chunks, owners: Owners) -> Array:
        """The rows of one chunk, by the shard's metadata, which is fetched if it is not at hand."""
        view = self.views.get(shard) or self._fetched_view(shard, owners)
        first = number * self.index(shard).array(array).rows
        return self.decoder(view, shard, array, like, [(first, first + 1)], chunks, owners)(number, None)

    def _fetched_view(self, shard: str, owners: Owners) -> ShardView:
        ((_, _, chunks),) = self.fetched(ReadPlan({shard: self.index(shard).plan({})}), owners)
        return self.add_view(shard, bytes(chunks["zarr.json"]))

    def _check_alike(self, view: ShardView, shard: str, array: str, like: Array) -> None:
        (found, _, found_rows), rows = view.describe(array), self.index(shard).array(array).rows
        if found.dtype != like.dtype or found.shape != like.shape or found_rows != rows:
            raise CorruptChunkError(
                f"it holds {found.dtype}{list(found.shape[1:])} in chunks of {found_rows} rows, where its schema and "
                f"the chunk table say {like.dtype}{list(like.shape[1:])} in chunks of {rows}"
            )

    def _undecodable(self, error: ArchiveError, shard: str, array: str, owners: Owners) -> CorruptChunkError:
        return CorruptChunkError(
            f"array {array!r} of shard {self._full_url(shard)}, where episode {owners[shard]!r} "
            f"lies, cannot be decoded: {error}; the bytes are damaged, run `archive verify`"
        )
