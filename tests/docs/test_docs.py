"""The pages in archive/docs run and print what they say, are linked and packaged; what is public can be found."""

from __future__ import annotations

import logging
import os
import pydoc
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive import cli
from archive.tables import TABLES
from tests.support import alf_buffer, reference, rlinf_objects, xtuner_managers
from tests.support.documents import (
    DECISIONS,
    DOCS,
    KINDS,
    PAGES,
    README,
    ROOT,
    Block,
    blocks,
    install_entry_points,
    named,
    only_block,
    run_alone,
    run_page,
    run_python,
)

ALONE = {"checkpoints", "observing"}  # they send themselves signals, or look at their own process
OBVIOUS = {"fsspec", "s3fs", "zarr", "numpy", "pyarrow"}  # the user asked for these
INSTALL = (DOCS / "how-to" / "install.md").read_text("utf-8")
MAX_PICTURE = 150_000
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def _alf() -> dict[str, Any]:
    return {"rb": alf_buffer.run(alf_buffer.ReplayBuffer(2, 8), 7)}


def _rlinf() -> dict[str, Any]:
    return {
        "buffer": rlinf_objects.buffer(range(3), cache=3), "empty": rlinf_objects.buffer(cache=3),
        "trajectories": [rlinf_objects.trajectory(number) for number in range(3)],
    }  # fmt: skip


def _xtuner() -> dict[str, Any]:
    return {"manager": xtuner_managers.manager(), "fresh": xtuner_managers.manager()}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {"alf": _alf, "exchange": _alf, "rlinf": _rlinf, "xtuner": _xtuner}
ELSEWHERE = {"transferqueue", "ray-data", "rllib"}  # run where its system is
NEEDS = {"torchrl": "torchrl", "exchange": "torchrl", "rlinf": "rlinf"}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in ELSEWHERE:
        return
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    if page.stem in ALONE:
        run_alone(page, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root.manager, "disable", logging.WARNING)  # TorchRL tells of every storage on stdout
    run_page(page, GIVEN.get(page.stem, dict)())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    assert {block.kind for block in blocks(page)} <= KINDS


def test_the_s3_options_are_right(moto_endpoint: str) -> None:
    block = only_block(DOCS / "how-to" / "s3.md", "python s3")
    text = block.text.replace("https://s3.example.org", moto_endpoint)
    assert text != block.text
    names: dict[str, Any] = {"archive": archive}
    run_python(DOCS / "how-to" / "s3.md", Block("python", text, block.line), names)
    assert names["arc"].url == "s3://bucket/runs/42"
    assert len(names["arc"].episodes) == 0


def test_ones_own_tests_run(tmp_path: Path) -> None:
    block = only_block(DOCS / "how-to" / "testing.md", "python test")
    (tmp_path / "test_mine.py").write_text(block.text, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    installed = install_entry_points(tmp_path / "installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout


def test_the_training_script_is_the_one_that_is_tested() -> None:
    script = (ROOT / "tests" / "examples" / "train_resume.py").read_text("utf-8")
    assert only_block(DOCS / "tutorials" / "training-job.md", "python file").text == script


@pytest.mark.parametrize("page", reference.MADE_PAGES, ids=named)
def test_what_is_made_of_the_code_is_up_to_date(page: Path) -> None:
    text = page.read_text("utf-8")
    assert reference.made_anew(text) == text, "run `make docs`"


def test_every_command_and_adapter_has_its_place() -> None:
    text = (DOCS / "reference" / "cli.md").read_text("utf-8")
    assert re.findall(r"^### `archive ([\w-]+)", text, re.MULTILINE) == list(cli.COMMANDS)
    made = "".join(page.read_text("utf-8") for page in PAGES)
    for name in ("torchrl", "alf", "rlinf", "xtuner", "rllib", "transferqueue", "minari", "lerobot", "npz"):
        assert f"<!-- table of archive.adapters.{name}: " in made
    document = (ROOT / "archive" / "FORMAT.md").read_text("utf-8")
    assert re.findall(r"^<!-- columns of (\w+): ", document, re.MULTILINE) == list(TABLES)


def test_every_dependency_has_its_reason() -> None:
    needed = {re.split(r"[<>=\[]", text)[0] for text in PROJECT["project"]["dependencies"]} - OBVIOUS
    listed = re.findall(r"^\| ([\w-]+) \|", INSTALL.partition("## Dependencies")[2], re.MULTILINE)
    assert set(listed) - {"package"} == needed
    extras = INSTALL.partition("## Extras")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", extras, re.MULTILINE)) == set(PROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_is_listed(page: Path) -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    assert page.name == "index.md" or f"({page.relative_to(DOCS).as_posix()})" in index


def test_pages_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["archive"]
    shipped = {path for pattern in patterns for path in (ROOT / "archive").glob(pattern)}
    needed = [*(ROOT / "archive").rglob("*.md"), *DOCS.rglob("*.png"), *(ROOT / "archive" / "view" / "app").iterdir()]
    assert set(needed) <= shipped


def test_pictures_are_small_and_shown() -> None:
    texts = "".join(page.read_text("utf-8") for page in (README, *PAGES))
    for picture in DOCS.rglob("*.png"):
        assert picture.stat().st_size < MAX_PICTURE, picture
        assert re.search(rf"\]\(([\w/-]+/)?{re.escape(picture.name)}\)", texts), picture


@pytest.mark.parametrize("word", ["SIGTERM", "requested()", "torch import ring", "save_on_crash", "Keep(", ".of("])
def test_some_page_has(word: str) -> None:
    assert any(word in page.read_text("utf-8") for page in PAGES)


@pytest.mark.parametrize("package", [archive, resharding])
def test_what_is_public_is_listed_and_there(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert [*names] == sorted(names)
    assert set(names) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in names)


@pytest.mark.parametrize("package", [archive, resharding])
def test_help_begins_with_what_people_need(package: object) -> None:
    text = pydoc.plain(pydoc.render_doc(package))
    assert len(dir(package)) < 80
    for name in ("open", "create") if package is archive else ("plan", "merge"):
        assert re.search(rf"^ +{name}\(", text, re.MULTILINE), name


RECORDS = [path for path in DECISIONS if path.stem != "index"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_decision_is_short_listed_and_complete(record: Path) -> None:
    text = record.read_text("utf-8")
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]
    assert len(text.splitlines()) <= 25
    title = text.splitlines()[0].removeprefix("# ")
    assert f"[{title}]({record.name})" in (DOCS / "decisions" / "index.md").read_text("utf-8")
