"""Late fields where things are let go of, looked at, and pruned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import archive
from archive.maintain import verify
from tests.support.archives import identical
from tests.support.checkpoints import steps


def five(url: str) -> archive.Archive:
    """Five episodes of three steps, each with a late field; the first two share a commit and a shard of it."""
    arc = archive.create(url)
    with arc.writer() as w:
        for k in range(5):
            w.add_episode(steps(range(3 * k, 3 * k + 3)), episode_id=f"e{k}")
    arc.writer().close()  # what the newest session wrote cannot be forgotten
    arc.refresh().add_fields({"score": {"e0": scores(0), "e1": scores(1)}})
    return arc.add_fields({"score": {f"e{k}": scores(k) for k in (2, 3, 4)}}, provenance="second")


def scores(k: int) -> np.ndarray:
    return np.arange(3, dtype=np.float32) + 10 * k


def test_what_is_forgotten_takes_its_late_rows_along_and_undo_brings_them_back(tmp_path: Path) -> None:
    arc = five(str(tmp_path))
    before = {ep.id: ep.read() for ep in arc.episodes}
    arc.forget(ids=["e0", "e1", "e3"], dry_run=False)
    other = archive.open(str(tmp_path))
    assert [row["position"] for row in other.late_fields.to_pylist()] == [6, 12]
    assert all(identical(ep.read(), before[ep.id]) for ep in other.episodes)
    assert not verify(other, deep=True).findings
    arc.undo()
    other = archive.open(str(tmp_path))
    assert {ep.id: len(ep.read()["score"]) for ep in other.episodes} == {f"e{k}": 3 for k in range(5)}
    assert all(identical(ep.read(), before[ep.id]) for ep in other.episodes)
    assert not verify(other, deep=True).findings


def test_prune_deletes_late_shards_that_nothing_needs(tmp_path: Path) -> None:
    arc = five(str(tmp_path))
    before = {ep.id: ep.read() for ep in arc.episodes}
    shards = set((tmp_path / "shards").iterdir())
    arc.forget(ids=["e0", "e1"], dry_run=False)
    arc.prune("0s", dry_run=False, force=True)
    other = archive.open(str(tmp_path))
    assert len(shards) - len(set((tmp_path / "shards").iterdir())) == 1
    assert all(identical(ep.read(), before[ep.id]) for ep in other.episodes)
    assert not verify(other, deep=True).findings


def test_a_late_shard_that_is_damaged_or_gone_is_found(tmp_path: Path) -> None:
    arc = five(str(tmp_path))
    key = arc.snapshot.annotations.late["shard"].to_pylist()[0]
    path = tmp_path / key
    data = path.read_bytes()
    spoilt = bytearray(data)
    at = data.index(scores(0).tobytes()[4:8]) if scores(0).tobytes()[4:8] in data else len(data) // 2
    spoilt[at] ^= 1
    path.write_bytes(bytes(spoilt))
    assert verify(archive.open(str(tmp_path)), deep=True).findings
    path.unlink()
    assert verify(archive.open(str(tmp_path))).findings


def test_restoring_takes_away_what_came_since(tmp_path: Path) -> None:
    arc = five(str(tmp_path))
    arc.restore(commit=arc.head.number - 1)
    assert {ep.id for ep in archive.open(str(tmp_path)).episodes if "score" in ep.fields} == {"e0", "e1"}
    assert sorted(archive.open(str(tmp_path), commit=4).episodes["e4"].fields) == ["obs/image", "reward", "serial"]
