"""`archive tag`, `tags`, `label` and `labels`: names for commits, and what is said of episodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from archive.base import UsageError
from archive.cli.options import Target, limit, of_pairs, of_run, on_archive, where
from archive.cli.selecting import named_checkpoint

TAG = ("name", "commit", "checkpoint", "run", "by", "created_at")
LABEL = ("episode_id", "key", "value", "by", "created_at", "commit")


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


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--id", "ids", multiple=True, metavar="ID", help="Of this episode. May be repeated.")
@where("Of the episodes that meet it, as in 'return > 10'.")
@click.option("--by", metavar="WHO", help="Who says it.")
def label(target: Target, labels: tuple[str, ...], ids: tuple[str, ...], where: str | None, by: str | None) -> None:
    """Say something of episodes: `archive label URL --id e1 success=true`.

    VALUE may be JSON; null takes a label back. The newest of a key counts, all others are kept.
    """
    said = of_pairs(labels, "a label")
    if bool(ids) == (where is not None):
        raise UsageError("say which episodes are meant: by --id, or by --where")
    arc = target.open()
    found = arc.episodes if ids else arc.episodes.filter(where=where)
    names: list[str] = list(ids) or found.columns(["episode_id"])["episode_id"].to_pylist()
    arc.label(dict.fromkeys(names, said), by=by)
    commit = arc.head.number if names else None
    count = len(dict.fromkeys(names))
    text = f"{', '.join(said)} of {count} episode{'' if count == 1 else 's'}" + (f", commit {commit}" if names else "")
    target.answer({"episodes": count, "labels": said, "commit": commit}, text)


@click.command()
@limit("How many rows, of the newest; 0 for all.")
@on_archive()
def labels(target: Target, limit: int) -> None:
    """All that was said of episodes, oldest first; what counts is in `archive episodes`."""
    from archive.base import jsontree

    table = target.open().labels
    rows: list[dict[str, Any]] = (table.slice(max(0, table.num_rows - limit)) if limit else table).to_pylist()
    read = [row | {"value": None if row["value"] is None else jsontree.loads(row["value"])} for row in rows]
    target.table(read, LABEL)
