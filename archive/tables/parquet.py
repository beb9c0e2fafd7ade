"""Pure, no I/O: the Parquet bytes of tables. Rows are checked against their declarations, and the memory
that columns take is bounded before they are decoded.

A page has the number of its values, their encoding, and its size uncompressed. If that does not bound the memory of
the texts of a column (each may repeat a prefix of the one before), they are decoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from archive.base import CorruptManifestError
from archive.tables.declared import COUNT, LEAST_INT, MOST_INT, TABLES, TableColumn
from archive.tables.rows import from_columns, schema

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_ROWS = 1 << 20  # of a row group, as Arrow writes them; this library writes fewer
_SMALL_BYTES, _MOST_TIMES = 1 << 28, 1 << 10  # of a table in any case, and for each byte of its file
_PIECE_BYTES = 1 << 26
_BATCH_BYTES = 1 << 24  # of texts that are decoded before they are counted
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 12}
_DICTIONARY_PAGE = 2
_PLAIN, _PLAIN_DICTIONARY, _DELTA_LENGTH, _DELTA, _RLE_DICTIONARY = 0, 2, 6, 7, 8  # how texts are encoded
_TEXTS = (_PLAIN, _PLAIN_DICTIONARY, _DELTA_LENGTH, _DELTA, _RLE_DICTIONARY)
_ABOUT = (5, 7, 8)  # where a page's header tells of a data page, of a dictionary, or of a newer data page
_LARGE_BYTES = 256 * 1024
_MOST_TEXT, _SMALL_TEXT = 1 << 10, 1 << 26  # bytes of the texts of a column, a row and in any case


def load() -> None:
    """Import what making and reading tables takes: Arrow imports pandas, if it is there,
    with the first list it converts."""
    loads(dumps(from_columns("live", {"rank": [0], "buffer": [""]})), "live", where="")


def dumps(table: pa.Table) -> bytes:
    """Parquet bytes of a table: repeated strings as dictionaries, the rest delta-coded or plain, zstd. Columns that
    would be so small that a reader took them for a bomb are stored plainly."""
    import pyarrow as pa

    delta = {pa.int64(): "DELTA_BINARY_PACKED", pa.int32(): "DELTA_BINARY_PACKED", pa.string(): "DELTA_BYTE_ARRAY"}
    encodings = {f.name: delta[f.type] for f in table.schema if f.type in delta}
    how = {"compression": "zstd", "compression_level": 1, "column_encoding": encodings}
    data = _parquet(table, "model_weights_uuids.list.element", **how)
    return data if 2 * _most_bytes(table) <= _limit(data) else _parquet(table, compression="none")


def _most_bytes(table: pa.Table) -> int:
    """The bytes that a reader assumes the columns to need: it knows only the longest text of a list."""
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
        table,
        sink,
        use_dictionary=dictionaries,
        write_statistics=["commit", "update_count_min", "update_count_max"],
        row_group_size=1 << 18,
        store_schema=False,
        **how,
    )
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def loads(
    data: Any,
    kind: str,
    *,
    where: str,
    columns: Sequence[str] | None = None,
    committed: bool = True,
    groups: Sequence[int] | None = None,
) -> pa.Table:
    """A table from its Parquet bytes. Unknown columns are ignored; missing ones, forbidden nulls and impossible numbers
    are errors. committed: False for rows that a rank staged or journaled.  groups: of rows that are read; None: all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = schema(kind) if columns is None else pa.schema([schema(kind).field(c) for c in columns])
    with _readable(kind, where):
        dictionaries = [f.name for f in wanted if pa.types.is_dictionary(f.type)]
        # not read_table(): that imports pyarrow.dataset and with it pandas, a fifth of a second at the first use
        large = len(data) >= _LARGE_BYTES  # handing the columns of a small one to threads takes longer than reading it
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=dictionaries)
        table = _read(file, data, wanted.names, where, groups, use_threads=large)
        for name in set(wanted.names).difference(table.column_names):
            if TABLES[kind].columns[name].new:
                table = table.append_column(name, pa.nulls(table.num_rows, wanted.field(name).type))
        table = table.select(wanted.names).cast(wanted)
        table.validate(full=True)  # text that is not UTF-8, above all
    _check(table, kind, where, committed=committed)
    return table


