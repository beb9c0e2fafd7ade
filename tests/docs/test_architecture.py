"""The map of the code is short, has every room, and names nothing that is not there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.places import ROOT

MAX_LINES = 150
TEXT = (ROOT / "archive" / "ARCHITECTURE.md").read_text("utf-8")
LAYERS = ast.parse((ROOT / "tests" / "test_layers.py").read_text("utf-8"))
ROOMS: tuple[str, ...] = next(
    ast.literal_eval(node.value)
    for node in LAYERS.body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ROOMS"
)
WALKS = ("write", "read", "checkpoint", "journal", "redistribution", "batch", "job", "look")


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def short(room: str) -> str:
    """A room as the map calls it."""
    return room.removeprefix("archive.").replace(".", "/")


def modules() -> list[str]:
    """All that is named as a module is: by its room and its name."""
    found = re.findall(r"`((?:[a-z_]+/)+[a-z_]+)`", TEXT)
    return sorted(set(found))


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_every_room_is_in_the_table() -> None:
    first_cells = [row.split("|")[1] for row in re.findall(r"^\| `.*\|$", section("Rooms"), re.MULTILINE)]
    listed = [name for cell in first_cells for name in re.findall(r"`([\w/]+)`", cell)]
    rooms = ["facade" if room == "archive" else short(room) for room in ROOMS]
    assert sorted(set(listed) - {"writer"}) == sorted(rooms)


@pytest.mark.parametrize("room", [room for room in ROOMS if "adapters" not in room])
def test_every_room_is_in_the_graph(room: str) -> None:
    name = "facade" if room == "archive" else short(room)
    assert re.search(rf"(?<![\w/]){name}(?![\w/])", section("Imports"))


@pytest.mark.parametrize("name", modules())
def test_a_module_that_it_names_exists(name: str) -> None:
    place = ROOT / name if name.startswith("resharding/") else ROOT / "archive" / name
    assert place.is_dir() or place.with_suffix(".py").exists()


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_its_modules(walk: str) -> None:
    assert len(set(modules()) & set(re.findall(r"`([a-z_/]+)`", section(f"The life of a {walk}")))) >= 5


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*(?:test_|format_)\w+\.py)`", TEXT))))
def test_a_test_that_it_names_exists(name: str) -> None:
    assert (ROOT / "tests" / name).exists()
