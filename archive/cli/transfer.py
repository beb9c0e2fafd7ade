"""Tool: `archive merge`, `split`, `filter`, `compact`: episodes of some archives in another, and bytes moved together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, on_archive

if TYPE_CHECKING:
    from archive import Archive

_shared = (
    click.option("--to", required=True, metavar="URL", help="The other archive; made if it is not there."),
    click.option("--copy", is_flag=True, help="Copy the shards; else they are referred to where they lie."),
)


def _moving(command: Callable[..., None]) -> Callable[..., None]:
    for option in _shared:
        command = option(command)
    return command


def _how(target: Target, copy: bool) -> dict[str, Any]:
    return {"copy": copy, "storage_options": target.storage_options, "allow_bases": True}


def _tell(target: Target, made: Archive) -> None:
    if target.as_json:
        output.as_json({"url": made.url, "commit": made.head.number, "episodes": len(made.episodes)})
    else:
        click.echo(f"{made.url} has {len(made.episodes)} episodes at commit {made.head.number}")


@click.command()
@on_archive(time_travel=False)
@click.argument("others", nargs=-1)
@_moving
def merge(target: Target, others: tuple[str, ...], to: str, copy: bool) -> None:
    """Make the episodes of archives (URL and OTHERS) visible in one. Again later, it adds what is new."""
    import resharding

    _tell(target, resharding.merge([target.url, *others], to, **_how(target, copy)))


@click.command()
@on_archive(time_travel=False)
@click.argument("count", type=click.IntRange(1))
@_moving
def split(target: Target, count: int, to: str, copy: bool) -> None:
    """Make the first COUNT episodes visible in another archive."""
    import resharding

    _tell(target, resharding.split(target.url, to, count, **_how(target, copy)))


@click.command("filter")
@on_archive(time_travel=False)
@click.option("--where", required=True, metavar="CONDITION", help="As in 'return > 10 and update_count >= 100'.")
@_moving
def filter_(target: Target, where: str, to: str, copy: bool) -> None:
    """Make the episodes that meet a condition visible in another archive."""
    import resharding

    _tell(target, resharding.filter(target.url, to, where=where, **_how(target, copy)))


@click.command()
@click.option(
    "--min-alive", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Shards below are rewritten."
)
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
@on_archive(time_travel=False)
def compact(target: Target, min_alive: float, yes: bool) -> None:
    """Write live steps anew, close together, that lie thinly in their shards. Deletes nothing."""
    import resharding

    if not yes:
        click.echo(
            "would rewrite the live steps of thin shards, as `archive plan URL N` counts them; add --yes to do it"
        )
        return
    done = resharding.compact(target.open(), min_alive=min_alive)
    if target.as_json:
        output.as_json({"shards": done.shards, "steps": done.steps, "commit": done.commit})
    else:
        click.echo(
            f"{done.steps} steps out of {done.shards} shards were written anew" if done.shards else "nothing to do"
        )
