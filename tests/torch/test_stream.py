"""Streams and loaders: each item once over workers and ranks, resumed in the middle, by any kind of process, on S3."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive

torch = pytest.importorskip("torch", reason="the streams need torch")
from torch.utils.data import DataLoader  # noqa: E402

import archive.torch as at  # noqa: E402
from archive.base.errors import FieldError, UsageError  # noqa: E402
from archive.torch import streams  # noqa: E402
from tests.support.backends import make_backend  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_workers")
LENGTHS = (5, 1, 8, 3, 12, 30, 7, 20)
STEPS = sum(LENGTHS)


def fill(arc: archive.Archive) -> None:
    with arc.writer() as w:
        at_step = 0
        for n in LENGTHS:
            steps = np.arange(at_step, at_step + n)
            w.add_episode({"t": steps, "obs": np.stack([steps, -steps], 1).astype(np.float32)}, terminated=True)
            at_step += n


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "a"
    fill(archive.create(folder))
    return folder


@pytest.fixture
def arc(written: Path) -> archive.Archive:
    return archive.open(written)


def steps_of(batches: Any) -> list[int]:
    return [int(t) for batch in batches for t in batch["t"].reshape(-1)]


@pytest.mark.parametrize("shuffle", ["blocks", "full", None])
def test_a_stream_gives_each_item_once_an_epoch(
    arc: archive.Archive, shuffle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BLOCK_STEPS": 8, "POOL_BLOCKS": 2, "READ_ITEMS": 10}.items():
        monkeypatch.setattr(streams, name, value)
    stream = at.StepStream(arc.episodes, shuffle=shuffle, seed=1)
    first, second = ([int(item["t"]) for item in stream] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(STEPS))
    assert (first == second) == (shuffle is None)
    stream.set_epoch(0)
    assert [int(item["t"]) for item in stream] == first
    other = at.StepStream(arc.episodes, shuffle=shuffle, seed=2)
    assert ([int(item["t"]) for item in other] == first) == (shuffle is None)


def test_streams_are_of_the_items_of_their_datasets(arc: archive.Archive) -> None:
    windows = list(at.WindowStream(arc.episodes, 4, stride=2, fields=["t"], shuffle=None))
    plain = at.WindowDataset(arc.episodes, 4, stride=2, fields=["t"])
    assert [w["t"].tolist() for w in windows] == [plain[i]["t"].tolist() for i in range(len(plain))]
    episodes = list(at.EpisodeStream(arc.episodes, shuffle=None))
    assert [len(e["t"]) for e in episodes] == list(LENGTHS)
    assert at.IterableDataset is at.StreamDataset
    for source in (arc, arc.episodes):
        assert [len(e["t"]) for e in at.IterableDataset(source, shuffle=None)] == list(LENGTHS)
    with pytest.raises(UsageError, match="a int"):
        at.IterableDataset(5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_plain_dataloaders_share_out_the_items(arc: archive.Archive, ranks: int, workers: int) -> None:
    found = []
    for rank in range(ranks):
        stream = at.StepStream(arc.episodes, rank=rank, world_size=ranks, seed=5)
        loader: Any = DataLoader(stream, batch_size=4, num_workers=workers, collate_fn=at.collate)
        found.append(steps_of(loader))
    assert sorted(t for one in found for t in one) == list(range(STEPS))
    assert max(map(len, found)) - min(map(len, found)) <= workers + 1


def test_rank_and_world_size_come_from_the_environment(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    stream = at.StepStream(arc.episodes)
    assert (stream.rank, stream.world_size) == (1, 4)
    assert len(list(stream)) in (STEPS // 4, STEPS // 4 + 1)


def test_a_stream_resumes_where_it_stopped(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_ITEMS", 16)
    stream = at.StepStream(arc.episodes, seed=3)
    walk = iter(stream)
    first = [int(next(walk)["t"]) for _ in range(21)]
    state = json.loads(json.dumps(stream.state_dict()))
    again = at.StepStream(arc.episodes, seed=3)
    again.load_state_dict(state)
    rest = [int(item["t"]) for item in again]
    assert first + rest == [int(item["t"]) for item in at.StepStream(arc.episodes, seed=3)]


WORLDS = [(1, 0), (1, 2), (2, 1), (3, 2)]


def loaders(arc: archive.Archive, ranks: int, workers: int, batch_size: int = 4, **options: Any) -> list[at.Loader]:
    return [
        at.loader(at.StepStream(arc.episodes, seed=7, rank=r, world_size=ranks), batch_size, workers, **options)
        for r in range(ranks)
    ]


@pytest.mark.parametrize("before", WORLDS)
@pytest.mark.parametrize("after", [(1, 0), (2, 2)])
def test_a_loader_resumes_in_any_world(arc: archive.Archive, before: tuple[int, int], after: tuple[int, int]) -> None:
    seen, states = [], []
    for loader in loaders(arc, *before):
        walk = iter(loader)
        seen += steps_of(next(walk) for _ in range(3))
        states.append(json.loads(json.dumps(loader.state_dict())))  # while workers have read ahead
        walk.close()
    for loader in loaders(arc, *after, batch_size=5):
        loader.load_state_dict(states[-1])
        expected = len(loader)
        rest = list(loader)
        assert len(rest) == expected
        assert loader.epoch == 1
        seen += steps_of(rest)
    assert sorted(seen) == list(range(STEPS))


def test_ranks_that_are_not_in_step_give_all_their_states(arc: archive.Archive) -> None:
    seen, states = [], []
    for batches, loader in zip((4, 1, 0), loaders(arc, 3, 0), strict=True):
        walk = iter(loader)
        seen += steps_of(next(walk) for _ in range(batches))
        states.append(loader.state_dict())
    (one,) = loaders(arc, 1, 2)
    one.load_state_dict(states)
    assert sorted(seen + steps_of(one)) == list(range(STEPS))


def test_the_same_world_goes_on_with_the_same_batches(arc: archive.Archive) -> None:
    (whole,) = loaders(arc, 1, 2)
    batches = [b["t"].tolist() for b in whole]
    (loader,) = loaders(arc, 1, 2)
    walk = iter(loader)
    first = [next(walk)["t"].tolist() for _ in range(5)]
    (again,) = loaders(arc, 1, 2)
    again.load_state_dict(loader.state_dict())
    assert first + [b["t"].tolist() for b in again] == batches
    assert [b["t"].tolist() for b in again] != batches  # the next epoch
    again.set_epoch(0)
    assert [b["t"].tolist() for b in again] == batches


def test_drop_last_gives_each_rank_and_worker_as_many_full_batches(arc: archive.Archive) -> None:
    found = [[b["t"].tolist() for b in loader] for loader in loaders(arc, 2, 2, batch_size=3, drop_last=True)]
    assert {len(b) for batches in found for b in batches} == {3}
    assert len(found[0]) == len(found[1]) == STEPS // (4 * 3) * 2
    every = [t for batches in found for b in batches for t in b]
    assert len(set(every)) == len(every)


def test_a_map_style_dataset_has_the_same_loader(arc: archive.Archive) -> None:
    data = at.WindowDataset(arc.episodes, 3, fields=["t"])
    plain = at.loader(data, 7)
    assert torch.equal(torch.cat([b["t"] for b in plain]), torch.stack([data[i]["t"] for i in range(len(data))]))
    mixed = at.loader(data, 7, shuffle=True, seed=1)
    walk = iter(mixed)
    first = [next(walk)["t"] for _ in range(3)]
    again = at.loader(data, 7, 2, shuffle="full", seed=1)
    again.load_state_dict(mixed.state_dict())
    found = torch.cat([*first, *(b["t"] for b in again)])
    assert sorted(found[:, 0].tolist()) == sorted(int(data[i]["t"][0]) for i in range(len(data)))
    with pytest.raises(UsageError, match="shuffle"):
        at.loader(data, 7, shuffle=None).load_state_dict(mixed.state_dict())


def test_only_one_pass_at_a_time(arc: archive.Archive) -> None:
    (loader,) = loaders(arc, 1, 0)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="one pass"):
        next(first)


def test_an_error_in_a_worker_reaches_the_caller(arc: archive.Archive) -> None:
    loader = at.loader(at.StepStream(arc.episodes, fields=["nothing"]), 4, 1)
    with pytest.raises(FieldError, match="nothing"):
        list(loader)


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"num_workers": -1}, {"collate": "some"}, {"sampler": None}, {"persistent_workers": True}],
)
def test_calls_that_are_wrong(arc: archive.Archive, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        at.loader(at.StepDataset(arc.episodes), **wrong)
    with pytest.raises(UsageError, match="stream"):
        at.loader(at.StepStream(arc.episodes), seed=1)


def test_only_the_chosen_fields_are_read(tmp_path: Path) -> None:
    big = np.random.default_rng(0).integers(0, 256, (500, 4096), np.uint8)
    with archive.create(tmp_path / "b").writer() as w:
        w.add_episode({"frame": big, "reward": np.ones(500, np.float32)})
    arc = archive.open(tmp_path / "b")
    before = arc.io_stats()
    batches = list(at.loader(at.WindowStream(arc.episodes, 10, fields=["reward"]), 64))
    used = arc.io_stats() - before
    assert sum(len(b["reward"]) for b in batches) == 491
    assert used.bytes_in < 40_000
    assert set(batches[0]) == {"reward"}


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_workers_of_all_kinds_read_from_s3(request: pytest.FixtureRequest, tmp_path: Path, context: str) -> None:
    backend = make_backend(request, "moto", tmp_path)
    fill(archive.create(backend.url, storage_options=backend.storage_options))
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    data = at.WindowDataset(arc.episodes, 2, fields=["t"], derive=["next_t", "done"])
    wanted = [data[i] for i in range(len(data))]  # the parent has its connections open
    plain: Any = DataLoader(data, batch_size=16, num_workers=1, multiprocessing_context=context)
    batches = list(plain)
    for name in ("t", "next_t", "done"):
        assert torch.equal(torch.cat([b[name] for b in batches]), torch.stack([w[name] for w in wanted]))
    stream = at.WindowStream(arc.episodes, 2, fields=["t"], seed=2)
    loader = at.loader(stream, 16, 2, multiprocessing_context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.cat([b["t"] for b in loader])
    assert sorted(found[:, 0].tolist()) == sorted(int(w["t"][0]) for w in wanted)


def test_everything_pickles(arc: archive.Archive) -> None:
    for data in (
        at.EpisodeDataset(arc.episodes),
        at.StepDataset(arc.episodes, derive=["next_obs", "done"]),
        at.WindowStream(arc.episodes, 3),
        at.StepStream(arc.checkpoints.latest.episodes if arc.checkpoints.latest else arc.episodes),
    ):
        again = pickle.loads(pickle.dumps(data))
        one, other = (next(iter(d)) for d in (data, again))
        assert one["t"].tolist() == other["t"].tolist()
