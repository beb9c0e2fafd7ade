"""The check of shards, batch by batch, on any worker: the findings of a batch are part of its result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, numbers, run_starts
from archive.base import (
    ArchiveError,
    CorruptStateError,
    Count,
    DeadlineError,
    FieldError,
    Record,
    cached_property,
    records,
)
from archive.index import METADATA, ShardIndex, Snapshot, chunkindex
from archive.jobs import Agree, Items, Procedure, Receipt, Result
from archive.log import StoredFile, tablefiles
from archive.read import Reader, Selection, Spans, indexes_of, sizes
from archive.store import Roots
from archive.tables import coded

if TYPE_CHECKING:
    import pyarrow as pa

_READ_BYTES = 64 * 1024 * 1024
_EXAMPLES = 3  # episodes of a shard
_MOST_BATCHES, _MOST_SHARDS, _ALONE = 1000, 16, 64  # of a job; of a batch, on other workers and in this process
Problem = tuple[str, str, tuple[str, ...]]  # an object, what is wrong with it, and episodes there, for example


@dataclass(frozen=True, slots=True)
class NamedShard(Record):
    """A shard to check, as rows name it: the files of its chunks, and episodes there, for example."""

    shard: str
    files: tuple[StoredFile, ...]
    episodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckedShards(Record):
    """The result of a batch: how many shards were checked, and how many bytes of them were read; what is wrong with
    them, and then the steps that cannot be read."""

    shards: Count
    bytes: Count
    problems: tuple[Problem, ...]
    unreadable: tuple[Problem, ...]

    @classmethod
    def of(cls, receipt: Receipt) -> CheckedShards:
        """The one that a result says; CorruptStateError if it says something else."""
        return cls.from_json(receipt.index.said, what=f"the result {receipt.where}", error=CorruptStateError)


class _Mapped(NamedTuple):
    """The rows of the segments table by their shard: those of shard i are rows[starts[i] : starts[i + 1]]."""

    shards: dict[str, int]
    starts: Ints
    rows: Ints


def named_shards(table: pa.Table) -> dict[str, NamedShard]:
    """Shard -> what rows say of it."""
    episodes: dict[str, dict[str, None]] = {}
    files: dict[str, dict[str, StoredFile]] = {}
    known = tablefiles.chunk_files(table)
    columns = (table[name].to_pylist() for name in ("shard", "episode_id", "chunks"))
    for shard, episode, path in zip(*columns, strict=True):
        if shard is None:
            continue
        some = episodes.setdefault(shard, {})
        if len(some) < _EXAMPLES:
            some[episode] = None
        if path is not None:
            files.setdefault(shard, {})[path] = known[path]
    place = {path: i for i, path in enumerate(known)}  # those of one chunk table follow each other
    ordered = sorted(episodes, key=lambda shard: place[next(iter(files[shard]))] if shard in files else -1)
    return {shard: NamedShard(shard, (*files.get(shard, {}).values(),), (*episodes[shard],)) for shard in ordered}


def batches_of(shards: Sequence[NamedShard], *, alone: bool) -> list[list[str]]:
    """The items of batches. alone: one worker in this process does all."""
    size = _ALONE if alone else min(_MOST_SHARDS, -(-len(shards) // _MOST_BATCHES))
    items = [json.dumps(one.to_json()) for one in shards]
    return [items[at : at + size] for at in range(0, len(items), max(1, size))]


class ShardCheck(Procedure):
    """The check of shards as of a commit: their first bytes or, if deep, every byte and every step. Items are
    NamedShards, as JSON. lasts: results are kept, so that a store that does not answer ends a batch."""

    def __init__(self, snapshot: Snapshot, *, deep: bool, lasts: bool) -> None:
        self._snapshot = snapshot
        self._deep = deep
        self._lasts = lasts
        self._roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._known: tuple[str, dict[str, ShardIndex]] = ("", {})  # the chunk table that was read last

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), deep=self._deep, lasts=self._lasts), (self._snapshot,)

    def run(self, items: Items, agree: Agree) -> Result:
        began, what, shards, fetched = perf_counter(), "the plan of a verification", 0, 0
        problems: list[Problem] = []
        sound: list[str] = []
        for item in items:
            value = records.parse(str(item), what=what, error=CorruptStateError, max_depth=records.MAX_DEPTH)
            named = NamedShard.from_json(value, what=what, error=CorruptStateError)
            before, index = len(problems), self._index(named, problems)
            if index is not None:
                shards += 1
                fetched += self._at_shard(index, named.episodes, problems)
            if len(problems) == before:
                sound.append(named.shard)
        unreadable: tuple[Problem, ...] = ()
        try:
            unreadable = tuple(self._unreadable(sound)) if self._deep else ()
        except ArchiveError as e:
            problems.append(("the segments table", self._told(e), ()))
        said = CheckedShards(shards, fetched, tuple(dict.fromkeys(problems)), unreadable)
        return Result(said=said.to_json(), seconds={"read": perf_counter() - began})

    def _told(self, error: ArchiveError) -> str:
        """The text of an error that is a finding; others are raised."""
        if self._lasts and isinstance(error, DeadlineError):
            raise error
        return str(error)

    def _index(self, named: NamedShard, problems: list[Problem]) -> ShardIndex | None:
        """The chunks of a shard; None, and a problem, if no chunk table has it."""
        for ref in named.files:
            if self._known[0] != ref.path:
                try:
                    ((_, found),) = indexes_of(self._roots, [ref])
                except ArchiveError as e:
                    problems.append((ref.path, self._told(e), ()))
                    continue
                self._known = ref.path, found
            if named.shard in self._known[1]:
                return self._known[1][named.shard]
        problems.append((named.shard, "no chunk table has it", named.episodes))
        return None

    def _at_shard(self, index: ShardIndex, episodes: tuple[str, ...], problems: list[Problem]) -> int:
        """Compare all members of a shard, or its metadata, with the chunk table; the bytes that were read."""
        reads = index.plan(index.everything() if self._deep else {})
        try:
            blocks = self._roots.get_ranges(reads.requests)
        except ArchiveError as e:
            problems.append((index.shard, self._told(e), episodes))
            return 0
        for piece in reads.pieces:
            data = memoryview(blocks[piece.request])[piece.start : piece.start + piece.size]
            if not chunkindex.is_sound(data, piece.crc32c, is_chunk=piece.array != METADATA):
                problems.append((index.shard, f"{piece.member!r} does not match its checksum", episodes))
        return reads.fetched_bytes

    # -- steps ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._snapshot)

    @cached_property
    def _rows(self) -> _Mapped:
        names, shard = coded(self._snapshot.columns(["shard"])["shard"])
        order = np.argsort(shard, kind="stable")
        order = order[np.count_nonzero(shard < 0) :]
        starts = np.append(run_starts(shard[order]), len(order))
        return _Mapped({name: i for i, name in enumerate(names)}, starts, order)

    def _unreadable(self, shards: Sequence[str]) -> Iterator[Problem]:
        """The first segment in each of these shards that cannot be read as tables and schemas say, and why. All are
        read, in parts of bounded size."""
        of = self._rows
        some = [of.shards[shard] for shard in sorted(shards) if shard in of.shards]
        if not some:
            return
        rows = np.concatenate([of.rows[of.starts[i] : of.starts[i + 1]] for i in some])
        table = self._snapshot.take(rows, ["shard", "length", "episode_id"])
        spans = Spans.of_each(rows, 0 * rows, numbers(table["length"]))
        bad: set[str] = set()
        for start, stop in sizes.runs(self._reader.as_written().sizes(spans), _READ_BYTES):
            if self._why(spans, range(start, stop)) is None:
                continue
            for n in range(start, stop):
                shard, episode = table["shard"][n].as_py(), table["episode_id"][n].as_py()
                if shard not in bad and (why := self._why(spans, range(n, n + 1))) is not None:
                    bad.add(shard)
                    yield shard, why, (episode,)

    def _why(self, spans: Spans, numbers: range) -> str | None:
        """Why these steps, with their derived columns, cannot be read; None: they can."""
        reader, some = self._reader, spans.pick(np.array(numbers))
        try:
            reader.read_stored(some)
            if reader.snapshot.annotations.head.late:
                with suppress(FieldError):  # derived columns of some of them only, or of another kind
                    reader.read(some, Selection(missing="skip"))
        except ArchiveError as e:
            return self._told(e)
        return None
