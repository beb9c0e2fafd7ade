"""The commands, and what becomes of their errors, in words of the command line."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import click

from archive.base import ArchiveError, UsageError, __version__
from archive.cli.output import cell

_DECLARED = {  # title of a group: module, and its commands; in the order of --help
    "Look": {
        "demo": ["demo"],
        "contents": ["info", "ls", "episodes", "show", "sample", "log", "ledger"],
        "viewer": ["view"],
    },
    "Checkpoints and runs": {"checkpoints": ["checkpoints", "diff", "plan", "request-checkpoint", "tails", "recover"]},
    "Keep and let go": {"upkeep": ["label", "labels", "tag", "tags", "forget", "undo", "restore", "prune"]},
    "Move data": {"transfer": ["reshard", "merge", "split", "filter"], "exchange": ["export", "import"]},
    "Maintain": {"upkeep": ["verify", "repair", "policy"], "transfer": ["compact"]},
}
GROUPS = {title: {name: at for at, names in of.items() for name in names} for title, of in _DECLARED.items()}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}
DEBUG = "archive.debug"  # key in the context's meta: whether tracebacks are wanted


class Failed(click.ClickException):
    """One line for the user."""

    def __init__(self, error: BaseException, command: str | None = None) -> None:
        text = cell(" ".join(str(error).split()), limit=None) or type(error).__name__
        known = isinstance(error, ArchiveError)
        hint = "" if known else f" ({type(error).__name__}, unexpected: run it again with --debug, and report it)"
        super().__init__(in_options(text, command) + hint)


class Misused(Failed):
    """The call is wrong."""

    exit_code = 2


class Commands(click.Group):
    """Commands that are imported when they are called, and whose errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = vars(import_module(f"archive.cli.{COMMANDS[cmd_name]}")).values()
        return next(one for one in found if isinstance(one, click.Command) and one.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                found = ((f"{name:<{longest}}", self.get_command(ctx, name)) for name in group)
                most = formatter.width - longest - 6
                formatter.write_dl([(name, one.get_short_help_str(most)) for name, one in found if one is not None])

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


_EVERYWHERE = (
    (r"raise deadline_s", "give a longer --retry-for"),
    (r"open it with archive\.open\(\.\.\., allow_bases=\['?([^'\]]*)'?\]\)", r"add --allow-base \1"),
    (r"(?:open|connect) with single_writer=True", "add --single-writer"),
    (r"plan with allow_missing=True", "add --allow-missing"),
    (r"plan the last whole one \(arc\.checkpoints[^ ]*latest\)", "name another --checkpoint"),
    (r"arc\.checkpoints\.of\(.*?\), or --run", "--run"),
    (r"say force=True", "add --force"),
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
    for pattern, option in (*_EVERYWHERE, *(_OF_ADAPTERS if command in _WITH_SET else ())):
        text = re.sub(pattern, option, text)
    return text
