"""The pages in archive/docs run as they stand, are linked from the README and packaged; what is public can be found."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import archive
import resharding
from tests.support.places import ROOT

PAGES = sorted((ROOT / "archive" / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Its Python blocks one after the other, in a process of their own: signal handlers stay there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "False" not in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_linked_and_its_links_lead_somewhere(page: Path) -> None:
    assert f"(archive/docs/{page.name})" in README
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_pages_are_packaged() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "docs/*.md" in about["tool"]["setuptools"]["package-data"]["archive"]


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
