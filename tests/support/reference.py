"""Tool: what the pages repeat of the code, written into them by `make docs`: commands, and the adapters' tables.

What is made stands between marks: `<!-- commands: ... -->`, `<!-- table of archive.adapters.alf: ... -->`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

import click

from archive.cli.commands import COMMANDS, main
from tests.support.documents import PAGES
from tests.support.places import ROOT

MADE = re.compile(r"^(<!-- (?P<what>[\w. ]+): made by `make docs` -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
EVERYWHERE = frozenset(  # options of every command
    {"as_json", "storage_pairs", "endpoint_url", "profile", "deadline_s", "allow_bases", "debug", "commit", "help"}
)
WIDTH = 120


def reference() -> str:
    """A section a command: how to call it, what it does, and the options of its own."""
    sections = []
    with click.Context(main, info_name="archive") as context:
        for name in COMMANDS:
            command = main.get_command(context, name)
            assert command is not None
            sections.append(_section(command, name, context))
    return "\n\n".join(sections)


def _section(command: click.Command, name: str, parent: click.Context) -> str:
    with click.Context(command, info_name=name, parent=parent) as context:
        pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        needed = [_called(option) for option in _options(command) if option.required]
        lines = [f"### `{' '.join(['archive', name, *pieces, *needed])}`", "", _wrapped(command.help or "")]
        options = [_option(option) for option in _options(command)]
    return "\n".join([*lines, *([""] if options else []), *options])


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


def _option(option: click.Option) -> str:
    called = f"- `{_called(option)}`"
    return _wrapped(f"{called}: {option.help}", indent="  ") if option.help else called


def _wrapped(text: str, indent: str = "") -> str:
    """A sentence or more, ending with a full stop, in lines of a document."""
    sentence = " ".join(text.split()).removesuffix(".") + "."
    return textwrap.fill(sentence, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table_of(module: str) -> str:
    """What the documentation of a module says from its first table on."""
    path = ROOT / module.replace(".", "/") / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return "|" + text.partition("\n|")[2]


def made_anew(text: str) -> str:
    """A page, with all that is between marks made anew."""
    return MADE.sub(lambda found: f"{found[1]}\n{_made(found['what'])}\n\n{found[3]}", text)


def _made(what: str) -> str:
    return reference() if what == "commands" else table_of(what.removeprefix("table of "))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(made_anew(page.read_text("utf-8")), "utf-8")
