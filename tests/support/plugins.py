"""What pytest finds by itself, as of pyproject.toml: the sources may be installed as they were earlier."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.support.places import ROOT


def install_entry_points(folder: Path) -> Path:
    """The folder, which is for PYTHONPATH, once it says what pyproject.toml does of pytest's plug-ins."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["pytest11"]
    info = folder / "trajectory_archive_tested-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trajectory-archive-tested\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return folder
