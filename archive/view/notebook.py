"""Pure, no I/O: tables that a notebook shows of archives, checkpoints, plans and episodes. Everything is escaped, since
names and values come from a bucket. Nothing of it runs."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import visible

if TYPE_CHECKING:
    import pyarrow as pa

MAX_TEXT = 300
MAX_ROWS = 200  # of a table that is all there is
FEW_ROWS = 10
MAX_RANKS = 64
MAX_RUNS = 50
_PLAIN = tuple("<>|=")  # what NumPy's own names of dtypes begin with
_SPREAD = {"return": "return", "update_count_max": "update count", "length": "length"}
_CHECKPOINT = ("name", "step", "run", "world_size", "whole", "replay_saved", "commit", "created_at")
_EPISODE = ("episode_id", "length", "return", "complete", "weights", "updates", "buffer")
_STYLE = """
.trajectories { font: 13px/1.5 system-ui, sans-serif; }
.trajectories h4 { margin: .8em 0 .2em; }
.trajectories table { border-collapse: collapse; font-size: 12px; }
.trajectories th, .trajectories td { text-align: left; padding: 1px 10px 1px 0; }
.trajectories td.number { text-align: right; }
.trajectories code { font-size: 12px; white-space: pre-wrap; }
.trajectories .more { opacity: .7; }
"""


# -- markup ------------------------------------------------------------------------------------------------------------


class Markup(str):
    """Text that is HTML already. Only `tag` and `join` make it; everything else is escaped."""

    __slots__ = ()


def join(parts: Iterable[Any]) -> Markup:
    """The parts one after the other; what is not markup is escaped."""
    return Markup("".join(p if isinstance(p, Markup) else html.escape(visible(str(p))) for p in parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Attributes that are None are left out; `class_` is class, `data_x` is data-x."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def shown(value: Any, limit: int = MAX_TEXT) -> str:
    """A value as people read it: numbers short, None as a dash, long text cut."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}" if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}" + (" UTC" if value.utcoffset() == timedelta() else "")
    if isinstance(value, (list, tuple)):
        value = ", ".join(shown(v, limit) for v in value) or "-"
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], count: int | None = None) -> Markup:
    """A table of some of `count` rows; empty without any."""
    if not rows:
        return Markup("")
    head = tag("tr", *(tag("th", c) for c in columns))
    body = [tag("tr", *map(_cell, row)) for row in rows]
    if count is not None and count > len(rows):
        body.append(tag("tr", tag("td", f"and {count - len(rows)} more", colspan=len(columns), class_="more")))
    return tag("table", tag("thead", head), tag("tbody", *body))


def _cell(value: Any) -> Markup:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return tag("td", shown(value), class_="number" if number else None)


def facts(pairs: Mapping[str, Any]) -> Markup:
    """Names and values, one a line; what is not known is left out."""
    known = ((name, value) for name, value in pairs.items() if value is not None and value != [])
    return tag("table", tag("tbody", *(tag("tr", tag("th", name), tag("td", shown(value))) for name, value in known)))


def _section(title: str, *content: Any) -> Markup:
    """A part with a heading; empty if all of its content is."""
    return tag("section", tag("h4", title), *content) if any(content) else Markup("")


def _block(heading: str, *content: Any) -> str:
    """A block with its own style, which changes nothing around it."""
    return tag("div", tag("style", Markup(_STYLE)), tag("strong", heading), *content, class_="trajectories")


class Framed:
    """A page in a frame of a notebook. It may run its script there, and reaches nothing of the notebook."""

    def __init__(self, text: str, height: int) -> None:
        self.text = text
        self.height = height

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{int(self.height)}px;border:0"
        return tag("iframe", srcdoc=self.text, sandbox="allow-scripts", style=style)


# -- what there is to show ---------------------------------------------------------------------------------------------


