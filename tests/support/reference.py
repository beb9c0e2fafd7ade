"""Tool: what the pages repeat of the code, written into them by `make docs`: commands, the adapters' tables, the
columns of the manifest's tables, and the prices of stores.

What is made stands between marks: `<!-- commands: ... -->`, `<!-- table of archive.adapters.alf: ... -->`; what
is made of columns stands below `<!-- columns of segments: ... -->`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping

import click

from archive.cli.commands import GROUPS, main
from archive.store import PRICES
from archive.tables.declared import TABLES, TableColumn
from tests.support.documents import PAGES
from tests.support.places import ROOT

MADE = re.compile(r"^(<!-- (?P<what>[\w. ]+): made by `make docs` -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
COLUMNS = re.compile(r"^(<!-- columns of (?P<kind>\w+): made by `make docs` -->\n)(\|.*\n)*", re.MULTILINE)
EVERYWHERE = frozenset(  # options of every command
    {"as_json", "storage_pairs", "endpoint_url", "profile", "deadline_s", "allow_bases", "debug", "commit", "help"}
)
WIDTH = 120
MADE_PAGES = (*PAGES, ROOT / "archive" / "FORMAT.md")
WORDS = {  # for the types of columns
    "dict": "string",
    "strings": "list of string",
    "extents": "list of {`field`, `start`, `rows`}",
    "weights": "list of {`steps`, `model_weights_uuid`, `update_count`}",
    "timestamp": "timestamp, µs, UTC",
}


def reference() -> str:
    """A section a command, by groups: how to call it, what it does, and the options of its own."""
    sections = []
    with click.Context(main, info_name="archive") as context:
        for title, group in GROUPS.items():
            sections.append(f"## {title}")
            for name in group:
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
    folder = ROOT / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return "|" + text.partition("\n|")[2]


def columns_of(kind: str) -> str:
    """The columns of one of the manifest's tables: a row for those that are told together."""
    columns = TABLES[kind].columns
    nulls = any(column.absent != "never" for column in columns.values())
    head = ["column", "type", "meaning", "null"][: 3 + nulls]
    rows, together = [head, ["---"] * len(head)], dict[str, TableColumn]()
    for name, column in columns.items():
        together[name] = column
        if column.meaning:
            types = dict.fromkeys(WORDS.get(one.kind, one.kind) for one in together.values())
            listed = [WORDS.get(one.kind, one.kind) for one in together.values()] if len(types) > 1 else types
            cells = [", ".join(f"`{one}`" for one in together), ", ".join(listed), column.meaning, _nulls(together)]
            rows.append(cells[: len(head)])
            together = {}
    return "\n".join("|".join(["", *(f" {cell} " if cell != "---" else cell for cell in row), ""]) for row in rows)


def _nulls(columns: Mapping[str, TableColumn]) -> str:
    """When these columns are null: each by its name, where they differ."""
    if len({column.absent for column in columns.values()}) == 1:
        return next(iter(columns.values())).absent
    return ", ".join(f"`{name}`: {column.absent}" for name, column in columns.items() if column.absent != "never")


def made_anew(text: str) -> str:
    """A page, with all that is between marks made anew."""
    text = COLUMNS.sub(lambda found: f"{found[1]}{columns_of(found['kind'])}\n", text)
    return MADE.sub(lambda found: f"{found[1]}\n{_made(found['what'])}\n\n{found[3]}", text)


def prices() -> str:
    """The list prices of stores, and their limits: a row a store."""
    columns = ("GB-month", "1,000 writes, lists", "1,000 reads", "GB written, read", "GB egress", "read on")
    rows = [["store", *columns], ["---"] * (1 + len(columns))]
    for one in PRICES.values():
        carried = f"{one.uploaded_gb:g}, {one.read_gb:g}" if one.uploaded_gb else "free"
        requests = [f"{1000 * count:.5f}".rstrip("0") for count in (one.write, one.read)]
        egress = f"{one.egress_gb:g}" if one.egress_gb else "free"
        name = f"[{one.store.partition(',')[0]}]({one.source})"
        rows.append([name, f"{one.gb_month:g}", *requests, carried, egress, one.read_on])
    return "\n".join("|".join(["", *(f" {cell} " if cell != "---" else cell for cell in row), ""]) for row in rows)


def _made(what: str) -> str:
    if what == "prices of stores":
        return prices()
    return reference() if what == "commands" else table_of(what.removeprefix("table of "))


if __name__ == "__main__":
    for page in MADE_PAGES:
        page.write_text(made_anew(page.read_text("utf-8")), "utf-8")
