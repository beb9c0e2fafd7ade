"""The notebooks run from beginning to end against a bucket, and are kept without outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
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
NEEDS = {"07_score_all_rollouts_again": "ray"}  # which has no wheel for every Python and platform


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


@contextmanager
def kernel(endpoint: str, folder: Path) -> Iterator[Any]:
    """A client whose kernel runs until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("MPLBACKEND", "agg")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=TIMEOUT_S, kernel_name="python3")
        with client.setup_kernel(cwd=str(folder)):
            yield client


def run(client: Any, path: Path, folder: Path) -> None:
    """Runs all cells among names of their own, in an empty folder and below a root of their own."""
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    root = f"s3://bucket/notebooks/{folder.name}"
    begin = f"%reset -f\nimport os\nos.chdir({str(folder)!r})\nos.environ['ARCHIVE_ROOT'] = {root!r}\ndel os"
    client.nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(begin), *notebook(path).cells])
    for index, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, index)


@pytest.fixture(scope="module")
def shared_kernel(moto_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """To start it and to import what notebooks use takes longer than running them."""
    with kernel(moto_endpoint, tmp_path_factory.mktemp("kernel")) as client:
        yield client


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_bucket(path: Path, shared_kernel: Any, tmp_path: Path) -> None:
    run(shared_kernel, path, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel_of_its_own(path: Path, moto_endpoint: str, tmp_path: Path) -> None:
    with kernel(moto_endpoint, tmp_path) as client:
        run(client, path, tmp_path)