def archive(
    about: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Mapping[str, Any]],
    found: pa.Table,
    fields: Mapping[str, str],
) -> str:
    """An archive: its runs, the newest checkpoints, and all its episodes."""
    rows = [[row[name] for name in _CHECKPOINT] for row in checkpoints[: -FEW_ROWS - 1 : -1]]
    newest = _section("Newest checkpoints", _table(_CHECKPOINT, rows, len(checkpoints)))
    return _block("Archive", facts({**about, **_totals(found)}), _runs(runs), newest, _overview(found, fields))


def runs(heading: str, about: Sequence[Mapping[str, Any]], found: pa.Table, fields: Mapping[str, str]) -> str:
    """Some runs: what is known of each, and how their returns are spread."""
    return _block(heading, _runs(about), _overview(found, fields))


def checkpoint(
    about: Mapping[str, Any], per_rank: Mapping[int, int], buffers: Any, discarded: Any, progress: Any
) -> str:
    """A checkpoint: live steps of each rank, the buffers, what was left out, and the run's counters."""
    ranks = [[f"rank {rank}", steps] for rank, steps in per_rank.items()]
    held = [[name, b["steps"], b["episodes"], ", ".join(b["columns"])] for name, b in buffers.items()]
    return _block(
        "Checkpoint",
        facts(about),
        _section("Live steps", _table(("rank", "steps"), ranks[:MAX_RANKS], len(ranks))),
        _section("Buffers", _table(("buffer", "steps", "episodes", "columns"), held)),
        _losses("Left out", discarded),
        _as_json("Progress", progress),
    )


def plan(about: Mapping[str, Any], moved: Mapping[tuple[int, int], int], ranks: Any, dropped: Any) -> str:
    """A plan: which ranks get how many steps of which, and what is dropped."""
    flows = [[source, target, steps] for (source, target), steps in sorted(moved.items())]
    counts = [[rank, *numbers] for rank, numbers in enumerate(ranks)]
    return _block(
        "Plan",
        facts(about),
        _section("Who gets what", _table(("from rank", "to rank", "steps"), flows[:MAX_RANKS], len(flows))),
        _section("Target ranks", _table(("rank", "episodes", "steps"), counts[:MAX_RANKS], len(counts))),
        _losses("Dropped", dropped),
    )


