"""`archive export`: episodes or a checkpoint as plain files, files of other systems, or a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from archive.base import UsageError
from archive.cli.exchange import ADAPTERS, adapter, adapter_option, stores_of
from archive.cli.options import Target, on_archive, option_values, weights, where
from archive.cli.pages import page_of, page_writer
from archive.cli.progress import bar
from archive.cli.selecting import named_checkpoint

if TYPE_CHECKING:
    from archive import Archive, Episodes

BULK = ("npz", "parquet")  # plain files that need no other system
ONLY_HTML = ("output", "world_size", "max_bytes", "tokenizer", "allow_missing")


@click.command()
@on_archive()
@click.argument("to", required=False)
@click.option("--format", "-f", "name", type=click.Choice([*BULK, *ADAPTERS]), default="npz", show_default=True)
@click.option(
    "--html", metavar="WHAT",
    help="A page instead, of an episode's id, of the 'best' one, of all 'episodes' that are chosen, of a checkpoint's "
    "name or "
    "the 'latest', of the 'archive'; with --output.",
)  # fmt: skip
@click.option("--output", "-o", metavar="FILE", help="Where the page goes.")
@click.option("--world-size", type=click.IntRange(1), metavar="N", help="The page of a checkpoint's plan for N ranks.")
@click.option("--checkpoint", metavar="NAME", help="What is live in it ('latest': the newest whole one).")
@click.option("--run", metavar="NAME", help="Of this run: the checkpoint; of all episodes, its own.")
@where()
@weights
@click.option(
    "--field", "fields", multiple=True, metavar="NAME",
    help="npz, parquet, an episode's page: only these. May be repeated.",
)  # fmt: skip
@click.option(
    "--max-bytes", type=click.IntRange(1), metavar="N", help="Of an episode's page; it names what is left out."
)
@click.option(
    "--tokenizer", metavar="NAME", help="Makes text of token ids on an episode's page: a folder or a Hub name."
)
@click.option("--allow-missing", is_flag=True, help="The page of a plan: do without ranks that are missing.")
@adapter_option
@click.option("--yes", is_flag=True, help="Replace files that are there.")
def export(
    target: Target, to: str | None, name: str, html: str | None, yes: bool, given: tuple[str, ...], **how: Any
) -> None:  # fmt: skip
    """Write episodes, or a checkpoint, to TO: npz and parquet files, or what another system reads.

    rlinf and alf take a checkpoint (default: the newest whole one), the others episodes (default: all). --html makes
    one page that needs no network: an episode that plays, episodes in rows to sort and filter, a checkpoint's ranks, a
    plan, or the archive with its runs.
    """
    if html is not None:
        _page(target, to or how["output"], html, yes, given, how)
        return
    if to is None or any(how.pop(name) for name in ONLY_HTML):
        raise UsageError(
            "give TO, a folder or file; --output, --world-size, --max-bytes, --tokenizer and --allow-missing go with "
            "--html"
        )
    export_to = _to_plain_files if name in BULK else _to_system
    export_to(target, to, name, given, yes=yes, **how)


def _page(
    target: Target, file: str | None, what: str, replace: bool, given: tuple[str, ...], how: Mapping[str, Any]
) -> None:
    if how["checkpoint"] or given or (how["world_size"] and how["weights"]):
        raise UsageError("--html takes a checkpoint's name itself, and no --set; a plan no --weights")
    if file is None:
        raise UsageError("--html wants a file to write: add --output FILE")
    choice = {name: how[name] for name in ("run", "where", "weights", "world_size", "allow_missing")}
    of_episode = {"fields": list(how["fields"]), "max_bytes": how["max_bytes"], "tokenizer": how["tokenizer"]}
    arc, write = target.open(), page_writer(file, target.storage_options, replace=replace)
    title, text = page_of(arc, what, **choice, **{name: value for name, value in of_episode.items() if value})
    write(text.encode())
    target.answer({"to": file, "format": "html", "source": title}, f"{title} is in {file}")


def _to_plain_files(
    target: Target, to: str, name: str, given: tuple[str, ...], *, yes: bool, fields: tuple[str, ...], **how: Any
) -> None:
    import resharding

    if option_values(given):
        raise UsageError(f"--set is for adapters; {name} has none")
    arc = target.open()
    episodes = _episodes(arc, **how)
    there = _present(to, name, target.storage_options)
    if there and not yes:
        raise UsageError(
            f"{to} has {there} files, some of which would be replaced by those of {len(episodes)} episodes; nothing "
            "was done: give another folder, or add --yes"
        )
    with bar(f"export {name}", [arc]) as advance:
        files = resharding.export(
            episodes, to, format=name, fields=list(fields) or None, storage_options=target.storage_options,
            progress=advance,
        )  # fmt: skip
    about = {"to": to, "format": name, "episodes": len(episodes), "files": files}
    target.answer(about, f"{len(episodes)} episodes are in {len(files)} files at {to}")


def _present(to: str, name: str, options: Mapping[str, Any]) -> int:
    """How many files there are that an export may replace."""
    from archive.store import Storage

    return sum(n.startswith("part-") and n.endswith(f".{name}") for n in Storage.connect(to, dict(options)).list(""))


def _episodes(
    arc: Archive, checkpoint: str | None, run: str | None, where: str | None, weights: tuple[str, ...]
) -> Episodes:
    if checkpoint:
        found = named_checkpoint(arc, checkpoint, run, replay=True).episodes
    else:
        found = arc.episodes if run is None else arc.runs[run].episodes
    return found.filter(where=where, model_weights_uuid=weights or None)


def _to_system(
    target: Target, to: str, name: str, given: tuple[str, ...], *, yes: bool, fields: tuple[str, ...], **how: Any
) -> None:
    from archive.adapters import Report

    arc = target.open()
    write = adapter("export", name, given)
    options: dict[str, Any] = {**stores_of(write, target), **option_values(given)}
    if ADAPTERS[name].unit == "checkpoint":
        source: Any = _checkpoint(arc, name, fields, **how)
    else:
        source = _episodes(arc, **how)
        options |= {"fields": list(fields)} if fields else {}
    with bar(f"export {name}", [arc]):
        made = write(source, to, **options)
    report = f": {made}" if isinstance(made, Report) else ""
    about = {"to": to, "format": name, "source": str(source)}
    target.answer(about | ({"report": str(made)} if report else {}), f"{source} was written to {to} for {name}{report}")


def _checkpoint(
    arc: Archive, name: str, fields: tuple[str, ...], checkpoint: str | None, run: str | None, where: str | None,
    weights: tuple[str, ...],
) -> Any:  # fmt: skip
    """What a format takes that takes checkpoints."""
    if fields:
        raise UsageError(f"--field is for formats of episodes; {name} takes a checkpoint whole")
    if where or weights:
        raise UsageError(f"{name} takes a checkpoint whole: leave out --where and --weights, or `archive filter` first")
    return named_checkpoint(arc, checkpoint, run, replay=True)
