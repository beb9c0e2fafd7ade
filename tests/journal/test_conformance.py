"""Objects of journals are plain Zarr in a ZIP: readers that have never heard of this library open them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tests.support.golden import GOLDEN
from tests.support.golden_journal import EPISODES, NAME

OBJECT = GOLDEN / NAME / "journal" / "second" / "rank-00000" / "000000000.zip"
WANTED: dict[str, Any] = {name: EPISODES["q/0"][name] for name in ("obs", "reward")}


def test_zarr_python() -> None:
    with zarr.storage.ZipStore(OBJECT, mode="r") as store:
        group = zarr.open_group(store, mode="r", zarr_format=3)
        for name, rows in WANTED.items():
            np.testing.assert_array_equal(np.asarray(group[name]), rows)


def test_tensorstore() -> None:
    import tensorstore

    for name, rows in WANTED.items():
        kvstore = {"driver": "zip", "base": f"file://{OBJECT}", "path": f"{name}/"}
        opened = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True).result(timeout=20)
        np.testing.assert_array_equal(opened.read().result(timeout=20), rows, strict=True)


def test_zarrs(tmp_path: Path) -> None:
    import zarrs

    with zipfile.ZipFile(OBJECT) as packed:
        packed.extractall(tmp_path)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        group = zarr.open_group(tmp_path, mode="r", zarr_format=3)
        assert {type(node.async_array.codec_pipeline) for _, node in group.arrays()} == {zarrs.ZarrsCodecPipeline}
        for name, rows in WANTED.items():
            np.testing.assert_array_equal(np.asarray(group[name]), rows)