def plan_of(verb: str, about: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A plan of what goes and what stays: rows by the title of their table, each with its reason."""
    listed = [
        _section(title, _table(list(rows[0]) if rows else [], [list(row.values()) for row in rows]))
        for title, rows in tables.items()
    ]
    return _block(verb, facts(about), *listed)


def episodes(about: Mapping[str, Any], found: pa.Table, fields: Mapping[str, str]) -> str:
    """Some episodes: how many, how they are spread, their fields and weights, and the first of them."""
    first = found.slice(0, FEW_ROWS).to_pylist()
    rows = [{**row, "weights": row["model_weights_uuids"], "updates": updates_of(row)} for row in first]
    listed = _table(_EPISODE, [[row[n] for n in _EPISODE] for row in rows], found.num_rows)
    known = facts({**about, **_totals(found)})
    return _block("Episodes", known, _overview(found, fields), _section("The first of them", listed))


def episode(about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any) -> str:
    """One episode: what is known of it without reading its steps."""
    given = (_as_json("Metadata", metadata or None), _as_json("Attributes", attributes or None))
    return _block("Episode", facts(about), _field_table(fields), *given)


def rows(heading: str, columns: Sequence[str], values: Sequence[Sequence[Any]]) -> str:
    """A table of anything."""
    return _block(heading, _table(columns, values[:MAX_ROWS], len(values)))


def _runs(about: Sequence[Mapping[str, Any]]) -> Markup:
    """A row of facts for each run; the newest at the top."""
    rows = [list(run.values()) for run in about[: -MAX_RUNS - 1 : -1]]
    names = [name.replace("_", " ") for name in about[-1]] if rows else []
    return _section("Runs", _table(names, rows, len(about)))


def _losses(title: str, counts: Mapping[str, Mapping[str, int]]) -> Markup:
    """Episodes and steps by reason."""
    rows = [[why, n.get("episodes"), n.get("steps")] for why, n in counts.items()]
    return _section(title, _table(("why", "episodes", "steps"), rows))


def _as_json(title: str, value: Any) -> Markup:
    """A JSON value as text, not too long; empty for None."""
    text = shown(json.dumps(value, default=str, ensure_ascii=False), 2000)
    return _section(title, tag("code", text)) if value is not None else Markup("")


def _field_table(fields: Mapping[str, str]) -> Markup:
    """The fields, with their dtypes as NumPy says them."""
    rows = [[path, *kind(text)] for path, text in fields.items()]
    return _section("Fields", _table(("field", "dtype", "shape", "axis"), rows))


def kind(text: str) -> tuple[str, str, str]:
    """dtype, shape of a step and axis of what a schema says of a field, such as "<f4[3] step"."""
    rest, _, axis = text.rpartition(" ")
    dtype, _, shape = rest.rstrip("]").rpartition("[")
    try:
        name = np.dtype(dtype).name if dtype[:1] in _PLAIN else dtype
    except TypeError:
        name = dtype
    return name or "-", shape.replace(", ", " x ") or "-", axis


def _totals(found: pa.Table) -> dict[str, Any]:
    """The counts of episodes and steps, and the buffers."""
    lengths, complete = found["length"].to_numpy(), found["complete"].to_numpy()
    return {
        "episodes": f"{len(lengths)}" + (f", {int((~complete).sum())} incomplete" if not complete.all() else ""),
        "steps": int(lengths.sum()),
        "buffers": sorted({str(b) for b in found["buffer"].unique().to_pylist()}),
    }


def _overview(found: pa.Table, fields: Mapping[str, str]) -> Markup:
    """The spread of the episodes' numbers, of the returns run by run, fields and weights."""
    import pyarrow.compute as pc

    names = [name for name in found["run"].unique().to_pylist() if name is not None]
    parts = {f"return of {name}": found.filter(pc.equal(found["run"], name))["return"] for name in names[-MAX_RUNS:]}
    each = {told: found[name] for name, told in _SPREAD.items()} | (parts if len(names) > 1 else {})
    spread = [[told, *known] for told, column in each.items() if (known := _quartiles(column))]
    weights = list(weights_counts(found).items())
    return join(
        [
            _section("Spread", _table(("", "from … to", "a quarter is below", "median", "a quarter is above"), spread)),
            _field_table(fields),
            _section(
                "Weights, newest first",
                _table(("weights", "episodes"), weights[: -FEW_ROWS - 1 : -1], len(weights)),
            ),
        ]
    )


def _quartiles(column: pa.ChunkedArray) -> list[Any]:
    """The ends of the numbers that are known, and their quartiles; nothing where none is."""
    values = column.drop_null().cast("float64").to_numpy()
    known = values[np.isfinite(values)]
    if not len(known):
        return []
    low, *between, high = map(float, np.quantile(known, (0, 0.25, 0.5, 0.75, 1)))
    return [f"{shown(low)} … {shown(high)}", *between]


def weights_counts(found: pa.Table) -> dict[str, int]:
    """Weights -> episodes that they made, in order of first use."""
    lists = found["model_weights_uuids"].combine_chunks()
    known, codes = np.unique(np.asarray(lists.flatten().to_pylist(), object).astype(str), return_inverse=True)
    first = np.full(len(known), len(codes))
    np.minimum.at(first, codes, np.arange(len(codes)))
    counts = np.bincount(codes, minlength=len(known))
    return {str(known[i]): int(counts[i]) for i in np.argsort(first, kind="stable").tolist()}


def updates_of(row: Mapping[str, Any]) -> str | None:
    """The update counts of an episode, of its row in the table."""
    low, high = row["update_count_min"], row["update_count_max"]
    return None if low is None else shown(low) if low == high else f"{low} to {high}"
