"""`python -m archive.cli`, for where the console script is not on the path."""

from __future__ import annotations

from archive.cli.commands import main

main(prog_name="archive")
