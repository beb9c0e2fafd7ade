"""Shards are plain Zarr v3: readers that have never heard of this library open them and find the same values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr

from archive.shard.packing import Member, loose, pack
from archive.shard.writer import encode

Arrays = Mapping[str, np.ndarray[Any, Any]]

ATTRIBUTES = {"schema": {"axes": {"obs/image": "step"}}, "n": 3}
ROWS = 2000


def write_loose(root: Path, members: list[Member]) -> None:
    for name, data in loose(members)[0]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"".join(data) if isinstance(data, list) else data)


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    rng = np.random.default_rng(0)
    kinds = {
        name: rng.integers(0, 100, ROWS).astype(name) for name in ("?", *"bBhHiIqQ", "f2", "f4", "f8", "c8", "c16")
    }
    return {
        **{f"kinds/{np.dtype(name).name}": array for name, array in kinds.items()},
        "obs/image": rng.integers(0, 256, (ROWS, 12, 12, 3), dtype=np.uint8),
        "obs/deep/er/vector": rng.random((ROWS + 1, 5)),
        "zeros": np.zeros((ROWS, 4), "f4"),
        "no_rows": np.zeros((0, 3), "f4"),
        "empty_axis": np.zeros((7, 0), "f4"),
        "prompt": np.array(["", "Grüße", "nul\0inside", "\U0001f916"] * (ROWS // 4), object),
        "%2Eodd-key_": rng.random(3),
    }


@pytest.fixture(scope="module", params=[None, "zstd:1", "gzip:1"])
def packed(request: pytest.FixtureRequest, arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "shard.zip"
    members = encode(arrays, attributes=ATTRIBUTES, compression=request.param)
    path.write_bytes(b"".join(pack(members)[0]))
    return path


@pytest.fixture(scope="module", params=[None, "zstd:1", "gzip:1"])
def directory(request: pytest.FixtureRequest, arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loose") / "shard"
    write_loose(root, encode(arrays, attributes=ATTRIBUTES, compression=request.param))
    return root


def numeric(arrays: Arrays) -> Arrays:
    return {path: array for path, array in arrays.items() if array.dtype != object}


def assert_zarr_group_holds(group: zarr.Group, arrays: Arrays) -> None:
    assert group.metadata.consolidated_metadata is not None
    assert dict(group.attrs) == ATTRIBUTES
    found = {path: node for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert set(found) == set(arrays)
    for path, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(found[path][:]), array, err_msg=path)
        assert found[path].shape == array.shape
        assert found[path].dtype == array.dtype or array.dtype == object


def test_zarr_zip_store(packed: Path, arrays: Arrays) -> None:
    with zarr.storage.ZipStore(packed, mode="r") as store:
        assert_zarr_group_holds(zarr.open_group(store, mode="r", zarr_format=3), arrays)


def test_zarr_through_fsspec(packed: Path, arrays: Arrays) -> None:
    assert_zarr_group_holds(zarr.open_group(f"zip::file://{packed}", mode="r", zarr_format=3), arrays)


@pytest.fixture
def in_memory(packed: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/conformance/shard.zip", packed.read_bytes())
    yield "zip::memory://conformance/shard.zip"
    memory.rm("/conformance", recursive=True)


def test_zarr_through_fsspec_from_memory(in_memory: str, arrays: Arrays) -> None:
    assert_zarr_group_holds(zarr.open_group(in_memory, mode="r", zarr_format=3), arrays)


def test_zarr_on_a_directory(directory: Path, arrays: Arrays) -> None:
    assert_zarr_group_holds(zarr.open_group(directory, mode="r", zarr_format=3), arrays)


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_consolidated_metadata_is_what_zarr_would_write(directory: Path) -> None:
    ours = json.loads((directory / "zarr.json").read_bytes())
    try:
        zarr.consolidate_metadata(directory, zarr_format=3)
        assert json.loads((directory / "zarr.json").read_bytes()) == ours
    finally:
        (directory / "zarr.json").write_text(json.dumps(ours))


def test_readers_without_consolidated_metadata(directory: Path, arrays: Arrays) -> None:
    group = zarr.open_group(directory, mode="r", zarr_format=3, use_consolidated=False)
    found = {path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert found == set(arrays)
    deep = group["obs/deep"]
    assert isinstance(deep, zarr.Group)
    assert [path for path, _ in deep.members(max_depth=None)] == ["er", "er/vector"]


def tensorstore_reads(kvstore: dict[str, Any]) -> np.ndarray[Any, Any]:
    import tensorstore

    opened = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True)
    values: np.ndarray[Any, Any] = opened.result(timeout=20).read().result(timeout=20)
    return values


def test_tensorstore_zip(packed: Path, arrays: Arrays) -> None:
    for path, array in numeric(arrays).items():
        found = tensorstore_reads({"driver": "zip", "base": f"file://{packed}", "path": f"{path}/"})
        np.testing.assert_array_equal(found, array, err_msg=path, strict=True)


def test_tensorstore_directory(directory: Path, arrays: Arrays) -> None:
    for path, array in numeric(arrays).items():
        found = tensorstore_reads({"driver": "file", "path": f"{directory / path}/"})
        np.testing.assert_array_equal(found, array, err_msg=path, strict=True)


def test_zarrs_directory(directory: Path, arrays: Arrays) -> None:
    import zarrs

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        group = zarr.open_group(directory, mode="r", zarr_format=3)
        pipelines = {type(node.async_array.codec_pipeline) for _, node in group.arrays()}
        assert pipelines == {zarrs.ZarrsCodecPipeline}  # else zarr read it, not zarrs
        assert_zarr_group_holds(group, arrays)


@pytest.mark.parametrize("group", [None, "obs", "obs/deep/er", "kinds"])
def test_xarray(packed: Path, arrays: Arrays, group: str | None) -> None:
    import xarray

    expected = {
        path.rpartition("/")[2]: array for path, array in arrays.items() if path.rpartition("/")[0] == (group or "")
    }
    url = f"zip::file://{packed}"
    with xarray.open_zarr(url, group=group, consolidated=True, zarr_format=3, chunks=None) as dataset:
        assert set(dataset.variables) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(dataset[name].values, array, err_msg=name)


def test_xarray_datatree_and_dimension_names(directory: Path, arrays: Arrays) -> None:
    import xarray

    with xarray.open_datatree(directory, engine="zarr", zarr_format=3) as tree:
        image, vector = tree["obs/image"], tree["obs/deep/er/vector"]
        assert image.dims == ("step", "obs.image.dim_1", "obs.image.dim_2", "obs.image.dim_3")
        assert vector.dims == ("obs.deep.er.vector.row", "obs.deep.er.vector.dim_1")
        np.testing.assert_array_equal(image.values, arrays["obs/image"])


def test_xarray_takes_no_field_for_an_index(tmp_path: Path) -> None:
    import xarray

    fields = {"step": np.zeros((4, 2)), "x": np.arange(4), "x_dim_1": np.arange(9)}
    write_loose(tmp_path, encode(fields, attributes={}))
    with xarray.open_zarr(tmp_path, zarr_format=3, consolidated=True, chunks=None) as dataset:
        assert not dataset.coords
        np.testing.assert_array_equal(dataset["step"].values, fields["step"])


def test_a_flipped_bit_is_an_error_in_other_readers_too(directory: Path, arrays: Arrays) -> None:
    chunk = directory / "zeros" / "c" / "0" / "0"
    before = chunk.read_bytes()
    chunk.write_bytes(before[:-9] + bytes([before[-9] ^ 1]) + before[-8:])
    try:
        with pytest.raises(ValueError, match="checksum"):
            zarr.open_array(directory, path="zeros", mode="r", zarr_format=3)[:]
        with pytest.raises(ValueError, match="zeros/c/0/0"):
            tensorstore_reads({"driver": "file", "path": f"{directory / 'zeros'}/"})
    finally:
        chunk.write_bytes(before)


def test_nothing_warns(arrays: Arrays) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        members = encode(arrays, attributes=ATTRIBUTES)
        pack(members)
    assert caught == []
