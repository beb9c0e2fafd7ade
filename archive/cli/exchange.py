"""The systems that `archive export` and `import` know; and `archive import`: what they saved as a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from archive.base import ARCHIVE_KEY, NotFoundError, UsageError
from archive.cli.options import Target, on_archive, option_values
from archive.cli.progress import bar

if TYPE_CHECKING:
    from archive import Archive


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
adapter_option = click.option(
    "--set", "given", multiple=True, metavar="KEY=VALUE",
    help="An option of the format's adapter, as in 'fps=10'; VALUE may be JSON. May be repeated.",
)  # fmt: skip


def adapter(verb: str, name: str, given: tuple[str, ...]) -> Callable[..., Any]:
    """The function of an adapter that exports or imports, once it is known to take the options given;
    else UsageError."""
    module = import_module(f"archive.adapters.{ADAPTERS[name].module}")
    found: Callable[..., Any] = getattr(module, f"{verb}_{ADAPTERS[name].unit}")
    parameters, wanted = inspect.signature(found).parameters.values(), set(option_values(given))
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - OURS
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = sorted(wanted & OURS if passes_on else wanted - known)
    if unknown:
        raise UsageError(f"--set {unknown[0]}: {verb} of {name} takes {', '.join(sorted(known)) or 'no options'}")
    return found


def stores_of(function: Callable[..., Any], target: Target) -> dict[str, Any]:
    """The storage options, for a function that takes them."""
    takes = "storage_options" in inspect.signature(function).parameters
    return {"storage_options": target.storage_options} if takes else {}


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
    read = adapter("import", name, given)
    with _made_if_need_be(target) as arc:
        if run in arc.head.runs and not yes:
            raise UsageError(
                f"{arc.url} has a run {run!r}, and a job that still writes to it could no longer commit; nothing was "
                "done: give another --run, or add --yes"
            )
        with bar(f"import {name}", [arc]):
            source = list(sources) if len(sources) > 1 else sources[0]
            made = read(source, arc, run=run, **stores_of(read, target), **option_values(given))
    about = {
        "checkpoint": made.name, "commit": made.number, "step": made.step, "ranks": made.world_size,
        "episodes": len(made.episodes),
    }  # fmt: skip
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
        if not was_there and arc.storage.list("") == [ARCHIVE_KEY]:
            arc.storage.delete([ARCHIVE_KEY])
        raise
