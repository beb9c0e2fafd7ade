"""Pure, no I/O: rows of the manifest's tables in Arrow, made and changed; and their declared relation to rows of the
segments table: by the address of a segment, a range of steps, or the id of an episode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Mask, Steps, arrow, ascending, numbers, places, row_codes, texts
from archive.base import CorruptManifestError, layout
from archive.tables.declared import ADDRESS, EPISODE, FOLLOWING, LIVE_STREAM, STREAM, STRETCH, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

NO_ENV = -1  # env_id of episodes that were added without one
WEIGHTS = ("length", "model_weights_uuids", "update_count_min", "update_count_max", "weights")
_MANY_PARTS = 16
LOCATING = (*STRETCH, "shard")  # columns of the segments table that find live steps
Address = tuple[str, int, int]
KEYS = tuple(dict.fromkeys(name for kind in FOLLOWING for name in TABLES[kind].of))  # of the segments table


@cache
def schema(kind: str) -> pa.Schema:
    """Arrow schema of one of the tables."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    extent = pa.struct([("field", pa.string()), ("start", pa.int64()), ("rows", pa.int64())])
    weights = pa.struct([("steps", pa.int64()), ("model_weights_uuid", pa.string()), ("update_count", pa.int64())])
    types = {
        "string": pa.string(),
        "dict": text,
        "strings": pa.list_(pa.string()),
        "extents": pa.list_(extent),
        "weights": pa.list_(weights),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "uint32": pa.uint32(),
        "bool": pa.bool_(),
        "double": pa.float64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    return pa.schema([(name, types[column.kind]) for name, column in TABLES[kind].columns.items()])


def from_columns(kind: str, columns: Mapping[str, Sequence[Any] | Any]) -> pa.Table:
    """A table of one kind; missing columns are null, scalars and single strings fill theirs."""
    import pyarrow as pa

    count = next(len(v) for v in columns.values() if hasattr(v, "__len__") and not isinstance(v, str))
    arrays = [_array(columns.get(field.name), count, field.type) for field in schema(kind)]
    return pa.table(arrays, schema=schema(kind))


def weights_of(row: Mapping[str, Any], lo: int, hi: int) -> list[dict[str, Any]]:
    """The weights of steps [lo, hi) of a segment, of which `row` has WEIGHTS, as ranges of steps; None where they are
    unknown."""
    if row["weights"] is None:
        uuids, count = row["model_weights_uuids"] or [None], row["update_count_min"]
        uuid = uuids[0] if len(uuids) == 1 else None
        update = count if count == row["update_count_max"] else None
        runs = [{"steps": row["length"], "model_weights_uuid": uuid, "update_count": update}]
    else:
        runs = row["weights"]
    out, at = [], 0
    for run in runs:
        steps = min(hi, at + run["steps"]) - max(lo, at)
        at += run["steps"]
        if steps > 0:
            out.append({**run, "steps": steps})
    return out


def extents(fields: Mapping[str, tuple[Any, Any]], count: int) -> pa.Array:
    """The column of extents of `count` segments, from the first row and the number of rows of each, by field."""
    import pyarrow as pa

    kind = schema("segments").field("extents").type
    if not fields:
        return pa.nulls(count, kind)
    starts, rows = (np.stack(columns, axis=1).reshape(-1) for columns in zip(*fields.values(), strict=True))
    names = pa.array(list(fields) * count, pa.string())
    entries = pa.StructArray.from_arrays([names, pa.array(starts), pa.array(rows)], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * len(fields), pa.int32()), entries).cast(kind)


def extents_of(column: pa.ChunkedArray) -> tuple[Ints, list[str], Ints, Ints, Ints]:
    """The entries of a column of extents: the segment of each, the fields' names and which of them it is of, its first
    row and its number of rows."""
    import pyarrow.compute as pc

    listed = column.combine_chunks()
    if listed.null_count == len(listed):
        none = np.zeros(0, np.int64)
        return none, [], none, none, none
    entries = listed.flatten()
    fields = entries.field("field").dictionary_encode()
    start, rows = (numbers(entries.field(name)).astype(np.int64) for name in ("start", "rows"))
    segment, field = numbers(pc.list_parent_indices(listed)), numbers(fields.indices)
    return segment, fields.dictionary.to_pylist(), field, start, rows


def _array(values: Any, count: int, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.cast(kind)
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


def set_column(table: pa.Table, name: str, value: Any) -> pa.Table:
    """The table with one column set to one value."""
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, _constant(value, table.num_rows, field.type))


