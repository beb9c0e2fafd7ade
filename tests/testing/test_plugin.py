"""pytest finds the plug-in by itself; its fixtures give fresh places and end cleanly; who uses none pays nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import install_entry_points
from tests.support.places import ROOT

SETTINGS = (
    "[pytest]\naddopts = --strict-markers -p no:cacheprovider -p no:randomly -p no:xdist\nfilterwarnings = error\n"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which what pyproject.toml says of entry points is installed."""
    return install_entry_points(tmp_path / "installed")


def run(installed: Path, code: str, *options: str) -> str:
    """What pytest says of a user's test file."""
    folder = installed.parent / "mine"
    folder.mkdir()
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_mine.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *options, str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


PLACES = """
import numpy as np
import os
import pytest

seen = set()

def save(root):
    assert root.url not in seen
    seen.add(root.url)
    with root.create().writer() as w:
        w.add_episode({"reward": np.ones(3)}, episode_id="first")
    assert root.open().episodes["first"].length == 3

@pytest.mark.parametrize("again", [1, 2])
def test_url(archive_url, again):
    save(archive_url)

@pytest.mark.parametrize("again", [1, 2])
def test_s3(archive_s3, again):
    save(archive_s3)
    assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"

def test_both(archive_url, archive_s3):
    save(archive_url)
    save(archive_s3)
"""

OTHERS = """
import sys
import pytest

def test_nothing_is_loaded():
    assert not {"torch", "zarr", "numpy", "moto", "s3fs", "pyarrow", "aiohttp", "fsspec"} & set(sys.modules)
"""

CLEARED = """
import fsspec
import pytest

def test_one(archive_url):
    archive_url.create()

def test_cleared():
    assert fsspec.filesystem("memory").find("/") == []
"""


def test_fixtures_give_fresh_places(installed: Path) -> None:
    assert "8 passed" in run(installed, PLACES)


def test_what_lay_in_memory_is_gone(installed: Path) -> None:
    assert "3 passed" in run(installed, CLEARED)


def test_nothing_is_loaded_where_nobody_asks(installed: Path) -> None:
    assert "1 passed" in run(installed, OTHERS, "-p", "no:zarr", "-p", "no:hypothesispytest")  # zarr loads itself


def test_a_server_that_is_missing_is_named(installed: Path) -> None:
    code = "import sys\nsys.modules['moto.server'] = None\ndef test_it(archive_s3):\n    pass\n"
    assert "pip install 'trajectory-archive[testing]'" in run(installed, code)
