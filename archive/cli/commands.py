"""The commands, and what becomes of their errors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from archive.base import ArchiveError, UsageError, __version__
from archive.cli.advice import in_options
from archive.cli.output import cell

COMMANDS = {  # name: module and function; the order of --help
    "demo": "demo:demo",
    "info": "contents:info",
    "ls": "contents:ls",
    "episodes": "episodes:episodes",
    "show": "episodes:show",
    "sample": "sample:sample",
    "log": "contents:log",
    "ledger": "contents:ledger",
    "checkpoints": "checkpoints:checkpoints",
    "diff": "diff:diff",
    "plan": "checkpoints:plan",
    "reshard": "transfer:reshard",
    "request-checkpoint": "checkpoints:request_checkpoint",
    "tails": "checkpoints:tails",
    "recover": "checkpoints:recover",
    "merge": "transfer:merge",
    "split": "transfer:split",
    "filter": "transfer:filter_",
    "view": "viewing:view",
    "export": "export:export",
    "import": "exchange:import_",
    "compact": "transfer:compact",
    "label": "marking:label",
    "labels": "marking:labels",
    "tag": "marking:tag",
    "tags": "marking:tags",
    "forget": "upkeep:forget",
    "undo": "upkeep:undo",
    "restore": "upkeep:restore",
    "prune": "upkeep:prune",
    "verify": "upkeep:verify",
    "repair": "upkeep:repair",
    "policy": "upkeep:policy",
}
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
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"archive.cli.{module}"), name)
        return command

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
