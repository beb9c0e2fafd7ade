"""Tool: `archive tag` and `tags`: names for commits, and what they name."""

from __future__ import annotations

from dataclasses import asdict

import click

from archive.base import UsageError
from archive.cli.options import Target, of_run, on_archive
from archive.cli.selecting import named_checkpoint

TAG = ("name", "commit", "checkpoint", "run", "by", "created_at")


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("name")
@click.option("--checkpoint", metavar="NAME", help="Tag this checkpoint; `latest` is the newest whole one.")
@of_run
@click.option("--commit", "number", type=int, metavar="N", help="Tag this commit. Default: the newest.")
@click.option("--by", metavar="WHO", help="Who tags it.")
def tag(
    target: Target, name: str, checkpoint: str | None, run: str | None, number: int | None, by: str | None
) -> None:  # fmt: skip
    """Name a checkpoint or a commit, for --commit of other commands. What it names is kept."""
    if number is not None and (checkpoint or run):
        raise UsageError("--commit names a commit of its own: give it, or --checkpoint and --run")
    arc = target.open()
    what = named_checkpoint(arc, checkpoint, run) if checkpoint or run else number
    made = arc.tag(name, what, by=by)
    named = f", checkpoint {made.checkpoint!r} of run {made.run!r}" if made.checkpoint else ""
    target.answer(asdict(made), f"{made.name!r} is commit {made.commit}{named}")


@click.command()
@on_archive()
def tags(target: Target) -> None:
    """The tags, oldest first."""
    target.table([asdict(one) for one in target.open().tags.values()], TAG)
