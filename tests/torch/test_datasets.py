"""Torch datasets: what items hold, that windows stay within episodes, and that workers of all kinds can read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.fields.derived import n_step_return

torch = pytest.importorskip("torch", reason="the datasets need torch")
from torch.utils.data import DataLoader  # noqa: E402

from archive.torch import EpisodeDataset, StepDataset, WindowDataset  # noqa: E402

LENGTHS = (5, 1, 8, 3, 12)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "a"
    with archive.create(folder).writer() as w:
        at = 0
        for n in LENGTHS:
            steps = np.arange(at, at + n)
            w.add_episode(
                {
                    "obs": {"x": np.stack([steps, -steps], 1)},
                    "reward": steps.astype(np.float32),
                    "note": [str(s) for s in steps],
                }
            )
            at += n
    return folder


@pytest.fixture
def arc(written: Path) -> archive.Archive:
    return archive.open(written)


def test_an_item_of_an_episode_dataset_is_the_episode(arc: archive.Archive) -> None:
    data = EpisodeDataset(arc.episodes, fields=["obs", "reward"])
    assert len(data) == len(LENGTHS)
    assert data[2]["reward"].tolist() == [6, 7, 8, 9, 10, 11, 12, 13]
    assert data[-1]["obs"]["x"].shape == (12, 2)
    assert "note" not in data[0]
    with pytest.raises(IndexError):
        data[5]


@pytest.mark.parametrize(
    ("length", "stride", "pad"), [(3, 1, False), (3, 2, False), (4, 3, True), (1, 1, False), (20, 1, True)]
)
def test_windows_are_those_of_a_plain_loop(arc: archive.Archive, length: int, stride: int, pad: bool) -> None:
    data = WindowDataset(arc.episodes, length, stride, pad, fields=["reward"])
    wanted: list[list[int]] = []
    at = 0
    for n in LENGTHS:
        for start in range(0, n if pad else n - length + 1, stride):
            wanted.append(list(range(at + start, min(at + start + length, at + n))))
        at += n
    items = data.__getitems__(range(len(data)))
    assert len(data) == len(wanted)
    for item, steps in zip(items, wanted, strict=True):
        real = item["mask"].numpy() if pad else np.ones(length, bool)
        assert item["reward"].numpy()[real].tolist() == steps
        assert not item["reward"].numpy()[~real].any()
        assert len(item["reward"]) == length


def test_an_item_of_a_step_dataset_has_no_step_axis(arc: archive.Archive) -> None:
    data = StepDataset(arc.episodes)
    assert len(data) == sum(LENGTHS)
    item = data[7]
    assert item["obs"]["x"].tolist() == [7, -7]
    assert item["reward"].item() == 7
    assert item["note"] == "7"


@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_a_batch_is_one_read_and_none_where_its_chunks_are_kept(arc: archive.Archive, cache_bytes: int) -> None:
    data = StepDataset(arc.episodes, fields=["reward"], cache_bytes=cache_bytes)
    data[0]
    before = arc.io_stats()
    found = [int(item["reward"]) for item in data.__getitems__([0, 11, 28, 3])]
    assert found == [0, 11, 28, 3]
    assert (arc.io_stats() - before).get == (0 if cache_bytes else 1)


def test_derived_fields_read_no_chunk_again(arc: archive.Archive) -> None:
    data = WindowDataset(arc.episodes, 2, fields=["obs", "reward"], derive=["next_obs", n_step_return(0.9, 3)])
    data.__getitems__(range(len(data)))
    before = arc.io_stats()
    found = data.__getitems__([0, 5])
    assert found[0]["next_obs"]["x"].tolist() == [[1, -1], [2, -2]]
    assert (arc.io_stats() - before).requests == 0


def test_a_batch_of_other_fields_is_one_read(arc: archive.Archive) -> None:
    data = StepDataset(arc.episodes, fields=["note"])
    data[0]
    before = arc.io_stats()
    assert [item["note"] for item in data.__getitems__([0, 11, -1])] == ["0", "11", "28"]
    assert (arc.io_stats() - before).get == 1


def test_loader_workers_read_what_one_process_reads(arc: archive.Archive) -> None:
    data = WindowDataset(arc.episodes, 2, fields=["reward"])
    data[0]  # the parent has its connections open
    loader: Any = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    found = torch.cat([batch["reward"] for batch in loader])
    assert torch.equal(found, torch.stack([data[i]["reward"] for i in range(len(data))]))


@pytest.mark.parametrize("extra", [[], ["note"]])
def test_a_share_has_its_ids_renumbered(tmp_path: Path, extra: list[str]) -> None:
    schema = archive.Schema(env_id=["env"])
    with archive.create(tmp_path / "b").writer(schema=schema) as w:
        for env in range(4):
            w.append(
                {"env": np.full(6, env), "x": np.arange(6), "note": ["a"] * 6}, env_ids=env, first=True, terminated=True
            )
        w.checkpoint(step=1).result()
    ck = archive.open(tmp_path / "b").checkpoints.latest
    assert ck is not None
    share = resharding.plan(ck, world_size=2, num_envs=2).share(1)
    wanted = [ep.read(["env"])["env"].tolist() for ep in share]
    assert wanted == [[0] * 6, [1] * 6]
    for data in (
        EpisodeDataset(share, ["env", "x", *extra]),
        pickle.loads(pickle.dumps(EpisodeDataset(share, ["env"]))),
    ):
        assert [data[i]["env"].tolist() for i in range(len(data))] == wanted
    steps = StepDataset(share, ["env", *extra])
    assert [int(steps[i]["env"]) for i in range(len(steps))] == wanted[0] + wanted[1]
    assert len(StepDataset(ck)) == len(StepDataset(ck.episodes)) == 24
