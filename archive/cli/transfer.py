"""`archive merge`, `split`, `filter`, `reshard`, `compact`: episodes of some archives in another,
bytes moved together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from archive.base import UsageError
from archive.cli import output
from archive.cli.options import Target, on_archive, options_of, planned, planning, where
from archive.cli.output import bar

if TYPE_CHECKING:
    from archive import Archive

_moving = options_of(  # how episodes get to the other archive
    click.option("--verify", is_flag=True, help="Read every byte that is copied, and compare it with its checksum."),
    click.option("--copy", is_flag=True, help="Copy the shards; else they are referred to where they lie."),
    click.option("--to", required=True, metavar="URL", help="The other archive; made if it is not there."),
)


def _opened(target: Target, others: tuple[str, ...] = (), *, copy: bool, verify: bool, **_: Any) -> list[Archive]:
    """The sources, once it is known that the call makes sense."""
    if verify and not copy:
        raise UsageError("--verify is of copies: add --copy, or leave it out (`archive verify --deep` reads all)")
    return [target.open(url=url) for url in (target.url, *others)]


def _moved(target: Target, name: str, sources: list[Archive], do: Callable[..., Any], **how: Any) -> Any:
    """What `do` makes in the other archive while a bar is drawn. What was named on the way is allowed."""
    allowed = (*target.allow_bases, *(source.url for source in sources))
    options = {"storage_options": target.storage_options, "allow_bases": allowed, "single_writer": target.single_writer}
    with bar(name, sources) as advance:
        return do(progress=advance, **options, **how)


def _answer(target: Target, made: Archive) -> None:
    about = {"url": made.url, "commit": made.head.number, "episodes": len(made.episodes)}
    target.answer(about, "{url} has {episodes} episodes at commit {commit}".format(**about))


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("others", nargs=-1)
@_moving
def merge(target: Target, others: tuple[str, ...], **how: Any) -> None:
    """Make the episodes of archives (URL and OTHERS) visible in one. Again later, it adds what is new."""
    import resharding

    sources = _opened(target, others, **how)
    _answer(target, _moved(target, "merge", sources, resharding.merge, urls=sources, **how))


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("count", type=click.IntRange(1))
@where("The first of those that meet it, as in 'return > 10'.")
@_moving
def split(target: Target, count: int, where: str | None, **how: Any) -> None:
    """Make the first COUNT episodes visible in another archive."""
    import resharding

    (source,) = _opened(target, **how)
    found = source.episodes.filter(where=where)
    if count > len(found):
        raise UsageError(f"COUNT is {count}, and there are {len(found)} such episodes at {source.url}")
    ids = found[:count].table["episode_id"].to_pylist()
    _answer(target, _moved(target, "split", [source], resharding.filter, url=source, episode_id=ids, **how))


@click.command("filter")
@on_archive(time_travel=False, writes=True)
@where("As in 'return > 10 and update_count >= 100'.", required=True)
@_moving
def filter_(target: Target, where: str, **how: Any) -> None:
    """Make the episodes that meet a condition visible in another archive."""
    import resharding

    (source,) = _opened(target, **how)
    source.episodes.filter(where=where)  # refused before anything is made
    _answer(target, _moved(target, "filter", [source], resharding.filter, url=source, where=where, **how))


@click.command()
@on_archive(time_travel=False, writes=True)
@click.argument("world_size", type=click.IntRange(1))
@planning
@_moving
def reshard(target: Target, world_size: int, to: str, copy: bool, verify: bool, **planning: Any) -> None:
    """Save a checkpoint anew in another archive, as WORLD_SIZE ranks will resume from it. `plan` shows what it does."""
    import resharding

    how: dict[str, Any] = {"to": to, "copy": copy, "verify": verify}
    (source,) = _opened(target, **how)
    plan = planned(source, world_size, **planning)
    made = _moved(target, "reshard", [source], resharding.reshard, source=source, plan=plan, **how)
    about = {"checkpoint": made.name, "commit": made.number, "ranks": made.world_size, "steps": plan.steps}
    text = f"checkpoint {made.name!r} is in {to}, saved by {made.world_size} ranks of {output.cell(plan.steps)} steps"
    target.answer(about | {"dropped": plan.dropped}, text)


@click.command()
@click.option(
    "--min-alive", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Shards below are rewritten."
)
@click.option(
    "--min-full",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Shards of a buffer with less of a full one's bytes are joined; 0: none.",
)
@click.option("--yes", is_flag=True, help="Do it; without this, say what would be done.")
@on_archive(time_travel=False, writes=True)
def compact(target: Target, min_alive: float, min_full: float, yes: bool) -> None:
    """Rewrite sparsely used and small shards into full ones. The old ones stay until `archive prune`."""
    import resharding
    from resharding import compactable

    arc = target.open()
    if yes:
        with bar("compact", [arc]):
            done = resharding.compact(arc, min_alive=min_alive, min_full=min_full)
        about = {"shards": done.shards, "steps": done.steps, "commit": done.commit}
        text = "{steps} steps out of {shards} shards were written anew" if done.shards else "nothing to do"
    else:
        would = compactable(arc, min_alive=min_alive, min_full=min_full)
        about = {"shards": would.shards, "steps": would.steps, "commit": None}
        text = "would write {steps} live steps of {shards} thin or small shards anew; add --yes to do it"
        text = text if would.shards else "nothing to do: no shard is that thin, and few are that small"
    target.answer(about, text.format(**about))
