"""Pure, no I/O: the sections that tell of an archive, a checkpoint, a plan, episodes or one episode. Reads no data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.views import bands, charts
from archive.views.markup import Markup, join, section, shown, table, tag

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10
MAX_RANKS = 64
MAX_RUNS = 50
_PLAIN = tuple("<>|=")  # what NumPy's own names of dtypes begin with
_SPREAD = (("update_count_max", "update count"), ("length", "length"))
_CHECKPOINT = ("name", "step", "run", "world_size", "whole", "replay_saved", "commit", "created_at")
_EPISODE = ("episode_id", "length", "return", "complete", "weights", "updates", "buffer")


def newest_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Markup:
    """The newest rows of the table of checkpoints."""
    rows = [[row[name] for name in _CHECKPOINT] for row in checkpoints[: -MAX_ROWS - 1 : -1]]
    return section("Newest checkpoints", _listed(_CHECKPOINT, rows, len(checkpoints)))


def told(title: str, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """A table of rows that are told as they are, all of them."""
    return section(title, _listed(list(rows[0]) if rows else [], [list(row.values()) for row in rows]))


def runs(about: Sequence[Mapping[str, Any]]) -> Markup:
    """What is known of each run; the newest at the top."""
    rows = [list(run.values()) for run in about[: -MAX_RUNS - 1 : -1]]
    names = [name.replace("_", " ") for name in about[-1]] if rows else []
    return section("Runs", _listed(names, rows, len(about)))


def _listed(columns: Sequence[str], rows: Sequence[Sequence[Any]], count: int | None = None) -> Markup:
    """A table of some of `count` rows; empty without any."""
    return table(columns, rows, more=0 if count is None else count - len(rows)) if rows else Markup("")


def by_run(found: pa.Table) -> dict[str, pa.Table]:
    """The episodes of each run, of several; the runs that wrote last, as many as there are colours."""
    import pyarrow as pa
    import pyarrow.compute as pc

    runs = found["run"].cast(pa.string())
    names = list(dict.fromkeys(reversed([n for n in runs.unique().to_pylist() if n is not None])))
    if len(names) < 2:
        return {}
    return {name: found.filter(pc.equal(runs, name)) for name in reversed(names[: len(charts.COLORS)])}


def checkpoint(per_rank: Mapping[int, int], buffers: Any, discarded: Any, progress: Any) -> Markup:
    """Live steps of each rank, the buffers, what was left out, and the run's counters."""
    ranks = {f"rank {rank}": steps for rank, steps in list(per_rank.items())[:MAX_RANKS]}
    left = len(per_rank) - len(ranks)
    held = [[name, b["steps"], b["episodes"], ", ".join(b["columns"])] for name, b in buffers.items()]
    return join(
        [
            section("Live steps", charts.bars(ranks), f"and {left} more ranks" if left else ""),
            section("Buffers", _listed(("buffer", "steps", "episodes", "columns"), held)),
            _losses("Left out", discarded),
            _as_json("Progress", progress),
        ]
    )


def _losses(title: str, counts: Mapping[str, Mapping[str, int]]) -> Markup:
    """Episodes and steps by reason."""
    rows = [[why, n.get("episodes"), n.get("steps")] for why, n in counts.items()]
    return section(title, _listed(("why", "episodes", "steps"), rows))


def _as_json(title: str, value: Any) -> Markup:
    """A JSON value as text, not too long; empty for None."""
    text = shown(json.dumps(value, default=str, ensure_ascii=False), 2000)
    return section(title, tag("code", text)) if value is not None else Markup("")


def episode(fields: Mapping[str, str], metadata: Any, attributes: Any) -> Markup:
    """The fields, metadata and attributes of an episode."""
    given = (_as_json("Metadata", metadata or None), _as_json("Attributes", attributes or None))
    return join([field_table(fields), *given])


