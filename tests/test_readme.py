"""The README is short, its blocks run and print what it says, and what it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import archive
from tests.support.documents import DOCUMENTS, PAGES, README, ROOT, blocks, named, run_alone

MAX_WORDS = 1000
TEXT = README.read_text("utf-8")
GLOSSARY = ["episode", "segment", "shard", "chunk", "run", "session", "stream", "live", "column", "share"]


def test_it_prints_what_it_says(tmp_path: Path) -> None:
    run_alone(README, tmp_path)


def start(folder: Path, world_size: int, steps: int) -> None:
    """The job of the README in processes of its own, one a rank, until so many steps."""
    code = blocks(README)[0].text.replace("300", str(steps))
    assert str(steps) in code
    place = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": f"until-{steps}"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=os.environ | place | {"RANK": str(rank)})
        for rank in range(world_size)
    ]
    assert [rank.wait(120) for rank in ranks] == [0] * world_size


def test_the_job_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    start(tmp_path, 1, 200)
    start(tmp_path, 3, 300)
    latest = archive.open(tmp_path / "my-run").checkpoints.latest
    assert latest is not None
    assert (latest.step, latest.world_size) == (300, 3)
    steps = [int(at) for data in latest.episodes.read("obs") for at in data["obs"][:, 0]]
    assert sorted(steps) == sorted([*range(200)] * 4 + [*range(200, 300)] * 12)


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= MAX_WORDS


def test_it_has_a_glossary() -> None:
    rows = TEXT.partition("## Ten words\n\n")[2].partition("\n\n")[0]
    assert re.findall(r"^- \*\*(\w+)\*\*: \w", rows, re.MULTILINE) == GLOSSARY


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.kind for block in blocks(README)} == {"python", "text", "console"}


def test_it_leads_to_every_page() -> None:
    assert [named(page) for page in PAGES if f"]({named(page)})" not in TEXT.replace("(\n", "(")] == []


def test_the_two_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        page, _, place = target.partition("#")
        there = path.parent / page if page else path
        assert there.exists(), target
        assert not place or place in anchors(there.read_text("utf-8")), target


def anchors(text: str) -> set[str]:
    """The places in a page that a link can lead to, by its headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_tests_are_named_by_where_they_are(path: Path) -> None:
    for name in re.findall(r"`(tests/[\w./]+)`", path.read_text("utf-8")):
        assert (ROOT / name).exists(), name