def concat(kind: str, parts: Iterable[pa.Table]) -> pa.Table:
    """The rows of all parts, with one dictionary a column. Those of many parts are put together: each chunk of a column
    would have all of its texts, which the next call would go through for each."""
    import pyarrow as pa

    parts = list(parts)
    whole = pa.concat_tables(parts).unify_dictionaries() if parts else pa.Table.from_batches([], schema(kind))
    return whole.combine_chunks() if len(parts) > _MANY_PARTS else whole


def replaced(
    kind: str, table: pa.Table, gone: Sequence[int] | Ints, new: Sequence[tuple[int, Mapping[str, Any]]]
) -> pa.Table:
    """A table with new rows in place of some. gone: their numbers; new: each with the number whose place it takes."""
    import pyarrow as pa

    others = np.setdiff1d(np.arange(table.num_rows), gone)
    order = np.argsort(np.concatenate([others, [row for row, _ in new]]), kind="stable")
    columns = {name: [values[name] for _, values in new] for name in table.column_names}
    return concat(kind, [table.take(others), from_columns(kind, columns)]).take(pa.array(order))


def only_used(table: pa.Table) -> pa.Table:
    """Some rows of a table, without the dictionary entries of other rows, which would be written with them."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            column = table.column(at).cast(pa.string()).combine_chunks().dictionary_encode().cast(field.type)
            table = table.set_column(at, field, column)
    return table


# -- rows that follow segments -------------------------------------------------------------------------------


def of_segments(kind: str, rows: pa.Table, segments: pa.Table) -> Mask:
    """Mask of the rows of a table that follow one of these rows of the segments table, which have KEYS."""
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
    """Mask of the rows that go with rows of the segments table: they follow some that go, and none that stay."""
    return of_segments(kind, rows, gone) & ~of_segments(kind, rows, kept)


def among(column: Any, values: Any) -> Mask:
    """Mask of a column of text: it has one of these values, of a column or of a collection; a null is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    known = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else texts(sorted(values))
    found: Mask = numbers(pc.is_in(column.cast(pa.string()), value_set=known, skip_nulls=True))
    return found


def mention(table: pa.Table, values: Mapping[str, Set[str]]) -> bool:
    """True if a row has one of these values in a column of that name."""
    return any(among(table[name], values[name]).any() for name in values if name in table.column_names)


def distinct(column: pa.ChunkedArray) -> list[str]:
    """The values of a column of text, each once, in the order in which they come; without null."""
    import pyarrow as pa

    found: list[str] = column.cast(pa.string()).unique().drop_null().to_pylist()
    return found


