"""Pure, no I/O: how the rows of tables hang on those of the segments table, by what is declared of them: by the address
of a segment, by a stretch of steps, or by the id of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Mask
from archive.steps import Steps, places, row_codes
from archive.tables.declared import ADDRESS, EPISODE, FOLLOWING, STREAM, STRETCH, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

Address = tuple[str, int, int]
KEYS = tuple(dict.fromkeys(name for kind in FOLLOWING for name in TABLES[kind].of))  # of the segments table


def of_segments(kind: str, rows: pa.Table, segments: pa.Table) -> Mask:
    """A mask of the rows of a table that are of one of these rows of the segments table, which have KEYS."""
    of = TABLES[kind].of
    if of == ADDRESS:
        return segments_of(rows, segments) >= 0
    if of == STRETCH:
        out = np.zeros(rows.num_rows, bool)
        out[overlaps(rows, segments)["late"]] = True
        return out
    assert of == EPISODE
    return among(rows["episode_id"], segments["episode_id"])


def follow(kind: str, rows: pa.Table, gone: pa.Table, kept: pa.Table) -> Mask:
    """A mask of the rows that go with rows of the segments table: they are of some that go, and of none that stay."""
    return of_segments(kind, rows, gone) & ~of_segments(kind, rows, kept)


def among(column: Any, values: Any) -> Mask:
    """A mask of a column of text: it has one of these values, of a column or of a collection; a null is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    known = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(sorted(values), pa.string())
    found: Mask = np.asarray(pc.is_in(column.cast(pa.string()), value_set=known, skip_nulls=True), bool)
    return found


def mention(table: pa.Table, values: Mapping[str, Set[str]]) -> bool:
    """True if a row has one of these values in the column of that name, if the table has it."""
    return any(among(table[name], values[name]).any() for name in values if name in table.column_names)


def distinct(column: pa.ChunkedArray) -> list[str]:
    """The values of a column of text, each once, in the order in which they come; without null."""
    import pyarrow as pa

    found: list[str] = column.cast(pa.string()).unique().drop_null().to_pylist()
    return found


def coded(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The distinct values of a column of text, and the place of each row's among them."""
    import pyarrow as pa

    found = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return found.dictionary.to_pylist(), found.indices.to_numpy().astype(np.int64)


def objects_of(rows: pa.Table) -> set[str]:
    """The shards and chunk files that rows name, also those of other archives."""
    return {key for name in ("shard", "chunks") for key in distinct(rows[name])}


def addresses(table: pa.Table) -> list[Address]:
    """The address of each row."""
    return list(zip(*(table[name].to_pylist() for name in ADDRESS), strict=True))


def segments_of(said: pa.Table, segments: pa.Table) -> Ints:
    """The row of the segments table that each row of another one names; -1 where there is none. Both have ADDRESS."""
    named, there = row_codes(said.select(ADDRESS), segments.select(ADDRESS))
    found = places(named, there)
    found[said["sequence"].to_numpy() < 0] = -1  # of pieces that a compaction cut nothing is said
    return found


def overlaps(late: pa.Table, segments: pa.Table) -> Steps:
    """Where the steps of rows of one table are in rows of the other, in order of the first; both have STRETCH. The
    stream is the row of the other one; late: the row of the first, step: which step of it comes first."""
    stream, of_row = row_codes(late.select(STREAM), segments.select(STREAM))
    position, length = (late[name].to_numpy() for name in ("position", "length"))
    begins, counts = (segments[name].to_numpy() for name in ("position", "length"))
    met = Steps(stream, position, position + length).meet(Steps(of_row, begins, begins + counts))
    before = begins[met.right]
    step = met.lo - position[met.left]
    return Steps(met.right, met.lo - before, met.hi - before, follows=("step",), late=met.left, step=step)


def news(kind: str, theirs: pa.Table, ours: pa.Table) -> pa.Table:
    """Rows of a table that came after all that another one has of it, of what they are about."""
    table = TABLES[kind]
    if not theirs.num_rows or not ours.num_rows:
        return theirs
    (_, known), (row, new) = (_entries(rows.select((*table.about, *table.told))) for rows in (ours, theirs))
    (about,) = row_codes(new.select(table.about))
    before, now = row_codes(known, new)
    there = np.isin(now, before)
    at, last = np.arange(len(row)), np.full(len(row), -1)
    np.maximum.at(last, about[there], at[there])
    return theirs.take(np.unique(row[at > last[about]]))


def _entries(table: pa.Table) -> tuple[Ints, pa.Table]:
    """The rows of a table, those with a list of fields once for each, and the number of the row of each."""
    import pyarrow.compute as pc

    if "fields" not in table.column_names:
        return np.arange(table.num_rows), table
    listed = table["fields"].combine_chunks()
    row = pc.list_parent_indices(listed)
    return row.to_numpy().astype(np.int64), table.take(row).set_column(
        table.column_names.index("fields"), "fields", pc.list_flatten(listed)
    )
