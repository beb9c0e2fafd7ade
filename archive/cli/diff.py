"""`archive diff`: what came, went and changed between two commits or two checkpoints. Reads no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, limit, of_run, on_archive, where
from archive.cli.selecting import named_checkpoint

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episodes

_LENGTH = ("episode_id", "length")
Chosen = Callable[["Episodes"], "Episodes"]


@click.command()
@on_archive(time_travel=False)
@click.argument("old")
@click.argument("new")
@where("Compare only episodes that meet it, as in 'return > 10'.")
@limit("Ids to print; 0 for all.")
@of_run
def diff(target: Target, old: str, new: str, where: str | None, limit: int, run: str | None) -> None:
    """What changed from OLD to NEW: two numbers of commits, or two names of checkpoints."""
    arc = target.open()
    if old.isdecimal() and new.isdecimal():
        sides = (target.open(commit=int(old)), target.open(commit=int(new)))
        about = _commits(*sides, lambda found: found.filter(where=where, run=run))
    else:
        saved = (named_checkpoint(arc, old, run), named_checkpoint(arc, new, run))
        about = _checkpoints(*saved, lambda found: found.filter(where=where))
    changed = {name: value for name, value in about.items() if value not in ({}, [], None)}
    shown = {name.replace("_", " "): _short(value, limit) for name, value in changed.items()}
    target.answer(about, lambda: output.facts(shown))


def _short(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and value.keys() == {"before", "after"}:
        return f"{output.cell(value['before'])} -> {output.cell(value['after'])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(entry, limit)}" for key, entry in value.items())
    if not isinstance(value, list):
        return value
    more = ", ... (--limit 0 shows all)" if 0 < limit < len(value) else ""
    return f"{len(value)}: {', '.join(map(str, value[: limit or None]))}{more}"


def _commits(before: Archive, after: Archive, chosen: Chosen) -> dict[str, Any]:
    old, new = ({ck["name"]: ck["commit"] for ck in side.checkpoints.table.to_pylist()} for side in (before, after))
    runs = before.head.runs
    return {
        "from": {"commit": before.head.number},
        "to": {"commit": after.head.number},
        **_episodes(chosen(before.episodes), chosen(after.episodes)),
        "shards_added": len(set(after.shards) - set(before.shards)),
        "checkpoints_added": [name for name, number in new.items() if old.get(name) != number],
        "runs_changed": sorted(name for name, entry in after.head.runs.items() if runs.get(name) != entry),
    }


def _checkpoints(before: Checkpoint, after: Checkpoint, chosen: Chosen) -> dict[str, Any]:
    old, new = ({f"{b}/{c}" for b, about in ck.buffers.items() for c in about["columns"]} for ck in (before, after))
    return {
        "from": _named(before),
        "to": _named(after),
        **_episodes(chosen(before.episodes), chosen(after.episodes)),
        "ranks": _change(before.world_size, after.world_size),
        "buffers_added": sorted(set(after.buffers) - set(before.buffers)),
        "buffers_gone": sorted(set(before.buffers) - set(after.buffers)),
        "columns_added": sorted(new - old),
        "columns_gone": sorted(old - new),
        "progress": _changes(before.progress, after.progress),
        "metrics": _changes(before.metrics, after.metrics),
        "attributes": {name: count for name, count in _attributes(before, after).items() if count},
    }


def _named(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"checkpoint": checkpoint.name, "step": checkpoint.step, "commit": checkpoint.number}


def _episodes(before: Episodes, after: Episodes) -> dict[str, Any]:
    """Ids that came and went, and those that are longer or shorter now."""
    old, new = ({r["episode_id"]: r["length"] for r in found.columns(_LENGTH).to_pylist()} for found in (before, after))
    both = [name for name in new if name in old]
    return {
        "episodes": _change(len(old), len(new)),
        "steps": _change(sum(old.values()), sum(new.values())),
        "added": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "longer": [name for name in both if new[name] > old[name]],
        "shorter": [name for name in both if new[name] < old[name]],
    }


def _change(before: Any, after: Any) -> dict[str, Any] | None:
    return {"before": before, "after": after} if before != after else None


def _changes(before: Any, after: Any) -> dict[str, Any]:
    """Keys of which the values differ."""
    old, new = (side if isinstance(side, Mapping) else {} for side in (before, after))
    changes = {str(key): _change(old.get(key), new.get(key)) for key in sorted({*old, *new}, key=str)}
    return {key: change for key, change in changes.items() if change}


def _attributes(before: Checkpoint, after: Checkpoint) -> dict[str, int]:
    """Attribute -> how many episodes of both have another value of it."""
    old = before.values
    return {
        name: sum(1 for key, value in given.items() if key in old.get(name, {}) and old[name][key] != value)
        for name, given in after.values.items()
    }
