"""What an archive takes, by what it is there for; and what commits lead to, which it stands on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import archive
from archive.index import Walk

STEPS = 10


def kept(root: str, layout: str = "packed", checkpoints: int = 6) -> archive.Archive:
    """A ring of two episodes of one env row: each checkpoint adds an episode, and has that and the one before."""
    arc = archive.create(root, layout=layout)
    with arc.writer() as w:
        for number in range(checkpoints):
            w.append({"x": np.arange(STEPS) + number}, env_ids=0, last=[False] * (STEPS - 1) + [True])
            w.evict(env_id=0, before=STEPS * (number - 1))
            live = sum(w.live["length"].to_pylist())
            w.checkpoint(number, columns={"priority": np.ones(live)}, state={"a": number})
    return arc.refresh()


def objects(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_the_newest_commit_leads_to_all_that_checkpoints_need(tmp_path: Path, layout: str) -> None:
    arc = kept(str(tmp_path), layout)
    reach = Walk(arc.storage).reach(arc.head)
    there = {key for key in objects(tmp_path) if key.startswith(("shards", "states", "manifest"))}
    assert {key.partition(".zarr/")[0] + ".zarr" if ".zarr/" in key else key for key in there} == reach.keys


@pytest.mark.parametrize("layout", ["packed", "directory"])
def test_each_object_counts_once_for_what_it_is_there_for(tmp_path: Path, layout: str) -> None:
    arc = kept(str(tmp_path), layout)
    (tmp_path / "shards" / "00000000-gone-00000.zip").write_bytes(b"left behind")
    usage = arc.usage
    sizes = {key: (tmp_path / key).stat().st_size for key in objects(tmp_path)}
    assert (usage.total.bytes, usage.total.objects) == (sum(sizes.values()), len(sizes))
    newest = set(archive.open(str(tmp_path)).checkpoints.latest.episodes.table["episode_id"].to_pylist())
    assert len(newest) == 2
    states = sum(size for key, size in sizes.items() if key.startswith("states/"))
    assert 0 < usage.live.bytes < sum(sizes.values()) / 2 < sum(sizes.values()) - usage.live.bytes
    assert usage.checkpoints.bytes > states / 2
    assert usage.forgettable.bytes == len(b"left behind")  # as long as nothing was forgotten, nothing is pruned
    assert str(arc.info).count("objects") == 6
    assert arc.info.to_json()["usage"]["total"]["objects"] == len(sizes)


def test_episodes_that_no_checkpoint_holds_are_forgettable(tmp_path: Path) -> None:
    arc = archive.create(str(tmp_path))
    with arc.writer() as w:
        w.add_episode({"x": np.arange(1000)}, episode_id="only archived")
        w.remove(["only archived"])
        w.commit()
        w.add_episode({"x": np.arange(10)}, episode_id="live")
        w.checkpoint(1)
    arc.refresh()
    (alone, _) = arc.shards
    reach = Walk(arc.storage).reach(arc.head)
    superseded = {key for key in objects(tmp_path) if key.startswith("manifest/")} - reach.manifests
    (chunks,) = arc.commits[1].all_files[-1:]
    gone = {alone, chunks.path, *superseded}
    assert arc.usage.forgettable.bytes == sum((tmp_path / key).stat().st_size for key in gone)
    assert arc.usage.forgettable.objects == len(gone)
    assert arc.usage.checkpoints.objects == 0


def test_what_a_commit_leads_to_takes_requests_for_tables_alone() -> None:
    root = "memory://reach-requests"
    arc = kept(root, checkpoints=20)
    before = arc.io_stats()
    reach = Walk(arc.storage).reach(arc.head)
    taken = arc.io_stats() - before
    tables = len({ref.path for commit in arc.commits for ref in commit.files("segments")})
    tables += len(arc.head.files("checkpoints"))
    assert taken.get <= len(arc.checkpoints) + tables
    assert taken.requests == taken.get
    assert len(reach.states) == 20
