"""Tool: what all commands take: an archive, how to reach it, and how to print."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from archive.base import UsageError
from archive.cli.commands import DEBUG

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Archive

Command = Callable[..., None]
DEADLINE_S = 30.0  # somebody waits for the answer


@dataclass(frozen=True)
class Target:
    """Which archive is meant, and whether JSON is wanted."""

    url: str
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)  # may hold credentials
    commit: int | None = None
    as_json: bool = False
    deadline_s: float = DEADLINE_S
    allow_bases: tuple[str, ...] = ()
    single_writer: bool = False

    def open(self, **how: Any) -> Archive:
        import archive

        given = {
            "commit": self.commit, "storage_options": self.storage_options, "deadline_s": self.deadline_s,
            "allow_bases": self.allow_bases, "single_writer": self.single_writer,
        }  # fmt: skip
        return archive.open(how.pop("url", self.url), **(given | how))


def on_archive(
    *, default: str | None = None, time_travel: bool = True, writes: bool = False
) -> Callable[[Command], Command]:
    """Gives a command a Target as its first argument, and the options that make it up."""
    shared = [
        click.argument("url", metavar="[URL]", default=default) if default else click.argument("url"),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option("--storage-option", multiple=True, metavar="KEY=VALUE", help=_OPTION_HELP),
        click.option("--endpoint-url", metavar="URL", help="S3 server other than Amazon's."),
        click.option("--profile", metavar="NAME", help="Profile of the AWS configuration."),
        click.option(
            "--retry-for",
            type=click.FloatRange(min=0, min_open=True),
            default=DEADLINE_S,
            show_default=True,
            metavar="SECONDS",
            help="How long a request that fails is repeated.",
        ),
        click.option("--allow-base", multiple=True, metavar="URL", help=_BASE_HELP),
        click.option("--debug", is_flag=True, expose_value=False, callback=_debug, help="Show tracebacks."),
    ]
    if writes:
        shared.append(click.option("--single-writer", is_flag=True, help=_ALONE_HELP))
    if time_travel:
        shared.append(click.option("--commit", type=int, metavar="N", help="As of that commit."))

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(
            url: str, as_json: bool, retry_for: float, allow_base: tuple[str, ...], commit: int | None = None,
            single_writer: bool = False, **rest: Any,
        ) -> None:  # fmt: skip
            options = storage_options(rest.pop("storage_option"), rest.pop("endpoint_url"), rest.pop("profile"))
            command(Target(url, options, commit, as_json, retry_for, allow_base, single_writer), **rest)

        return functools.reduce(lambda function, add: add(function), reversed(shared), call)

    return decorate


of_run = click.option("--run", metavar="NAME", help="Of this run; needed where several have such a checkpoint.")

_OPTION_HELP = "Passed to the filesystem; VALUE may be JSON, a dot in KEY goes one level down. May be repeated."

_BASE_HELP = (
    "Another archive (or the folder above it) that this one may refer to, as `merge` makes it. May be repeated."
)
_ALONE_HELP = "For a store without a create-only put: you promise that nobody else writes there."


def _debug(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    ctx.meta[DEBUG] = wanted  # the group's context has the same meta


def storage_options(pairs: Iterable[str], endpoint_url: str | None, profile: str | None) -> dict[str, Any]:
    """fsspec's options from `key=value` texts: "client_kwargs.region_name=eu-west-1" is nested."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.UsageError("--storage-option wants KEY=VALUE")  # the text may be a credential
        *outer, last = key.split(".")
        level = out
        for part in outer:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise click.UsageError(f"--storage-option {key}: {part} has a value already, so nothing goes below it")
        level[last] = _value(text)
    named = {"endpoint_url": endpoint_url, "profile": profile}
    return out | {key: value for key, value in named.items() if value is not None}


def meeting(condition: str | None, table: pa.Table) -> pa.Table:
    """The rows of any table that meet a condition over its columns."""
    if condition is None:
        return table
    import pyarrow as pa

    from archive.manifest import expressions

    plain = pa.table({n: table[n].cast("string") if _is_coded(table[n].type) else table[n] for n in table.column_names})
    expression, _ = expressions.parse(condition, table.column_names)
    try:
        return plain.filter(expression)
    except pa.ArrowException as e:
        raise UsageError(f"the condition {condition} cannot be applied to these columns: {e}") from e


def _is_coded(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_dictionary(kind)) and bool(pa.types.is_string(kind.value_type))


def option_values(pairs: Iterable[str]) -> dict[str, Any]:
    """What `--set key=value` gives; a value may be JSON."""
    out = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise click.UsageError("--set wants KEY=VALUE")
        out[key] = _value(text)
    return out


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
