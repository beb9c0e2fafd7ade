"""Batches: stacked, end to end where lengths differ, as TensorDicts; the same however they were read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive import Schema
from archive.base.errors import FieldError, UsageError
from archive.fields import derived
from archive.fields.nests import Ragged

torch = pytest.importorskip("torch", reason="the datasets need torch")
from torch.utils.data import DataLoader, default_collate  # noqa: E402

import archive.torch as at  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_workers")
LENGTHS = (5, 1, 8, 3)
PLAIN = ["obs", "reward", "bits"]  # torch has no masked assignment of uint16


def tokens(t: int) -> np.ndarray[Any, Any]:
    return np.arange(t, t + t % 4, dtype=np.int32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collate") / "a"
    schema = Schema(axes={"tokens": "ragged", "goal": "free"}, json=["info"])
    with archive.create(folder).writer(schema=schema) as w:
        at_step = 0
        for n in LENGTHS:
            steps = np.arange(at_step, at_step + n)
            w.add_episode(
                {
                    "obs": {"x": np.stack([steps, -steps], 1)},
                    "reward": steps.astype(np.float32),
                    "bits": (steps + 60_000).astype(np.uint16),
                    "tokens": [tokens(t) for t in steps],
                    "note": [str(t) for t in steps],
                    "info": [{"t": int(t)} for t in steps],
                    "goal": np.full(2, n),
                },
                terminated=True,
            )
            at_step += n
    return folder


@pytest.fixture
def arc(written: Path) -> archive.Archive:
    return archive.open(written)


def batch_of(data: Any, indices: list[int], kind: str = "dict") -> Any:
    return at.collate(data.__getitems__(indices), kind)


def test_steps(arc: archive.Archive) -> None:
    batch = batch_of(at.StepDataset(arc.episodes), [2, 7, 16])
    assert batch["obs"]["x"].tolist() == [[2, -2], [7, -7], [16, -16]]
    assert batch["reward"].dtype == torch.float32
    assert batch["tokens"].lengths.tolist() == [2, 3, 0]
    assert batch["tokens"].values.tolist() == [2, 3, 7, 8, 9]
    assert batch["note"] == ["2", "7", "16"]
    assert batch["info"] == [{"t": 2}, {"t": 7}, {"t": 16}]


def test_ragged_fields_stay_ragged_where_the_lengths_happen_to_be_equal(arc: archive.Archive) -> None:
    batch = batch_of(at.StepDataset(arc.episodes, ["tokens"]), [1, 5])
    assert isinstance(batch["tokens"], Ragged)
    assert batch["tokens"].lengths.tolist() == [1, 1]
    whole = batch_of(at.EpisodeDataset(arc.episodes, PLAIN), [2, 2])
    assert isinstance(whole["reward"], Ragged)
    assert whole["reward"].lengths.tolist() == [8, 8]


def test_windows(arc: archive.Archive) -> None:
    batch = batch_of(at.WindowDataset(arc.episodes, 3), [0, 3])
    assert batch["reward"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch["tokens"].lengths.tolist() == [[0, 1, 2], [2, 3, 0]]
    assert batch["tokens"].values.tolist() == [1, 2, 3, 6, 7, 7, 8, 9]
    assert batch["goal"].tolist() == [[5, 5], [8, 8]]
    padded = batch_of(at.WindowDataset(arc.episodes, 3, pad=True), [4, 5])
    assert padded["mask"].tolist() == [[True, False, False]] * 2
    assert padded["tokens"].lengths.tolist() == [[0, 0, 0], [1, 0, 0]]


def test_episodes(arc: archive.Archive) -> None:
    batch = batch_of(at.EpisodeDataset(arc.episodes), [1, 3])
    assert batch["reward"].lengths.tolist() == [1, 3]
    assert batch["reward"].values.tolist() == [5, 14, 15, 16]
    assert batch["obs"]["x"].values.shape == (4, 2)
    assert batch["tokens"].lengths.lengths.tolist() == [1, 3]
    assert batch["tokens"].lengths.values.tolist() == [1, 2, 3, 0]
    assert batch["goal"].tolist() == [[1, 1], [3, 3]]
    assert batch["note"] == [["5"], ["14", "15", "16"]]


MAKERS = {
    "steps": lambda eps, **o: at.StepDataset(eps, **o),
    "windows": lambda eps, **o: at.WindowDataset(eps, 3, 2, **o),
    "padded windows": lambda eps, **o: at.WindowDataset(eps, 4, 1, True, **o),
    "episodes": lambda eps, **o: at.EpisodeDataset(eps, **o),
}
DERIVE = [
    "next_obs",
    "done",
    "has_next",
    derived.n_step_return(0.9, 3),
    derived.n_step_discount(0.9, 3),
    derived.discounted_return(0.5),
    derived.frame_stack("obs/x", 3),
]


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_read_at_once_is_that_of_its_items(arc: archive.Archive, name: str) -> None:
    """Fields of one row a step are gathered for the whole batch; with another field the items are read one by one."""
    fast = MAKERS[name](arc.episodes, fields=PLAIN, derive=DERIVE)
    slow = MAKERS[name](arc.episodes, fields=[*PLAIN, "note"], derive=DERIVE)
    order = np.random.default_rng(0).permutation(len(fast)).tolist()
    items, others = fast.__getitems__(order), slow.__getitems__(order)
    assert items.whole is not None
    assert others.whole is None
    one, two = at.collate(items), at.collate(others)
    two.pop("note")
    same(one, two)
    same(at.collate(list(items)) if name != "episodes" else one, one)
    same(items[0], {k: v for k, v in others[0].items() if k != "note"})
    same(fast[order[0]], items[0])


def same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for k in one:
            same(one[k], two[k])
    elif isinstance(one, Ragged):
        same(one.values, two.values)
        same(one.lengths, two.lengths)
    else:
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two)


def test_torchs_own_collation_works_as_well(arc: archive.Archive) -> None:
    data = at.WindowDataset(arc.episodes, 2, fields=PLAIN)
    same(default_collate(data.__getitems__([3, 0])), batch_of(data, [3, 0]))
    loader: Any = DataLoader(data, batch_size=3)
    assert sum(len(b["reward"]) for b in loader) == len(data)


def test_a_transform_makes_the_items(arc: archive.Archive) -> None:
    data = at.StepDataset(arc.episodes, PLAIN, transform=lambda item: {"r": item["reward"] * 2})
    assert batch_of(data, [3, 4])["r"].tolist() == [6, 8]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_tensordicts(arc: archive.Archive, maker: Any) -> None:
    tensordict = pytest.importorskip("tensordict")
    data = maker(arc.episodes)
    batch, plain = batch_of(data, [0, 2], "tensordict"), batch_of(data, [0, 2])
    assert isinstance(batch, tensordict.TensorDict)
    assert batch.batch_size == (2,)
    if isinstance(plain["reward"], Ragged):
        assert batch["reward"].is_nested
        assert torch.equal(batch["reward"].values(), plain["reward"].values)
        assert batch["reward"].offsets().diff().tolist() == plain["reward"].lengths.tolist()
    else:
        assert torch.equal(batch["obs", "x"], plain["obs"]["x"])
    assert [batch[i]["note"] for i in range(2)] == plain["note"]


def sum_of_rewards(items: list[Any]) -> Any:
    """Of this module, for processes that are not forked from the test's own."""
    return sum(item["reward"] for item in items)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["dict", "tensordict", "list"])
