"""A job of very many ranks in one process, by the real protocol: rank 0 is a whole writer, and the parts of the others
are staged by the code that stages any part, of rank 0's rows under other names and with sizes as of large episodes.

Shards have a size and no bytes (`counted_store`): a hundred terabytes of them take the memory of their names.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import archive
from archive import tables
from archive.base import layout
from archive.checkpoint.checkpoints import Checkpoint
from archive.saved import PartIndex, Request, stage
from archive.write import Column, Cut, RankRows, Written
from tests.support.counted_store import CountedStore, Requests, store_of

STEPS = 10  # of an episode
EPISODE_BYTES = 10_000_000  # as said
EPISODES_A_SHARD = 6  # of about 64 MB
COLUMN = "priority"


@dataclass
class Figures:
    """What one verb took."""

    requests: Requests = field(default_factory=Requests)
    cpu_s: float = 0.0
    peak_bytes: int = 0

    def __str__(self) -> str:
        counts = {prefix: dict(verbs) for prefix, verbs in self.requests.counts.items()}
        return (
            f"{len(self.requests):,} requests in {self.requests.round_trips} round trips, "
            f"{self.requests.bytes_in:,} bytes in, {self.requests.bytes_out:,} out, {self.cpu_s:.1f} s CPU, "
            f"{self.peak_bytes / 2**20:.0f} MiB\n  {counts}"
        )


@contextmanager
def measured(store: CountedStore) -> Iterator[Figures]:
    """The requests and CPU time of the block, and how much memory this process took at most beyond what it had, and
    beyond what the store has in it by then."""
    out, began = Figures(), time.process_time()
    before = _memory_bytes("VmRSS")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the greatest size begins anew
    try:
        with store.counting() as out.requests:
            yield out
    finally:
        out.cpu_s = time.process_time() - began
        out.peak_bytes = max(0, _memory_bytes("VmHWM") - before - out.requests.bytes_out)


def _memory_bytes(name: str) -> int:
    """What Linux says of the memory of this process; 0 elsewhere."""
    status = Path("/proc/self/status")
    said = status.read_text() if status.exists() else ""
    return next((int(line.split()[1]) * 1024 for line in said.splitlines() if line.startswith(name)), 0)


@dataclass
class ManyRanks:
    """A session of a run with `world_size` ranks, each of which has made `episodes` episodes in all."""

    url: str
    world_size: int
    episodes: int
    session: str = "first"
    rounds: int = 1
    store: CountedStore = field(init=False)
    writer: archive.Writer = field(init=False)
    made: int = 0  # episodes of each rank so far
    figures: dict[str, Figures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = store_of(self.url)
        archive.create(self.url)

    def open_first(self) -> None:
        """Open the writer of rank 0."""
        self.writer = archive.open(self.url).writer(0, self.world_size, session=self.session, chunk_bytes=1 << 20)

    def open(self) -> None:
        """Open all ranks, rank 0 first; those that are not simulated by a writer of their own end at once."""
        with measured(self.store) as self.figures["open"]:
            self.open_first()
            for rank in range(1, self.world_size):
                archive.open(self.url).writer(rank, self.world_size, session=self.session)._end()

    def add(self, number: int) -> None:
        """Add the episodes of checkpoint `number` to rank 0; those of the others are made of them."""
        for at in range(self.episodes // self.rounds):
            made_by = {"model_weights_uuid": f"w-{number}", "update_count": self.made}
            self.writer.add_episode(_steps(self.made), terminated=True, **made_by)
            self.made += 1
            if at % EPISODES_A_SHARD == EPISODES_A_SHARD - 1:
                self.writer.flush()
        self.writer.flush()

    def checkpoint(self, number: int) -> Checkpoint:
        """Checkpoint `number` of all ranks, with the next part of their episodes."""
        self.add(number)
        with measured(self.store) as self.figures["stage"]:
            self.stage_others(number)
        with measured(self.store) as self.figures["join"]:
            values = self._values(number)
            return self.writer.checkpoint(number + 1, progress={"step": number + 1}, **values).result(3600)

    def stage_others(self, number: int, first: int = 1) -> None:
        """Stage the parts of all ranks from the second on, made of what the first would stage now."""
        w = self.writer
        with w._entered():
            (written,) = [Written.joined(w._pipeline.wait(w._sent()))]
        cut = w._cut_of("replay", self._values(number), "keep")
        part = w._saver.request(
            number + 1, None, save_replay=True, progress=None, unconsumed=None, metrics=None, config=None,
            partial=False, known_at=-1,
        ).part  # fmt: skip
        w._saver._ordinal -= 1
        for rank in range(first, self.world_size):
            self._stage_as(rank, written, cut, part)

    def _stage_as(self, rank: int, written: Written, cut: Cut, part: PartIndex) -> None:
        """Stage the part of another rank."""
        rows = as_rank(written.rows, self.session, rank)
        for shard, size in zip(*_sizes(rows.chunks), strict=True):
            self.store.keep(shard, size)
        values = {name: Column(one.array + rank, one.dtype) for name, one in cut.columns.items()}
        mine = replace(cut, place=(self.session, rank), columns=values)
        index = replace(part, rank=rank, nonce=secrets.token_hex(8))
        stage(self.writer._log.storage, Request(index), [mine], [Written(rows)])

    def _values(self, number: int) -> dict[str, Any]:
        column = np.full(int(self.writer.live_set.runs().length.sum()), number, np.float32)
        return {"columns": {COLUMN: column}, "state": {"cursor": number, "rng": np.arange(8)}}


def as_rank(rows: RankRows, session: str, rank: int) -> RankRows:
    """Rank 0's rows as those of another rank, and with the sizes of large episodes."""
    old = pc.unique(rows.chunks["shard"]).to_pylist()
    names = {name: layout.shard_key(secrets.token_hex(4), session, rank, "packed") for name in old}
    first, own = f"{session}-00000-", f"{session}-{rank:05}-"
    new = {
        "rank": rank,
        "episode_id": pc.replace_substring(rows.segments["episode_id"], first, own, max_replacements=1),
        "return": pa.array(np.random.default_rng(rank).normal(size=rows.segments.num_rows)),
        "shard": _renamed(rows.segments["shard"], names),
    }
    segments = _with(rows.segments, new)
    scale = EPISODE_BYTES * EPISODES_A_SHARD * len(old) // max(1, rows.stored_bytes)
    scaled = {name: pc.multiply(rows.chunks[name], scale) for name in ("size", "offset")}
    chunks = _with(rows.chunks, {"shard": _renamed(rows.chunks["shard"], names), **scaled})
    return RankRows(segments, chunks, rows.ledger)


def _renamed(column: Any, names: dict[str, str]) -> Any:
    column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    known = [names[name] for name in column.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(column.indices, pa.array(known))


def _with(table: Any, columns: dict[str, Any]) -> Any:
    for name, value in columns.items():
        if isinstance(value, int):
            table = tables.set_column(table, name, value)
        else:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(name), value.cast(table.schema.field(name).type))
    return table


def _sizes(chunks: Any) -> tuple[list[str], list[int]]:
    """The shards of chunk rows, and the bytes of each."""
    of = chunks.select(["shard", "size"]).group_by("shard").aggregate([("size", "sum")])
    return of["shard"].to_pylist(), of["size_sum"].to_pylist()


def _steps(number: int) -> dict[str, Any]:
    """Episode `number` of a rank: a few steps stand for its ten megabytes."""
    count = 2 + number * 7919 % (2 * STEPS - 3)
    return {"obs": np.zeros((count, 4), np.float32), "reward": np.full(count, number % 97, np.float32)}
