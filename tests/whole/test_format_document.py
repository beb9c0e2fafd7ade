"""archive/FORMAT.md is enough to read an archive: `format_reader.py`, made from it, never imports this library."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base import layout
from archive.tables import TABLES
from tests.support import format_reader, golden
from tests.support.format_reading import plain, run
from tests.support.places import ROOT

DOCUMENT = (ROOT / "archive" / "FORMAT.md").read_text("utf-8")
BANNED = "import sys, runpy; sys.modules['archive'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
WRITE = """
import sys
from tests.support import golden
for layout in sys.argv[2:]:
    golden.write(f"{sys.argv[1]}/{layout}", layout)
"""
PLACES = (*golden.ARCHIVES, "packed", "directory")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The golden archives, and one of each layout that another process has just written."""
    folder, layouts = tmp_path_factory.mktemp("written"), [name for name in PLACES if name not in golden.ARCHIVES]
    run("-c", WRITE, folder, *layouts)
    return {name: (folder if name in layouts else golden.GOLDEN) / name for name in PLACES}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, places: dict[str, Path]) -> Path:
    return places[request.param]


@pytest.fixture(scope="module")
def all_found(places: dict[str, Path]) -> dict[Path, Any]:
    """What the reader finds in each, all read by one process."""
    told = run("-I", "-c", BANNED, ROOT / "tests" / "support" / "format_reader.py", *places.values())
    return dict(zip(places.values(), json.loads(told), strict=True))


@pytest.fixture(scope="module")
def found(place: Path, all_found: dict[Path, Any]) -> Any:
    return all_found[place]


@pytest.mark.parametrize("name", golden.EPISODES)
def test_fields_are_what_was_written(found: Any, name: str) -> None:
    assert found["episodes"][name]["fields"] == plain(golden.added(name, golden.EPISODES[name]))


@pytest.mark.parametrize("name", golden.EPISODES)
def test_summaries_are_what_was_written(found: Any, name: str) -> None:
    steps = golden.EPISODES[name]["reward"]
    told = {key: value for key, value in found["episodes"][name].items() if key not in ("fields", "made_by")}
    assert told == golden.DEFAULTS | {"length": len(steps)} | golden.SUMMARIES[name]


def test_nothing_else_is_found(found: Any) -> None:
    assert found["episodes"].keys() == golden.EPISODES.keys()
    assert found["checkpoints"].keys() == golden.CHECKPOINTS.keys()


@pytest.mark.parametrize("name", golden.CHECKPOINTS)
def test_checkpoints_are_what_was_written(found: Any, name: str) -> None:
    wanted = dict(golden.CHECKPOINTS[name])
    columns = {"replay/priority": [plain(wanted.pop("priority"))]}
    assert found["checkpoints"][name] == wanted | {"columns": columns}


def test_what_came_after_the_steps_is_what_was_written(found: Any) -> None:
    assert found["labels"] == {name: golden.LABELS.get(name, {}) for name in golden.EPISODES}
    assert found["tags"] == golden.TAGS


def test_what_a_tag_names_is_read_as_of_then(place: Path) -> None:
    tags = format_reader.read(place)["tags"]
    for tag in tags.values():
        then = format_reader.read(place, tag["commit"])
        assert then["episodes"].keys() == golden.EPISODES.keys()
        assert set(then["checkpoints"]) >= {tag["checkpoint"]} - {None}


def test_checkpoints_are_served_by_a_commit_that_let_go(place: Path) -> None:
    log = format_reader.commits(place)
    rows = format_reader.table(place, log[-1]["checkpoints"])
    kinds = {log[row["manifest"] - 1]["kind"] for row in rows if row.get("manifest")}
    assert kinds == {"forget"}


@pytest.mark.parametrize("seed", range(3))
def test_branches_are_followed_as_the_document_says(tmp_path: Path, seed: int) -> None:
    """Runs that go back at random, with ends and tails left behind: the reader and the library see the same
    episodes."""
    rng = np.random.default_rng(seed)
    arc = archive.create(str(tmp_path / "a"))
    resume: Any = None
    for number in range(10):
        with arc.writer(resume=resume) as w:
            for env in range(3):
                if rng.random() < 0.7:
                    w.append({"t": np.array([number])}, env_ids=env, last=[True] if rng.random() < 0.3 else None)
                if env == 1:
                    w.checkpoint(number, progress={})
            if rng.random() < 0.3:
                w.close_episodes(terminated=True)
        arc = archive.open(arc.url)
        arc.label({e.id: {f"k{i % 2}": number if rng.random() < 0.7 else None} for i, e in enumerate(arc.episodes)})
        resume = arc.checkpoints[int(rng.integers(max(0, number - 2), number + 1))] if rng.random() < 0.9 else None
    read = format_reader.read(tmp_path / "a")
    found = read["episodes"]
    assert read["labels"] == {e.id: dict(e.labels) for e in arc.episodes}
    assert found.keys() == {e.id for e in arc.episodes}
    for episode in arc.episodes:
        told = found[episode.id]
        assert told["fields"] == plain(episode.read())
        assert (told["complete"], told["terminated"]) == (episode.complete, episode.terminated)


