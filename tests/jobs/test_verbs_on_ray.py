"""Verification, export, import, compaction, copies and redaction by actors of Ray: as one process does them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import npz
from archive.testing import steps
from resharding import archives
from tests.support import ray_cluster
from tests.support.compactions import everything
from tests.support.pruning import NOW, sound
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


def test_what_is_written_anew(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction, a merge of copies, and a redaction there."""
    arc = archive.create(tmp_path / "a")
    with ExitStack() as stack:
        writers = [stack.enter_context(arc.writer(rank=rank, world_size=2, session="job")) for rank in range(2)]
        for rank, w in enumerate(writers):
            for i in range(8):
                w.add_episode(steps(10, 10 * rank + i), episode_id=f"e{rank}-{i}")
            w.remove([f"e{rank}-{i}" for i in range(6)])
        for pending in [w.checkpoint(1) for w in writers]:
            pending.result()
    how: dict[str, Any] = {"engine": "ray", "workers": 2}
    before = everything(arc.refresh())
    assert resharding.compact(arc, job="tidy", **how).steps == 40
    np.testing.assert_equal(everything(archive.open(arc.url)), before)
    monkeypatch.setattr(archives, "BATCH_BYTES", 1)
    merged = resharding.merge([arc.url], tmp_path / "to", copy=True, job="all", num_cpus=1, **how)
    np.testing.assert_equal(everything(merged), before)
    del before["e0-0"]
    assert merged.forget(ids=["e0-0"], redact=True).commit(job="gone", **how).made is not None
    merged.prune(dry_run=False, **NOW)
    np.testing.assert_equal(everything(archive.open(merged.url)), before)
    assert sound(merged)
    assert all(one.finished for of in (arc, merged) for one in of.jobs.values())
