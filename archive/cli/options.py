"""The options that several commands take, and what they mean: an archive, a checkpoint, a plan, rows of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Archive, Checkpoint
    from archive.checkpoint import Checkpoints
    from archive.store import Storage
    from resharding import Plan

COUNT, ABOVE_0 = click.IntRange(1), click.FloatRange(min=0, min_open=True)
CHOICE = re.compile(r"[a-z0-9_]+(\|[a-z0-9_]+)+")
DEADLINE_S = 30.0  # somebody waits for the answer
DEBUG = "archive.debug"  # key in the context's meta: whether tracebacks are wanted


@dataclass(frozen=True)
class Target:
    """The archive that a command is called with, and how to reach it."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold credentials
    commit: int | str | None = None
    deadline_s: float = DEADLINE_S
    allow_bases: tuple[str, ...] = ()
    single_writer: bool = False
    as_json: bool = False

    def open(self, **how: Any) -> Archive:
        """The archive; `how` goes before the options that were given, as another `url` or `commit`."""
        import archive

        names = ("commit", "storage_options", "deadline_s", "allow_bases", "single_writer")
        given = {name: getattr(self, name) for name in names}
        return archive.open(how.pop("url", self.url), **(given | how))

    def connect(self) -> Storage:
        """The folder, whether an archive is in it or not."""
        from archive.store import Storage

        return Storage.connect(
            self.url, self.storage_options, deadline_s=self.deadline_s, single_writer=self.single_writer
        )


# -- declaring ---------------------------------------------------------------------------------------------------------


def argument(name: str, **how: Any) -> click.Argument:
    """An argument, by its place."""
    return click.Argument([name], **how)


def option(spec: str, help: str, **how: Any) -> click.Option:
    """An option, by how it is typed: "--deep" is a flag, "--incomplete keep|drop" a choice, "--capacity N" a number of
    1 or more; "--id ids ID..." may be repeated, and is called `ids` in Python. A default is shown."""
    words = spec.split()
    names = [word for word in words if word.startswith("-") or (word.islower() and word.isidentifier())]
    value = words[-1] if len(words) > len(names) else None
    if value is None:
        return click.Option(names, help=help, is_flag=True, **how)
    if value.endswith("..."):
        return click.Option(names, help=f"{help} May be repeated.", metavar=value[:-3], multiple=True, **how)
    if CHOICE.fullmatch(value):
        how["type"] = click.Choice(value.split("|"))
    else:
        how = {"metavar": value, "type": COUNT if value == "N" else None, **how}
    return click.Option(names, help=help, show_default="default" in how, **how)


def of_run(help: str, **how: Any) -> click.Option:
    """The option --run."""
    return option("--run NAME", help, **how)


def where(help: str = "Only episodes that meet it, as in 'return > 10'.", **how: Any) -> click.Option:
    """The option --where."""
    return option("--where CONDITION", help, **how)


def limit(help: str) -> click.Option:
    """The option --limit."""
    return option("--limit -n N", f"{help}; 0 for all.", type=click.IntRange(0), default=20)


IN_RUN = of_run("The run of the checkpoint; needed if several runs have one of this name.")
POLICIES = ("balanced", "interleaved", "by_trajectory")
_POLICY = "Ranges of equally many steps; episodes in turn; ranges of equally many episodes."
PLANNING = (  # what `planned` takes
    IN_RUN,
    option("--checkpoint name NAME", "Which checkpoint. Default: the newest whole one."),
    option(f"--policy {'|'.join(POLICIES)}", _POLICY, default=POLICIES[0]),
    option("--num-envs N", "Envs of each rank."),
    option("--max-length N", "Steps that an env holds; the oldest are dropped."),
    option("--capacity N", "Steps that a rank holds; the oldest are dropped."),
    option("--incomplete keep|drop", "Episodes without a first or a last step.", default="keep"),
    where(),
    option("--allow-missing", "Do without ranks that are missing from the checkpoint."),
)


OF_JOB = (  # how work over all that is stored is done
    option("--engine local|ray", "Processes of this machine, or actors of a Ray cluster.", default="local"),
    option("--workers N", "How many work. Default: this process alone; with Ray, as many as have room."),
    option("--job NAME", "Keep what is done under this name: after a crash, the same command goes on."),
)

# -- what is meant -----------------------------------------------------------------------------------------------------

LATEST = "latest"  # stands for the newest whole one


def checkpoints_of(arc: Archive, run: str | None) -> Checkpoints:
    """The checkpoints of a run, or all. NotFoundError if there is no such run."""
    return arc.checkpoints if run is None else arc.runs[run].checkpoints


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


def _split(pairs: Iterable[str], what: str) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.UsageError(f"{what} wants KEY=VALUE")  # the text may be a credential
        try:
            yield key, json.loads(text)
        except (ValueError, RecursionError):
            yield key, text
