"""Tool: `archive diff`: what came, went and changed between two commits or two checkpoints. Reads no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, of_run, on_archive
from archive.cli.ranks import named_checkpoint

if TYPE_CHECKING:
    from archive import Checkpoint, Episodes

SHOWN = 20


@click.command()
@on_archive(time_travel=False)
@click.argument("old")
@click.argument("new")
@click.option("--where", metavar="CONDITION", help="Compare only episodes that meet it, as in 'return > 10'.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=SHOWN, show_default=True, help="Ids to print; 0 for all."
)
@of_run
def diff(target: Target, old: str, new: str, where: str | None, limit: int, run: str | None) -> None:
    """What changed from OLD to NEW: two numbers of commits, or two names of checkpoints."""
    arc = target.open()
    if old.isdecimal() and new.isdecimal():
        told = _commits(target, old, new, lambda found: found.filter(where=where, run=run))
    else:
        sides = (named_checkpoint(arc, old, run), named_checkpoint(arc, new, run))
        told = _checkpoints(*sides, lambda found: found.filter(where=where))
    if target.as_json:
        output.as_json(told)
        return
    changed = {name: value for name, value in told.items() if value not in ({}, [], None)}
    output.facts({name.replace("_", " "): _short(value, limit) for name, value in changed.items()})


def _short(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and value.keys() == {"before", "after"}:
        return f"{output.cell(value['before'])} -> {output.cell(value['after'])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(entry, limit)}" for key, entry in value.items())
    if isinstance(value, list) and limit and len(value) > limit:
        return f"{len(value)}: {', '.join(map(str, value[:limit]))}, ... (--limit 0 shows all)"
    return f"{len(value)}: {', '.join(map(str, value))}" if isinstance(value, list) else value


Chosen = Callable[["Episodes"], "Episodes"]


def _commits(target: Target, old: str, new: str, chosen: Chosen) -> dict[str, Any]:
    sides = [target.open(commit=int(number)) for number in (old, new)]
    before, after = ({ck["name"]: ck["commit"] for ck in side.checkpoints.table.to_pylist()} for side in sides)
    told = _episodes(*(chosen(side.episodes) for side in sides))
    return {
        "from": {"commit": int(old)}, "to": {"commit": int(new)}, **told,
        "shards_added": len(set(sides[1].shards) - set(sides[0].shards)),
        "checkpoints_added": [name for name, number in after.items() if before.get(name) != number],
        "runs_changed": sorted(r for r, e in sides[1].head.runs.items() if sides[0].head.runs.get(r) != e),
    }  # fmt: skip


def _checkpoints(before: Checkpoint, after: Checkpoint, chosen: Chosen) -> dict[str, Any]:
    told = _episodes(chosen(before.episodes), chosen(after.episodes))
    columns = [{f"{b}/{c}" for b, about in ck.buffers.items() for c in about["columns"]} for ck in (before, after)]
    return {
        "from": _named(before), "to": _named(after), **told,
        "ranks": _change(before.world_size, after.world_size),
        "buffers_added": sorted(set(after.buffers) - set(before.buffers)),
        "buffers_gone": sorted(set(before.buffers) - set(after.buffers)),
        "columns_added": sorted(columns[1] - columns[0]),
        "columns_gone": sorted(columns[0] - columns[1]),
        "progress": _changes(before.progress, after.progress),
        "metrics": _changes(before.metrics, after.metrics),
        "attributes": {name: count for name, count in _attributes(before, after).items() if count},
    }  # fmt: skip


def _named(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"checkpoint": checkpoint.name, "step": checkpoint.step, "commit": checkpoint.number}


def _episodes(before: Episodes, after: Episodes) -> dict[str, Any]:
    """Ids that came and went, and those of which the steps are others."""
    names = ("episode_id", "length", "commit")
    sides = [{r["episode_id"]: r for r in eps.table.select(names).to_pylist()} for eps in (before, after)]
    both = [name for name in sides[1] if name in sides[0]]
    longer = [name for name in both if sides[1][name]["length"] > sides[0][name]["length"]]
    shorter = [name for name in both if sides[1][name]["length"] < sides[0][name]["length"]]
    totals = [sum(row["length"] for row in side.values()) for side in sides]
    return {
        "episodes": _change(*map(len, sides)),
        "steps": _change(*totals),
        "added": [name for name in sides[1] if name not in sides[0]],
        "gone": [name for name in sides[0] if name not in sides[1]],
        "longer": longer,
        "shorter": shorter,
    }


def _change(before: Any, after: Any) -> dict[str, Any] | None:
    return {"before": before, "after": after} if before != after else None


def _changes(before: Any, after: Any) -> dict[str, Any]:
    """Keys of which the values differ."""
    sides = [dict(side) if isinstance(side, Mapping) else {"": side} for side in (before, after)]
    keys = sorted({*sides[0], *sides[1]} - {""}, key=str)
    return {str(k): _change(sides[0].get(k), sides[1].get(k)) for k in keys if sides[0].get(k) != sides[1].get(k)}


def _attributes(before: Checkpoint, after: Checkpoint) -> dict[str, int]:
    """Attribute -> how many episodes of both have another value of it."""
    old, new = before.values, after.values
    return {
        name: sum(1 for key, value in given.items() if key in old.get(name, {}) and old[name][key] != value)
        for name, given in new.items()
    }
