"""RLinf's folders: imported, exported, merged and split, as RLinf does it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import archive
import resharding
from archive.adapters import rlinf
from archive.base.errors import AlreadyExistsError, UsageError
from archive.store.storage import Storage
from tests.support import rlinf_objects as objects
from tests.support.backends import make_backend
from tests.support.rlinf_objects import DOCUMENTED, FIXTURE, assert_same
from tests.support.worlds import STORES, shares

SIZES = [5, 3, 0, 4]  # trajectories of each rank of the fixture


@pytest.fixture
def arc(request: pytest.FixtureRequest) -> archive.Archive:
    return archive.create(f"memory://rlinf-import-{request.node.name}")


def test_rank_folders_become_the_ranks_of_one_checkpoint(arc: archive.Archive) -> None:
    ck = rlinf.import_checkpoint(FIXTURE, arc)
    assert ck.world_size == 4
    assert resharding.plan(ck, world_size=4).episodes == SIZES
    ep = ck.episodes[0]
    assert ep.metadata["trajectory_id"] == 0
    assert (ep.length, ep.metadata["B"], ep.metadata["shape"]) == (3, 2, [3, 2, 4])
    assert ep.model_weights_uuid == "e96ed0bc-405c-5dbe-b03f-19090f690578"
    assert ep.update_count is None
    assert ck.episodes.filter(complete=True).lengths().tolist() == ck.episodes.lengths().tolist()
    assert rlinf.problems(ck) == []


def test_the_update_count_of_the_documented_names(arc: archive.Archive) -> None:
    ck = rlinf.import_checkpoint(str(DOCUMENTED), arc)
    assert ck.step == 140
    found = ck.episodes.filter(update_count=(110, 130))
    assert [ep.update_count for ep in found] == [110, 120, 110, 120]
    assert found[0].model_weights_uuid == "59da4f34-7dda-5ad5-a34b-837810c18bcb"
    assert found[0].metadata["model_weights_id"] == "59da4f34-7dda-5ad5-a34b-837810c18bcb_110"


@pytest.mark.parametrize("folder", [FIXTURE, DOCUMENTED], ids=["current", "documented"])
@pytest.mark.parametrize("store", STORES)
def test_export_gives_the_same_folders(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, folder: Path
) -> None:
    root = make_backend(request, store, tmp_path)
    arc = archive.create(f"{root.url}/archive", storage_options=root.storage_options)
    target = f"{root.url}/out"
    ck = rlinf.import_checkpoint(folder, arc)
    files = objects.saved_trees(folder)
    assert rlinf.export_checkpoint(ck, target, storage_options=root.storage_options) == len(files)
    out = Storage.connect(target, root.storage_options)
    for name, tree in files.items():
        assert_same(tree, torch.load(io.BytesIO(out.get(name)), weights_only=True), name)
    for path in folder.rglob("*.json"):
        assert json.loads(out.get(str(path.relative_to(folder)))) == json.loads(path.read_text())
    again = archive.create(f"{root.url}/again", storage_options=root.storage_options)
    back = rlinf.import_checkpoint(target, again, storage_options=root.storage_options)
    assert [ep.metadata for ep in back.episodes] == [ep.metadata for ep in ck.episodes]
    with pytest.raises(AlreadyExistsError, match="export to an empty folder"):
        rlinf.export_checkpoint(ck, target, storage_options=root.storage_options)


def test_rlinf_loads_what_was_exported(arc: archive.Archive, tmp_path: Path) -> None:
    rlinf.export_checkpoint(rlinf.import_checkpoint(FIXTURE, arc), tmp_path / "out")
    for rank in (0, 1, 3):
        found = []
        for folder in (FIXTURE, tmp_path / "out"):
            made = objects.buffer(window=50)
            made.load_checkpoint(str(folder / f"rank_{rank}"))
            found.append(made)
        assert len(found[0]) == SIZES[rank]
        assert_same(*map(objects.plain_state, found))
        assert_same(*map(objects.samples, found))


def test_one_rank_and_one_share_are_exported_alone(arc: archive.Archive, tmp_path: Path) -> None:
    ck = rlinf.import_checkpoint(FIXTURE, arc)
    assert rlinf.export_checkpoint(ck, tmp_path / "one", rank=1) == 3
    expected = objects.saved_trees(FIXTURE / "rank_1")
    assert_same(expected, objects.saved_trees(tmp_path / "one"))
    for share in shares(ck, 3):
        assert rlinf.export_checkpoint(share, tmp_path / f"share-{share.rank}") == len(share)
        made = objects.buffer(window=50)
        made.load_checkpoint(str(tmp_path / f"share-{share.rank}"))
        assert (len(made), made.total_samples) == (len(share), 2 * share.steps)


def test_a_live_buffer_gets_what_rlinf_would_load(arc: archive.Archive) -> None:
    ck = rlinf.import_checkpoint(FIXTURE / "rank_0", arc)
    assert ck.world_size == 1
    for world in (1, 2, 3, 7):
        for share in shares(ck, world, policy="by_trajectory"):
            ours, theirs = objects.buffer(window=50), objects.buffer(window=50)
            rlinf.restore(ours, share)
            theirs.load_checkpoint(
                str(FIXTURE / "rank_0"), is_distributed=True, local_rank=share.rank, world_size=world
            )
            assert ours._trajectory_id_list == theirs._trajectory_id_list
            assert ours.get_stats() == theirs.get_stats()
            assert ours._trajectory_counter == theirs._trajectory_counter
            cache = ours._flat_trajectory_cache, theirs._flat_trajectory_cache
            assert_same(*({n: c.get(n) for n in c.cache} for c in cache))


def merged_by_hand(folder: Path) -> list[Any]:
    """The trees in the order of RLinf's tool: number, then folder name as text."""
    files = folder.rglob("trajectory_*.pt")
    ordered = sorted(files, key=lambda f: (int(f.name.split("_")[1]), f.parent.name))
    return [torch.load(f, weights_only=True) for f in ordered]