def coded(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """The distinct values of a column of text, and the place of each row's value among them; -1 for none."""
    import pyarrow as pa

    joined = column.combine_chunks()
    joined = joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined
    if not pa.types.is_dictionary(joined.type):
        joined = joined.dictionary_encode()
    if len(joined) == 1:  # the most frequent case of many small reads
        value = joined[0].as_py()
        return ([] if value is None else [value]), np.full(1, -1 if value is None else 0)
    codes = numbers(joined.indices, -1).astype(np.int64)
    used, place = np.unique(codes, return_inverse=True)
    missing = int(len(used) > 0 and used[0] < 0)
    return joined.dictionary.take(arrow(used[missing:])).to_pylist(), place - missing


def objects_of(rows: pa.Table) -> set[str]:
    """The objects of the shards and chunk files that rows name, also those of other archives."""
    return {layout.object_of(key) for name in ("shard", "chunks") for key in distinct(rows[name])}


def stored_in(rows: pa.Table, objects: Collection[str]) -> Mask:
    """A mask of the rows whose shards lie in these objects."""
    return among(rows["shard"], {shard for shard in distinct(rows["shard"]) if layout.object_of(shard) in objects})


def addresses(table: pa.Table) -> list[Address]:
    """The address of each row."""
    return list(zip(*(table[name].to_pylist() for name in ADDRESS), strict=True))


def segments_of(said: pa.Table, segments: pa.Table) -> Ints:
    """The row of the segments table that each row of another table names; -1 without one. Both have ADDRESS."""
    named, there = row_codes(said.select(ADDRESS), segments.select(ADDRESS))
    found = places(named, there)
    found[numbers(said["sequence"]) < 0] = -1  # rows that a compaction cut have no labels
    return found


def overlaps(late: pa.Table, segments: pa.Table) -> Steps:
    """The steps that rows of two tables share, in order of the first; both have STRETCH. The stream is the row of the
    second; late: the row of the first, step: the first of its steps."""
    stream, of_row = row_codes(late.select(STREAM), segments.select(STREAM))
    position, length = (numbers(late[name]) for name in ("position", "length"))
    begins, counts = (numbers(segments[name]) for name in ("position", "length"))
    met = Steps(stream, position, position + length).meet(Steps(of_row, begins, begins + counts))
    before = begins[met.right]
    step = met.lo - position[met.left]
    return Steps(met.right, met.lo - before, met.hi - before, follows=("step",), late=met.left, step=step)


def news(kind: str, theirs: pa.Table, ours: pa.Table) -> pa.Table:
    """Rows of a table that are newer than all rows of another one with the same subject."""
    table = TABLES[kind]
    if not theirs.num_rows or not ours.num_rows:
        return theirs
    (_, known), (row, new) = (_entries(rows.select((*table.about, *table.told))) for rows in (ours, theirs))
    (about,) = row_codes(new.select(table.about))
    before, now = row_codes(known, new)
    there = np.isin(now, before)
    at, last = np.arange(len(row)), np.full(len(row), -1)
    np.maximum.at(last, about[there], at[there])
    return theirs.take(ascending(row[at > last[about]]))


def _entries(table: pa.Table) -> tuple[Ints, pa.Table]:
    """The rows of a table, those with a list of fields once for each, and the number of each row."""
    import pyarrow.compute as pc

    if "fields" not in table.column_names:
        return np.arange(table.num_rows), table
    listed = table["fields"].combine_chunks()
    row = pc.list_parent_indices(listed)
    return numbers(row).astype(np.int64), table.take(row).set_column(
        table.column_names.index("fields"), "fields", pc.list_flatten(listed)
    )


# -- live steps --------------------------------------------------------------------------------------------------------


def locate(live: pa.Table, segments: pa.Table) -> Steps:
    """The live steps of segments, in live order, with rows of the segments table as streams. run: the live range, in
    which they are at `position`. A live step that no segment has is an error."""
    out = locate_some(live, segments)
    bad, steps = lacking(live, out), _steps(live, out)
    if len(bad):
        row = live.slice(int(bad[0]), 1).to_pylist()[0]
        raise CorruptManifestError(
            f"the live set names steps {row['lo']} to {row['hi']} of env {row['stream_env']}, rank "
            f"{row['stream_rank']}, session {row['session']!r}, of which only {int(steps[bad[0]])} are in the segments "
            "table; run `archive verify`"
        )
    return out


def locate_some(live: pa.Table, segments: pa.Table) -> Steps:
    """The live steps that these segments have, likewise."""
    run_lo, run_hi, run_position = (numbers(live[n]) for n in ("lo", "hi", "position"))
    position, length = (numbers(segments[n]) for n in ("position", "length"))
    runs, rows = _written(live, segments)
    met = runs.placed.meet(rows)  # an episode without steps has an offset of its own
    row = rows["row"][met.right]
    lo = met.lo - position[row]
    hi = np.minimum(run_hi[met.left] - position[row], length[row])
    at = run_position[met.left] + met.lo - run_lo[met.left]
    return Steps(row, lo, np.maximum(hi, lo), follows=("position",), run=met.left, position=at)


def touched(live: pa.Table, segments: pa.Table) -> Mask:
    """Mask of the segments with a live step; live steps that are in no segment are ignored."""
    runs, rows = _written(live, segments)
    out = np.zeros(segments.num_rows, bool)
    out[rows["row"][runs.placed.union().meet(rows).right]] = True
    return out


def _written(live: pa.Table, segments: pa.Table) -> tuple[Steps, Steps]:
    """The streams' steps in live ranges, and those in segments: rows with steps, and episodes without; rows that only
    close an episode are left out."""
    run, of_row = row_codes(live.select(LIVE_STREAM), segments.select(STREAM))
    position, length = (numbers(segments[n]) for n in ("position", "length"))
    rows = np.flatnonzero((length > 0) | numbers(segments["shard"].is_valid()))
    held = Steps(of_row[rows], position[rows], (position + length)[rows], row=rows)
    return Steps(run, numbers(live["lo"]), numbers(live["hi"])), held.placed


def lacking(live: pa.Table, found: Steps) -> Ints:
    """The live ranges of which steps are missing, or were found twice."""
    absent = np.bincount(found["run"], minlength=live.num_rows) == 0
    return np.flatnonzero((_steps(live, found) != numbers(live["hi"]) - numbers(live["lo"])) | absent)


def _steps(live: pa.Table, found: Steps) -> Ints:
    """The number of steps of each live range that were found."""
    return np.bincount(found["run"], weights=found.length, minlength=live.num_rows).astype(np.int64)
