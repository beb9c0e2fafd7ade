"""Pure, no I/O: the manifest's tables, field by field, and their Parquet bytes.
archive/FORMAT.md says what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from archive.base import CorruptManifestError
from archive.manifest import tablechecks

if TYPE_CHECKING:
    import pyarrow as pa

NO_ENV = -1  # env_id of episodes that were added without one

_SEGMENTS = {
    "episode_id": "string",
    "session": "dict",
    "buffer": "dict",
    "rank": "int32",
    "env_id": "int64",
    "position": "int64",
    "sequence": "int64",
    "predecessor": "string",
    "replaces": "bool",
    "shard": "dict",
    "start": "int64",
    "length": "int64",
    "extents": "extents",
    "schema": "dict",
    "model_weights_uuids": "strings",
    "update_count_min": "int64",
    "update_count_max": "int64",
    "first": "bool",
    "last": "bool",
    "terminated": "bool",
    "truncated": "bool",
    "reason": "dict",
    "episode_start": "int64",
    "return": "double",
    "metadata": "string",
    "created_at": "timestamp",
    "commit": "int64",
    "chunks": "dict",
    "chunks_bytes": "int64",
    "chunks_crc32c": "uint32",
}
_CHUNKS = {
    "shard": "dict",
    "member": "string",
    "array": "dict",
    "chunk": "int32",
    "rows": "int64",
    "offset": "int64",
    "size": "int64",
    "crc32c": "uint32",
}
_LIVE = {
    "rank": "int32",
    "buffer": "dict",
    "env_id": "int64",
    "position": "int64",
    "session": "dict",
    "stream_rank": "int32",
    "stream_env": "int64",
    "lo": "int64",
    "hi": "int64",
}
_CHECKPOINTS = {
    "commit": "int64",
    "run": "dict",
    "session": "dict",
    "name": "string",
    "step": "int64",
    "world_size": "int32",
    "whole": "bool",
    "replay_saved": "bool",
    "metrics": "string",
    "created_at": "timestamp",
    "manifest": "int64",
}
_BRANCHES = {
    "session": "dict",
    "run": "dict",
    "parent": "dict",
    "parent_run": "dict",
    "rank": "int32",
    "sequence": "int64",
    "resumed_from": "int64",
    "commit": "int64",
    "trained": "int64",
}
_FORGOTTEN = {
    "key": "string",
    "bytes": "int64",
    "commit": "int64",
}
_PRUNED = {
    "key": "string",
    "bytes": "int64",
    "reason": "dict",
    "commit": "int64",
}
_LABELS = {
    "episode_id": "string",
    "session": "dict",
    "rank": "int32",
    "sequence": "int64",
    "key": "dict",
    "value": "string",
    "by": "dict",
    "created_at": "timestamp",
    "commit": "int64",
}
_LATE = {
    "session": "dict",
    "buffer": "dict",
    "rank": "int32",
    "env_id": "int64",
    "position": "int64",
    "length": "int64",
    "shard": "dict",
    "start": "int64",
    "extents": "extents",
    "schema": "dict",
    "fields": "strings",
    "provenance": "dict",
    "by": "dict",
    "dropped": "bool",
    "created_at": "timestamp",
    "commit": "int64",
    "chunks": "dict",
    "chunks_bytes": "int64",
    "chunks_crc32c": "uint32",
}
_TAGS = {
    "name": "string",
    "target": "int64",
    "checkpoint": "string",
    "run": "string",
    "by": "string",
    "created_at": "timestamp",
    "commit": "int64",
}
_LEDGER = {
    "ledger": "dict",
    "key": "string",
    "round": "int64",
    "sibling": "int64",
    "state": "dict",
    "siblings": "int64",
    "episode_id": "string",
    "model_weights_uuid": "dict",
    "update_count": "int64",
    "reason": "dict",
    "cursor": "string",
    "session": "dict",
    "rank": "int32",
    "sequence": "int64",
    "created_at": "timestamp",
    "commit": "int64",
}
_TABLES = {
    "segments": _SEGMENTS,
    "chunks": _CHUNKS,
    "live": _LIVE,
    "checkpoints": _CHECKPOINTS,
    "branches": _BRANCHES,
    "forgotten": _FORGOTTEN,
    "pruned": _PRUNED,
    "labels": _LABELS,
    "late": _LATE,
    "tags": _TAGS,
    "ledger": _LEDGER,
}
_MAY_LACK = {  # columns that files of earlier versions do not have: null there
    "checkpoints": frozenset({"manifest"}),
    "branches": frozenset({"trained"}),
}


@cache
def schema(kind: str) -> pa.Schema:
    """Arrow schema of one of the tables."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    extent = pa.struct([("field", pa.string()), ("start", pa.int64()), ("rows", pa.int64())])
    types = {
        "string": pa.string(), "dict": text, "strings": pa.list_(pa.string()), "extents": pa.list_(extent),
        "int32": pa.int32(), "int64": pa.int64(), "uint32": pa.uint32(), "bool": pa.bool_(), "double": pa.float64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }  # fmt: skip
    return pa.schema([(name, types[t]) for name, t in _TABLES[kind].items()])


