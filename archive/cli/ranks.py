"""Tool: `archive checkpoints`, `plan`, `request-checkpoint`: what was saved, what resuming takes, and asking for one more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError
from archive.cli import output
from archive.cli.options import Target, meeting, of_run, on_archive

if TYPE_CHECKING:
    from archive import Archive, Checkpoint
    from archive.checkpoint import Checkpoints
    from resharding import Plan

LATEST = "latest"  # stands for the newest whole one
POLICIES, INCOMPLETE = ("balanced", "interleaved", "by_trajectory"), ("keep", "drop")
_POLICY = "Runs of as many steps; episodes in turn; runs of as many episodes."
_planning = (
    of_run,
    click.option("--checkpoint", "name", metavar="NAME", help="Which one; default: the newest whole one."),
    click.option("--policy", type=click.Choice(POLICIES), default=POLICIES[0], show_default=True, help=_POLICY),
    click.option("--num-envs", type=click.IntRange(1), help="Env rows of each rank."),
    click.option("--max-length", type=click.IntRange(1), help="Steps that an env row holds; the oldest are dropped."),
    click.option("--capacity", type=click.IntRange(1), help="Steps that a rank holds; the oldest are dropped."),
    click.option(
        "--incomplete",
        type=click.Choice(INCOMPLETE),
        default=INCOMPLETE[0],
        show_default=True,
        help="Headless and open episodes.",
    ),
    click.option("--where", metavar="CONDITION", help="Only episodes that meet it, as in 'return > 10'."),
    click.option("--allow-missing", is_flag=True, help="Do without ranks that are missing from the checkpoint."),
)


def planning(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say how to deal out steps."""
    for option in reversed(_planning):
        command = option(command)
    return command


def checkpoints_of(arc: Archive, run: str | None) -> Checkpoints:
    """Those of a run, or all."""
    if run is None:
        return arc.checkpoints
    if run not in arc.head.runs:
        known = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NotFoundError(f"there is no run {run!r} at {arc.url}; its runs: {known}")
    return arc.checkpoints.of(run)


def named_checkpoint(arc: Archive, name: str | None, run: str | None = None, *, replay: bool = False) -> Checkpoint:
    """By name; without one, or as "latest", the newest whole one (with replay=True, that has its buffers)."""
    checkpoints = checkpoints_of(arc, run)
    found = checkpoints[name] if name and name != LATEST else checkpoints.newest(replay=replay)
    if found is None:
        whose = "" if run is None else f"of run {run!r} "
        raise NotFoundError(f"there is no checkpoint {whose}at {arc.url} yet; `archive log` shows what is there")
    return found


def planned(checkpoint: Checkpoint, world_size: int, where: str | None, **how: Any) -> Plan:
    import resharding

    return resharding.plan(checkpoint, world_size, filter=where, **how)


@click.command()
@click.option("--where", metavar="CONDITION", help="Only those that meet it, as in 'step >= 1000 and whole = true'.")
@click.option("--run", metavar="NAME", help="Only those of this run.")
@on_archive()
def checkpoints(target: Target, where: str | None, run: str | None) -> None:
    """The checkpoints, oldest first."""
    from archive.base import jsontree

    rows = meeting(where, checkpoints_of(target.open(), run).table).to_pylist()
    rows = [row | {"metrics": jsontree.loads(row["metrics"] or "{}")} for row in rows]
    if target.as_json:
        output.as_json(rows)
    else:
        columns = ("commit", "name", "step", "run", "world_size", "whole", "replay_saved", "metrics", "created_at")
        output.table(([row[c] if row[c] != {} else None for c in columns] for row in rows), columns)


@click.command()
@on_archive()
@click.argument("world_size", type=click.IntRange(1))
@planning
def plan(target: Target, world_size: int, name: str | None, run: str | None, **how: Any) -> None:
    """What resuming on WORLD_SIZE ranks takes: who gets what, bytes, requests, and what is dropped. Reads no data."""
    checkpoint = named_checkpoint(target.open(), name, run)
    made = planned(checkpoint, world_size, **how)
    if not target.as_json:
        output.say(str(made))
        return
    totals = zip(made.episodes, made.steps, made.cost(), strict=True)
    shares = [{"rank": i, "episodes": e, "steps": s} | cost for i, (e, s, cost) in enumerate(totals)]
    about = {"checkpoint": checkpoint.name, "identity": made.is_identity}
    output.as_json(about | {"ranks": shares, "dropped": made.dropped})


@click.command("request-checkpoint")
@on_archive(time_travel=False, writes=True)
def request_checkpoint(target: Target) -> None:
    """Ask the job that writes to this archive for a checkpoint, at its next step or a few later."""
    from archive.checkpoint import requests

    key = requests.post(target.open().storage)
    if target.as_json:
        output.as_json({"request": key})
    else:
        output.say(
            f"requested: {key}. The job looks every {requests.POLL_S:.0f} s; `archive checkpoints` shows when it is done"
        )
