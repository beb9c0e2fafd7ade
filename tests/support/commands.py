"""The command line as a test calls it."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from archive import cli

HOSTILE = "x\x1b[31m\n<script>[bold]"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def printed(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: object) -> Any:
    return json.loads(printed(*arguments, "--json"))
