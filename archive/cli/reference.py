"""Tool: the README's reference of commands, made from their own help: `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from archive.base import NotFoundError
from archive.cli.commands import COMMANDS, main

BEGIN, END = "<!-- commands: made by `make docs` -->", "<!-- end of commands -->"
EVERYWHERE = frozenset(  # options of every command
    {"as_json", "storage_pairs", "endpoint_url", "profile", "deadline_s", "allow_bases", "debug", "commit", "help"}
)


def reference() -> str:
    """A table of all commands: how to call them, what they do, and the options of their own."""
    rows = ["| command | does | options |", "|---|---|---|"]
    with click.Context(main, info_name="archive") as context:
        for name in COMMANDS:
            command = main.get_command(context, name)
            assert command is not None
            rows.append(_row(command, name, context))
    return "\n".join(rows)


def _row(command: click.Command, name: str, parent: click.Context) -> str:
    with click.Context(command, info_name=name, parent=parent) as context:
        pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        needed = [_called(p) for p in _options(command) if p.required]
        call = " ".join(["archive", name, *pieces, *needed])
        text = " ".join((command.help or "").split()).removesuffix(".")
        chosen = ", ".join(f"`{_called(p)}`" for p in _options(command) if not p.required)
    return f"| `{_cell(call)}` | {_cell(text)} | {_cell(chosen)} |"


def _options(command: click.Command) -> Iterator[click.Option]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in EVERYWHERE:
            yield parameter


def _called(option: click.Option) -> str:
    """The option as it is typed."""
    names = [*[n for n in option.opts if n.startswith("--")][:1], *option.secondary_opts]
    name = "/".join(names)
    if option.is_flag:
        return name
    if isinstance(option.type, click.Choice):
        return f"{name} {'|'.join(option.type.choices)}"
    return f"{name} {option.metavar or ('NAME' if option.type is click.STRING else 'N')}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def put_into(text: str) -> str:
    """The document with the reference between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise NotFoundError(f"the document has no {BEGIN} and {END} to put the reference between")
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(put_into(path.read_text("utf-8")), "utf-8")