def numbered(folder: Path) -> list[Any]:
    index = json.loads((folder / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == list(range(len(index["trajectory_id_list"])))
    names = [f"trajectory_{n}_{e['model_weights_id']}.pt" for n, e in index["trajectory_index"].items()]
    return [torch.load(folder / name, weights_only=True) for name in names]


def test_merge_has_the_order_of_rlinfs_tool(arc: archive.Archive, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for rank in range(12):
        shutil.copytree(FIXTURE / f"rank_{rank % 4}", source / f"rank_{rank}")
    ck = rlinf.import_checkpoint(source, arc)
    before = arc.io_stats().bytes_out
    merged = rlinf.merge(ck, arc)
    assert arc.io_stats().bytes_out - before < 60_000
    assert len(arc.shards) == len(archive.open(arc.url, commit=ck.number).shards)
    assert (merged.world_size, len(merged.episodes), merged.name) == (1, 36, "step-0-merged")
    rlinf.export_checkpoint(merged, tmp_path / "out")
    assert_same(merged_by_hand(source), numbered(tmp_path / "out"))
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    wanted = {"trajectory_format": "pt", "size": 36, "total_samples": 372, "trajectory_counter": 36, "seed": 7}
    assert metadata == wanted


def test_the_interleaved_plan_is_the_same_merge(arc: archive.Archive, tmp_path: Path) -> None:
    ck = rlinf.import_checkpoint(FIXTURE, arc)
    share = resharding.plan(ck, world_size=1, policy="interleaved").share(0)
    rlinf.export_checkpoint(share, tmp_path / "out")
    assert_same(merged_by_hand(FIXTURE), numbered(tmp_path / "out"))


def test_split_takes_the_first_ones(arc: archive.Archive, tmp_path: Path) -> None:
    merged = rlinf.merge(rlinf.import_checkpoint(FIXTURE, arc), arc)
    ck = rlinf.split(merged, arc, 5)
    rlinf.export_checkpoint(ck, tmp_path / "out")
    assert_same(merged_by_hand(FIXTURE)[:5], numbered(tmp_path / "out"))
    for count in (0, -1, 13):
        with pytest.raises(UsageError, match="give 1 to 12"):
            rlinf.split(merged, arc, count)
    source = rlinf.import_checkpoint(FIXTURE, arc, run="other")
    with pytest.raises(UsageError, match="give rank="):
        rlinf.split(source, arc, 1)
    assert [ep.length for ep in rlinf.split(source, arc, 2, rank=3).episodes] == [6, 5]


def test_episodes_of_each_env(arc: archive.Archive) -> None:
    ck = rlinf.import_checkpoint(FIXTURE / "rank_0", arc, split=True)
    trees = list(objects.saved_trees(FIXTURE / "rank_0").values())
    ends = sum(int(t["dones"][1:].sum()) for t in trees)
    assert len(ck.episodes.filter(complete=True)) == ends > 0
    assert sum(ep.length for ep in ck.episodes) == sum(2 * len(t["rewards"]) for t in trees)
    for ep in ck.episodes:
        tree, env, start = trees[ep.metadata["from_trajectory"]], ep.metadata["env"], ep.metadata["start"]
        data = ep.to_torch()
        assert_same(tree["actions"][start : start + ep.length, env], data["actions"])
        assert_same(tree["next_obs"]["states"][start : start + ep.length, env], data["next_obs"]["states"])
        assert_same(tree["dones"][1:][start : start + ep.length, env], data["dones"])
        assert data["dones"][:-1].sum() == 0
        assert bool(data["dones"][-1]) == ep.complete
        assert ep.terminated == (bool(data["terminations"][-1]) if ep.complete else None)
    with pytest.raises(UsageError, match="split=True"):
        rlinf.export_checkpoint(ck, "memory://nowhere")
