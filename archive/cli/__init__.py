"""The command line. A command is a function that opens an archive, calls the library and returns an `Output`.

To add one: write the function in the module of its group, and declare it with `@commands.command(group, options...)`.
Nothing heavy is imported before a command runs.

Exit codes: 0 done, 1 it failed (one line on stderr says why and what to do), 2 the call is wrong.
"""

from __future__ import annotations

from archive.cli import demo, look, checkpoints, keep, move, maintain, cost, output  # isort: skip  # in the order of --help
from archive.cli.commands import main

COMMANDS = main.commands

__all__ = ["COMMANDS", "checkpoints", "cost", "demo", "keep", "look", "main", "maintain", "move", "output"]
