"""Pure, no I/O: what a notebook shows for an archive, checkpoint, plan, episodes or one episode. No data is read for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.views import bands, charts
from archive.views.markup import Markup, facts, join, section, shown, table, tag

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 10
MAX_RANKS = 64
MAX_RUNS = 50
STYLE = (
    ".trajectories{font:13px/1.5 system-ui,sans-serif}.trajectories h4{margin:.8em 0 .2em}"
    ".trajectories table{border-collapse:collapse;font-size:12px}.trajectories th{text-align:left;padding:1px 10px 1px 0;"
    "font-weight:600}.trajectories td{text-align:left;padding:1px 10px 1px 0}.trajectories td.number{text-align:right}"
    ".trajectories figure{display:inline-block;margin:0 18px 0 0}.trajectories figcaption{font-size:11px;opacity:.7}"
    ".trajectories .keys{margin-right:1em}.trajectories .key{margin-right:1em}.trajectories .key i{display:inline-block;"
    "width:9px;height:9px;margin-right:4px}"
    ".trajectories code{font-size:12px;white-space:pre-wrap}.trajectories svg{overflow:visible}.trajectories .more{opacity:.7}"
)
_PLAIN = tuple("<>|=")  # what NumPy's own names of dtypes begin with
_SPREAD = (("update_count_max", "update count"), ("length", "length"))
_SHOWN = ("episode_id", "length", "return", "complete", "weights", "updates", "buffer")


def framed(title: Any, *content: Any) -> Markup:
    """A block with its own style, which changes nothing around it."""
    # The style is ours, and a browser does not read entities inside <style>.
    style = tag("style", Markup(STYLE))
    return tag("div", style, tag("strong", title), *content, class_="trajectories")


def archive(
    about: Mapping[str, Any], episodes: pa.Table, checkpoints: Sequence[Mapping[str, Any]], fields: Mapping[str, str],
    runs: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """An archive: where it is, how much it holds, its runs, its newest checkpoints and all its episodes."""
    told = [facts({**about, **totals(episodes)}), section("Runs", runs_table(runs)), newest_checkpoints(checkpoints)]
    return framed("Archive", *told, overview(episodes, fields, compared=by_run(episodes)))


def runs(title: str, about: Sequence[Mapping[str, Any]], found: pa.Table, fields: Mapping[str, str]) -> str:
    """Some runs: what is known of each, and their returns in one picture."""
    return framed(title, runs_table(about), overview(found, fields, compared=by_run(found)))


def newest_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Markup:
    """The newest rows of the table of checkpoints."""
    columns = ("name", "step", "run", "world_size", "whole", "replay_saved", "commit", "created_at")
    newest = list(checkpoints)[: -MAX_ROWS - 1 : -1]
    rows = [[c[name] for name in columns] for c in newest]
    return section("Newest checkpoints", table(columns, rows, more=len(checkpoints) - len(newest)) if rows else "")


def runs_table(runs: Sequence[Mapping[str, Any]]) -> Markup:
    """What is known of each run; the newest at the top."""
    newest = list(runs)[: -MAX_RUNS - 1 : -1]
    rows = [list(run.values()) for run in newest]
    return (
        table([name.replace("_", " ") for name in newest[0]], rows, more=len(runs) - len(rows)) if rows else Markup("")
    )


def by_run(found: pa.Table) -> dict[str, pa.Table]:
    """The episodes of each run, of several; the runs that wrote last, as many as there are colours."""
    import pyarrow as pa
    import pyarrow.compute as pc

    runs = found["run"].cast(pa.string())
    names = list(dict.fromkeys(reversed([n for n in runs.unique().to_pylist() if n is not None])))
    if len(names) < 2:
        return {}
    return {name: found.filter(pc.equal(runs, name)) for name in reversed(names[: len(charts.COLORS)])}


def checkpoint(
    about: Mapping[str, Any], per_rank: Mapping[int, int], buffers: Any, discarded: Any, progress: Any
) -> str:
    """A checkpoint: what it holds, rank by rank and buffer by buffer."""
    return framed("Checkpoint", facts(about), checkpoint_parts(per_rank, buffers, discarded, progress))


def checkpoint_parts(per_rank: Mapping[int, int], buffers: Any, discarded: Any, progress: Any) -> Markup:
    """Live steps of each rank, the buffers, what was left out, and the run's counters."""
    ranks = {f"rank {rank}": steps for rank, steps in list(per_rank.items())[:MAX_RANKS]}
    left = len(per_rank) - len(ranks)
    held = [[name, b["steps"], b["episodes"], ", ".join(b["columns"])] for name, b in buffers.items()]
    gone = [[why, n.get("episodes"), n.get("steps")] for why, n in discarded.items()]
    return join([
        section("Live steps", charts.bars(ranks), f"and {left} more ranks" if left else ""),
        section("Buffers", table(("buffer", "steps", "episodes", "columns"), held) if held else ""),
        section("Left out", table(("why", "episodes", "steps"), gone) if gone else ""),
        section("Progress", tag("code", as_json(progress)) if progress is not None else ""),
    ])  # fmt: skip


