"""The command line. Each command opens an archive, calls the library and prints.

To add one: write a function in a module of this package (click, with the decorators of `options`), and name it in a
group of `commands`. Nothing heavy is imported before a command runs.

Exit codes: 0 done, 1 it failed (one line on stderr says why and what to do), 2 the call is wrong.
"""

from __future__ import annotations

from archive.cli import output
from archive.cli.commands import COMMANDS, main
from archive.cli.options import Target, on_archive

__all__ = ["COMMANDS", "Target", "main", "on_archive", "output"]
