"""The group of commands: how each is declared, called and shown in `--help`, and its errors in words of the command
line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from archive.base import ArchiveError, UsageError, __version__
from archive.cli.options import ABOVE_0, DEADLINE_S, DEBUG, Target, argument, option, storage_options
from archive.cli.output import Output, cell

LOOK, RUNS, KEEP = "Look", "Checkpoints and runs", "Retention and labels"
MOVE, MAINTAIN = "Move data", "Maintain"
WHOLE = 200  # characters: a first sentence is not cut
Function = TypeVar("Function", bound=Callable[..., Any])
GROUPS: dict[str, dict[str, click.Command]] = {title: {} for title in (LOOK, RUNS, KEEP, MOVE, MAINTAIN)}


class Failed(click.ClickException):
    """An error as one line for the user."""

    def __init__(self, error: BaseException, command: str | None = None) -> None:
        text = cell(" ".join(str(error).split()), limit=None) or type(error).__name__
        known = isinstance(error, ArchiveError)
        hint = "" if known else f" ({type(error).__name__}, unexpected: run it again with --debug, and report it)"
        super().__init__(in_options(text, command) + hint)


class Misused(Failed):
    """The call is wrong."""

    exit_code = 2


class Commands(click.Group):
    """Commands in groups, whose errors are one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self.commands))
        for title, group in GROUPS.items():
            with formatter.section(title):
                shown = [(f"{name:<{longest}}", one.get_short_help_str(WHOLE)) for name, one in group.items()]
                formatter.write_dl(shown)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.meta.get(DEBUG):
                raise
            raise (Misused if isinstance(error, UsageError) else Failed)(error, ctx.invoked_subcommand) from error


EPILOG = """\b
Exit codes: 0 done, 1 it failed, 2 the call is wrong; one line on stderr says what to do.
Completion: eval "$(_ARCHIVE_COMPLETE=bash_source archive)", or zsh_source, fish_source."""


@click.group(
    cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="archive")
def main() -> None:
    """Replay buffers and trajectories on any object store."""


# -- declaring a command -----------------------------------------------------------------------------------------------


def _number_or_tag(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _show_tracebacks(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    ctx.meta[DEBUG] = wanted  # the group's context has the same


_WRITES = option("--single-writer", "For a store that cannot refuse to overwrite: you promise that only you write.")
_COMMIT = option("--commit N|TAG", "The archive as of that commit.", type=_number_or_tag)
_EVERY = (
    option("--json as_json", "Print one JSON document."),
    option("--storage-option storage_pairs KEY=VALUE...", "For the filesystem. VALUE may be JSON; a.b=1 is nested."),
    option("--endpoint-url URL", "S3 server other than Amazon's."),
    option("--profile NAME", "Profile of the AWS configuration."),
    option("--retry-for deadline_s SECONDS", "Repeat a failing request for so long.", type=ABOVE_0, default=DEADLINE_S),
    option("--allow-base allow_bases URL...", "Another archive, or a folder of them, that this one may refer to."),
    option("--debug", "Show tracebacks.", expose_value=False, callback=_show_tracebacks),
)
_YES = option("--yes", "Do it. Without this, only show what would be done.")
_OF_TARGET = ("url", "commit", "as_json", "deadline_s", "allow_bases", "single_writer")


def command(
    group: str, *own: click.Parameter, writes: bool = False, looks_back: bool | None = None
) -> Callable[[Function], Function]:
    """A decorator that makes a function a command of this group: by its name, with its docstring as help.

    The function takes a Target and its `own` parameters, and returns an Output, or None if it has printed. A generator
    asks first: it yields the Output of what it would do and, with --yes alone, goes on and yields the Output of what it
    did. writes: the command takes --single-writer; looks_back: it takes --commit, as all do that write nothing.
    """

    def declare(function: Function) -> Function:
        asks = inspect.isgeneratorfunction(function)

        def call(storage_pairs: tuple[str, ...], endpoint_url: str | None, profile: str | None, **given: Any) -> None:
            of_target = {name: given.pop(name) for name in _OF_TARGET if name in given}
            target = Target(**of_target, storage_options=storage_options(storage_pairs, endpoint_url, profile))
            goes_on = asks and given.pop("yes")
            found = function(target, **given)
            output: Output | None = next(found) if asks else found
            output = next(found) if goes_on else output
            if output is not None:
                output.show(as_json=target.as_json)
                click.get_current_context().exit(output.code)

        at_commit = not writes if looks_back is None else looks_back
        url = () if any(one.name == "url" for one in own) else (argument("url"),)
        shared = [
            *([_YES] if asks else ()),
            *([_WRITES] if writes else ()),
            *([_COMMIT] if at_commit else ()),
            *_EVERY,
        ]
        name = function.__name__.strip("_").replace("_", "-")
        made = click.Command(name, callback=call, params=[*url, *own, *shared], help=inspect.getdoc(function))
        main.add_command(made)
        GROUPS[group][name] = made
        return function

    return declare


# -- what errors advise ------------------------------------------------------------------------------------------------

_EVERYWHERE = (
    (r"raise deadline_s", "give a longer --retry-for"),
    (r"open it with archive\.open\(\.\.\., allow_bases=\['?([^'\]]*)'?\]\)", r"add --allow-base \1"),
    (r"(?:open|connect) with single_writer=True", "add --single-writer"),
    (r"^append_only is for", "--append-only is for"),
    (r"plan with allow_missing=True", "add --allow-missing"),
    (r"plan the last whole one \(arc\.checkpoints[^ ]*latest\)", "name another --checkpoint"),
    (r"arc\.checkpoints\.of\(.*?\), or --run", "--run"),
    (r"(?:say|give) force=True", "add --force"),
    (r"forget\(\) needs keep=.*", "say what goes: --keep-last, -every, -within, -best, --episodes, --where or --id"),
    (r"use arc\.restore\(commit=(\d+)\)", r"use `archive restore --commit \1`"),
    (r"give copy=True", "add --copy"),
    (r"copy with verify=True", "copy with --verify"),
    (r"pass replace=True", "add --replace"),
    (r"make one with archive\.create\(\), or check the URL", "`archive import` makes one; or check the URL"),
    (r"; open it with archive\.open\(\)", ""),
    (r"(?:pass such settings in|check) storage_options", "check --storage-option"),
    (r"leave it out with fields=", "leave it out: name the others with --field"),
    (
        r"pass missing='skip' to leave it out, or missing=VALUE to fill it in",
        "`archive show` lists those of an episode",
    ),
    (r"make the buffer with missing='skip'", "give --missing skip"),
    (r"(?:Make the buffer with )?missing=VALUE", "--missing VALUE"),
    (r"missing='skip'", "--missing skip"),
    (r"\bnum_envs=", "--num-envs "),
    (r"\bmax_length=", "--max-length "),
    (r"\bcapacity=", "--capacity "),
    (r"give another host= or port=", "give another --host or --port"),
)
_OF_ADAPTERS = (  # options of an adapter are given with --set
    (r"\b([a-z_]+)='([^']*)'", r"--set \1=\2"),
    (r"\b([a-z_]+)=True\b", r"--set \1=true"),
    (r"\b([Gg]ive|name|with) ([a-z_]+)=(?=[;,. ]|$)", r"\1 --set \2=VALUE"),
)
_WITH_SET = frozenset({"export", "import"})


def in_options(text: str, command: str | None = None) -> str:
    """A message as somebody needs it who gave `command`, and no Python."""
    for pattern, given in (*_EVERYWHERE, *(_OF_ADAPTERS if command in _WITH_SET else ())):
        text = re.sub(pattern, given, text)
    return text
