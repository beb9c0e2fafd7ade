"""What was saved, what resuming takes, asking for one more, and what changed: `archive checkpoints`, `plan`,
`request-checkpoint`, `diff`; what was journaled since, and making a checkpoint of it: `tails`, `recover`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import (
    Target,
    checkpoints_of,
    limit,
    meeting,
    named_checkpoint,
    of_run,
    on_archive,
    planned,
    planning,
    where,
)

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episodes
    from archive.journal import Tails

SAVED = ("commit", "name", "step", "run", "world_size", "whole", "replay_saved", "metrics", "created_at")


@click.command()
@where("Only those that meet it, as in 'step >= 1000 and whole = true'.")
@click.option("--run", metavar="NAME", help="Only those of this run.")
@on_archive()
def checkpoints(target: Target, where: str | None, run: str | None) -> None:
    """The checkpoints, oldest first."""
    from archive.base import jsontree

    rows = meeting(where, checkpoints_of(target.open(), run).table).to_pylist()
    rows = [row | {"metrics": jsontree.loads(row["metrics"] or "{}")} for row in rows]
    target.answer(rows, lambda: output.table([row | {"metrics": row["metrics"] or None} for row in rows], SAVED))


@click.command()
@on_archive()
@click.argument("world_size", type=click.IntRange(1))
@planning
def plan(target: Target, world_size: int, **how: Any) -> None:
    """What resuming on WORLD_SIZE ranks takes: who gets what, bytes, requests, and what is dropped. Reads no data, and
    writes nothing: what was journaled beyond the checkpoint, which a job's own plan makes a checkpoint of, is told
    beside it."""
    arc = target.open()
    made = planned(arc, world_size, tails="ignore", **how)
    beyond = _beyond(arc, made.checkpoint)
    if not target.as_json:  # each form asks for the costs anew
        output.say(str(made))
        if beyond is not None:
            found = f"{beyond.total.steps} steps of {beyond.total.episodes} episodes"
            output.say(f"{found} are journaled beyond it: a job's own plan takes them in, `archive tails` shows them")
        return
    totals = zip(made.episodes, made.steps, made.cost(), strict=True)
    shares = [{"rank": i, "episodes": e, "steps": s} | cost for i, (e, s, cost) in enumerate(totals)]
    about = {"checkpoint": made.checkpoint.name, "identity": made.is_identity, "tails": beyond and beyond.to_json()}
    output.as_json(about | {"ranks": shares, "dropped": made.dropped})


def _beyond(arc: Archive, checkpoint: Checkpoint) -> Tails | None:
    """What is journaled beyond a checkpoint, if it is the one that a job would go on from."""
    entry = arc.head.runs[checkpoint.run]
    newest = arc.checkpoints.newest(run=checkpoint.run, replay=True)
    if entry.journal is None or arc.pinned or newest is None or newest.number != checkpoint.number:
        return None
    return arc.tails(checkpoint.run) or None


@click.command("request-checkpoint")
@on_archive(time_travel=False, writes=True)
def request_checkpoint(target: Target) -> None:
    """Ask the job that writes to this archive for a checkpoint, at its next step or a few later."""
    from archive.checkpoint import requests

    key = requests.post(target.open().storage)
    looks = f"The job looks every {requests.POLL_S:.0f} s; `archive checkpoints` shows when it is done"
    target.answer({"request": key}, f"requested: {key}. {looks}")


_of_journal = click.option("--run", default="main", show_default=True, metavar="NAME", help="Of this run.")


@click.command()
@on_archive()
@_of_journal
def tails(target: Target, run: str) -> None:
    """What a run's newest session has journaled beyond its newest checkpoint, and why each rank's journal ends."""
    found = target.open().tails(run)
    target.answer(found.to_json(), str(found))


@click.command()
@on_archive(time_travel=False, writes=True)
@_of_journal
@click.option("--dry-run", is_flag=True, help="Say what would be recovered; as `archive tails` does.")
def recover(target: Target, run: str, dry_run: bool) -> None:
    """Make a checkpoint of what a dead job has journaled beyond its newest one. The next job does so by itself."""
    arc = target.open()
    found, before = arc.tails(run), arc.head.number
    made = None if dry_run else arc.recover(run)
    if made is None or made.number <= before:
        text = f"{found}\n{'nothing is recovered yet' if found else 'nothing is to be recovered'}"
        target.answer({"commit": None, "checkpoint": None, "tails": found.to_json()}, text)
        return
    text = f"{found}\ncheckpoint {made.name!r}, commit {made.number}, has it"
    target.answer({"commit": made.number, "checkpoint": made.name, "tails": found.to_json()}, text)


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
        about = _between_commits(*sides, lambda found: found.filter(where=where, run=run))
    else:
        saved = (named_checkpoint(arc, old, run), named_checkpoint(arc, new, run))
        about = _between_checkpoints(*saved, lambda found: found.filter(where=where))
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


def _between_commits(before: Archive, after: Archive, chosen: Chosen) -> dict[str, Any]:
    old, new = ({ck["name"]: ck["commit"] for ck in side.checkpoints.table.to_pylist()} for side in (before, after))
    runs = before.head.runs
    return {
        "from": {"commit": before.head.number},
        "to": {"commit": after.head.number},
        **_came_and_went(chosen(before.episodes), chosen(after.episodes)),
        "shards_added": len(set(after.shards) - set(before.shards)),
        "checkpoints_added": [name for name, number in new.items() if old.get(name) != number],
        "runs_changed": sorted(name for name, entry in after.head.runs.items() if runs.get(name) != entry),
    }


def _between_checkpoints(before: Checkpoint, after: Checkpoint, chosen: Chosen) -> dict[str, Any]:
    old, new = ({f"{b}/{c}" for b, about in ck.buffers.items() for c in about["columns"]} for ck in (before, after))
    return {
        "from": _named(before),
        "to": _named(after),
        **_came_and_went(chosen(before.episodes), chosen(after.episodes)),
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


def _came_and_went(before: Episodes, after: Episodes) -> dict[str, Any]:
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
