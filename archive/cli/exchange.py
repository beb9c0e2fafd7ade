"""Tool: `archive export` and `import`: episodes and checkpoints as files of other systems, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from archive.base import ARCHIVE_KEY, NotFoundError, UsageError
from archive.cli import output
from archive.cli.options import Target, on_archive, option_values
from archive.cli.pages import write_page
from archive.cli.progress import bar
from archive.cli.ranks import named_checkpoint

if TYPE_CHECKING:
    from archive import Archive, Episodes

BULK = ("npz", "parquet")  # plain files that need no other system


class Format(NamedTuple):
    """What an adapter reads and writes: its module, and whether it takes checkpoints or episodes."""

    module: str
    unit: str


ADAPTERS = {
    "rlinf": Format("rlinf", "checkpoint"),
    "alf": Format("alf", "checkpoint"),
    "minari": Format("minari", "dataset"),
    "lerobot": Format("lerobot", "dataset"),
    "d3rlpy": Format("npz", "dataset"),
}
OURS = {"run", "storage_options", "fields"}  # have options of their own
_more = click.option(
    "--set", "given", multiple=True, metavar="KEY=VALUE",
    help="An option of the format's adapter, as in 'fps=10'; VALUE may be JSON. May be repeated.",
)  # fmt: skip


@click.command()
@on_archive()
@click.argument("to", required=False)
@click.option("--format", "-f", "name", type=click.Choice([*BULK, *ADAPTERS]), default="npz", show_default=True)
@click.option(
    "--html",
    metavar="WHAT",
    help="A page instead, of an episode's id, of the 'best' one, of all 'episodes' that are chosen, of a checkpoint's name or "
    "the 'latest', of the 'archive'; with --output.",
)
@click.option("--output", "-o", metavar="FILE", help="Where the page goes.")
@click.option(
    "--world-size", type=click.IntRange(1), metavar="N", help="The page of the checkpoint's plan for N ranks."
)
@click.option("--checkpoint", metavar="NAME", help="What is live in it ('latest': the newest whole one).")
@click.option("--run", metavar="NAME", help="Of this run: the checkpoint; of all episodes, its own.")
@click.option("--where", metavar="CONDITION", help="Only episodes that meet it, as in 'return > 10'.")
@click.option("--weights", multiple=True, metavar="UUID", help="Only episodes made by these. May be repeated.")
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME",
    help="npz, parquet, an episode's page: only these. May be repeated.",
)
@click.option(
    "--max-bytes", type=click.IntRange(1), metavar="N", help="Of an episode's page; it says what was left out."
)
@click.option(
    "--tokenizer", metavar="NAME", help="Makes text of token ids on an episode's page: a folder, or a Hub name."
)
@click.option("--allow-missing", is_flag=True, help="The page of a plan: do without ranks that are missing.")
@_more
@click.option("--yes", is_flag=True, help="Replace files that are there.")
def export(
    target: Target, to: str | None, name: str, html: str | None, output: str | None, world_size: int | None, yes: bool,
    allow_missing: bool, given: tuple[str, ...], **how: Any,
) -> None:  # fmt: skip
    """Write episodes, or a checkpoint, to TO: npz and parquet files, or what another system reads.

    rlinf and alf take a checkpoint (default: the newest whole one), the others episodes (default: all). --html makes one
    page that needs no network: an episode that plays, episodes in rows to sort and filter, a checkpoint's ranks, a plan, or
    the archive with its runs.
    """
    if html is not None:
        if how.pop("checkpoint") or given or (world_size and how["weights"]):
            raise UsageError("--html takes a checkpoint's name itself, and no --set; a plan no --weights")
        how["fields"] = list(how["fields"])
        kept = {key: value for key, value in how.items() if value or key in ("where", "weights")}
        _html(
            target,
            html,
            to or output,
            world_size=world_size,
            replace=yes,
            allow_missing=allow_missing,
            storage_options=target.storage_options,
            **kept,
        )
        return
    pages_only = [how.pop("max_bytes"), how.pop("tokenizer"), world_size, output, allow_missing or None]
    if to is None or any(given is not None for given in pages_only):
        raise UsageError(
            "give TO, a folder or file; --output, --world-size, --max-bytes, --tokenizer and --allow-missing go with --html"
        )
    _files(target, to, name, yes, given, how)


def _html(target: Target, what: str, file: str | None, **how: Any) -> None:
    if file is None:
        raise UsageError("--html wants a file to write: add --output FILE")
    title = write_page(target.open(), what, file, **how)
    _tell(target, {"to": file, "format": "html", "source": title}, f"{title} is in {file}")


def _files(target: Target, to: str, name: str, yes: bool, given: tuple[str, ...], how: dict[str, Any]) -> None:
    arc = target.open()
    if name in BULK:
        _bulk(target, arc, to, name, yes, option_values(given), how)
        return
    format = ADAPTERS[name]
    fields, write = list(how.pop("fields")), _function(format, "export", name, given)
    if fields and format.unit == "checkpoint":
        raise UsageError(f"--field is for formats of episodes; {name} takes a checkpoint whole")
    if format.unit == "checkpoint":
        if how["where"] or how["weights"]:
            raise UsageError(
                f"{name} takes a checkpoint whole: leave out --where and --weights, or `archive filter` first"
            )
        source: Any = named_checkpoint(arc, how["checkpoint"], how["run"], replay=True)
    else:
        source = _episodes(arc, **how)
    with bar(f"export {name}", [arc]):
        write(source, to, **({"fields": fields} if fields else {}), **_stores(write, target), **option_values(given))
    _tell(target, {"to": to, "format": name, "source": str(source)}, f"{source} was written to {to} for {name}")


def _bulk(
    target: Target, arc: Archive, to: str, name: str, yes: bool, given: Mapping[str, Any], how: Mapping[str, Any]
) -> None:
    import resharding

    if given:
        raise UsageError(f"--set is for adapters; {name} has none")
    episodes = _episodes(arc, **{name: how[name] for name in ("checkpoint", "run", "where", "weights")})
    there = _present(to, name, target.storage_options)
    if there and not yes:
        raise UsageError(
            f"{to} has {there} files, some of which would be replaced by those of {len(episodes)} episodes; nothing was "
            "done: give another folder, or add --yes"
        )
    with bar(f"export {name}", [arc]) as advance:
        files = resharding.export(
            episodes, to, format=name, fields=list(how["fields"]) or None, storage_options=target.storage_options,
            progress=advance,
        )  # fmt: skip
    about = {"to": to, "format": name, "episodes": len(episodes), "files": files}
    _tell(target, about, f"{len(episodes)} episodes are in {len(files)} files at {to}")


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


@click.command("import")
@on_archive(time_travel=False, writes=True)
@click.argument("sources", nargs=-1, required=True)
@click.option("--format", "-f", "name", type=click.Choice(list(ADAPTERS)), required=True, help="What SOURCES are.")
@click.option("--run", default="imported", show_default=True, help="The run that the checkpoint belongs to.")
@_more
@click.option("--yes", is_flag=True, help="Do it though it ends the session of a run that is there.")
def import_(target: Target, sources: tuple[str, ...], name: str, run: str, given: tuple[str, ...], yes: bool) -> None:
    """Add what another system saved at SOURCES as a checkpoint. Makes the archive if it is not there.

    SOURCES: a file, folder or name as the other system has it; of alf, one file for each rank.
    """
    if len(sources) > 1 and name != "alf":
        raise UsageError(f"{name} has one source, not {len(sources)}; import them one after the other")
    source = list(sources) if len(sources) > 1 else sources[0]
    read = _function(ADAPTERS[name], "import", name, given)
    with _made_if_need_be(target) as arc:
        if run in arc.head.runs and not yes:
            raise UsageError(
                f"{arc.url} has a run {run!r}, and a job that still writes to it could no longer commit; nothing was done: "
                "give another --run, or add --yes"
            )
        with bar(f"import {name}", [arc]):
            made = read(source, arc, run=run, **_stores(read, target), **option_values(given))
    about = {"checkpoint": made.name, "commit": made.number, "step": made.step, "ranks": made.world_size}
    about["episodes"] = len(made.episodes)
    _tell(
        target,
        about,
        f"checkpoint {made.name!r} of {arc.url} has {len(made.episodes)} episodes of {', '.join(sources)}",
    )


@contextmanager
def _made_if_need_be(target: Target) -> Iterator[Archive]:
    """The archive, made if there is none; and not left behind if an error comes before anything is in it."""
    try:
        arc, was_there = target.open(), True
    except NotFoundError:
        arc, was_there = target.open(create=True), False
    try:
        yield arc
    except BaseException:
        if not was_there and arc.storage.list("") == [ARCHIVE_KEY]:
            arc.storage.delete([ARCHIVE_KEY])
        raise


def _function(format: Format, verb: str, name: str, given: tuple[str, ...]) -> Callable[..., Any]:
    """The adapter's function, once it is known to take the options given."""
    module = import_module(f"archive.adapters.{format.module}")
    found: Callable[..., Any] = getattr(module, f"{verb}_{format.unit}")
    parameters, wanted = inspect.signature(found).parameters.values(), set(option_values(given))
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - OURS
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = sorted(wanted & OURS if passes_on else wanted - known)
    if unknown:
        raise UsageError(f"--set {unknown[0]}: {verb} of {name} takes {', '.join(sorted(known)) or 'no options'}")
    return found


def _stores(function: Callable[..., Any], target: Target) -> dict[str, Any]:
    """The storage options, for a function that takes them."""
    takes = "storage_options" in inspect.signature(function).parameters
    return {"storage_options": target.storage_options} if takes else {}


def _tell(target: Target, about: dict[str, Any], text: str) -> None:
    if target.as_json:
        output.as_json(about)
    else:
        output.say(text)
