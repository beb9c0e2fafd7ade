"""What commands take: an archive, how to reach it and how to print; options that several of them share, and the
checkpoint or the rows that these mean."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError, UsageError
from archive.cli import output
from archive.cli.commands import DEBUG

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Archive, Checkpoint
    from archive.checkpoint import Checkpoints
    from resharding import Plan

Command = Callable[..., None]
Decorator = Callable[[Command], Command]
DEADLINE_S = 30.0  # somebody waits for the answer


@dataclass(frozen=True)
class Target:
    """The archive that is meant, and whether JSON is wanted."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold credentials
    commit: int | str | None = None
    as_json: bool = False
    deadline_s: float = DEADLINE_S
    allow_bases: tuple[str, ...] = ()
    single_writer: bool = False

    def open(self, **how: Any) -> Archive:
        """The archive; `how` goes before the options that were given, as another `url` or `commit`."""
        import archive

        given = {
            "commit": self.commit,
            "storage_options": self.storage_options,
            "deadline_s": self.deadline_s,
            "allow_bases": self.allow_bases,
            "single_writer": self.single_writer,
        }
        return archive.open(how.pop("url", self.url), **(given | how))

    def answer(self, document: Any, text: str | Callable[[], None]) -> None:
        """Print the document if JSON is wanted, else the text; or call what prints it."""
        if self.as_json:
            output.as_json(document)
        elif isinstance(text, str):
            output.say(text)
        else:
            text()

    def table(self, rows: list[dict[str, Any]], columns: Iterable[str]) -> None:
        """Print rows: as JSON whole, else these columns of them."""
        self.answer(rows, lambda: output.table(rows, list(columns)))


_SHARED = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
    click.option(
        "--storage-option", "storage_pairs", multiple=True, metavar="KEY=VALUE",
        help="Passed to the filesystem; VALUE may be JSON, a dot in KEY goes one level down. May be repeated.",
    ),
    click.option("--endpoint-url", metavar="URL", help="S3 server other than Amazon's."),
    click.option("--profile", metavar="NAME", help="Profile of the AWS configuration."),
    click.option(
        "--retry-for", "deadline_s", type=click.FloatRange(min=0, min_open=True), default=DEADLINE_S, show_default=True,
        metavar="SECONDS", help="How long a request that fails is repeated.",
    ),
    click.option(
        "--allow-base", "allow_bases", multiple=True, metavar="URL",
        help="Another archive (or the folder above it) that this one may refer to, as `merge` makes it. "
        "May be repeated.",
    ),
    click.option(
        "--debug", is_flag=True, expose_value=False, help="Show tracebacks.",
        callback=lambda ctx, _, wanted: ctx.meta.update({DEBUG: wanted}),  # the group's context has the same meta
    ),
)  # fmt: skip
_SINGLE_WRITER = click.option(
    "--single-writer",
    is_flag=True,
    help="For a store without a create-only put: you promise that nobody else writes there.",
)


_COMMIT = click.option(
    "--commit",
    metavar="N|TAG",
    help="As of that commit.",
    callback=lambda ctx, param, text: int(text) if text and text.isdecimal() else text,
)
_OF_TARGET = ("url", "commit", "as_json", "deadline_s", "allow_bases", "single_writer")


def on_archive(*, default: str | None = None, time_travel: bool = True, writes: bool = False) -> Decorator:
    """Gives a command a Target as its first argument, and the options that make it up."""
    url = click.argument("url", metavar="[URL]", default=default) if default else click.argument("url")
    added = [url, *_SHARED, *([_SINGLE_WRITER] if writes else ()), *([_COMMIT] if time_travel else ())]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(storage_pairs: tuple[str, ...], endpoint_url: str | None, profile: str | None, **given: Any) -> None:
            of_target = {name: given.pop(name) for name in _OF_TARGET if name in given}
            options = storage_options(storage_pairs, endpoint_url, profile)
            command(Target(**of_target, storage_options=options), **given)

        return options_of(*added)(call)

    return decorate


def options_of(*added: Decorator) -> Decorator:
    """One decorator of several, which add their options in this order."""
    return lambda command: functools.reduce(lambda function, add: add(function), reversed(added), command)


# -- options of several commands ---------------------------------------------------------------------------------------

of_run = click.option("--run", metavar="NAME", help="Of this run; needed where several have such a checkpoint.")
weights = click.option("--weights", multiple=True, metavar="UUID", help="Only episodes made by these. May be repeated.")


