"""engine="ray": the same work on a cluster, here a local one of two workers, gives the same archive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import CorruptChunkError, UsageError
from archive.testing import steps
from tests.support import ray_cluster
from tests.support.backends import make_backend
from tests.support.compactions import Job, everything, of_checkpoint
from tests.support.places import ROOT
from tests.support.tampering import inverted
from tests.support.transfers import Place, equal, holds

pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two workers, which import what this process does."""
    with ray_cluster.cluster(2, PYTHONPATH=str(ROOT)):
        yield


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path, cluster: None) -> Place:
    return Place(make_backend(request, "local", tmp_path))


@pytest.mark.parametrize("store", ["local", "moto"])
def test_merge(
    request: pytest.FixtureRequest, tmp_path: Path, cluster: None, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(make_backend(request, store, tmp_path))
    monkeypatch.setattr("resharding.transfer.copying.SHARDS_PER_TASK", 1)  # as many tasks as shards
    place.source("a", 0, 6)
    place.source("b", 6, 3, "directory")
    target = place.open("to", create=True)
    before = target.io_stats().put
    resharding.merge([place.url("a"), place.url("b")], to=target, copy=True, engine="ray", **place.options)
    assert holds(place.open("to"), range(9))
    assert len(target.storage.list("shards")) == 5
    assert target.io_stats().put - before == 3  # two chunk tables and the segments table: others wrote the shards


def test_split_and_filter(local: Place) -> None:
    local.source("a", 0, 6)
    assert holds(resharding.split(local.url("a"), local.url("x"), 2, copy=True, engine="ray"), range(2))
    assert holds(
        resharding.filter(local.url("a"), local.url("y"), update_count=(2, 5), copy=True, engine="ray"), range(2, 5)
    )


def test_an_error_in_a_task_is_ours(local: Place) -> None:
    source = local.source("a", 0, 4)
    victim = Path(local.url("a")) / source.shards[1]
    whole = victim.read_bytes()
    victim.write_bytes(inverted(whole))
    with pytest.raises(CorruptChunkError, match="archive verify"):
        resharding.merge([local.url("a")], to=local.url("to"), copy=True, engine="ray")
    assert len(archive.open(local.url("to")).episodes) == 0
    victim.write_bytes(whole)
    assert holds(resharding.merge([local.url("a")], to=local.url("to"), copy=True, engine="ray"), range(4))


def test_compact(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(local.url("a"))
    job.w.close()
    arc = job.opened()
    before, latest = everything(arc), of_checkpoint(arc.checkpoints.latest)
    monkeypatch.setattr("resharding.transfer.rewriting.TASK_BYTES", 2000)
    shards = len(arc.shards)
    done = resharding.compact(arc, engine="ray")
    assert done.commit is not None
    assert len(arc.shards) > shards + 2  # each task writes its own
    assert equal(everything(job.opened()), before)
    assert equal(of_checkpoint(job.opened().checkpoints.latest), latest)
    assert resharding.compact(arc, engine="ray").commit is None


def test_export(local: Place) -> None:
    local.source("a", 0, 6)
    names = resharding.export(local.url("a"), local.url("out"), engine="ray", episodes_per_file=2, **local.options)
    here = resharding.export(local.url("a"), local.url("here"), episodes_per_file=2, **local.options)
    assert names == here == ["part-000000.npz", "part-000001.npz", "part-000002.npz"]
    folders = [Path(local.url(n).removeprefix("file://")) for n in ("out", "here")]
    for name in names:
        with np.load(folders[0] / name) as one, np.load(folders[1] / name) as other:
            assert one.files == other.files
            assert all(one[n].tobytes() == other[n].tobytes() for n in one.files)


def test_memory_is_out_of_reach() -> None:
    arc = archive.create(f"memory://ray-{time.time_ns()}")
    with arc.writer() as w:
        w.add_episode(steps(3))
    for act in (
        lambda: resharding.merge([arc.url], to="memory://ray-to", copy=True, engine="ray"),
        lambda: resharding.compact(arc, engine="ray"),
    ):
        with pytest.raises(UsageError, match="cannot see"):
            act()
