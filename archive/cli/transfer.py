"""Tool: `archive merge`, `split`, `filter`, `reshard`, `compact`: episodes of some archives in another, bytes moved together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from archive.base import UsageError
from archive.cli import output
from archive.cli.options import Target, on_archive
from archive.cli.progress import bar
from archive.cli.ranks import named_checkpoint, planned, planning

if TYPE_CHECKING:
    from archive import Archive

_shared = (
    click.option("--to", required=True, metavar="URL", help="The other archive; made if it is not there."),
    click.option("--copy", is_flag=True, help="Copy the shards; else they are referred to where they lie."),
    click.option("--verify", is_flag=True, help="Read every byte that is copied, and compare it with its checksum."),
)


def _moving(command: Callable[..., None]) -> Callable[..., None]:
    for option in _shared:
        command = option(command)
    return command


@dataclass(frozen=True)
class How:
    """How episodes get to the other archive."""

    copy: bool
    verify: bool

    def __post_init__(self) -> None:
        if self.verify and not self.copy:
            raise UsageError("--verify is of copies: add --copy, or leave it out (`archive verify --deep` reads all)")


def _moved(target: Target, how: How, what: str, sources: list[Archive], do: Callable[..., Any]) -> Any:
    """What `do` gives, called with how to do it, while a bar is drawn. What was named on the way is allowed."""
    given = {
        "copy": how.copy, "verify": how.verify, "storage_options": target.storage_options,
        "allow_bases": (*target.allow_bases, *(source.url for source in sources)), "single_writer": target.single_writer,
    }  # fmt: skip
    with bar(what, sources) as advance:
        return do(progress=advance, **given)


def _tell(target: Target, made: Archive) -> None:
    if target.as_json:
        output.as_json({"url": made.url, "commit": made.head.number, "episodes": len(made.episodes)})
    else:
        output.say(f"{made.url} has {len(made.episodes)} episodes at commit {made.head.number}")


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("others", nargs=-1)
@_moving
def merge(target: Target, others: tuple[str, ...], to: str, copy: bool, verify: bool) -> None:
    """Make the episodes of archives (URL and OTHERS) visible in one. Again later, it adds what is new."""
    import resharding

    moving = How(copy, verify)
    sources = [target.open(url=url) for url in (target.url, *others)]
    _tell(target, _moved(target, moving, "merge", sources, lambda **how: resharding.merge(sources, to, **how)))


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("count", type=click.IntRange(1))
@click.option("--where", metavar="CONDITION", help="The first of those that meet it, as in 'return > 10'.")
@_moving
def split(target: Target, count: int, where: str | None, to: str, copy: bool, verify: bool) -> None:
    """Make the first COUNT episodes visible in another archive."""
    import resharding

    moving = How(copy, verify)
    source = target.open()
    found = source.episodes.filter(where=where)
    if count > len(found):
        raise UsageError(f"COUNT is {count}, and there are {len(found)} such episodes at {source.url}")
    ids = found[:count].table["episode_id"].to_pylist()

    def do(**how: Any) -> Archive:
        return resharding.filter(source, to, episode_id=ids, **how)

    _tell(target, _moved(target, moving, "split", [source], do))


@click.command("filter")
@on_archive(time_travel=False, writes=True)
@click.option("--where", required=True, metavar="CONDITION", help="As in 'return > 10 and update_count >= 100'.")
@_moving
def filter_(target: Target, where: str, to: str, copy: bool, verify: bool) -> None:
    """Make the episodes that meet a condition visible in another archive."""
    import resharding

    moving = How(copy, verify)
    source = target.open()
    source.episodes.filter(where=where)  # refused before anything is made

    def do(**how: Any) -> Archive:
        return resharding.filter(source, to, where=where, **how)

    _tell(target, _moved(target, moving, "filter", [source], do))


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("world_size", type=click.IntRange(1))
@planning
@_moving
def reshard(
    target: Target, world_size: int, name: str | None, run: str | None, to: str, copy: bool, verify: bool, **how: Any
) -> None:  # fmt: skip
    """Save a checkpoint anew in another archive, as WORLD_SIZE ranks will resume from it. `plan` shows what it does."""
    import resharding

    moving = How(copy, verify)
    source = target.open()
    plan = planned(named_checkpoint(source, name, run), world_size, **how)
    made = _moved(target, moving, "reshard", [source], lambda **h: resharding.reshard(source, plan, to, **h))
    told = {"checkpoint": made.name, "commit": made.number, "ranks": made.world_size, "steps": plan.steps}
    if target.as_json:
        output.as_json(told | {"dropped": plan.dropped})
        return
    output.say(
        f"checkpoint {made.name!r} is in {to}, saved by {made.world_size} ranks of {output.cell(plan.steps)} steps"
    )


@click.command()
@click.option(
    "--min-alive", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Shards below are rewritten."
)
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
@on_archive(time_travel=False, writes=True)
def compact(target: Target, min_alive: float, yes: bool) -> None:
    """Write live steps anew, close together, that lie thinly in their shards. Deletes nothing."""
    import resharding
    from resharding.transfer import compactable

    arc = target.open()
    if not yes:
        would = compactable(arc, min_alive=min_alive)
        if target.as_json:
            output.as_json({"shards": would.shards, "steps": would.steps, "commit": None})
            return
        what = f"would write {would.steps} live steps of {would.shards} thin shards anew; add --yes to do it"
        output.say(what if would.shards else "nothing to do: no shard is that thin")
        return
    with bar("compact", [arc]):
        done = resharding.compact(arc, min_alive=min_alive)
    if target.as_json:
        output.as_json({"shards": done.shards, "steps": done.steps, "commit": done.commit})
    else:
        output.say(
            f"{done.steps} steps out of {done.shards} shards were written anew" if done.shards else "nothing to do"
        )