def episodes(found: pa.Table, fields: Mapping[str, str], size_told: str, where: str) -> str:
    """Some episodes: how many, their fields, weights and update counts, and the first of them."""
    return framed(
        "Episodes",
        facts({"at": where, **totals(found), "uncompressed": size_told}),
        overview(found, fields),
        first_rows(found),
    )


def episode(about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any) -> str:
    """One episode: what is known of it without reading its steps."""
    return framed("Episode", facts(about), episode_parts(fields, metadata, attributes))


def episode_parts(fields: Mapping[str, str], metadata: Any, attributes: Any) -> Markup:
    """The fields, metadata and attributes of an episode."""
    return join([
        field_parts(fields),
        section("Metadata", tag("code", as_json(metadata)) if metadata else ""),
        section("Attributes", tag("code", as_json(attributes)) if attributes else ""),
    ])  # fmt: skip


def field_parts(fields: Mapping[str, str]) -> Markup:
    """The fields, with their dtypes as NumPy says them."""
    rows = [[path, *kind(text)] for path, text in fields.items()]
    return section("Fields", table(("field", "dtype", "shape", "axis"), rows) if rows else "")


def kind(text: str) -> tuple[str, str, str]:
    """dtype, shape of a step and axis of what a schema says of a field, such as "<f4[3] step"."""
    rest, _, axis = text.rpartition(" ")
    dtype, _, shape = rest.rstrip("]").rpartition("[")
    try:
        name = np.dtype(dtype).name if dtype[:1] in _PLAIN else dtype
    except TypeError:
        name = dtype
    return name or "-", shape.replace(", ", " x ") or "-", axis


def plan(about: Mapping[str, Any], moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any) -> str:
    """A plan: who gets what, as a picture and in numbers."""
    return framed("Plan", facts(about), plan_parts(moved, ranks, dropped, about))


def plan_parts(moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any, about: Mapping[str, Any]) -> Markup:
    """The picture of who gets what, the ranks' numbers, and what is dropped."""
    sources, targets = int(about["source ranks"]), int(about["target ranks"])
    drawn = charts.flow(moved, sources, targets) if max(sources, targets) <= MAX_RANKS else ""
    rows = [[rank, *counts] for rank, counts in enumerate(ranks)][:MAX_RANKS]
    columns = ("rank", "episodes", "steps", "bytes", "requests")[: len(rows[0]) if rows else 3]
    gone = [[why, n["episodes"], n["steps"]] for why, n in dropped.items()]
    return join([
        section("Who gets what", drawn),
        section("Target ranks", table(columns, rows, more=len(ranks) - len(rows))),
        section("Dropped", table(("why", "episodes", "steps"), gone) if gone else ""),
    ])  # fmt: skip


def totals(found: pa.Table) -> dict[str, Any]:
    """How many episodes and steps."""
    lengths, complete = found["length"].to_numpy(), found["complete"].to_numpy()
    return {
        "episodes": f"{len(lengths)}" + (f", {int((~complete).sum())} incomplete" if not complete.all() else ""),
        "steps": int(lengths.sum()),
        "buffers": sorted({str(b) for b in found["buffer"].unique().to_pylist()}),
    }


def overview(
    found: pa.Table, fields: Mapping[str, str], *, compared: Mapping[str, pa.Table] | None = None, rows: Markup | str = ""
) -> Markup:  # fmt: skip
    """How returns, update counts and lengths are spread, fields and weights; the returns of `compared` each by itself.

    rows: what shows the episodes one by one, with the spread of their numbers.
    """
    per_weights = list(weights_counts(found).items())
    kept = per_weights[: -MAX_ROWS - 1 : -1]
    listed = table(("weights", "episodes"), kept, more=len(per_weights) - len(kept)) if kept else ""
    series, along = bands.series_of(compared or {"": found})
    drawn = [charts.histogram(found[name].to_pylist(), label=label) for name, label in _SPREAD] if not rows else []
    return join([
        section("Returns", bands.chart(series, along, "return")),
        section("Update counts and lengths", join(drawn)),
        rows,
        field_parts(fields),
        section("Weights, newest first", listed),
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
    rows = [[*row_of(r).values()] for r in found.slice(0, MAX_ROWS).to_pylist()]
    return section("The first of them", table(_SHOWN, rows, more=found.num_rows - len(rows)) if rows else "")


def row_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a table of episodes shows of one."""
    low, high = row["update_count_min"], row["update_count_max"]
    updates = None if low is None else shown(low) if low == high else f"{low} to {high}"
    known = {name: row[name] for name in _SHOWN if name in row}
    return {name: (known | {"weights": row["model_weights_uuids"], "updates": updates})[name] for name in _SHOWN}


def as_json(value: Any) -> str:
    """A JSON value as text, not too long."""
    return shown(json.dumps(value, default=str, ensure_ascii=False), 2000)
