"""Tool: `archive checkpoints`, `plan`, `request-checkpoint`: what was saved, what resuming takes, and asking for one more."""

from __future__ import annotations

from typing import Any

import click

from archive.cli import output
from archive.cli.options import Target, on_archive
from archive.errors import NotFoundError


@click.command()
@on_archive()
def checkpoints(target: Target) -> None:
    """The checkpoints, oldest first."""
    rows = target.open().checkpoints.table.to_pylist()
    if target.as_json:
        output.as_json(rows)
    else:
        columns = ("commit", "name", "step", "run", "world_size", "whole", "replay_saved", "metrics", "created_at")
        output.table(([row[c] for c in columns] for row in rows), columns)


@click.command()
@on_archive()
@click.argument("world_size", type=click.IntRange(1))
@click.option("--checkpoint", "name", metavar="NAME", help="Which one; default: the newest whole one.")
@click.option("--policy", default="balanced", show_default=True, help="balanced, interleaved or by_trajectory.")
@click.option("--num-envs", type=click.IntRange(1), help="Env rows of each rank.")
@click.option("--max-length", type=click.IntRange(1), help="Steps that an env row holds; the oldest are dropped.")
@click.option("--capacity", type=click.IntRange(1), help="Steps that a rank holds; the oldest are dropped.")
@click.option("--incomplete", default="keep", show_default=True, help="keep or drop headless and open episodes.")
@click.option("--where", metavar="CONDITION", help="Only episodes that meet it, as in 'return > 10'.")
def plan(target: Target, world_size: int, name: str | None, where: str | None, **how: Any) -> None:
    """What resuming on WORLD_SIZE ranks takes: who gets what, bytes, requests, and what is dropped. Reads no data."""
    import resharding

    saved = target.open().checkpoints
    checkpoint = saved[name] if name else saved.latest
    if checkpoint is None:
        raise NotFoundError(f"there is no checkpoint at {target.url} yet; `archive log` shows what is there")
    made = resharding.plan(checkpoint, world_size, filter=where, **how)
    if target.as_json:
        ranks = [
            dict(zip(("episodes", "steps"), pair, strict=True)) for pair in zip(made.episodes, made.steps, strict=True)
        ]
        shares = [{"rank": i} | rank | cost for i, (rank, cost) in enumerate(zip(ranks, made.cost(), strict=True))]
        output.as_json(
            {"checkpoint": checkpoint.name, "identity": made.is_identity, "ranks": shares, "dropped": made.dropped}
        )
    else:
        click.echo(str(made))


@click.command("request-checkpoint")
@on_archive(time_travel=False)
def request_checkpoint(target: Target) -> None:
    """Ask the job that writes to this archive for a checkpoint, at its next step or a few later."""
    from archive import checkpointing

    key = checkpointing.post(target.open().storage)
    if target.as_json:
        output.as_json({"request": key})
    else:
        click.echo(
            f"requested: {key}. The job looks every {checkpointing.POLL_S:.0f} s; `archive checkpoints` shows when it is done"
        )