def from_columns(kind: str, columns: Mapping[str, Sequence[Any] | Any]) -> pa.Table:
    """A table of one kind; missing columns are null, scalars and single strings fill theirs."""
    import pyarrow as pa

    count = next(len(v) for v in columns.values() if hasattr(v, "__len__") and not isinstance(v, str))
    arrays = [_array(columns.get(field.name), count, field.type) for field in schema(kind)]
    return pa.table(arrays, schema=schema(kind))


def extents(fields: Mapping[str, tuple[Any, Any]], count: int) -> pa.Array:
    """The column of extents of so many segments, from the first row and the number of rows of each, by field."""
    import numpy as np
    import pyarrow as pa

    kind = schema("segments").field("extents").type
    if not fields:
        return pa.nulls(count, kind)
    starts, rows = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*fields.values(), strict=True))
    names = pa.array(list(fields) * count, pa.string())
    entries = pa.StructArray.from_arrays([names, pa.array(starts), pa.array(rows)], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * len(fields), pa.int32()), entries).cast(kind)


def _array(values: Any, count: int, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.cast(kind)
    if values is None:
        return pa.nulls(count, kind)
    if isinstance(values, str) or not hasattr(values, "__len__"):
        return _constant(values, count, kind)
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def _constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if value is None:  # not as a dictionary's entry, which could not be unified
        return pa.nulls(count, kind)
    if pa.types.is_dictionary(kind):
        indices = pa.array([0], pa.int32()).take(pa.repeat(pa.scalar(0), count)) if count else pa.array([], pa.int32())
        return pa.DictionaryArray.from_arrays(indices, pa.array([value], pa.string()))
    return pa.repeat(pa.scalar(value, kind), count)


def load() -> None:
    """Import what making and reading tables takes: Arrow imports pandas, if it is there,
    with the first list it converts."""
    loads(dumps(from_columns("live", {"rank": [0], "buffer": [""]})), "live", where="")


def set_column(table: pa.Table, name: str, value: Any) -> pa.Table:
    """The table with one column set to one value."""
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, _constant(value, table.num_rows, field.type))


def concat(kind: str, parts: Iterable[pa.Table]) -> pa.Table:
    import pyarrow as pa

    parts = list(parts)
    return pa.concat_tables(parts).unify_dictionaries() if parts else schema(kind).empty_table()


def only_used(table: pa.Table) -> pa.Table:
    """Some rows of a table, without what other rows had in their dictionaries: it would be written with them."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(at).cast(pa.string()).combine_chunks().dictionary_encode().cast(field.type)
            table = table.set_column(at, field, column)
    return table


def dumps(table: pa.Table) -> bytes:
    """Parquet bytes of a table; repeated strings as dictionaries, the rest delta-coded or plain, zstd."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dictionaries = [f.name for f in table.schema if pa.types.is_dictionary(f.type)]
    sink = pa.BufferOutputStream()
    encodings = {f.name: _ENCODINGS[f.type] for f in table.schema if f.type in _encodings()}
    pq.write_table(
        table, sink, compression="zstd", compression_level=1,
        use_dictionary=[*dictionaries, "model_weights_uuids.list.element"], column_encoding=encodings,
        write_statistics=["commit", "update_count_min", "update_count_max"], row_group_size=1 << 18, store_schema=False,
    )  # fmt: skip
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


_ENCODINGS: dict[Any, str] = {}


def _encodings() -> dict[Any, str]:
    import pyarrow as pa

    if not _ENCODINGS:
        _ENCODINGS.update(
            {pa.int64(): "DELTA_BINARY_PACKED", pa.int32(): "DELTA_BINARY_PACKED", pa.string(): "DELTA_BYTE_ARRAY"}
        )
    return _ENCODINGS


_LARGE_BYTES = 256 * 1024


def loads(
    data: Any, kind: str, *, where: str, columns: Sequence[str] | None = None, committed: bool = True
) -> pa.Table:
    """A table from its Parquet bytes; unknown extra columns are passed over, missing ones are an error, and so are
    nulls where there can be none, and numbers that cannot be. committed: else what a rank staged or journaled."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = schema(kind) if columns is None else pa.schema([schema(kind).field(c) for c in columns])
    try:
        dictionaries = [f.name for f in wanted if pa.types.is_dictionary(f.type)]
        # not read_table(): that imports pyarrow.dataset and with it pandas, a fifth of a second at the first use
        large = len(data) >= _LARGE_BYTES  # handing the columns of a small one to threads takes longer than reading it
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=dictionaries)
        tablechecks.check_claims(file.metadata, where)
        table = file.read(columns=wanted.names, use_threads=large)
        for name in _MAY_LACK.get(kind, frozenset()).intersection(wanted.names).difference(table.column_names):
            table = table.append_column(name, pa.nulls(table.num_rows, wanted.field(name).type))
        table = table.select(wanted.names).cast(wanted)
        table.validate(full=True)  # text that is not UTF-8, above all
    except (pa.ArrowException, KeyError, OSError, UnicodeDecodeError) as e:
        raise CorruptManifestError(f"{where} cannot be read as a {kind} table ({e}); run `archive verify`") from e
    tablechecks.check(table, kind, where, committed=committed)
    return table
