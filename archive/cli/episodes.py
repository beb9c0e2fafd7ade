"""Tool: `archive episodes` and `show`: find episodes, and look at one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, on_archive

if TYPE_CHECKING:
    from archive import Archive, Episode, Episodes

SHOWN = (
    "episode_id",
    "length",
    "return",
    "complete",
    "weights",
    "updates",
    "env_id",
    "rank",
    "run",
    "buffer",
    "commit",
    "metadata",
)


def _update_range(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """A number, or START:STOP, half-open; either side may be left out."""
    start, colon, stop = (text or "").partition(":")
    try:
        return (int(start) if start else None, int(stop) if stop else None) if colon else int(text) if text else None
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor START:STOP", ctx, param) from None


@click.command()
@click.option("--weights", multiple=True, metavar="UUID", help="Made by these. May be repeated.")
@click.option("--updates", callback=_update_range, metavar="N|START:STOP", help="Of these update counts, without STOP.")
@click.option("--where", metavar="CONDITION", help="As in \"return > 10 and metadata.task = 'push'\".")
@click.option("--run", multiple=True, metavar="NAME", help="Of these runs. May be repeated.")
@click.option("--buffer", multiple=True, metavar="NAME", help="In these buffers. May be repeated.")
@click.option("--complete/--incomplete", default=None, help="With, or without, both beginning and end.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=20, show_default=True, help="How many, of the newest; 0 for all."
)
@on_archive()
def episodes(
    target: Target, weights: tuple[str, ...], updates: Any, where: str | None, run: tuple[str, ...],
    buffer: tuple[str, ...],    complete: bool | None, limit: int,
) -> None:  # fmt: skip
    """Find episodes. Reads no data."""
    arc = target.open()
    found = arc.episodes.filter(
        model_weights_uuid=weights or None,
        update_count=updates,
        where=where,
        buffer=buffer or None,
        complete=complete,
        run=_known(arc, run),
    )
    shown = found[-limit:] if limit else found
    rows = [_summary(row) for row in shown.table.to_pylist()]
    if target.as_json:
        output.as_json({"found": len(found), "episodes": rows})
        return
    columns = [name for name in SHOWN if name != "run" or len(arc.runs) > 1]
    output.table(([_in_short(row)[c] for c in columns] for row in rows), columns)
    output.say(_count(found, len(rows)))


def _known(arc: Archive, runs: tuple[str, ...]) -> list[str] | None:
    """The runs that are asked for; an error if the archive has none of that name."""
    return [arc.runs[name].name for name in runs] or None


def _count(found: Episodes, shown: int) -> str:
    more = f", the newest {shown} shown; --limit 0 shows all" if shown < len(found) else ""
    return f"{len(found)} episode{'' if len(found) == 1 else 's'}{more}"


def _summary(row: dict[str, Any]) -> dict[str, Any]:
    from archive.base import jsontree

    return row | {"metadata": jsontree.loads(row["metadata"]) if row["metadata"] else {}}


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["update_count_min"], row["update_count_max"]
    updates = None if low is None else _span((low, high + 1))
    return row | {
        "weights": row["model_weights_uuids"] or None,
        "updates": updates,
        "metadata": row["metadata"] or None,
    }


def _span(updates: tuple[int, int] | None) -> str | None:
    """A half-open range as people say it."""
    if updates is None:
        return None
    return str(updates[0]) if updates[1] == updates[0] + 1 else f"{updates[0]} to {updates[1] - 1}"


@click.command()
@on_archive()
@click.argument("episode_id")
@click.option(
    "--read", "-r", "names", multiple=True, metavar="FIELD", help="Print this field's values. May be repeated."
)
@click.option("--start", default=0, show_default=True, help="First step to print.")
@click.option("--stop", type=int, help="Step before which to end.")
def show(target: Target, episode_id: str, names: tuple[str, ...], start: int, stop: int | None) -> None:
    """One episode: what is known of it, its fields, and their values."""
    from archive.views import summaries

    episode = target.open().episodes[episode_id]
    values = episode.read(list(names), start, stop) if names else {}
    if target.as_json:
        output.as_json(_about(episode) | {"fields": episode.fields} | ({"values": values} if names else {}))
        return
    about = _about(episode) | {"update_counts": _span(episode.update_counts)}
    output.facts({name: value for name, value in about.items() if value not in (None, {}, [])})
    output.table(
        ([n, *summaries.kind(text)] for n, text in episode.fields.items()), ("field", "dtype", "shape", "axis")
    )
    _print_values(values, start)


def _about(episode: Episode) -> dict[str, Any]:
    names = ("id", "length", "complete", "terminated", "truncated", "reason", "model_weights_uuids", "update_counts")
    more = ("env_id", "rank", "run", "session", "buffer", "created_at", "commit", "metadata")
    return (
        {n: getattr(episode, n) for n in names}
        | {"return": episode.total_reward}
        | {n: getattr(episode, n) for n in more}
    )


def _print_values(values: dict[str, Any], start: int) -> None:
    """Numbers as NumPy prints them; text, JSON and what varies in length step by step."""
    from archive.views import frames, texts

    for path, leaf in frames.leaves(values):
        output.say(f"\n{output.cell(path, limit=None)}")
        said = texts.as_texts(leaf)
        if said is None or (not said.written and not isinstance(leaf, list)):
            output.say(str(leaf))
            continue
        for step, text in enumerate(said.steps, max(start, 0)):
            for i, line in enumerate(text.split("\n")):
                output.say(f"{f'[{step}]' if i == 0 else '':<6} {output.cell(line, limit=None)}".rstrip())
