"""`archive export` and `import`: episodes or a checkpoint as plain files, files of other systems, or a page; and what
other systems saved as a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError, UsageError, layout
from archive.cli.options import Target, checkpoints_of, named_checkpoint, of_pairs, on_archive, weights, where
from archive.cli.output import bar
from archive.store import file_exists, local_path, write_file

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episode, Episodes


ADAPTERS = {  # the module of each, and whether it takes checkpoints or episodes
    "rlinf": ("rlinf", "checkpoint"),
    "alf": ("alf", "checkpoint"),
    "minari": ("minari", "dataset"),
    "lerobot": ("lerobot", "dataset"),
    "d3rlpy": ("npz", "dataset"),
}
OURS = {"run", "storage_options", "fields"}  # have options of their own
adapter_option = click.option(
    "--set",
    "given",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the format's adapter, as in 'fps=10'; VALUE may be JSON. May be repeated.",
)


def adapter(target: Target, verb: str, name: str, given: tuple[str, ...]) -> Callable[..., Any]:
    """The function of an adapter that exports or imports, with the options that were given and those of the storage.
    UsageError if it does not take these."""
    module, unit = ADAPTERS[name]
    found: Callable[..., Any] = getattr(import_module(f"archive.adapters.{module}"), f"{verb}_{unit}")
    options, parameters = of_pairs(given), inspect.signature(found).parameters
    known = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY} - OURS
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = sorted(options.keys() & OURS if passes_on else options.keys() - known)
    if unknown:
        raise UsageError(f"--set {unknown[0]}: {verb} of {name} takes {', '.join(sorted(known)) or 'no options'}")
    stores = {"storage_options": target.storage_options} if "storage_options" in parameters else {}
    return partial(found, **options, **stores)


@click.command("import")
@on_archive(time_travel=False, writes=True)
@click.argument("sources", nargs=-1, required=True)
@click.option("--format", "-f", "name", type=click.Choice(list(ADAPTERS)), required=True, help="What SOURCES are.")
@click.option("--run", default="imported", show_default=True, help="The run that the checkpoint belongs to.")
@adapter_option
@click.option("--yes", is_flag=True, help="Do it though it ends the session of a run that is there.")
def import_(target: Target, sources: tuple[str, ...], name: str, run: str, given: tuple[str, ...], yes: bool) -> None:
    """Add what another system saved at SOURCES as a checkpoint. Makes the archive if it is not there.

    SOURCES: a file, folder or name as the other system has it; of alf, one file for each rank.
    """
    if len(sources) > 1 and name != "alf":
        raise UsageError(f"{name} has one source, not {len(sources)}; import them one after the other")
    read = adapter(target, "import", name, given)
    with _made_if_need_be(target) as arc:
        if run in arc.head.runs and not yes:
            raise UsageError(
                f"{arc.url} has a run {run!r}, and a job that still writes to it could no longer commit; nothing was "
                "done: give another --run, or add --yes"
            )
        with bar(f"import {name}", [arc]):
            made = read(list(sources) if len(sources) > 1 else sources[0], arc, run=run)
    about = {
        "checkpoint": made.name,
        "commit": made.number,
        "step": made.step,
        "ranks": made.world_size,
        "episodes": len(made.episodes),
    }
    text = f"checkpoint {made.name!r} of {arc.url} has {about['episodes']} episodes of {', '.join(sources)}"
    target.answer(about, text)


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
        if not was_there and arc.storage.list("") == [layout.ARCHIVE_KEY]:
            arc.storage.delete([layout.ARCHIVE_KEY])
        raise


BULK = ("npz", "parquet")  # plain files that need no other system
ONLY_HTML = ("output", "world_size", "max_bytes", "tokenizer", "allow_missing")


@click.command()
@on_archive()
@click.argument("to", required=False)
@click.option("--format", "-f", "name", type=click.Choice([*BULK, *ADAPTERS]), default="npz", show_default=True)
@click.option(
    "--html",
    metavar="WHAT",
    help="A page instead, of an episode's id, of the 'best' one, of all 'episodes' that are chosen, of a checkpoint's "
    "name or "
    "the 'latest', of the 'archive'; with --output.",
)
@click.option("--output", "-o", metavar="FILE", help="Where the page goes.")
@click.option("--world-size", type=click.IntRange(1), metavar="N", help="The page of a checkpoint's plan for N ranks.")
@click.option("--checkpoint", metavar="NAME", help="What is live in it ('latest': the newest whole one).")
@click.option("--run", metavar="NAME", help="Of this run: the checkpoint; of all episodes, its own.")
@where()
@weights
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME",
    help="npz, parquet, an episode's page: only these. May be repeated.",
)
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
) -> None:
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
    arc, path = target.open(), None if "://" in file else local_path(file, "--output")
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UsageError(f"--output {file} is no file in a folder that is there: make the folder, or give another")
    place, options = (file, target.storage_options) if path is None else (str(path), {})
    if file_exists(place, options) and not replace:
        raise UsageError(f"{file} is there; nothing was done: give another --output, or add --yes to replace it")
    choice = {name: how[name] for name in ("run", "where", "weights", "world_size", "allow_missing")}
    of_episode = {"fields": list(how["fields"]), "max_bytes": how["max_bytes"], "tokenizer": how["tokenizer"]}
    title, text = page_of(arc, what, **choice, **{name: value for name, value in of_episode.items() if value})
    write_file(place, text.encode(), storage_options=options)  # whole or not at all
    target.answer({"to": file, "format": "html", "source": title}, f"{title} is in {file}")


def _to_plain_files(
    target: Target, to: str, name: str, given: tuple[str, ...], *, yes: bool, fields: tuple[str, ...], **how: Any
) -> None:
    import resharding
    from archive.store import Storage

    if of_pairs(given):
        raise UsageError(f"--set is for adapters; {name} has none")
    arc = target.open()
    episodes = _chosen(arc, **how)
    files = Storage.connect(to, target.storage_options).list("")
    there = sum(file.startswith("part-") and file.endswith(f".{name}") for file in files)
    if there and not yes:
        raise UsageError(
            f"{to} has {there} files, some of which would be replaced by those of {len(episodes)} episodes; nothing "
            "was done: give another folder, or add --yes"
        )
    with bar(f"export {name}", [arc]) as advance:
        made = resharding.export(
            episodes, to, format=name, fields=list(fields) or None, storage_options=target.storage_options,
            progress=advance,
        )  # fmt: skip
    about = {"to": to, "format": name, "episodes": len(episodes), "files": made}
    target.answer(about, f"{len(episodes)} episodes are in {len(made)} files at {to}")


def _chosen(
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
    write = adapter(target, "export", name, given)
    if ADAPTERS[name][1] == "dataset":
        source: Any = _chosen(arc, **how)
        write = partial(write, fields=list(fields)) if fields else write
    elif fields:
        raise UsageError(f"--field is for formats of episodes; {name} takes a checkpoint whole")
    elif how["where"] or how["weights"]:
        raise UsageError(f"{name} takes a checkpoint whole: leave out --where and --weights, or `archive filter` first")
    else:
        source = named_checkpoint(arc, how["checkpoint"], how["run"], replay=True)
    with bar(f"export {name}", [arc]):
        made = write(source, to)
    report = f": {made}" if isinstance(made, Report) else ""
    about = {"to": to, "format": name, "source": str(source)}
    target.answer(about | ({"report": str(made)} if report else {}), f"{source} was written to {to} for {name}{report}")


BEST = "best"  # the episode of the greatest return, where none has this id
EPISODES = "episodes"  # all that meet the conditions, where no episode has this id
WHOLE = "archive"  # the archive itself, or a run of it, likewise


def page_of(
    arc: Archive, what: str, *, run: str | None, where: str | None, weights: tuple[str, ...], world_size: int | None,
    allow_missing: bool, **how: Any,
) -> tuple[str, str]:  # fmt: skip
    """Title and text of the page of an episode's id or a checkpoint's name ("latest"), with a world size of its plan.

    how: options of an episode's page, as of Episode.to_html; a UsageError for another one's. NotFoundError if there is
    nothing of that name.
    """
    if world_size:
        import resharding

        _refuse(how, "plan")
        checkpoint = _shown(arc, what, run, "checkpoint")
        made = resharding.plan(checkpoint, world_size, filter=where, allow_missing=allow_missing, tails="ignore")
        return f"plan of {checkpoint.name} for {world_size} ranks", made.to_html()
    if run is not None:
        arc.runs[run]  # a run that is not there is an error of its own
    found = arc.episodes.filter(where=where, model_weights_uuid=weights or None, run=run)
    if len(named := found.filter(episode_id=what)):
        return f"episode {what}", named[0].to_html(**how)
    if what == BEST and (best := _best(found)) is not None:
        return f"episode {best.id}", best.to_html(**how)
    if what == EPISODES:
        _refuse(how, "list of episodes")
        return f"{len(found)} episodes", found.to_html()
    if where is not None or weights:
        raise NotFoundError(
            f"no episode {what!r} at {arc.url} meets --where and --weights; `archive episodes` lists those that do"
        )
    if what == WHOLE:
        _refuse(how, "whole archive")
        return (what, arc.to_html()) if run is None else (f"run {run}", arc.runs.to_html(run))
    checkpoint = _shown(arc, what, run, "episode or checkpoint")
    _refuse(how, "checkpoint")
    return f"checkpoint {checkpoint.name}", checkpoint.to_html()


def _refuse(how: Mapping[str, Any], kind: str) -> None:
    if how:
        option = "--" + ("field" if "fields" in how else min(how).replace("_", "-"))
        raise UsageError(f"{option} is for the page of an episode; that of a {kind} shows no steps: leave it out")


def _best(found: Episodes) -> Episode | None:
    """The one of the greatest return."""
    import pyarrow.compute as pc

    returns = found.columns(["return"])["return"]
    greatest = pc.max(returns)
    return found[pc.index(returns, greatest).as_py()] if greatest.is_valid else None


def _shown(arc: Archive, name: str, run: str | None, kind: str) -> Checkpoint:
    """The checkpoint of this name, or the newest whole one."""
    checkpoints_of(arc, run)  # a run that is not there is an error of its own
    try:
        return named_checkpoint(arc, name, run)
    except NotFoundError:
        raise NotFoundError(
            f"there is no {kind} {name!r} at {arc.url}; `archive episodes` and `archive checkpoints` list them"
        ) from None
