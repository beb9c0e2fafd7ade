"""Pure, no I/O: the manifest's tables as Arrow has them, made and changed, and their Parquet bytes.
archive/FORMAT.md says what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints
from archive.base import CorruptManifestError
from archive.tables import parquet
from archive.tables.declared import COUNT, TABLES, Column

if TYPE_CHECKING:
    import pyarrow as pa

NO_ENV = -1  # env_id of episodes that were added without one
WEIGHTS = ("length", "model_weights_uuids", "update_count_min", "update_count_max", "weights")


@cache
def schema(kind: str) -> pa.Schema:
    """Arrow schema of one of the tables."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    extent = pa.struct([("field", pa.string()), ("start", pa.int64()), ("rows", pa.int64())])
    weights = pa.struct([("steps", pa.int64()), ("model_weights_uuid", pa.string()), ("update_count", pa.int64())])
    types = {
        "string": pa.string(), "dict": text, "strings": pa.list_(pa.string()), "extents": pa.list_(extent),
        "weights": pa.list_(weights),
        "int32": pa.int32(), "int64": pa.int64(), "uint32": pa.uint32(), "bool": pa.bool_(), "double": pa.float64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }  # fmt: skip
    return pa.schema([(name, types[column.kind]) for name, column in TABLES[kind].columns.items()])


def from_columns(kind: str, columns: Mapping[str, Sequence[Any] | Any]) -> pa.Table:
    """A table of one kind; missing columns are null, scalars and single strings fill theirs."""
    import pyarrow as pa

    count = next(len(v) for v in columns.values() if hasattr(v, "__len__") and not isinstance(v, str))
    arrays = [_array(columns.get(field.name), count, field.type) for field in schema(kind)]
    return pa.table(arrays, schema=schema(kind))


def weights_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The weights of a segment, of which `row` has WEIGHTS, as runs of steps; None for what it does not tell apart."""
    if row["weights"] is not None:
        found: list[dict[str, Any]] = row["weights"]
        return found
    uuids, count = row["model_weights_uuids"] or [None], row["update_count_min"]
    uuid = uuids[0] if len(uuids) == 1 else None
    update = count if count == row["update_count_max"] else None
    return [{"steps": row["length"], "model_weights_uuid": uuid, "update_count": update}]


def cut_weights(runs: Sequence[Mapping[str, Any]], lo: int, hi: int) -> list[dict[str, Any]]:
    """The weights of steps [lo, hi), from those of all steps of a segment."""
    out, at = [], 0
    for run in runs:
        steps = min(hi, at + run["steps"]) - max(lo, at)
        at += run["steps"]
        if steps > 0:
            out.append({**run, "steps": steps})
    return out


def extents(fields: Mapping[str, tuple[Any, Any]], count: int) -> pa.Array:
    """The column of extents of so many segments, from the first row and the number of rows of each, by field."""
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


def replaced(
    kind: str, table: pa.Table, gone: Sequence[int] | Ints, new: Sequence[tuple[int, Mapping[str, Any]]]
) -> pa.Table:
    """A table with new rows in the places of some. gone: their numbers; new: the number in whose place each comes."""
    import pyarrow as pa

    others = np.setdiff1d(np.arange(table.num_rows), gone)
    order = np.argsort(np.concatenate([others, [row for row, _ in new]]), kind="stable")
    columns = {name: [values[name] for _, values in new] for name in table.column_names}
    return concat(kind, [table.take(others), from_columns(kind, columns)]).take(pa.array(order))


def only_used(table: pa.Table) -> pa.Table:
    """Some rows of a table, without what other rows had in their dictionaries: it would be written with them."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(at).cast(pa.string()).combine_chunks().dictionary_encode().cast(field.type)
            table = table.set_column(at, field, column)
    return table


def dumps(table: pa.Table) -> bytes:
    """Parquet bytes of a table; repeated strings as dictionaries, the rest delta-coded or plain, zstd. What would be so
    small that a reader took it for a bomb is stored plainly."""
    how = {"compression": "zstd", "compression_level": 1, "column_encoding": _encodings_of(table)}
    data = _parquet(table, "model_weights_uuids.list.element", **how)
    return data if 2 * _most_bytes(table) <= parquet.most_bytes(data) else _parquet(table, compression="none")


