"""Batches from workers lie in memory that is used again: where they were made in it, and where there was no room."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archive

torch = pytest.importorskip("torch")


import archive.torch as at  # noqa: E402
from archive.fields import Ragged  # noqa: E402
from archive.torch.loaders import Packed, Receiver, Sender, flags  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def arc(tmp_path_factory: pytest.TempPathFactory) -> archive.Archive:
    made = archive.create(tmp_path_factory.mktemp("shared") / "a")
    with made.writer() as w:
        for number in range(12):
            t = np.arange(20 + number)
            w.add_episode({"x": (t + 100 * number)[:, None].repeat(50, 1), "r": t.astype(np.float32), "done": t > 3})
    return made


def batch_of(sender: Sender, value: int, rows: int = 100) -> dict[str, Any]:
    made = sender.empty((rows, 3), np.dtype(np.float32))
    made[:] = value
    return {"a": torch.from_numpy(made), "b": {"c": torch.full((7,), value, dtype=torch.int16)}}


def assert_is(batch: Any, value: int, rows: int = 100) -> None:
    assert batch["a"].shape == (rows, 3)
    assert (batch["a"] == value).all()
    assert (batch["b"]["c"] == value).all()


def test_what_was_made_in_a_block_is_sent_from_there() -> None:
    held = flags(1, 2)
    sender, receiver = Sender(0, held), Receiver(held)
    first = receiver.unpack(sender.pack(batch_of(sender, 1)))  # there is no block yet
    del first
    batch = batch_of(sender, 2)
    packed = sender.pack(batch)
    assert isinstance(packed, Packed)
    assert packed.block is None
    found = receiver.unpack(packed)
    assert_is(found, 2)
    assert found["a"].data_ptr() == batch["a"].data_ptr()


def test_a_block_that_somebody_has_is_left_alone() -> None:
    held = flags(1, 3)
    sender, receiver = Sender(0, held), Receiver(held)
    kept: list[Any] = []
    for value in range(20):
        kept.append(receiver.unpack(sender.pack(batch_of(sender, value))))
        if value in (7, 13):
            del kept[2]
    values = [value for value in range(20) if value not in (2, 3)]
    for value, batch in zip(values, kept, strict=True):
        assert_is(batch, value)


def test_a_batch_that_outgrows_its_block_has_another() -> None:
    held = flags(1, 1)
    sender, receiver = Sender(0, held), Receiver(held)
    for value, rows in enumerate([10, 5, 400, 10, 0, 401]):
        assert_is(receiver.unpack(sender.pack(batch_of(sender, value, rows))), value, rows)


def test_parts_and_copies_of_what_was_made_there_come_as_they_are() -> None:
    held = flags(1, 1)
    sender, receiver = Sender(0, held), Receiver(held)
    for value in range(3):
        made = batch_of(sender, value)["a"]
        made[:, 1] = 50 + value
        lengths = torch.tensor([40, 59])
        sent = {"part": made[1:], "column": made[:, 1], "ragged": Ragged(made[1:], lengths), "other": made + 1}
        found = receiver.unpack(sender.pack(sent))
        assert (found["part"][:, 0] == value).all()
        assert found["column"].tolist() == [50 + value] * 100
        assert found["ragged"].values.shape == (99, 3)
        assert found["ragged"].lengths.tolist() == [40, 59]
        assert (found["other"][:, 1] == 51 + value).all()
        del found


def test_a_batch_that_fails_leaves_room_for_the_next() -> None:
    held = flags(1, 1)
    sender, receiver = Sender(0, held), Receiver(held)
    receiver.unpack(sender.pack(batch_of(sender, 1)))
    batch_of(sender, 2)  # is never packed
    assert_is(receiver.unpack(sender.pack(batch_of(sender, 3))), 3)


DATASETS = [
    lambda eps: at.WindowDataset(eps, 8),
    lambda eps: at.WindowDataset(eps, 8, stride=5, pad=True),
    lambda eps: at.WindowDataset(eps, 8, derive="next_r"),
    lambda eps: at.StepDataset(eps),
    lambda eps: at.EpisodeDataset(eps),
    lambda eps: at.join(at.StepDataset(eps), at.StepDataset(eps, fields=["x", "r", "done"])),
    lambda eps: at.WindowDataset(eps, 8, transform=lambda item: {"x": item["x"], "mean": item["r"].mean()}),
]


@pytest.mark.parametrize("make", DATASETS)
@pytest.mark.parametrize("keep", [True, False])
def test_workers_give_what_one_process_does(arc: archive.Archive, make: Any, keep: bool) -> None:
    """Whether the caller keeps every batch, or none."""
    data = make(arc.episodes)
    expected = list(at.loader(data, 4, 1, shuffle="full", seed=3))
    alone = list(at.loader(data, 4, 0, shuffle="full", seed=3))
    found = at.loader(data, 4, 1, shuffle="full", seed=3)
    batches = list(found) if keep else [_copy(batch) for batch in found]
    assert len(batches) == len(expected) == len(alone)
    for one, other, third in zip(batches, expected, alone, strict=True):
        _assert_same(one, other)
        _assert_same(one, third)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, dict):
        return {name: _copy(value) for name, value in leaf.items()}
    return Ragged(*map(_copy, leaf)) if isinstance(leaf, Ragged) else leaf.clone()


def _assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            _assert_same(one[name], other[name])
    elif isinstance(one, Ragged):
        for part, of_other in zip(one, other, strict=True):
            _assert_same(part, of_other)
    else:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
