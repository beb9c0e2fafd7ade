"""What a message or a page says to install can be installed: our own name with extras that are there, or a package that
pyproject.toml, or what it names, brings."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import PAGES, README
from tests.support.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
BROUGHT = {"gymnasium", "tensordict", "transformers", "lerobot", "rlinf", "xtuner"}  # by name on PyPI, of other systems
REQUIREMENT = re.compile(r"(?P<name>\.|[A-Za-z0-9][\w.-]*)(\[(?P<extras>[\w,-]+)\])?(?P<version>[<>=!~,.\w]*)")
INSTALLS = re.compile(r"pip install (?:-\S+ )*(\"[^\"\n]+\"|'[^'\n]+'|[\w.\[\]<>=!~,-]+)")
CALLS = ("package", "system")  # their last argument is what to install
SOURCES = sorted(path for top in ("archive", "resharding") for path in (ROOT / top).rglob("*.py"))


def known() -> set[str]:
    """All packages that pyproject.toml names, without their versions."""
    every = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    return {found[0].lower() for one in every if (found := NAME.match(one))} | BROUGHT


def advised(path: Path) -> Iterator[str]:
    """The requirements that a file says to install: in texts, and as arguments of what raises the error."""
    text = path.read_text("utf-8")
    yield from (found.strip("'\"") for found in INSTALLS.findall(text))
    if path.suffix != ".py":
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLS:
            last = node.args[-1]
            if isinstance(last, ast.Constant):
                yield from shlex.split(str(last.value))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTALL":
            yield from shlex.split(ast.literal_eval(node.value))


def wrong(requirement: str) -> str | None:
    """The reason why pip could not do it; None if it can."""
    found = REQUIREMENT.fullmatch(requirement)
    if found is None:
        return "no requirement"
    extras = [one for one in (found["extras"] or "").split(",") if one]
    if found["name"] in (".", PROJECT["name"]):
        return f"no such extra as {missing}" if (missing := set(extras) - set(EXTRAS)) else None
    return None if found["name"].lower() in known() else f"{found['name']} is no package that is known here"


def test_what_is_advised_can_be_installed() -> None:
    paths = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, *SOURCES]
    found = [(path.relative_to(ROOT).as_posix(), one, wrong(one)) for path in paths for one in advised(path)]
    assert [one for one in found if one[2] is not None] == []


def test_many_are_found() -> None:
    found = [one for path in SOURCES for one in advised(path)]
    assert found.count("trajectory-archive[torch]") >= 4
    assert {"trajectory-archive[view]", "trajectory-archive[fast]", "trajectory-archive[plots]"} <= set(found)


@pytest.mark.parametrize("requirement", ["trajectory-archive[viewer]", "archive[view]", "a b", ".[none]"])
def test_what_cannot_be_installed_is_noticed(requirement: str) -> None:
    assert wrong(requirement) is not None
