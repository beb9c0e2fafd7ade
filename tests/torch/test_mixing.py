"""Mixes of sources in exact proportions, resumed where they stopped; several archives as one dataset."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import DeadlineError, FieldError, UsageError
from archive.fields.nests import Ragged

torch = pytest.importorskip("torch", reason="mixes are of tensors")

import archive.torch as at  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_workers")
FIRST, SECOND = 40, 1000  # rewards of the replay and of the demonstrations begin here


def make(folder: Path, lengths: tuple[int, ...], start: int, **extra: Any) -> archive.Episodes:
    with archive.create(folder).writer() as w:
        for n in lengths:
            t = np.arange(start, start + n)
            fields = {name: np.full(n, value) for name, value in extra.items()}
            w.add_episode({"obs": {"x": np.stack([t, t], 1)}, "reward": t.astype(np.float32), **fields})
            start += n
    return archive.open(folder).episodes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixing")
    make(folder / "replay", (9, 4, 17), FIRST)
    make(folder / "demo", (6, 5), SECOND)
    return folder


@pytest.fixture
def replay(written: Path) -> archive.Episodes:
    return archive.open(written / "replay").episodes


@pytest.fixture
def demo(written: Path) -> archive.Episodes:
    return archive.open(written / "demo").episodes


class Buffer:
    """Something with sample(n), as replay buffers are."""

    def __init__(self, start: int, size: int = 50) -> None:
        self.values, self.cursor, self.ready_after = torch.arange(start, start + size), 0, 0

    def sample(self, count: int) -> dict[str, Any]:
        at_ = torch.arange(self.cursor, self.cursor + count) % len(self.values)
        self.cursor += count
        rows = self.values[at_[: len(self.values)]]
        return {"obs": {"x": torch.stack([rows, rows], 1)}, "reward": rows.float()}

    def is_ready(self, size: int) -> bool:
        self.ready_after -= 1
        return self.ready_after < 0

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]


def origin(batch: Any) -> list[int]:
    return [int(r >= SECOND) for r in batch["reward"]]


def test_half_and_half(replay: archive.Episodes, demo: archive.Episodes) -> None:
    mix = at.mix({"replay": at.StepDataset(replay), "demo": at.StepDataset(demo)}, batch_size=8, tag="source")
    seen: Counter[float] = Counter()
    for _ in range(30):
        batch = next(mix)
        assert origin(batch) == [0] * 4 + [1] * 4 == batch["source"].tolist()
        assert batch["obs"]["x"].shape == (8, 2)
        seen.update(batch["reward"].tolist())
    assert len(seen) == 30 + 11
    assert {seen[FIRST + i] for i in range(30)} == {4}  # 120 of 30 items
    assert {seen[SECOND + i] for i in range(11)} == {10, 11}  # 120 of 11


@pytest.mark.parametrize(
    ("ratios", "size", "parts"),
    [
        (None, 5, (0.5, 0.5)),
        ({"replay": 3, "demo": 1}, 6, (0.75, 0.25)),
        ([0.9, 0.1], 7, (0.9, 0.1)),
        ({"replay": 1, "demo": 0}, 4, (1, 0)),
        ("size", 10, (30 / 41, 11 / 41)),
    ],
)
def test_counts_are_as_exact_as_whole_items_can_be(
    replay: archive.Episodes, demo: archive.Episodes, ratios: Any, size: int, parts: tuple[float, float]
) -> None:
    sources = {"replay": at.StepDataset(replay), "demo": at.StepDataset(demo)}
    mix = at.mix(sources, ratios, batch_size=size)
    totals = np.zeros(2)
    for batches in range(1, 42):
        batch = next(mix)
        assert len(batch["reward"]) == size == sum(mix.counts.values())
        counts = np.bincount(origin(batch), minlength=2)
        assert counts.tolist() == list(mix.counts.values())
        assert (np.abs(counts - np.array(parts) * size) < 1).all()
        totals += counts
        assert (np.abs(totals - np.array(parts) * size * batches) < 1).all()


def test_three_sources_never_stray_by_an_item() -> None:
    ratios = {"a": Fraction(1, 2), "b": Fraction(1, 3), "c": Fraction(1, 6)}
    mix = at.mix({name: Buffer(0) for name in ratios}, ratios, batch_size=5)
    totals: Counter[str] = Counter()
    for batches in range(1, 30):
        next(mix)
        totals.update(mix.counts)
        assert all(abs(totals[n] - 5 * batches * r) <= 1 for n, r in ratios.items())
        assert all(n >= 0 for n in mix.counts.values())


def sources(replay: archive.Episodes, demo: archive.Episodes) -> dict[str, Any]:
    return {"replay": at.WindowDataset(replay, 3), "demo": at.WindowStream(demo, 3, shuffle="full", seed=4)}


def test_a_mix_resumes_with_the_same_batches(replay: archive.Episodes, demo: archive.Episodes) -> None:
    mix = at.mix(sources(replay, demo), [2, 1], batch_size=5, seed=3)
    for _ in range(7):
        next(mix)
    state = json.loads(json.dumps(mix.state_dict()))
    wanted = [next(mix)["reward"].tolist() for _ in range(20)]
    again = at.mix(sources(replay, demo), [2, 1], batch_size=5, seed=3)
    again.load_state_dict(state)
    assert again.batches == 7
    assert [next(again)["reward"].tolist() for _ in range(20)] == wanted


def test_the_state_of_samplers_is_part_of_it() -> None:
    mix = at.mix({"a": Buffer(0), "b": Buffer(SECOND)}, batch_size=3)
    next(mix)
    state = json.loads(json.dumps(mix.state_dict()))
    wanted = [next(mix)["reward"].tolist() for _ in range(3)]
    again = at.mix({"a": Buffer(0), "b": Buffer(SECOND)}, batch_size=3)
    again.load_state_dict(state)
    assert [next(again)["reward"].tolist() for _ in range(3)] == wanted
    with pytest.raises(UsageError, match="of a mix of"):
        at.mix({"a": Buffer(0)}, batch_size=3).load_state_dict(state)
    with pytest.raises(UsageError, match="no state"):
        again.load_state_dict({})


def test_loaders_with_workers_are_sources(replay: archive.Episodes, demo: archive.Episodes) -> None:
    def made() -> at.Mix:
        one = at.loader(at.StepDataset(replay), 4, 1, shuffle="full", drop_last=True)
        return at.mix({"replay": one, "demo": Buffer(SECOND)}, batch_size=8)

    mix = made()
    found = [next(mix) for _ in range(4)]
    assert [origin(b) for b in found] == [[0] * 4 + [1] * 4] * 4
    state = mix.state_dict()
    wanted = [next(mix)["reward"].tolist() for _ in range(5)]  # over the end of the epoch
    again = made()
    again.load_state_dict(state)
    assert [next(again)["reward"].tolist() for _ in range(5)] == wanted
    with pytest.raises(UsageError, match="batches of 4"):
        next(at.mix({"replay": at.loader(at.StepDataset(replay), 4), "demo": Buffer(0)}, [3, 1], batch_size=8))


def test_a_source_that_is_none_is_left_out_and_tensordicts_come_on_request(replay: archive.Episodes) -> None:
    tensordict = pytest.importorskip("tensordict")
    mix = at.mix({"replay": at.StepDataset(replay), "demo": None}, batch_size=6, collate="tensordict")
    batch = next(mix)
    assert isinstance(batch, tensordict.TensorDict)
    assert batch.batch_size == (6,)


def test_episodes_mix_as_ragged_batches(replay: archive.Episodes, demo: archive.Episodes) -> None:
    pair = {"replay": at.EpisodeDataset(replay), "demo": at.EpisodeDataset(demo)}
    batch = next(at.mix(pair, batch_size=4, shuffle=None))
    assert isinstance(batch["reward"], Ragged)
    assert batch["reward"].lengths.tolist() == [9, 4, 6, 5]
    assert len(batch["reward"].values) == 24


def test_waiting_until_sources_hold_enough() -> None:
    slow = Buffer(0)
    slow.ready_after = 3
    mix = at.mix({"a": slow}, batch_size=2, min_sizes={"a": 10})
    assert slow.ready_after < 0
    assert len(next(mix)["reward"]) == 2
    never = Buffer(0)
    never.ready_after = 10**9
    with pytest.raises(DeadlineError, match="'a' did not hold 10"):
        at.mix({"a": never}, batch_size=2, min_sizes={"a": 10}, timeout_s=0.1)
    with pytest.raises(UsageError, match="'b'"):
        at.mix({"a": never}, batch_size=2, min_sizes={"b": 10})


def test_what_does_not_mix(tmp_path: Path, replay: archive.Episodes, demo: archive.Episodes) -> None:
    steps = at.StepDataset(replay)
    with pytest.raises(UsageError, match="instead of 60"):
        next(at.mix({"a": Buffer(0)}, batch_size=60))
    more = at.StepDataset(make(tmp_path / "more", (5,), 0, extra=1))
    with pytest.raises(FieldError, match="'replay' and 'more' differ: extra"):
        next(at.mix({"replay": steps, "more": more}, batch_size=4))
    other = at.StepDataset(demo, transform=lambda item: {**item, "reward": item["reward"].double()})
    with pytest.raises(FieldError, match=r"in 'reward': torch.float32\[\] and torch.float64"):
        next(at.mix({"replay": steps, "demo": other}, batch_size=4))
    with pytest.raises(FieldError, match="tag"):
        next(at.mix({"replay": steps}, batch_size=4, tag="reward"))
    for wrong in ({"ratios": [1]}, {"ratios": [-1, 2]}, {"ratios": [0, 0]}, {"ratios": "some"}, {"batch_size": 0},
                  {"ratios": [float("nan"), 1]}, {"ratios": ["a", 1]}):  # fmt: skip
        with pytest.raises(UsageError):
            at.mix({"a": steps, "b": steps}, **{"batch_size": 4, **wrong})
    assert at.mix({"a": steps, "b": steps}, np.array([0.25, 0.75], np.float32), batch_size=4).ratios["a"] == 0.25
    with pytest.raises(UsageError, match="StepDataset"):
        at.mix({"a": replay}, batch_size=4)
    with pytest.raises(UsageError, match="at least one"):
        at.mix({"a": None}, batch_size=4)


def test_several_archives_as_one(replay: archive.Episodes, demo: archive.Episodes) -> None:
    joined = at.join(at.StepDataset(replay), at.StepDataset(demo))
    assert len(joined) == 41
    assert int(joined[29]["reward"]), int(joined[-1]["reward"]) == (FIRST + 29, SECOND + 10)
    order = np.random.default_rng(0).permutation(41).tolist()
    items = joined.__getitems__(order)
    wanted = [*range(FIRST, FIRST + 30), *range(SECOND, SECOND + 11)]
    assert [int(item["reward"]) for item in items] == [wanted[i] for i in order]
    assert at.collate(items)["reward"].tolist() == [wanted[i] for i in order]
    loader = at.loader(joined, 4, 2, shuffle="blocks", seed=1)
    walk = iter(loader)
    first = [r for _ in range(3) for r in next(walk)["reward"].tolist()]
    again = at.loader(joined, 5, shuffle="blocks", seed=1)
    again.load_state_dict(loader.state_dict())
    assert sorted(first + [r for b in again for r in b["reward"].tolist()]) == wanted
    with pytest.raises(IndexError):
        joined[41]
    with pytest.raises(UsageError):
        at.join()


def test_samplers_are_sources(replay: archive.Episodes, demo: archive.Episodes) -> None:
    def made() -> at.Mix:
        drawn = at.Sampler(replay, batch_size=4, generator=torch.Generator().manual_seed(2))
        return at.mix({"replay": drawn, "demo": at.StepDataset(demo)}, batch_size=7)

    mix = made()
    assert len(next(mix)["reward"]) == 7
    state = mix.state_dict()
    wanted = [next(mix)["reward"].tolist() for _ in range(5)]
    again = made()
    again.load_state_dict(state)
    assert [next(again)["reward"].tolist() for _ in range(5)] == wanted


def test_replay_buffers_of_trajectories_are_sources() -> None:
    trajectories = pytest.importorskip("tests.support.trajectories")
    buffers = {name: trajectories.TrajectoryReplayBuffer(seed=1) for name in ("replay", "demo")}
    for first, buffer in enumerate(buffers.values()):
        buffer.add_trajectories([trajectories.make(10 * first + i) for i in range(3)])
    mix = at.mix(buffers, batch_size=8, min_sizes={"replay": 2, "demo": 2}, timeout_s=5)
    for _ in range(3):
        numbers = trajectories.check_batch(next(mix), 8)
        assert [n >= 100_000 for n in numbers] == [False] * 4 + [True] * 4
    for buffer in buffers.values():
        buffer.close()