def field_table(fields: Mapping[str, str]) -> Markup:
    """The fields, with their dtypes as NumPy says them."""
    rows = [[path, *kind(text)] for path, text in fields.items()]
    return section("Fields", _listed(("field", "dtype", "shape", "axis"), rows))


def kind(text: str) -> tuple[str, str, str]:
    """dtype, shape of a step and axis of what a schema says of a field, such as "<f4[3] step"."""
    rest, _, axis = text.rpartition(" ")
    dtype, _, shape = rest.rstrip("]").rpartition("[")
    try:
        name = np.dtype(dtype).name if dtype[:1] in _PLAIN else dtype
    except TypeError:
        name = dtype
    return name or "-", shape.replace(", ", " x ") or "-", axis


def plan(moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any, about: Mapping[str, Any]) -> Markup:
    """The picture of who gets what, the ranks' numbers, and what is dropped."""
    sources, targets = int(about["source ranks"]), int(about["target ranks"])
    drawn = charts.flow(moved, sources, targets) if max(sources, targets) <= MAX_RANKS else ""
    rows = [[rank, *counts] for rank, counts in enumerate(ranks)][:MAX_RANKS]
    columns = ("rank", "episodes", "steps", "bytes", "requests")[: len(rows[0]) if rows else 3]
    numbers = table(columns, rows, more=len(ranks) - len(rows))
    return join([section("Who gets what", drawn), section("Target ranks", numbers), _losses("Dropped", dropped)])


def totals(found: pa.Table) -> dict[str, Any]:
    """How many episodes and steps."""
    lengths, complete = found["length"].to_numpy(), found["complete"].to_numpy()
    return {
        "episodes": f"{len(lengths)}" + (f", {int((~complete).sum())} incomplete" if not complete.all() else ""),
        "steps": int(lengths.sum()),
        "buffers": sorted({str(b) for b in found["buffer"].unique().to_pylist()}),
    }


def overview(found: pa.Table, fields: Mapping[str, str], rows: Markup | str = "") -> Markup:
    """How returns (of several runs, each by itself), update counts and lengths are spread, fields and weights.

    rows: what shows the episodes one by one, with the spread of their numbers.
    """
    series, along = bands.series_of(by_run(found) or {"": found})
    drawn = [charts.histogram(found[name].to_pylist(), label) for name, label in _SPREAD] if not rows else []
    weights = list(weights_counts(found).items())
    return join([
        section("Returns", bands.chart(series, along, "return")),
        section("Update counts and lengths", join(drawn)),
        rows,
        field_table(fields),
        section("Weights, newest first", _listed(("weights", "episodes"), weights[: -MAX_ROWS - 1 : -1], len(weights))),
    ])  # fmt: skip


def weights_counts(found: pa.Table) -> dict[str, int]:
    """Weights -> episodes that they made, in order of first use."""
    lists = found["model_weights_uuids"].combine_chunks()
    known, codes = np.unique(np.asarray(lists.flatten().to_pylist(), object).astype(str), return_inverse=True)
    first = np.full(len(known), len(codes))
    np.minimum.at(first, codes, np.arange(len(codes)))
    counts = np.bincount(codes, minlength=len(known))
    return {str(known[i]): int(counts[i]) for i in np.argsort(first, kind="stable").tolist()}


def first_rows(found: pa.Table) -> Markup:
    """The first episodes of a table."""
    first = found.slice(0, MAX_ROWS).to_pylist()
    rows = [{**row, "weights": row["model_weights_uuids"], "updates": updates_of(row)} for row in first]
    return section("The first of them", _listed(_EPISODE, [[row[n] for n in _EPISODE] for row in rows], found.num_rows))


def updates_of(row: Mapping[str, Any]) -> str | None:
    """The update counts of an episode, of its row in the table."""
    low, high = row["update_count_min"], row["update_count_max"]
    return None if low is None else shown(low) if low == high else f"{low} to {high}"
