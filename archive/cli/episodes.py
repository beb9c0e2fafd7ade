"""`archive episodes` and `show`: find episodes, and look at one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, limit, on_archive, where

if TYPE_CHECKING:
    from archive import Episode

SHOWN = (
    "episode_id", "length", "return", "complete", "weights", "updates", "env_id", "rank", "run", "buffer", "commit",
    "metadata",
)  # fmt: skip
ABOUT = (
    "id", "length", "complete", "terminated", "truncated", "reason", "model_weights_uuids", "update_counts",
    "total_reward", "env_id", "rank", "run", "session", "buffer", "created_at", "commit", "metadata", "labels",
)  # fmt: skip


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
@where("As in \"return > 10 and metadata.task = 'push'\".")
@click.option("--run", multiple=True, metavar="NAME", help="Of these runs. May be repeated.")
@click.option("--buffer", multiple=True, metavar="NAME", help="In these buffers. May be repeated.")
@click.option("--complete/--incomplete", default=None, help="With, or without, both beginning and end.")
@limit("How many, of the newest; 0 for all.")
@on_archive()
def episodes(
    target: Target, weights: tuple[str, ...], updates: Any, run: tuple[str, ...], buffer: tuple[str, ...], limit: int,
    **how: Any,
) -> None:  # fmt: skip
    """Find episodes. Reads no data."""
    from archive.base import jsontree

    arc = target.open()
    runs = [arc.runs[name].name for name in run]  # an error of its own, if there is none of that name
    found = arc.episodes.filter(
        model_weights_uuid=weights or None, update_count=updates, buffer=buffer or None, run=runs or None, **how
    )
    some = found[-limit:] if limit else found
    table = some.columns(some.episode_index.names)
    rows = table.to_pylist()
    whole = [row | {"metadata": jsontree.loads(row["metadata"]) if row["metadata"] else {}} for row in rows]

    def show() -> None:
        said = [name for name in table.column_names if name.startswith("label.")]
        shown = [*(name for name in SHOWN if name != "run" or len(arc.runs) > 1), *said]
        output.table(map(_in_short, whole), shown)
        more = f", the newest {len(rows)} shown; --limit 0 shows all" if len(rows) < len(found) else ""
        output.say(f"{len(found)} episode{'' if len(found) == 1 else 's'}{more}")
        for note in found.notes:
            output.say(note)

    target.answer({"found": len(found), "episodes": whole}, show)


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
    episode = target.open().episodes[episode_id]
    values = episode.read(list(names), start, stop) if names else {}
    about = {name.replace("total_reward", "return"): getattr(episode, name) for name in ABOUT}

    def show() -> None:
        known = about | {"update_counts": _span(episode.update_counts)}
        output.facts({name: value for name, value in known.items() if value not in (None, {}, [])})
        _print_fields(episode)
        _print_values(values, start)

    target.answer(about | {"fields": episode.fields} | ({"values": values} if names else {}), show)


def _print_fields(episode: Episode) -> None:
    from archive.views import summaries

    columns = ("field", "dtype", "shape", "axis")
    rows = [(name, *summaries.kind(text)) for name, text in episode.fields.items()]
    output.table([dict(zip(columns, row, strict=True)) for row in rows], columns)


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
