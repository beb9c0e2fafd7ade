"""Verification, export and import by actors of Ray: as one process does them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import npz
from tests.support import ray_cluster
from tests.support.verbs import damage, imported, of_shards, one_file, same


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster.cluster(2) as started:
        yield started


def test_verify(ray: Any, tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a")
    damage(root, 1, 40)
    plain = archive.open(root).verify(True)
    assert asdict(archive.open(root).verify(True, engine="ray", workers=2, job="check")) == asdict(plain)
    assert not plain.sound


def test_export(ray: Any, tmp_path: Path) -> None:
    arc = archive.open(of_shards(tmp_path / "a"))
    plain = resharding.export(arc, tmp_path / "plain", episodes_per_file=3)
    made = resharding.export(arc, tmp_path / "made", episodes_per_file=3, engine="ray", workers=2)
    assert made == plain
    assert same(tmp_path / "plain", tmp_path / "made")


def test_import(ray: Any, tmp_path: Path) -> None:
    file = one_file(tmp_path)
    plain = npz.import_dataset(file, archive.create(tmp_path / "plain"))
    made = npz.import_dataset(file, archive.create(tmp_path / "made"), engine="ray", workers=2, job="in")
    np.testing.assert_equal(imported(made), imported(plain))
