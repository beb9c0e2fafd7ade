"""What other libraries make of an archive without our help: Polars, pandas, xarray, zarr, Parquet readers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest

import archive
from archive.base.errors import MissingPackageError
from tests.support.backends import make_backend


def written(url: str, storage_options: dict[str, object] | None = None, **options: str) -> archive.Archive:
    with archive.create(url, storage_options=storage_options, **options).writer() as w:  # type: ignore[arg-type]
        for i in range(6):
            w.add_episode(
                {"obs": {"x": np.arange(12.0).reshape(4, 3) + i}, "reward": np.full(4, i / 2)},
                episode_id=f"e{i}", update_count=i, metadata={"task": "push"},
            )  # fmt: skip
    return archive.open(url, storage_options=storage_options)


def test_the_table_as_polars(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="Polars is an extra of the user's")
    arc = written(str(tmp_path / "a"))
    frame = arc.episodes.to_polars()
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == arc.episodes.table.column_names
    assert frame.filter(polars.col("return") > 5)["episode_id"].to_list() == ["e3", "e4", "e5"]
    assert frame["model_weights_uuids"].dtype == polars.List(polars.String)


def test_polars_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingPackageError, match="pip install polars"):
        written(str(tmp_path / "a")).episodes.to_polars()


def test_torch_is_asked_for_by_name_where_it_is_needed_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "archive"]:
        monkeypatch.delitem(sys.modules, name)  # so that they are imported once more
    monkeypatch.setitem(sys.modules, "torch", None)
    with_torch = [
        "torch",
        "buffers",
        *(f"adapters.{n}" for n in ("alf", "rlinf", "torchrl", "transferqueue", "exchange")),
    ]
    for name in with_torch:
        with pytest.raises(ImportError, match=rf"^archive\.{name} needs torch .*trajectory-archive\[torch\]"):
            importlib.import_module(f"archive.{name}")
    for name in ("minari", "lerobot", "npz", "video", "xtuner"):
        importlib.import_module(f"archive.adapters.{name}")


def test_the_table_as_pandas(tmp_path: Path) -> None:
    frame = written(str(tmp_path / "a")).episodes.to_pandas()
    assert frame.set_index("episode_id").loc["e4", "return"] == 8.0


@pytest.mark.parametrize("store", ["local", "moto"])
def test_manifest_urls_are_parquet_files_of_the_same_rows(
    request: pytest.FixtureRequest, tmp_path: Path, store: str
) -> None:
    import fsspec

    backend = make_backend(request, store, tmp_path)
    arc = written(backend.url, backend.storage_options)
    assert arc.manifest_urls
    found = []
    for url in arc.manifest_urls:
        fs, path = fsspec.url_to_fs(url, **backend.storage_options)
        found += ds.dataset(path, filesystem=fs).to_table(columns=["episode_id"])["episode_id"].to_pylist()
    assert found == [f"e{i}" for i in range(6)]


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_xarray_and_zarr_open_what_shard_url_gives(tmp_path: Path, layout: str) -> None:
    import xarray
    import zarr

    arc = written(str(tmp_path / "a"), layout=layout)
    url = arc.shard_url(0)
    wanted = np.concatenate([np.arange(12.0).reshape(4, 3) + i for i in range(6)])
    group = zarr.open_group(url, mode="r")
    np.testing.assert_array_equal(np.asarray(group["obs/x"]), wanted)
    group.store.close()
    with xarray.open_zarr(url, group="obs", zarr_format=3, consolidated=True, chunks=None) as dataset:
        assert dataset["x"].dims[0] == "step"
        np.testing.assert_array_equal(dataset["x"].values, wanted)