def _most_bytes(table: pa.Table) -> int:
    """What a reader takes the columns to need: it knows the longest text of a list alone."""
    import pyarrow as pa
    import pyarrow.compute as pc

    listed = [pc.list_flatten(table[f.name]) for f in table.schema if f.type == pa.list_(pa.string())]
    longest = ((len(texts), pc.max(pc.binary_length(texts)).as_py() or 0) for texts in listed)
    return int(table.nbytes + sum(count * size for count, size in longest))


def _parquet(table: pa.Table, *listed: str, **how: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    dictionaries = [*(f.name for f in table.schema if pa.types.is_dictionary(f.type)), *listed]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, use_dictionary=dictionaries,
        write_statistics=["commit", "update_count_min", "update_count_max"], row_group_size=1 << 18, store_schema=False,
        **how,
    )  # fmt: skip
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _encodings_of(table: pa.Table) -> dict[str, str]:
    return {f.name: _ENCODINGS[f.type] for f in table.schema if f.type in _encodings()}


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
        table = parquet.read(file, data, wanted.names, where, use_threads=large)
        for name in set(wanted.names).difference(table.column_names):
            if TABLES[kind].columns[name].new:
                table = table.append_column(name, pa.nulls(table.num_rows, wanted.field(name).type))
        table = table.select(wanted.names).cast(wanted)
        table.validate(full=True)  # text that is not UTF-8, above all
    except CorruptManifestError:
        raise
    except (pa.ArrowException, LookupError, OSError, ValueError) as e:
        raise CorruptManifestError(f"{where} cannot be read as a {kind} table ({e}); run `archive verify`") from e
    _check(table, kind, where, committed=committed)
    return table


_MOST_TEXT, _SMALL_TEXT = 1 << 10, 1 << 26  # bytes of the texts of a column, a row and in any case


def _check(table: pa.Table, kind: str, where: str, *, committed: bool) -> None:
    """CorruptManifestError if a row lacks what no row lacks, has a number that cannot be, or contradicts another."""
    table_of = TABLES[kind]
    columns = [(name, table_of.columns[name], table[name]) for name in table.column_names]
    if empty := [name for name, column, _ in columns if _lacking(table, name, column, committed)]:
        raise _corrupt(where, kind, f"without {', '.join(empty)}, which no row lacks")
    if beyond := [name for name, column, values in columns if not _within(column, values)]:
        raise _corrupt(where, kind, f"with a {beyond[0]} that cannot be")
    if swollen := [name for name, column, values in columns if not column.prose and _swells(values)]:
        raise _corrupt(where, kind, f"that repeat too long a {swollen[0]}")
    for rule in table_of.rules:
        if set(rule.columns) <= set(table.column_names) and rule.broken(table):
            raise _corrupt(where, kind, f"with {rule.wrong}")


def _corrupt(where: str, kind: str, what: str) -> CorruptManifestError:
    return CorruptManifestError(f"{where} has rows of the {kind} table {what}; run `archive verify`")


def _lacking(table: pa.Table, name: str, column: Column, committed: bool) -> bool:
    """Whether there are nulls where there can be none."""
    import pyarrow.compute as pc

    if column.nulls or not table[name].null_count or (column.late and not committed):
        return False
    rows = None
    if column.given:
        rows = pc.is_valid(table[column.given]) if column.given in table.column_names else False
    elif column.dropped:
        rows = pc.invert(table[column.dropped]) if column.dropped in table.column_names else False
    if rows is False:
        return False
    return bool((table[name] if rows is None else table[name].filter(rows)).null_count)


def _within(column: Column, values: pa.ChunkedArray) -> bool:
    """Whether all numbers of a column are within its bounds."""
    import pyarrow.compute as pc

    if column.kind == "extents":
        extents = pc.list_flatten(values)
        parts = [pc.struct_field(extents, name) for name in ("field", "start", "rows")]
        return not any(part.null_count for part in parts) and all(_within(COUNT, part) for part in parts[1:])
    if not column.bounded:
        return True
    bounds = pc.min_max(values).as_py()
    return bounds["min"] is None or bool(column.least <= bounds["min"] and bounds["max"] <= column.most)


def _swells(column: Any) -> bool:
    """Whether the texts of a column of repeated ones take far more memory row by row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return False
    size = 0
    for part in column.chunks:
        lengths = pc.binary_length(part.dictionary)
        if (pc.max(lengths).as_py() or 0) > _MOST_TEXT:  # mostly none is
            size += pc.sum(pc.cast(lengths.take(part.indices), pa.int64())).as_py() or 0
    return size > _SMALL_TEXT + _MOST_TEXT * len(column)