def loads_in_parts(data: Any, kind: str, *, where: str) -> Iterator[pa.Table]:
    """The rows of a table as `loads` gives them, some at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _readable(kind, where):
        count = pq.read_metadata(pa.BufferReader(data)).num_row_groups
    for group in range(count):
        yield loads(data, kind, where=where, groups=[group])


@contextmanager
def _readable(kind: str, where: str) -> Iterator[None]:
    """CorruptManifestError for bytes that are no table of this kind."""
    import pyarrow as pa

    try:
        yield
    except CorruptManifestError:
        raise
    except (pa.ArrowException, LookupError, OSError, ValueError) as e:
        raise CorruptManifestError(f"{where} cannot be read as a {kind} table ({e}); run `archive verify`") from e


def _check(table: pa.Table, kind: str, where: str, *, committed: bool) -> None:
    """CorruptManifestError for a forbidden null, an impossible number, or values that contradict each other."""
    table_of = TABLES[kind]
    columns = [(name, table_of.columns[name], table[name]) for name in table.column_names]
    if empty := [name for name, column, _ in columns if _lacking(table, name, column, committed)]:
        raise _corrupt(where, kind, f"without {', '.join(empty)}, which every row must have")
    if beyond := [name for name, column, values in columns if not _within(column, values)]:
        raise _corrupt(where, kind, f"with an impossible {beyond[0]}")
    if swollen := [name for name, column, values in columns if not column.prose and _swells(values)]:
        raise _corrupt(where, kind, f"that repeat too long a {swollen[0]}")
    for rule in table_of.rules:
        if set(rule.columns) <= set(table.column_names) and rule.broken(table):
            raise _corrupt(where, kind, f"with {rule.wrong}")


def _corrupt(where: str, kind: str, what: str) -> CorruptManifestError:
    return CorruptManifestError(f"{where} has rows of the {kind} table {what}; run `archive verify`")


def _lacking(table: pa.Table, name: str, column: TableColumn, committed: bool) -> bool:
    """True if there are nulls where there can be none."""
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


def _within(column: TableColumn, values: pa.ChunkedArray) -> bool:
    """True if all numbers of a column are within its bounds."""
    import pyarrow.compute as pc

    if column.kind == "extents":
        extents = pc.list_flatten(values)
        parts = [pc.struct_field(extents, name) for name in ("field", "start", "rows")]
        return not any(part.null_count for part in parts) and all(_within(COUNT, part) for part in parts[1:])
    if column.least == LEAST_INT and column.most == MOST_INT:
        return True
    bounds = pc.min_max(values).as_py()
    return bounds["min"] is None or bool(column.least <= bounds["min"] and bounds["max"] <= column.most)


def _swells(column: Any) -> bool:
    """True if a column of repeated texts takes far more memory row by row."""
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


# -- memory ------------------------------------------------------------------------------------------------------------


def _limit(data: Any) -> int:
    """The bytes that columns of a file may take together."""
    return _SMALL_BYTES + _MOST_TIMES * len(data)


def _read(
    file: Any, data: Any, names: Sequence[str], where: str, groups: Sequence[int] | None, *, use_threads: bool
) -> pa.Table:
    """The columns of these names that a file has; CorruptManifestError before they take more memory than allowed."""
    import pyarrow as pa

    metadata, most = file.metadata, _limit(data)
    if metadata.num_rows > _MOST_ROWS * metadata.num_row_groups:
        told = f"{metadata.num_rows} rows in {metadata.num_row_groups} groups"
        raise CorruptManifestError(f"{where} says that it has {told}; run `archive verify`")
    some = [*range(metadata.num_row_groups)] if groups is None else [*groups]
    total, doubtful, pages = 0, 0, dict[str, int]()
    for name, sure, doubt, page in _columns(metadata, memoryview(data), names, some):
        total, doubtful = total + sure, doubtful + doubt
        if doubt:
            pages[name] = max(page, pages.get(name, 0))
        if total > most:
            raise _too_large(where, most)
    if total + doubtful <= most:
        return file.read_row_groups(some, columns=list(names), use_threads=use_threads)
    if listed := [name for name in pages if "." in name]:
        raise ValueError(f"texts of {listed[0]} are encoded by {_DELTA}")
    table = file.read_row_groups(some, columns=[name for name in names if name not in pages], use_threads=use_threads)
    for name, page in pages.items():
        parts, size = [], max(1, _BATCH_BYTES // page)
        for part in file.iter_batches(batch_size=size, row_groups=some, columns=[name], use_threads=False):
            parts.append(part)
            total += part.nbytes
            if total > most:
                raise _too_large(where, most)
        table = table.append_column(name, pa.Table.from_batches(parts).column(0))
    return table


def _too_large(where: str, most: int) -> CorruptManifestError:
    return CorruptManifestError(
        f"{where} holds columns that take more than {most} bytes of memory, which no table of its size does; "
        "run `archive verify`"
    )


def _columns(
    metadata: Any, data: memoryview, names: Sequence[str], groups: Sequence[int]
) -> Iterator[tuple[str, int, int, int]]:
    """The parts of these columns: path, certain bytes, most bytes of its texts, and the largest page with texts that
    may take more than its size."""
    for group in groups:
        row_group = metadata.row_group(group)
        for number in range(metadata.num_columns):
            column = row_group.column(number)
            if column.path_in_schema.partition(".")[0] in names:
                yield column.path_in_schema, *_sizes(column, _pages(column, data))


def _sizes(column: Any, pages: Iterator[tuple[int, int, int, int, memoryview]]) -> tuple[int, int, int]:
    """The certain bytes of a part's pages, the most bytes of its texts, and the largest page of doubtful texts."""
    width, listed = _WIDTHS.get(column.physical_type), "." in column.path_in_schema
    sure = doubtful = largest = entry = 0
    for kind, size, values, encoding, stored in pages:
        sure += size + (width or 4) * values
        if width is None and kind == _DICTIONARY_PAGE:
            entry = size
            if listed and entry * column.num_values > _PIECE_BYTES >= entry:
                entry = _longest(_inflated(stored, size, column.compression))
        elif width is None and encoding == _DELTA:
            doubtful += size * values
            largest = max(largest, size)
        elif width is None and listed and encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
            sure += entry * values
    return sure, doubtful, largest


