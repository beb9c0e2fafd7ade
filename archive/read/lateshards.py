"""Derived columns, in shards of their own: rows for each step come in with the steps; rows of the late table and of the
chunk table go out. In between they are gathered by kind."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, arrow, numbers
from archive.base import FieldError, layout, show
from archive.fields import (
    NODES,
    Array,
    Bools,
    FieldSpec,
    Path,
    Schema,
    ShardSchema,
    loads,
    normalise,
    shard_schema,
    to_path,
    unflatten,
)
from archive.index import Snapshot
from archive.log import tablefiles
from archive.read.spans import Spans
from archive.shard import SHARD_BYTES, ShardWriter
from archive.store import Storage, under_fresh_name
from archive.tables import STREAM

if TYPE_CHECKING:
    import pyarrow as pa

_BESIDE_BYTES = 1024  # memory of an episode beside its rows


class StoredFields(NamedTuple):
    """The derived columns of one episode: their specs, and their rows in stored form, both by name."""

    specs: dict[str, FieldSpec]
    rows: dict[str, Array]


def checked(values: Mapping[Any, Any], steps: int, episode: str, known: Sequence[ShardSchema]) -> StoredFields:
    """The columns that are given to an episode of so many steps, in stored form.

    FieldError for one that has not one row a step, whose values cannot be stored, or that does not go
    with the fields which steps of these schemas have.
    """
    leaves = {to_path(name): value for name, value in values.items()}
    for path, value in leaves.items():
        _check_path(path, [*leaves], known)
        if isinstance(value, np.ndarray) and value.dtype.kind == "U":
            leaves[path] = value.astype(object)  # texts of any length are of one dtype: episodes share a shard
    found = normalise(unflatten(leaves), Schema(axes=dict.fromkeys(leaves, "step")))
    rows: dict[str, Array] = {}
    for name, value in found.data.items():
        rows[name] = np.asarray(value)
        _check_kind(found.specs[name], known)
        if len(rows[name]) != steps:
            raise FieldError(
                f"field {show(found.specs[name].path)!r} of episode {episode!r} has {len(rows[name])} rows, the "
                f"episode {steps} steps; give one row a step. Nothing was added to any"
            )
    if len(rows) < len(leaves):
        raise FieldError(f"episode {episode!r} is given a field without an array; nothing was added to any")
    return StoredFields(found.specs, rows)


def _check_path(path: Path, given: Sequence[Path], known: Sequence[ShardSchema]) -> None:
    have = {spec.path for one in known for spec in one.fields if spec.axis != "dict"}
    for other in [*given, *have]:
        shorter = min(len(path), len(other))
        if other != path and other[:shorter] == path[:shorter]:
            raise FieldError(f"field {show(path)!r} and field {show(other)!r} cannot be within one another")


def _check_kind(spec: FieldSpec, known: Sequence[ShardSchema]) -> None:
    """New rows must be of the kind of the rows that they replace: both are then one field."""
    own = [one.by_name[spec.name] for one in known if spec.name in one.by_name]
    for other in own:
        if other.axis not in NODES and (other.axis, other.dtype, other.shape) != (spec.axis, spec.dtype, spec.shape):
            raise FieldError(
                f"field {show(spec.path)!r} is {other.dtype}{list(other.shape)} {other.axis} in these episodes, and "
                f"{spec.dtype}{list(spec.shape)} {spec.axis} in the new rows; give it in that dtype and shape, or "
                "under another name"
            )


def alike(first: StoredFields, values: Mapping[Any, Any], steps: int) -> StoredFields | None:
    """The columns of another episode that are arrays of numbers as the first one's were, in stored form, without all
    the checks; None if they are not."""
    rows: dict[str, Array] = {}
    for name, value in values.items():
        known = first.rows.get(name) if isinstance(name, str) else None
        same = (
            type(value) is np.ndarray
            and known is not None
            and known.dtype == value.dtype
            and known.dtype.kind in "biufc"
        )
        if not same or known is None or len(value) != steps or value.shape[1:] != known.shape[1:]:
            return None
        rows[name] = value
    plain = len(rows) == len(first.rows) and all(first.specs[name].dtype == rows[name].dtype.str for name in rows)
    return StoredFields(first.specs, rows) if plain else None


class LateRows(NamedTuple):
    """Derived columns of one kind: a row of the late table for each range of steps, whose place is in these arrays; and
    the arrays by name, with the rows of all ranges end to end."""

    schema: str
    rows: pa.Table
    arrays: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(_BESIDE_BYTES * self.rows.num_rows) + sum(rows.nbytes for rows in self.arrays.values())

    def where(self, kept: Bools) -> LateRows:
        """The ranges of a mask."""
        if kept.all():
            return self
        steps = np.repeat(kept, numbers(self.rows["length"]))
        arrays = {name: rows[steps] for name, rows in self.arrays.items()}
        return LateRows(self.schema, self.rows.filter(arrow(kept)), arrays)


class Gathered(NamedTuple):
    """Derived columns of one kind: the numbers of the episodes that have them, and the arrays by name, with the rows of
    all of these end to end."""

    schema: str
    episodes: Ints
    arrays: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return _BESIDE_BYTES * len(self.episodes) + sum(rows.nbytes for rows in self.arrays.values())

    def of(self, snapshot: Snapshot, spans: Spans) -> LateRows:
        """The columns with rows of the late table, of the steps of all episodes."""
        return LateRows(self.schema, _rows(snapshot, spans.pick(self.episodes), self.schema), self.arrays)


def gathered(made: Iterable[tuple[int, StoredFields]]) -> Iterator[Gathered]:
    """The derived columns of episodes, each with its number, gathered by kind as they are made: few are in memory."""
    held: dict[tuple[FieldSpec, ...], list[tuple[int, StoredFields]]] = {}
    held_bytes: Counter[tuple[FieldSpec, ...]] = Counter()

    def give(kind: tuple[FieldSpec, ...]) -> Gathered:
        some, held_bytes[kind] = held.pop(kind), 0
        own = shard_schema({spec.name: spec for spec in kind}, Schema())
        arrays = {spec.name: np.concatenate([given.rows[spec.name] for _, given in some]) for spec in kind}
        return Gathered(own.dumps(), np.array([number for number, _ in some], np.int64), arrays)

    specs, kind = None, tuple[FieldSpec, ...]()
    for number, given in made:
        if given.specs is not specs:
            specs, kind = given.specs, tuple(given.specs[name] for name in sorted(given.specs))
        held.setdefault(kind, []).append((number, given))
        held_bytes[kind] += _BESIDE_BYTES + sum(rows.nbytes for rows in given.rows.values())
        if held_bytes[kind] >= SHARD_BYTES:
            yield give(kind)
    yield from (give(kind) for kind in [*held])


def write(storage: Storage, session: str, archive_layout: str, made: Iterable[LateRows]) -> tuple[pa.Table, pa.Table]:
    """Write derived columns as they come: equal kinds share a shard, and few are in memory. The rows of the late table,
    and of the chunk table for their shards."""
    shards = ShardWriter(storage, archive_layout)
    held: dict[str, list[LateRows]] = {}
    late: list[pa.Table] = []
    chunks: list[pa.Table] = []

    def fresh() -> str:
        return layout.shard_key(uuid.uuid4().hex[:8], session, 0, archive_layout)

    def write_shard(kind: str) -> None:
        some = held.pop(kind)
        arrays = {name: np.concatenate([one.arrays[name] for one in some]) for name in some[0].arrays}
        rows = tables.concat("late", [one.rows for one in some])
        members = shards.encode(kind, arrays)
        key, placed = under_fresh_name(fresh, lambda key: shards.write(key, members))
        chunks.append(tablefiles.chunk_rows(key, placed))
        length = numbers(rows["length"])
        late.append(
            tables.from_columns(
                "late",
                {
                    **{name: rows[name] for name in rows.column_names},
                    "shard": key,
                    "start": np.cumsum(length) - length,
                },
            )
        )

    try:
        for one in made:
            if not one.rows.num_rows:
                continue
            held.setdefault(one.schema, []).append(one)
            if sum(each.nbytes for each in held[one.schema]) >= SHARD_BYTES:
                write_shard(one.schema)
        for kind in [*held]:
            write_shard(kind)
    finally:
        shards.close()
    return tables.concat("late", late), tables.concat("chunks", chunks)


def _rows(snapshot: Snapshot, spans: Spans, schema: str) -> pa.Table:
    """A row of the late table for each range of steps, whose values lie end to end."""
    some = spans.hi > spans.lo
    row, lo, counts = spans.rows[some], spans.lo[some], (spans.hi - spans.lo)[some]
    found = snapshot.take(row, [*STREAM, "position"])
    return tables.from_columns(
        "late",
        {
            **{name: found[name] for name in STREAM},
            "position": found["position"].to_numpy() + lo,
            "length": counts,
            "start": np.cumsum(counts) - counts,
            "schema": schema,
            "fields": [[spec.name for spec in loads(schema).fields]] * len(row),
            "dropped": False,
        },
    )