def test_loaders_collate_as_asked(arc: archive.Archive, kind: str, workers: int) -> None:
    pytest.importorskip("tensordict")
    batches = list(at.loader(at.StepDataset(arc.episodes, PLAIN), 5, workers, collate=kind))
    if kind == "list":
        rewards = [int(item["reward"]) for batch in batches for item in batch]
    else:
        assert (type(batches[0]) is dict) == (kind == "dict")
        rewards = [int(r) for batch in batches for r in batch["reward"]]
    assert rewards == list(range(sum(LENGTHS)))


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_collate_by_a_function(arc: archive.Archive, workers: int) -> None:
    other = {"multiprocessing_context": "forkserver"} if workers else {}
    sums = at.loader(at.StepDataset(arc.episodes, PLAIN), 5, workers, collate=sum_of_rewards, **other)
    assert sum(float(b) for b in sums) == sum(range(sum(LENGTHS)))


@pytest.mark.parametrize(("name", "context"), [*((name, "fork") for name in MAKERS), ("episodes", "forkserver")])
def test_workers_give_the_same_batches_and_those_stay_as_they_are(
    arc: archive.Archive, name: str, context: str
) -> None:
    """More batches are kept than workers have slabs, and memory that is used again is used by none that is kept."""
    data = MAKERS[name](arc.episodes)
    wanted = list(at.loader(data, 1))
    kept = []
    for _ in range(3):
        kept += list(at.loader(data, 1, 1, multiprocessing_context=context))
        for _ in at.loader(
            data, 1, 1, multiprocessing_context=context
        ):  # these are let go, so that their memory is used again
            pass
    for found, expected in zip(kept, wanted * 3, strict=True):
        for name in ("obs", "reward", "tokens"):
            same(found[name], expected[name])
        assert found["note"] == expected["note"]


def test_a_part_of_a_batch_keeps_its_memory(arc: archive.Archive) -> None:
    data = at.StepDataset(arc.episodes, PLAIN)
    rows = [b["obs"]["x"][0] for b in at.loader(data, 1, 1)]
    assert torch.stack(rows)[:, 0].tolist() == list(range(sum(LENGTHS)))


def test_what_makes_no_batch(tmp_path: Path) -> None:
    with archive.create(tmp_path / "b").writer() as w:
        w.add_episode({"a": np.arange(3), "x": np.zeros((3, 2))})
        w.add_episode({"a": np.arange(3), "b": np.arange(3), "x": np.zeros((3, 4))})
    episodes = archive.open(tmp_path / "b").episodes
    with pytest.raises(FieldError, match="differ in their fields: b"):
        batch_of(at.StepDataset(episodes, ["a", "b"], missing="skip"), [0, 3])
    with pytest.raises(FieldError, match="x"):
        batch_of(at.EpisodeDataset(episodes, ["x"]), [0, 1])
    assert batch_of(at.StepDataset(episodes, ["a", "b"], missing=-1), [0, 3])["b"].tolist() == [-1, 0]
    with pytest.raises(UsageError, match="collate"):
        at.collate([], "other")
