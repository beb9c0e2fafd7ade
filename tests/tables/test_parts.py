"""A table is read a group of rows at a time, too: the same rows, and the same errors."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from archive import tables
from archive.base import CorruptManifestError


def chunks(count: int) -> pa.Table:
    """Rows of the chunk table, of two shards."""
    columns = {name: list(range(count)) for name in ("chunk", "rows", "offset", "size", "crc32c")}
    texts = {name: [f"{name}-{i % 2}" for i in range(count)] for name in ("shard", "member", "array")}
    return tables.from_columns("chunks", {**columns, **texts})


def stored(table: pa.Table, group: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=group, store_schema=False)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(("count", "group", "parts"), [(10, 3, [3, 3, 3, 1]), (4, 8, [4]), (0, 8, [])])
def test_the_parts_of_a_table_are_its_rows(count: int, group: int, parts: list[int]) -> None:
    data = stored(chunks(count), group)
    found = list(tables.loads_in_parts(data, "chunks", where="x"))
    assert [one.num_rows for one in found if one.num_rows] == parts
    assert tables.concat("chunks", found).to_pylist() == tables.loads(data, "chunks", where="x").to_pylist()


def test_what_is_no_table_is_told() -> None:
    with pytest.raises(CorruptManifestError, match="x cannot be read as a chunks table"):
        list(tables.loads_in_parts(b"no Parquet", "chunks", where="x"))