def where(text: str = "Only episodes that meet it, as in 'return > 10'.", **how: Any) -> Decorator:
    """The option --where."""
    return click.option("--where", metavar="CONDITION", help=text, **how)


def limit(text: str) -> Decorator:
    """The option --limit."""
    return click.option("--limit", "-n", type=click.IntRange(0), default=20, show_default=True, help=text)


POLICIES, INCOMPLETE = ("balanced", "interleaved", "by_trajectory"), ("keep", "drop")
planning = options_of(  # how to deal out steps
    of_run,
    click.option("--checkpoint", "name", metavar="NAME", help="Which one; default: the newest whole one."),
    click.option(
        "--policy", type=click.Choice(POLICIES), default=POLICIES[0], show_default=True,
        help="Runs of as many steps; episodes in turn; runs of as many episodes.",
    ),
    click.option("--num-envs", type=click.IntRange(1), help="Env rows of each rank."),
    click.option("--max-length", type=click.IntRange(1), help="Steps that an env row holds; the oldest are dropped."),
    click.option("--capacity", type=click.IntRange(1), help="Steps that a rank holds; the oldest are dropped."),
    click.option(
        "--incomplete", type=click.Choice(INCOMPLETE), default=INCOMPLETE[0], show_default=True,
        help="Headless and open episodes.",
    ),
    where(),
    click.option("--allow-missing", is_flag=True, help="Do without ranks that are missing from the checkpoint."),
)  # fmt: skip


# -- values of options -------------------------------------------------------------------------------------------------


def storage_options(pairs: Iterable[str], endpoint_url: str | None, profile: str | None) -> dict[str, Any]:
    """fsspec's options from `key=value` texts: "client_kwargs.region_name=eu-west-1" is nested."""
    out: dict[str, Any] = {}
    for key, value in _split(pairs, "--storage-option"):
        *outer, last = key.split(".")
        level = out
        for part in outer:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise click.UsageError(f"--storage-option {key}: {part} has a value already, so nothing goes below it")
        level[last] = value
    named = {"endpoint_url": endpoint_url, "profile": profile}
    return out | {key: value for key, value in named.items() if value is not None}


def of_pairs(pairs: Iterable[str], what: str = "--set") -> dict[str, Any]:
    """Key -> value of `KEY=VALUE` arguments; a value may be JSON."""
    return dict(_split(pairs, what))


def _split(pairs: Iterable[str], option: str) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.UsageError(f"{option} wants KEY=VALUE")  # the text may be a credential
        try:
            yield key, json.loads(text)
        except (ValueError, RecursionError):
            yield key, text


LATEST = "latest"  # stands for the newest whole one


def checkpoints_of(arc: Archive, run: str | None) -> Checkpoints:
    """The checkpoints of a run, or all. NotFoundError if there is no such run."""
    if run is None:
        return arc.checkpoints
    if run not in arc.head.runs:
        known = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NotFoundError(f"there is no run {run!r} at {arc.url}; its runs: {known}")
    return arc.checkpoints.of(run)


def named_checkpoint(arc: Archive, name: str | None, run: str | None = None, *, replay: bool = False) -> Checkpoint:
    """The checkpoint of this name, or the newest whole one (with replay=True, that has its buffers).

    NotFoundError if there is none.
    """
    checkpoints = checkpoints_of(arc, run)
    found = checkpoints[name] if name and name != LATEST else checkpoints.newest(replay=replay)
    if found is None:
        owner = "" if run is None else f"of run {run!r} "
        raise NotFoundError(f"there is no checkpoint {owner}at {arc.url} yet; `archive log` shows what is there")
    return found


def planned(arc: Archive, world_size: int, name: str | None, run: str | None, where: str | None, **how: Any) -> Plan:
    """The plan that these options ask for."""
    import resharding

    return resharding.plan(named_checkpoint(arc, name, run), world_size, filter=where, **how)


def meeting(condition: str | None, table: pa.Table) -> pa.Table:
    """The rows of any table that meet a condition over its columns. UsageError if it can't be applied to them."""
    if condition is None:
        return table
    import pyarrow as pa

    from archive.index import expressions

    columns = {name: table[name] for name in table.column_names}
    coded = {n for n, c in columns.items() if pa.types.is_dictionary(c.type) and pa.types.is_string(c.type.value_type)}
    plain = pa.table({name: column.cast("string") if name in coded else column for name, column in columns.items()})
    expression, _ = expressions.parse(condition, table.column_names)
    try:
        return plain.filter(expression)
    except pa.ArrowException as e:
        raise UsageError(f"the condition {condition} cannot be applied to these columns: {e}") from e
