"""Pure, no I/O: what no row of the manifest's tables lacks, and between which bounds its numbers are: whoever reads a
table relies on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive.base import CorruptManifestError

if TYPE_CHECKING:
    import pyarrow as pa

MOST_SIBLINGS = 1 << 20  # of a prompt: each takes a byte while it is in flight
MOST = (1 << 48) - 1  # rows, steps, bytes, commits: more than there will be, and sums of them fit into 64 bits
_MOST_TEXT, _SMALL_TEXT = 1 << 10, 1 << 26  # bytes of the texts of a column, a row and in any case
_MANY_SHARE = ("schema", "provenance")  # long texts, which nobody reads row by row
_MOST_ROWS = 1 << 20  # of a row group, as Arrow writes them; this library writes fewer
_GIVEN = ("shard", "start", "schema", "chunks", "chunks_bytes", "chunks_crc32c")  # null in late rows that drop
_PLACED = ("start", "chunks", "chunks_bytes", "chunks_crc32c")  # null in rows of the segments table without a shard
_MAY_BE_NULL = {  # columns of the tables in which no other is
    "chunks": frozenset[str](),
    "live": frozenset[str](),
    "checkpoints": frozenset({"manifest"}),
    "branches": frozenset({"trained"}),
    "forgotten": frozenset[str](),
    "pruned": frozenset[str](),
    "labels": frozenset({"value", "by"}),
    "late": frozenset({"provenance", "by", "extents", *_GIVEN}),
    "tags": frozenset({"checkpoint", "run", "by"}),
    "ledger": frozenset({"siblings", "episode_id", "model_weights_uuid", "update_count", "reason", "cursor", "commit"}),
}
_NEVER_NULL = {  # of the segments table: more is known of its rows once they are committed
    False: frozenset({
        "episode_id", "session", "buffer", "rank", "env_id", "position", "sequence", "length", "schema",
        "episode_start",
    }),
    True: frozenset({"commit"}),
}  # fmt: skip
_COUNTS = (
    "rank", "position", "length", "start", "episode_start", "rows", "offset", "size", "lo", "hi", "stream_rank",
    "bytes", "chunks_bytes", "commit", "manifest", "target", "world_size", "round", "resumed_from", "trained",
)  # fmt: skip
_BOUNDS = dict.fromkeys(_COUNTS, (0, MOST)) | {
    "chunk": (-1, MOST),
    "sibling": (-1, MOST_SIBLINGS - 1),
    "siblings": (0, MOST_SIBLINGS),
    "sequence": (-(1 << 63), MOST),
    "start": (-MOST, MOST),  # who reads the rows says of which shard they are
}


def may_be_null(kind: str) -> frozenset[str] | None:
    """The columns of a table in which there may be nulls; None if that depends."""
    return _MAY_BE_NULL.get(kind)


def check_claims(metadata: Any, where: str) -> None:
    """CorruptManifestError before a Parquet file is read that says that it has more rows than any."""
    if metadata.num_rows > _MOST_ROWS * metadata.num_row_groups:
        raise _corrupt(where, f"says that it has {metadata.num_rows} rows in {metadata.num_row_groups} groups")


def check(table: pa.Table, kind: str, where: str, *, committed: bool) -> None:
    """CorruptManifestError if a row lacks what no row lacks, or has a number that cannot be."""
    if empty := _empty(table, kind, committed):
        raise _corrupt(where, f"has rows of the {kind} table without {', '.join(empty)}, which no row lacks")
    if beyond := _beyond(table):
        raise _corrupt(where, f"has rows of the {kind} table with a {beyond[0]} that cannot be")
    if swollen := [name for name in table.column_names if name not in _MANY_SHARE and _swells(table[name])]:
        raise _corrupt(where, f"has rows of the {kind} table that repeat too long a {swollen[0]}")


def _corrupt(where: str, what: str) -> CorruptManifestError:
    return CorruptManifestError(f"{where} {what}; run `archive verify`")


def _empty(table: pa.Table, kind: str, committed: bool) -> list[str]:
    """The columns that have nulls where there can be none."""
    import pyarrow.compute as pc

    if kind == "segments":
        never = _NEVER_NULL[False] | (_NEVER_NULL[True] if committed else frozenset())
    else:
        never = frozenset(table.column_names) - _MAY_BE_NULL[kind]
    empty = [name for name in table.column_names if name in never and table[name].null_count]
    if not empty and kind == "late" and "dropped" in table.column_names:
        empty = _nulls(table, _GIVEN, pc.invert(table["dropped"]))
    if not empty and kind == "segments" and "shard" in table.column_names:
        empty = _nulls(table, _PLACED if committed else _PLACED[:1], pc.is_valid(table["shard"]))
    return empty


def _nulls(table: pa.Table, names: tuple[str, ...], rows: Any) -> list[str]:
    """Those of these columns that have nulls in these rows."""
    there = [name for name in names if name in table.column_names and table[name].null_count]
    return [name for name in there if table[name].filter(rows).null_count]


def _beyond(table: pa.Table) -> list[str]:
    """The columns that have numbers that cannot be."""
    import pyarrow.compute as pc

    found = [name for name in table.column_names if name in _BOUNDS and not _within(table[name], *_BOUNDS[name])]
    if "extents" in table.column_names:
        extents = pc.list_flatten(table["extents"])
        parts = [pc.struct_field(extents, name) for name in ("field", "start", "rows")]
        sound = not any(part.null_count for part in parts) and all(_within(part, 0, MOST) for part in parts[1:])
        found += [] if sound else ["extents"]
    if {"lo", "hi"} <= set(table.column_names) and pc.any(pc.less(table["hi"], table["lo"])).as_py():
        found.append("hi")
    return found


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


def _within(column: Any, least: int, most: int) -> bool:
    import pyarrow.compute as pc

    bounds = pc.min_max(column).as_py()
    return bounds["min"] is None or (least <= bounds["min"] and bounds["max"] <= most)
