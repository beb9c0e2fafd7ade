"""Checkpoints and runs: `checkpoints`, `diff`, `plan`, `request-checkpoint`; and journals: `tails`, `recover`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from archive.base import jsontree
from archive.cli import options as opt
from archive.cli import output
from archive.cli.commands import RUNS, command
from archive.cli.options import Target
from archive.cli.output import Output

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episodes
    from archive.journal import Tails

SAVED = ("commit", "name", "step", "run", "world_size", "whole", "replay_saved", "metrics", "created_at")


@command(
    RUNS,
    opt.where("Only those that meet it, as in 'step >= 1000 and whole = true'."),
    opt.of_run("Only those of this run."),
)
def checkpoints(target: Target, where: str | None, run: str | None) -> Output:
    """List the checkpoints, oldest first."""
    rows = opt.meeting(where, opt.checkpoints_of(target.open(), run).table).to_pylist()
    rows = [row | {"metrics": jsontree.loads(row["metrics"] or "{}")} for row in rows]
    return Output(rows, [([row | {"metrics": row["metrics"] or None} for row in rows], SAVED)])


@command(
    RUNS,
    opt.argument("old"),
    opt.argument("new"),
    opt.where("Compare only episodes that meet it, as in 'return > 10'."),
    opt.limit("Ids to print"),
    opt.IN_RUN,
    looks_back=False,
)
def diff(target: Target, old: str, new: str, where: str | None, limit: int, run: str | None) -> Output:
    """Compare two commits or two checkpoints.

    OLD and NEW are two numbers of commits, or two names of checkpoints.
    """
    both = (old, new)
    if old.isdecimal() and new.isdecimal():
        commits = [target.open(commit=int(one)) for one in both]
        ends: list[dict[str, Any]] = [{"commit": one.head.number} for one in commits]
        found = [one.episodes.filter(where=where, run=run) for one in commits]
        more = _between_commits(*commits)
    else:
        arc = target.open()
        saved = [opt.named_checkpoint(arc, one, run) for one in both]
        ends = [{"checkpoint": one.name, "step": one.step, "commit": one.number} for one in saved]
        found = [one.episodes.filter(where=where) for one in saved]
        more = _between_checkpoints(*saved)
    about = {"from": ends[0], "to": ends[1], **_came_and_went(*found), **more}
    changed = {name: value for name, value in about.items() if value not in ({}, [], None)}
    return Output(about, [{name.replace("_", " "): _short(value, limit) for name, value in changed.items()}])


def _short(value: Any, limit: int) -> Any:
    if isinstance(value, dict) and value.keys() == {"before", "after"}:
        return f"{output.cell(value['before'])} -> {output.cell(value['after'])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(entry, limit)}" for key, entry in value.items())
    if not isinstance(value, list):
        return value
    more = ", ... (--limit 0 shows all)" if 0 < limit < len(value) else ""
    return f"{len(value)}: {', '.join(map(str, value[: limit or None]))}{more}"


def _between_commits(before: Archive, after: Archive) -> dict[str, Any]:
    old, new = ({ck["name"]: ck["commit"] for ck in side.checkpoints.table.to_pylist()} for side in (before, after))
    runs = before.head.runs
    return {
        "shards_added": len(set(after.shards) - set(before.shards)),
        "checkpoints_added": [name for name, number in new.items() if old.get(name) != number],
        "runs_changed": sorted(name for name, entry in after.head.runs.items() if runs.get(name) != entry),
    }


def _between_checkpoints(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    old, new = ({f"{b}/{c}" for b, about in ck.buffers.items() for c in about["columns"]} for ck in (before, after))
    return {
        "ranks": _change(before.world_size, after.world_size),
        "buffers_added": sorted(set(after.buffers) - set(before.buffers)),
        "buffers_gone": sorted(set(before.buffers) - set(after.buffers)),
        "columns_added": sorted(new - old),
        "columns_gone": sorted(old - new),
        "progress": _changes(before.progress, after.progress),
        "metrics": _changes(before.metrics, after.metrics),
        "attributes": {name: count for name, count in _attributes(before, after).items() if count},
    }


def _came_and_went(before: Episodes, after: Episodes) -> dict[str, Any]:
    """Episodes that came or went, and those that are longer or shorter now."""
    tables = (found.columns(("episode_id", "length")) for found in (before, after))
    old, new = ({row["episode_id"]: row["length"] for row in table.to_pylist()} for table in tables)
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
    """The keys whose values differ."""
    old, new = (side if isinstance(side, Mapping) else {} for side in (before, after))
    changes = {str(key): _change(old.get(key), new.get(key)) for key in sorted({*old, *new}, key=str)}
    return {key: change for key, change in changes.items() if change}


def _attributes(before: Checkpoint, after: Checkpoint) -> dict[str, int]:
    """The number of episodes of both that have another value, by attribute."""
    old = before.values
    return {
        name: sum(1 for key, value in given.items() if key in old.get(name, {}) and old[name][key] != value)
        for name, given in after.values.items()
    }


@command(RUNS, opt.argument("world_size", type=opt.COUNT), *opt.PLANNING)
def plan(target: Target, world_size: int, **how: Any) -> Output:
    """Show what resuming on WORLD_SIZE ranks reads and drops.

    Prints the episodes, steps, bytes and requests of each rank. Reads no data and writes nothing. Steps that are
    journaled beyond the checkpoint are shown beside it; a job's own plan makes a checkpoint of them first.
    """
    arc = target.open()
    made = opt.planned(arc, world_size, tails="ignore", **how)
    beyond = _beyond(arc, made.checkpoint)
    if not target.as_json:  # each form asks for the costs anew
        text = str(made)
        if beyond is not None:
            found = f"{beyond.total.steps} steps of {beyond.total.episodes} episodes"
            text += f"\n{found} are journaled beyond it: a job's own plan takes them in, `archive tails` shows them"
        return Output(None, text)
    totals = zip(made.episodes, made.steps, made.cost(), strict=True)
    shares = [{"rank": i, "episodes": e, "steps": s} | cost for i, (e, s, cost) in enumerate(totals)]
    about = {"checkpoint": made.checkpoint.name, "identity": made.is_identity, "tails": beyond and beyond.to_json()}
    return Output(about | {"ranks": shares, "dropped": made.dropped}, ())


def _beyond(arc: Archive, checkpoint: Checkpoint) -> Tails | None:
    """The steps that are journaled beyond a checkpoint, if a job would go on from it."""
    entry = arc.head.runs[checkpoint.run]
    newest = arc.checkpoints.newest(run=checkpoint.run, replay=True)
    if entry.journal is None or arc.pinned or newest is None or newest.number != checkpoint.number:
        return None
    return arc.tails(checkpoint.run) or None


@command(RUNS, writes=True)
def request_checkpoint(target: Target) -> Output:
    """Ask the running job for a checkpoint.

    The job makes it at its next step, or a few steps later.
    """
    from archive.checkpoint import requests

    key = requests.post(target.open().storage)
    looks = f"The job looks every {requests.POLL_S:.0f} s; `archive checkpoints` shows when it is done"
    return Output({"request": key}, f"requested: {key}. {looks}")


OF_JOURNAL = opt.of_run("The run whose journals are read.", default="main")


@command(RUNS, OF_JOURNAL)
def tails(target: Target, run: str) -> Output:
    """Show journaled steps that no checkpoint has yet.

    They are those of the run's newest session, with the reason why each rank's journal ends.
    """
    found = target.open().tails(run)
    return Output(found.to_json(), str(found))


@command(
    RUNS,
    OF_JOURNAL,
    opt.option("--dry-run", "Only show what would be recovered, as `archive tails` does."),
    writes=True,
)
def recover(target: Target, run: str, dry_run: bool) -> Output:
    """Make a checkpoint of what a dead job journaled.

    The next job does so by itself.
    """
    arc = target.open()
    found, before = arc.tails(run), arc.head.number
    made = None if dry_run else arc.recover(run)
    if made is None or made.number <= before:
        text = f"{found}\n{'nothing is recovered yet' if found else 'nothing is to be recovered'}"
        return Output({"commit": None, "checkpoint": None, "tails": found.to_json()}, text)
    text = f"{found}\ncheckpoint {made.name!r}, commit {made.number}, has it"
    return Output({"commit": made.number, "checkpoint": made.name, "tails": found.to_json()}, text)