# -- damage is noticed by what the document says -----------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def named(root: Path, kind: str) -> Path:
    """The newest manifest file of a table, in the newest commit that names one that is there."""
    refs = [log.get(kind) for log in reversed(format_reader.commits(root))]
    paths = (root / (ref[-1] if isinstance(ref, list) else ref)["path"] for ref in refs if ref)
    return next(path for path in paths if path.exists())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "commit": lambda root: flip(largest(root, "commits/*/*.json"), 60),
    "segments": lambda root: flip(named(root, "segments"), 300),
    "chunks": lambda root: flip(named(root, "chunks"), 300),
    "chunk of a shard": lambda root: flip(largest(root, "shards/*.zarr/obs/c/0/0"), 3),
    "metadata of a shard": lambda root: flip(largest(root, "shards/*.zarr/zarr.json"), 200),
    "state": lambda root: flip(largest(root, "states/*/*/rank-00000.zip"), 100),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_flipped_bit_is_noticed(tmp_path: Path, what: str) -> None:
    root = shutil.copytree(golden.GOLDEN / "format-2-directory", tmp_path / "copy")
    DAMAGE[what](root)
    with pytest.raises((format_reader.Damaged, ValueError)):
        format_reader.read(root)


# -- the document says what the code does ------------------------------------------------------------------------------


def section(title: str) -> str:
    return re.split(r"^#+ ", DOCUMENT.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("seed", range(2))
def test_late_fields_of_branches_are_as_the_document_says(tmp_path: Path, seed: int) -> None:
    """Runs that go back at random, with rows added and dropped meanwhile: the reader and the library see the same."""
    rng = np.random.default_rng(seed)
    arc = archive.create(str(tmp_path / "a"))
    resume: Any = None
    for number in range(8):
        with arc.writer(resume=resume) as w:
            for env in range(3):
                w.append({"t": np.arange(2) + number}, env_ids=env, last=[False, rng.random() < 0.3])
                if env == 1:
                    w.checkpoint(number, progress={})
        arc = archive.open(arc.url)
        given = {e.id: np.full(e.length, number) for e in arc.episodes if rng.random() < 0.5}
        if given:
            arc.add_fields({f"n{int(rng.integers(2))}": given, "t": dict([*given.items()][:1])})
        if number == 4:
            arc.drop_fields(["t"])
        resume = arc.checkpoints[int(rng.integers(max(0, number - 2), number + 1))] if rng.random() < 0.9 else None
    found = format_reader.read(tmp_path / "a")["episodes"]
    assert {name: told["fields"] for name, told in found.items()} == {ep.id: plain(ep.read()) for ep in arc.episodes}
    assert {name for told in found.values() for name in told["fields"]} == {"t", "n0", "n1"}


def test_the_weights_of_each_step_are_as_the_document_says(tmp_path: Path) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        mixed = {"model_weights_uuid": ["p31", "p26", None, "p31", "p31"], "update_count": [31, 26, 26, 30, 31]}
        w.append({"t": np.arange(5)}, env_ids=0, episode_ids="e", **mixed)
        w.flush()
        w.append({"t": np.arange(2)}, env_ids=0, model_weights_uuid="p32", update_count=32)
    found = format_reader.read(tmp_path / "a")["episodes"]["e"]["made_by"]
    assert found == [[*row.values()] for row in arc.refresh().episodes["e"].weights.to_pylist()]
    assert found[:4] == [["p31", 31], ["p26", 26], [None, 26], ["p31", 30]]


@pytest.mark.parametrize("kind", TABLES)
def test_the_document_says_when_columns_are_null(kind: str) -> None:
    """Of segments readers let nulls pass in a few columns that no writer leaves out."""
    columns = TABLES[kind].columns
    may = {name for name, column in columns.items() if column.nulls or column.given or column.dropped}
    told = {name for name, column in columns.items() if not column.absent.startswith("never")}
    assert told <= may if kind == "segments" else told == may


def test_the_document_has_the_version_of_the_code() -> None:
    versions = [int(number) for number in re.findall(r"^\| (\d+) \|", section("Versions"), re.MULTILINE)]
    assert f"archive, version {layout.VERSION}\n" in DOCUMENT.splitlines(keepends=True)[0]
    assert max(versions) == layout.VERSION


def test_the_document_has_the_layout_of_the_code() -> None:
    keys = section("Objects")
    for key in (
        layout.commit_key(10_007), layout.rank_key("s", 3), layout.shard_key("0" * 8, "s", 3, "packed"),
        layout.state_key("s", "c", 3), layout.manifest_key("0" * 8, "s", "live"),
    ):  # fmt: skip
        assert f"`{key.partition('/')[0]}/" in keys
    assert layout.commit_key(10_007) == "commits/000010/000010007.json"
    assert layout.MAGIC in keys
