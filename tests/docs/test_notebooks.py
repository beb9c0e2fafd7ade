"""The notebooks run from beginning to end against a bucket, and are kept without outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS = 15
TIMEOUT_S = 120


def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks() -> None:
    assert [path.stem.split("_")[0] for path in NOTEBOOKS] == [f"{i:02}" for i in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_has_no_outputs(path: Path) -> None:
    cells = notebook(path).cells
    assert 0 < len(cells) <= MAX_CELLS
    for cell in cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_files_that_are_there(path: Path) -> None:
    text = "\n".join(cell.source for cell in notebook(path).cells if cell.cell_type == "markdown")
    for name in re.findall(r"`((?:archive|tests|notebooks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_bucket(
    path: Path, moto_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIVE_ROOT", f"s3://bucket/notebooks/{tmp_path.name}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    client = nbclient.NotebookClient(notebook(path), timeout=TIMEOUT_S, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
