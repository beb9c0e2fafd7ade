"""Counts of the code that may only go down.

Too much of something? Take some of it away. Less than a figure says? Lower the figure: then it stays so.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.support.places import ROOT

FIGURES = {
    "modules": 327,
    "lines of the engine": 52_606,
    "modules that serve one sibling": 29,
    "modules named ...ing": 12,
    "records and protocols of the engine": 242,
    "class names with two meanings": 0,
    "docstrings that begin with a relative word": 4,
    "files with searchsorted": 9,
    "places that append to the log": 0,
}
MARGIN = 0.02  # of a figure: so far below it a count may be before the figure must follow
ELSEWHERE = ("adapters", "buffers", "cli.demo", "testing", "view", "views")  # rooms of archive that are no engine
MOST_RELATIVE = 0.05  # of the docstrings: some words of the list may begin a sentence with a subject
RELATIVE = re.compile("(What|Who|Where|Whether|How|Those|Of|As|By|All|Each|Whose|Which|When)[,:;]*( |$)")


class Module(NamedTuple):
    name: str
    is_door: bool
    text: str
    tree: ast.Module

    @property
    def is_engine(self) -> bool:
        return not any(f"{self.name}.".startswith(f"archive.{room}.") for room in ELSEWHERE)


@cache
def modules() -> tuple[Module, ...]:
    out = []
    for path in sorted(one for top in ("archive", "resharding") for one in (ROOT / top).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text("utf-8")
        out.append(Module(name, path.name == "__init__.py", text, ast.parse(text)))
    return tuple(out)


def found_in_engine(text: str) -> Iterator[str]:
    """Each place in the engine that a regular expression finds."""
    return (found for one in modules() if one.is_engine for found in re.findall(text, one.text))


def nodes(*kinds: type[ast.AST]) -> Iterator[Any]:
    """Those of the engine."""
    return (node for one in modules() if one.is_engine for node in ast.walk(one.tree) if isinstance(node, kinds))


def imported(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_one_sibling() -> int:
    """Modules that one other imports, which is of the same room."""
    users: dict[str, set[str]] = defaultdict(set)
    for user in modules():
        for name in set(imported(user)) - {user.name}:
            users[name].add(user.name)
    alone = [(one.name, *users[one.name]) for one in modules() if not one.is_door and len(users[one.name]) == 1]
    return sum(name.rpartition(".")[0] == user.rpartition(".")[0] for name, user in alone)


def is_record(node: ast.ClassDef) -> bool:
    bases = " ".join(map(ast.unparse, node.bases))
    return bool(re.search("NamedTuple|Protocol", bases)) or "dataclass" in " ".join(
        map(ast.unparse, node.decorator_list)
    )


def class_names() -> Counter[str]:
    return Counter(node.name.lstrip("_") for node in nodes(ast.ClassDef))


def docstrings() -> Iterator[str]:
    """The first line of every docstring of the whole tree, heads of modules among them."""
    for one in modules():
        for node in ast.walk(one.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                yield text.partition("\n")[0]


def relative_docstrings() -> int:
    """Docstrings without a subject: they begin with a relative word, or with one that stands for a clause."""
    return sum(bool(RELATIVE.match(text)) for text in docstrings())


def test_docstrings_have_a_subject() -> None:
    assert relative_docstrings() <= MOST_RELATIVE * len([*docstrings()])


COUNTS: dict[str, Callable[[], int]] = {
    "modules": lambda: len(modules()),
    "lines of the engine": lambda: len([*found_in_engine("\n")]),
    "modules that serve one sibling": of_one_sibling,
    "modules named ...ing": lambda: sum(one.name.endswith("ing") and not one.is_door for one in modules()),
    "records and protocols of the engine": lambda: sum(map(is_record, nodes(ast.ClassDef))),
    "class names with two meanings": lambda: sum(count > 1 for count in class_names().values()),
    "docstrings that begin with a relative word": relative_docstrings,
    "files with searchsorted": lambda: sum("np.searchsorted" in one.text for one in modules() if one.is_engine),
    "places that append to the log": lambda: len([*found_in_engine(r"\b_?log\.append\(")]),
}


@pytest.mark.parametrize("what", COUNTS)
def test_it_only_goes_down(what: str) -> None:
    count, figure = COUNTS[what](), FIGURES[what]
    assert count <= figure, f"{count} {what}, at most {figure}: merge or take away, do not raise the figure"
    assert count >= figure - max(1, round(MARGIN * figure)), f"{count} {what}: lower the figure, {figure}, to it"