def _inflated(stored: memoryview, size: int, codec: str) -> memoryview:
    import pyarrow as pa

    if codec == "UNCOMPRESSED":
        return stored
    return memoryview(pa.decompress(stored, decompressed_size=size, codec=codec.lower()))


def _longest(texts: memoryview) -> int:
    """Bytes of the longest text of a dictionary's page."""
    at = longest = 0
    while at < len(texts):
        size = int.from_bytes(texts[at : at + 4], "little")
        at, longest = at + 4 + size, max(longest, size)
    return longest


def _pages(column: Any, data: memoryview) -> Iterator[tuple[int, int, int, int, memoryview]]:
    """The pages of a part by their headers: kind, size (uncompressed), values, encoding, stored bytes. ValueError for
    an encoding that no table of an archive has."""
    if not column.num_values and not column.total_compressed_size:  # a group without rows has no pages
        return
    at = min(o for o in (column.dictionary_page_offset, column.data_page_offset) if o)
    stop = at + column.total_compressed_size
    while at < stop:
        header, at = _struct(data, at)
        kind, size, stored = _numbers(header, 1, 2, 3)
        values, encoding = _numbers(next((header[n] for n in _ABOUT if n in header), None), 1, 4 if 8 in header else 2)
        text = column.physical_type not in _WIDTHS and kind != _DICTIONARY_PAGE
        if text and encoding not in _TEXTS:
            raise ValueError(f"texts are encoded by {encoding}")
        if min(size, values, stored) < 0:
            raise ValueError("a page has a size below 0")
        yield kind, size, values, encoding, data[at : at + stored]
        at += stored


def _numbers(struct: Any, *fields: int) -> list[int]:
    """The numbers in these fields of a struct of a page's header; ValueError where it has none there."""
    values = [struct[n] for n in fields if isinstance(struct.get(n), int)] if isinstance(struct, dict) else []
    if len(values) < len(fields):
        raise ValueError("a page's header lacks a number")
    return values


def _struct(data: memoryview, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """The integers and structs of a struct in Thrift's compact protocol, by their numbers, and its end."""
    out: dict[int, Any] = {}
    number = 0
    while kind := data[at]:
        at += 1
        delta, kind = kind >> 4, kind & 15
        if not delta:
            delta, at = _varint(data, at)
            number, delta = 0, (delta >> 1) ^ -(delta & 1)
        number += delta
        if kind == 12 and depth < 8:
            out[number], at = _struct(data, at, depth + 1)
        elif kind in (4, 5, 6):
            value, at = _varint(data, at)
            out[number] = (value >> 1) ^ -(value & 1)
        elif kind == 8:
            size, at = _varint(data, at)
            at += size
        elif kind == 3:
            at += 1
        elif kind not in (1, 2):
            raise ValueError(f"a page's header has a field of type {kind}")
    return out, at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")
