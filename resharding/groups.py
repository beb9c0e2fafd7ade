"""Groups of a shared plan: objects with all that the shares of some target ranks need of the tables that the plan was
made from.

It has the rows of the segments table of its episodes, those of the chunk table of their shards, of the live table, and
the places of its steps among these. They are taken from the tables part by part, so that one is in memory at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, arrow, ascending, numbers, places, spans
from archive.base import Count, Positive, Record, at_once, layout, stored
from archive.log import StoredFile, tablefiles
from archive.saved import SavedIndex, pack
from archive.shard import Members, encode, file_member
from archive.store import Storage, split_key
from resharding.placement import Rules
from resharding.plans import Plan

if TYPE_CHECKING:
    import pyarrow as pa


GROUP_ROWS = 1 << 16  # episodes of a group, but for a target rank that has more
AT_ONCE = 8
_MANY_RANGES = 1000
PIECES = ("row", "lo", "hi", "position", "run", "rank", "env", "at")
UNITS = ("head", "number", "steps", "rank", "env", "age", "headless", "tailless", "open")
PARTS = ("target", "unit", "lo", "hi", "env", "position")
NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _GroupBuffer(Record):
    """One buffer of a group: the rules of its plan, and the rows of its arrays."""

    rules: Rules
    pieces: Count
    units: Count
    parts: Count


@dataclass(frozen=True, slots=True)
class GroupIndex(SavedIndex):
    """The index of a group. `number`: of the group among those of the plan; `served`: the commit whose tables serve the
    steps of the checkpoint of `commit`; `segments`, `chunks`: members with rows of these tables; `dealt`, `dropped`:
    steps of all target ranks, and those of none by buffer and reason."""

    REMEDY: ClassVar[str] = "plan again in a new session, or with resharding.plan"

    session: str
    plan: str
    number: Count
    nonce: str
    commit: Count
    served: Count
    digest: str
    world_size: Positive
    identity: bool
    seen: Count
    takes_all: bool
    segments: Count
    chunks: Count
    buffers: Mapping[str, _GroupBuffer]
    dealt: Count
    dropped: Mapping[str, Mapping[str, Mapping[str, Count]]]
    conditions: str | None = stored(None, always=True)
    origin: tuple[str, str, Count, Mapping[int, int], Mapping[int, int] | None] | None = stored(None, always=True)
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """The key of its object."""
        return layout.plan_key(self.session, self.plan, self.number)


@dataclass(frozen=True)
class _TargetRanks:
    """Some target ranks of a plan, by buffer: their parts, the numbers of their units, and of the pieces of these.
    rows, runs: rows of the segments and live tables that they need, sorted."""

    parts: Mapping[str, Steps]
    units: Mapping[str, Ints]
    pieces: Mapping[str, Ints]
    rows: Ints
    runs: Ints


def put(plan: Plan, storage: Storage, session: str, name: str) -> list[int]:
    """Put a plan into the bucket, in groups of its target ranks; the first rank of each."""
    firsts, made = list[int](), list[_TargetRanks]()
    for first, group in _groups(plan):
        firsts.append(first)
        made.append(group)
    rows = _GroupRows(plan, [group.rows for group in made])
    place = partial(_put, plan, storage, (session, name), rows)
    at_once(lambda number: place(number, made[number]), range(len(made)), AT_ONCE)
    return firsts


def _groups(plan: Plan) -> Iterator[tuple[int, _TargetRanks]]:
    """The target ranks in groups of about GROUP_ROWS episodes; the first rank of each."""
    episodes, first = np.array(plan.episodes), 0
    while first < plan.world_size:
        stop = first + 1
        while stop < plan.world_size and episodes[first : stop + 1].sum() <= GROUP_ROWS:
            stop += 1
        yield first, _group(plan, first, stop)
        first = stop


def _group(plan: Plan, first: int, stop: int) -> _TargetRanks:
    parts, units, pieces = dict[str, Steps](), dict[str, Ints](), dict[str, Ints]()
    rows, runs = [NONE], [NONE]
    for name, placement in plan.placements.items():
        source, (lo, hi) = plan.sources[name], np.searchsorted(placement.parts["target"], (first, stop))
        parts[name] = placement.parts.pick(slice(lo, hi))
        own = units[name] = ascending(parts[name].stream)
        begin = source.offsets[own]
        pieces[name] = spans(begin, source.offsets[own + 1] - begin)
        rows.append(plan.checkpoint.index.chains.rows_of(ascending(source.number[own])))
        runs.append(source.pieces["run"][pieces[name]])
    return _TargetRanks(parts, units, pieces, ascending(np.concatenate(rows)), ascending(np.concatenate(runs)))


class _GroupRows:
    """The rows of the segments and chunk tables that each group needs, as Parquet."""

    def __init__(self, plan: Plan, rows: Sequence[Ints]) -> None:
        self.segments: list[list[bytes]] = [[] for _ in rows]
        self.chunks: list[list[bytes]] = [[] for _ in rows]
        shards, files, base = list[tuple[int, Any]](), dict[str, StoredFile](), 0
        for table in plan.checkpoint.snapshot.in_parts():
            for number, wanted in enumerate(rows):
                some = wanted[slice(*np.searchsorted(wanted, (base, base + table.num_rows)))] - base
                if len(some):
                    part = _taken(table, some)
                    self.segments[number].append(tables.dumps(part))
                    shards.append((number, part["shard"].unique().drop_null()))
                    files |= tablefiles.chunk_files(part)
            base += table.num_rows
        own = [ref for path, ref in files.items() if not split_key(path)[0]]  # other archives' are read as ever
        self._add_chunks(plan.checkpoint.storage, sorted(shards, key=itemgetter(0)), own)

    def _add_chunks(self, storage: Storage, shards: Sequence[tuple[int, Any]], files: Sequence[StoredFile]) -> None:
        """Add the chunks of the shards of each group, which come group by group."""
        import pyarrow as pa
        import pyarrow.compute as pc

        text = pa.string()
        names = pa.chunked_array([one.cast(text) for _, one in shards] or [pa.array([], text)])
        owner = np.repeat([number for number, _ in shards], [len(one) for _, one in shards]).astype(np.int64)
        for ref in files:
            (data,) = tablefiles.fetch(storage, [ref])
            for table in tables.loads_in_parts(data, "chunks", where=storage.full_url(ref.path)):
                known, code = tables.coded(table["shard"])
                order = np.argsort(code, kind="stable")
                begins = np.searchsorted(code[order], np.arange(len(known) + 1))
                found = numbers(pc.index_in(names, value_set=pa.array(known, text)), -1).astype(np.int64)
                there = np.flatnonzero(found >= 0)
                edges = np.searchsorted(owner[there], np.arange(len(self.chunks) + 1))
                for number in np.flatnonzero(np.diff(edges)).tolist():
                    mine = ascending(found[there[edges[number] : edges[number + 1]]])
                    some = np.sort(order[spans(begins[mine], begins[mine + 1] - begins[mine])])
                    self.chunks[number].append(tables.dumps(_taken(table, some)))


def _taken(table: pa.Table, rows: Ints) -> pa.Table:
    """These rows, which are sorted and mostly a few ranges; dictionaries have no more texts than these need."""
    import pyarrow as pa

    heads = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    if len(heads) > _MANY_RANGES:
        some = table.take(arrow(rows))
    else:
        stops = np.append(heads[1:], len(rows))
        ranges = zip(rows[heads].tolist(), (stops - heads).tolist(), strict=True)
        some = pa.concat_tables([table.slice(first, count) for first, count in ranges])
    columns = [
        some[one.name].cast(pa.string()).combine_chunks().dictionary_encode()
        if pa.types.is_dictionary(one.type)
        else some[one.name]
        for one in table.schema
    ]
    return pa.table(columns, schema=table.schema)


def _put(
    plan: Plan, storage: Storage, place: tuple[str, str], rows: _GroupRows, number: int, group: _TargetRanks
) -> None:
    """Put one group into the bucket. place: the session, and the name of the plan."""
    ck, arrays, buffers = plan.checkpoint, dict[str, Ints](), dict[str, _GroupBuffer]()
    every = ascending(np.concatenate([NONE, *(plan.sources[name].number[own] for name, own in group.units.items())]))
    for at, name in enumerate(plan.sources):
        made = _arrays(plan, group, name, every)
        arrays |= {f"{kind}/{at}": array for kind, array in made.items()}
        buffers[name] = _GroupBuffer(plan.placements[name].rules, *map(len, made.values()))
    segments, chunks = rows.segments[number], rows.chunks[number]
    lost = {name: plan.dropped_of(name) for name in plan.placements}
    origin: Any = None if plan.origin is None else tuple(plan.origin)
    index = GroupIndex(
        *place, number, secrets.token_hex(8), ck.number, ck.served_by.number, ck.commit.digest, plan.world_size,
        plan.is_identity, plan.seen, plan.takes_all, len(segments), len(chunks), buffers, plan.dealt, lost,
        plan.conditions, origin,
    )  # fmt: skip
    files = [(f"segments-{i}.parquet", data) for i, data in enumerate(segments)]
    files += [(f"chunks-{i}.parquet", data) for i, data in enumerate(chunks)]
    members = [*(file_member(*one) for one in files), *encode(arrays, attributes={}, chunk_bytes=1 << 20)]
    live = {"live": _taken(ck.live, group.runs)} if len(group.runs) else {}
    storage.create_once(index.key, pack(index, live, members)[0])


def _arrays(plan: Plan, group: _TargetRanks, name: str, episodes: Ints) -> dict[str, Ints]:
    """The arrays of one buffer: its pieces, units and parts, numbered as they are in the group."""
    source, parts, units = plan.sources[name], group.parts[name], group.units[name]
    own = source.pieces.pick(group.pieces[name])
    pieces = {key: own[key] for key in ("position", "rank", "env", "at")} | {"lo": own.lo, "hi": own.hi}
    pieces |= {"row": places(own.stream, group.rows), "run": places(own["run"], group.runs)}
    about, counts = source.units.pick(units), source.offsets[units + 1] - source.offsets[units]
    of_units: dict[str, Ints] = {key: about[key] for key in ("rank", "env", "age", "headless", "tailless", "open")}
    of_units |= {"head": np.cumsum(counts) - counts, "steps": about.hi}
    of_units["number"] = places(source.number[units], episodes)
    of_parts: dict[str, Ints] = {key: parts[key] for key in ("target", "env", "position")}
    of_parts |= {"unit": places(parts.stream, units), "lo": parts.lo, "hi": parts.hi}
    kinds = {"pieces": (PIECES, pieces), "units": (UNITS, of_units), "parts": (PARTS, of_parts)}
    return {
        kind: np.stack([np.asarray(values[key], np.int64) for key in keys], axis=1)
        for kind, (keys, values) in kinds.items()
    }
