"""The checkpoint, the episodes and the rows that options of a command mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive.base import NotFoundError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Archive, Checkpoint
    from archive.checkpoint import Checkpoints

LATEST = "latest"  # stands for the newest whole one


def checkpoints_of(arc: Archive, run: str | None) -> Checkpoints:
    """Those of a run, or all. NotFoundError if there is no such run."""
    if run is None:
        return arc.checkpoints
    if run not in arc.head.runs:
        known = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NotFoundError(f"there is no run {run!r} at {arc.url}; its runs: {known}")
    return arc.checkpoints.of(run)


def named_checkpoint(arc: Archive, name: str | None, run: str | None = None, *, replay: bool = False) -> Checkpoint:
    """By name; without one, or as "latest", the newest whole one (with replay=True, that has its buffers).

    NotFoundError if there is none.
    """
    checkpoints = checkpoints_of(arc, run)
    found = checkpoints[name] if name and name != LATEST else checkpoints.newest(replay=replay)
    if found is None:
        owner = "" if run is None else f"of run {run!r} "
        raise NotFoundError(f"there is no checkpoint {owner}at {arc.url} yet; `archive log` shows what is there")
    return found


def meeting(condition: str | None, table: pa.Table) -> pa.Table:
    """The rows of any table that meet a condition over its columns. UsageError if it can't be applied to them."""
    if condition is None:
        return table
    import pyarrow as pa

    from archive.manifest import expressions

    plain = pa.table({n: table[n].cast("string") if _is_coded(table[n].type) else table[n] for n in table.column_names})
    expression, _ = expressions.parse(condition, table.column_names)
    try:
        return plain.filter(expression)
    except pa.ArrowException as e:
        raise UsageError(f"the condition {condition} cannot be applied to these columns: {e}") from e


def _is_coded(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind)) and bool(pa.types.is_string(kind.value_type))
