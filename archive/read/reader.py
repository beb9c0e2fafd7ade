"""Reading steps: from segments to byte ranges to arrays, in three passes (plan, fetch, decode); each chunk once a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import ArchiveError, CorruptChunkError, CorruptManifestError, IntegrityError, StorageError
from archive.fields import Array, Ragged, ShardSchema, schema
from archive.manifest import ShardIndex, ShardReads, Snapshot, StoredFile, chunkindex
from archive.read import fetching, fieldparts
from archive.read.segments import Part, Segment, Slice
from archive.shard import ShardView
from archive.store import Buffer, Roots

MAX_AHEAD_BYTES = 64 * 1024 * 1024
MAX_VIEWS = 1024  # shards whose metadata is kept
_SEGMENT = (
    "episode_id", "shard", "start", "length", "extents", "schema", "chunks", "chunks_bytes", "chunks_crc32c",
)  # fmt: skip


class Tail(NamedTuple):
    """A chunk in which reading stopped."""

    chunk: int
    member: str
    data: bytes


T = TypeVar("T")
Tails = dict[str, dict[str, Tail]]  # shard -> array -> chunk


@dataclass(frozen=True)
class ReadPlan:
    """What a read takes: per shard its requests. Printed by plans, executed by Reader."""

    shards: Mapping[str, ShardReads]

    @property
    def requests(self) -> int:
        return sum(len(s.requests) for s in self.shards.values())

    @property
    def fetched_bytes(self) -> int:
        return sum(s.fetched_bytes for s in self.shards.values())


class Reader:
    """Reads parts of segments of one snapshot. Keeps what is small and immutable: chunk indexes and shard metadata."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._schemas: dict[str, ShardSchema] = {}
        self._indexes: dict[str, ShardIndex] = {}
        self._files: set[str] = set()
        self._roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._views: dict[str, ShardView] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["snapshot"])  # type: ignore[misc]

    def segments(self, rows: Sequence[int]) -> dict[int, Segment]:
        """Row -> segment, of distinct rows."""
        unique = list(dict.fromkeys(rows))
        table = self.snapshot.take(np.array(unique, np.int64), _SEGMENT)
        columns = [table[name].to_pylist() for name in _SEGMENT]
        return {row: self._segment(*values) for row, *values in zip(unique, *columns, strict=True)}

    def _segment(
        self, episode: str, shard: str | None, start: int, length: int, extents: list[dict[str, Any]] | None,
        text: str, path: str | None, size: int, crc: int,
    ) -> Segment:  # fmt: skip
        if text not in self._schemas:
            self._schemas[text] = schema.loads(text)
        places = {e["field"]: (e["start"], e["rows"]) for e in extents or ()}
        chunks = StoredFile(path or "", size or 0, crc or 0)
        return Segment(episode, shard, start or 0, length, places, self._schemas[text], chunks)

    def read(
        self, parts: Sequence[Sequence[Part]], selection: fieldparts.Selection, tails: Tails | None = None
    ) -> list[dict[str, Any]]:
        """One nested dict for each list of parts, fetched together.

        tails: of a caller that reads on from where it stopped, for the chunks in which it stopped, so as not to fetch
        them again; kept up to date.
        """
        return self.read_each(parts, [selection] * len(parts), tails)

    def read_each(
        self, parts: Sequence[Sequence[Part]], selections: Sequence[fieldparts.Selection], tails: Tails | None = None
    ) -> list[dict[str, Any]]:
        """As `read`, with a selection of fields for each list of parts."""
        segments = self.segments([p.row for group in parts for p in group])
        jobs = [
            fieldparts.episode_job([(segments[p.row], p) for p in group], selection)
            for group, selection in zip(parts, selections, strict=True)
        ]
        arrays = self._arrays([s for job in jobs for s in job.slices()], tails)
        try:
            return [job.build(arrays) for job in jobs]
        except IntegrityError as e:
            raise type(e)(f"{e} (reading {len(parts)} episodes at {self.snapshot.storage.url})") from e

    def read_stored(self, parts: Sequence[Part]) -> list[dict[str, Array | Ragged]]:
        """The fields of each part in their stored form, by name, fetched together: for writing them again."""
        segments = self.segments([p.row for p in parts])
        jobs = [fieldparts.episode_job([(segments[p.row], p)], fieldparts.Selection()) for p in parts]
        arrays = self._arrays([s for job in jobs for s in job.slices()])
        return [job.stored(arrays) for job in jobs]

    def plan(self, slices: Sequence[Slice]) -> ReadPlan:
        """The byte ranges that these rows take, chunk and metadata bytes included; the same whatever was read before."""
        return self._plan(_by_shard(slices), {}, {})

    def _plan(self, wanted: Mapping[str, chunkindex.Wanted], known: Mapping[str, ShardView], tails: Tails) -> ReadPlan:
        held = {shard: {name: t.chunk for name, t in of.items()} for shard, of in tails.items()}
        return ReadPlan({
            shard: self._index(shard).plan(arrays, metadata=shard not in known, held=held.get(shard))
            for shard, arrays in wanted.items()
        })  # fmt: skip

    def _index(self, shard: str) -> ShardIndex:
        if shard not in self._indexes:
            raise CorruptManifestError(
                f"the segments table of {self.snapshot.storage.url} names shard {shard!r}, which the chunk table of "
                "its commit does not have; run `archive verify`"
            )
        return self._indexes[shard]

    def shard_bytes(self, shard: str) -> int:
        """Bytes of all members of a shard whose index is loaded."""
        return sum(int(chunks.size.sum()) for chunks in self._indexes[shard].arrays.values())

    def load_indexes(self, segments: Sequence[Segment]) -> None:
        """Fetch the chunk tables of the commits that wrote these segments, once each."""
        refs = {s.chunks.path: s.chunks for s in segments if s.shard is not None and s.shard not in self._indexes}
        refs = {path: ref for path, ref in refs.items() if path not in self._files}
        for path, found in fetching.indexes(self._roots, list(refs.values())):
            self._indexes.update(found)
            self._files.add(path)

    def _arrays(self, slices: Sequence[tuple[Segment, Slice]], tails: Tails | None = None) -> fieldparts.Arrays:
        held = {} if tails is None else tails
        self.load_indexes([segment for segment, _ in slices])
        wanted = _by_shard([s for _, s in slices])
        owners = {s.shard: segment.episode_id for segment, s in slices}
        known = {shard: view for shard in wanted if (view := self._views.get(shard)) is not None}
        out = fieldparts.Arrays()
        for shard, reads, blocks in self._fetched(self._plan(wanted, known, held), owners):
            chunks = fetching.members(shard, reads, blocks, f"episode {owners[shard]!r}")
            chunks |= {tail.member: tail.data for tail in held.get(shard, {}).values()}
            view = known.get(shard) or self._new_view(shard, chunks)
            for array, (starts, stops) in wanted[shard].items():
                runs = list(zip(starts.tolist(), stops.tolist(), strict=True))
                out.put(shard, array, runs, self._decoded(view, shard, array, runs, chunks, owners[shard]))
            if tails is not None:
                tails.setdefault(shard, {}).update(self._tails(shard, wanted[shard], chunks))
            del blocks, chunks  # so that the next shard is read into the same memory
        for shard in held.keys() - wanted.keys():
            del held[shard]  # reading has gone on to other shards
        return out

    def stored_chunks(
        self, wanted: Mapping[str, chunkindex.Wanted], owners: Mapping[str, str], *, max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, dict[str, bytes | memoryview]]]:
        """The chunks that rows of shards lie in, as they are stored, shard by shard; each was compared with the table.

        The shards' indexes must be loaded. At most `max_bytes` (and always one request) are fetched ahead.
        """
        plan = ReadPlan({shard: self._index(shard).plan(arrays, metadata=False) for shard, arrays in wanted.items()})
        for shard, reads, blocks in self._fetched(plan, owners, max_bytes):
            yield shard, reads, fetching.members(shard, reads, blocks, f"episode {owners[shard]!r}")

    def index(self, shard: str) -> ShardIndex:
        """Where the chunks of a shard lie, once `load_indexes` has fetched it."""
        return self._index(shard)

    def has_index(self, shard: str) -> bool:
        """Whether `load_indexes` has fetched where the chunks of a shard lie."""
        return shard in self._indexes

    def has_view(self, shard: str) -> bool:
        """Whether the metadata of a shard is at hand."""
        return shard in self._views

    def decoded_chunk(
        self, shard: str, array: str, chunk: int, chunks: Mapping[str, Any], owners: Mapping[str, str]
    ) -> np.ndarray[Any, Any]:
        """The rows of one chunk that was fetched, by the shard's metadata, which is fetched if it is not at hand."""
        view = self._views.get(shard) or self._fetched_view(shard, owners)
        return self._told(lambda: view.chunk(array, chunk, chunks), shard, array, owners)

    def _fetched_view(self, shard: str, owners: Mapping[str, str]) -> ShardView:
        plan = ReadPlan({shard: self._index(shard).plan({})})
        ((_, reads, blocks),) = self._fetched(plan, owners)
        return self._new_view(shard, fetching.members(shard, reads, blocks, f"episode {owners[shard]!r}"))

    def _tails(self, shard: str, wanted: chunkindex.Wanted, chunks: Mapping[str, Any]) -> dict[str, Tail]:
        """The chunk of each array that holds the last of these rows."""
        out = {}
        for name, (_, stops) in wanted.items():
            array = self._index(shard).arrays[name]
            last = (int(stops.max()) - 1) // array.rows
            out[name] = Tail(last, array.member[last], bytes(chunks[array.member[last]]))
        return out

    def _fetched(
        self, plan: ReadPlan, owners: Mapping[str, str], max_bytes: int = MAX_AHEAD_BYTES
    ) -> Iterator[tuple[str, ShardReads, list[Buffer]]]:
        """The blocks of each shard, in order; bounded bytes are fetched ahead."""
        requests = [r for reads in plan.shards.values() for r in reads.requests]
        blocks = self._roots.iter_ranges(requests, max_bytes=max_bytes)
        for shard, reads in plan.shards.items():
            try:
                yield shard, reads, [next(blocks) for _ in reads.requests]
            except StorageError as e:  # of any shard that is read ahead, so it is looked for by name
                culprit = next((name for name in plan.shards if name in str(e)), shard)
                raise type(e)(
                    f"shard {culprit} of the archive at {self.snapshot.storage.url}, where episode {owners[culprit]!r} "
                    f"lies, cannot be read: {e}; run `archive verify`"
                ) from e

    def _new_view(self, shard: str, chunks: dict[str, bytes | memoryview]) -> ShardView:
        view = self._views[shard] = ShardView(bytes(chunks.pop("zarr.json")))
        while len(self._views) > MAX_VIEWS:
            self._views.pop(next(iter(self._views)), None)
        return view

    def _decoded(
        self, view: ShardView, shard: str, array: str, runs: list[tuple[int, int]], chunks: dict[str, Any], episode: str
    ) -> list[np.ndarray[Any, Any]]:
        return self._told(lambda: view.read_many(array, runs, chunks), shard, array, {shard: episode})

    def _told(self, decode: Callable[[], T], shard: str, array: str, owners: Mapping[str, str]) -> T:
        """What decoding gives; what fails says which array of which shard, and whose."""
        try:
            return decode()
        except ArchiveError as e:
            raise CorruptChunkError(
                f"array {array!r} of shard {self.snapshot.storage.full_url(shard)}, where episode {owners[shard]!r} "
                f"lies, cannot be decoded: {e}; the bytes are damaged, run `archive verify`"
            ) from e


def _by_shard(slices: Sequence[Slice]) -> dict[str, dict[str, tuple[Ints, Ints]]]:
    """Shard -> array -> row runs, sorted and apart; those that touch stay apart, for each becomes an array of its own."""
    runs: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for s in slices:
        runs.setdefault(s.shard, {}).setdefault(s.array, []).append((s.start, s.stop))
    return {
        shard: {name: merge_runs(*np.array(pairs, np.int64).T, touching=False) for name, pairs in arrays.items()}
        for shard, arrays in runs.items()
    }
