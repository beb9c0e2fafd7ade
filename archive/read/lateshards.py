"""Fields that come after their steps, into shards of their own: rows of each step's fields come in with the
steps; rows of the late table and of the chunk table go out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.base import FieldError, layout, show
from archive.fields import NODES, Array, FieldSpec, Path, Schema, ShardSchema, shard_schema, to_path, unflatten
from archive.fields.axes import normalise
from archive.index import Snapshot
from archive.log import FileRef, tablefiles
from archive.read.spans import Spans
from archive.shard import SHARD_BYTES, ShardWriter
from archive.tables import STREAM

if TYPE_CHECKING:
    import pyarrow as pa

_BESIDE_BYTES = 1024  # that an episode takes in memory beside its rows


class StoredFields(NamedTuple):
    """The late fields of one episode: what they are, and their rows in stored form, both by name."""

    specs: dict[str, FieldSpec]
    rows: dict[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


def checked(values: Mapping[Any, Any], steps: int, episode: str, known: Sequence[ShardSchema]) -> StoredFields:
    """The fields that an episode of so many steps is given, in stored form.

    FieldError for one that has other rows than the episode steps, whose values cannot be stored, or that does not go
    with the fields which steps of these schemas have.
    """
    leaves = {to_path(name): _plain(value) for name, value in values.items()}
    for path in leaves:
        _check_path(path, [*leaves], known)
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


def _plain(value: Any) -> Any:
    """Strings of any length are of one dtype, so that episodes share a shard."""
    return value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind == "U" else value


def _check_path(path: Path, given: Sequence[Path], known: Sequence[ShardSchema]) -> None:
    have = {spec.path for one in known for spec in one.fields if spec.axis != "dict"}
    for other in [*given, *have]:
        shorter = min(len(path), len(other))
        if other != path and other[:shorter] == path[:shorter]:
            raise FieldError(f"field {show(path)!r} and field {show(other)!r} cannot lie within one another")


def _check_kind(spec: FieldSpec, known: Sequence[ShardSchema]) -> None:
    """Rows that take the place of others are of their kind: what has the one and the other goes on as one field."""
    own = [one.by_name[spec.name] for one in known if spec.name in one.by_name]
    for other in own:
        if other.axis not in NODES and (other.axis, other.dtype, other.shape) != (spec.axis, spec.dtype, spec.shape):
            raise FieldError(
                f"field {show(spec.path)!r} is {other.dtype}{list(other.shape)} {other.axis} in these episodes, and "
                f"{spec.dtype}{list(spec.shape)} {spec.axis} in what is added; give it in that dtype and shape, or "
                "under another name"
            )


class LateShards:
    """Late fields of episodes on their way into shards: those that are alike share one, and few are in memory."""

    def __init__(self, snapshot: Snapshot, session: str, archive_layout: str) -> None:
        self._snapshot = snapshot
        self._storage = snapshot.storage
        self._session = session
        self._shards = ShardWriter(snapshot.storage, archive_layout)
        self._held: dict[tuple[FieldSpec, ...], list[tuple[Spans, StoredFields]]] = {}
        self._held_bytes: dict[tuple[FieldSpec, ...], int] = {}
        self._late: list[pa.Table] = []
        self._chunks: list[pa.Table] = []

    def add(self, spans: Spans, given: StoredFields) -> None:
        """The fields of one episode, of which these are the steps."""
        if not len(spans.rows) or not (spans.hi > spans.lo).any():
            return
        kind = tuple(given.specs[name] for name in sorted(given.specs))
        self._held.setdefault(kind, []).append((spans, given))
        self._held_bytes[kind] = self._held_bytes.get(kind, 0) + given.nbytes + _BESIDE_BYTES
        if self._held_bytes[kind] >= SHARD_BYTES:
            self._write(kind)

    def _write(self, kind: tuple[FieldSpec, ...]) -> None:
        held, self._held_bytes[kind] = self._held.pop(kind), 0
        arrays = {spec.name: np.concatenate([given.rows[spec.name] for _, given in held]) for spec in kind}
        own = shard_schema({spec.name: spec for spec in kind}, Schema())
        key = layout.shard_key(uuid.uuid4().hex[:8], self._session, 0, self._shards.archive_layout)
        placed = self._shards.write(key, self._shards.encode(own.dumps(), arrays))
        self._chunks.append(tablefiles.chunk_rows(key, placed))
        self._late.append(self._rows([spans for spans, _ in held], key, own))

    def _rows(self, held: Sequence[Spans], key: str, own: ShardSchema) -> pa.Table:
        """A row of the late table for each run of steps that lies in the shard."""
        row, lo, hi = (np.concatenate([getattr(spans, name) for spans in held]) for name in ("rows", "lo", "hi"))
        some = hi > lo
        row, lo, counts = row[some], lo[some], (hi - lo)[some]
        found = self._snapshot.take(row, [*STREAM, "position"])
        names = [spec.name for spec in own.fields]
        stream = {name: found[name] for name in STREAM}
        return tables.from_columns("late", {
            **stream, "position": found["position"].to_numpy() + lo, "length": counts, "shard": key,
            "start": np.cumsum(counts) - counts, "schema": own.dumps(), "fields": [names] * len(row), "dropped": False,
        })  # fmt: skip

    def close(self) -> tuple[pa.Table, FileRef | None]:
        """Write what is held; the rows of the late table, and the file with the chunk rows of their shards."""
        for kind in [*self._held]:
            self._write(kind)
        self._shards.close()
        if not self._chunks:
            return tables.schema("late").empty_table(), None
        chunks = tablefiles.write(self._storage, self._session, "chunks", tables.concat("chunks", self._chunks))
        return tablefiles.with_chunks(tables.concat("late", self._late), chunks), chunks
