"""TorchRL: what TensorDicts are beside their leaves comes back: batch sizes, names, order, classes, what is empty."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

import archive
from archive.adapters import torchrl
from tests.support.torchrl_buffers import assert_same_samples, buffer, rectangle, steps
from tests.support.worlds import save_world

import torch  # isort: skip
from tensordict import (  # isort: skip
    LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection, tensorclass,
)  # fmt: skip
from torchrl.data import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage  # isort: skip


class _Pair:
    a: torch.Tensor
    b: torch.Tensor


class _Nest:
    pair: Any
    text: str
    missing: torch.Tensor | None = None


Pair: Any = tensorclass(_Pair)
Nest: Any = tensorclass(_Nest)
_Pair, _Nest = Pair, Nest  # by the names that they say they have


def saved(rb: Any) -> archive.Checkpoint:
    return save_world(f"memory://shapes/{uuid.uuid4().hex}", [rb], torchrl.save)


def about(value: Any) -> Any:
    """Class, order of keys, batch sizes, names and devices, of nested ones too."""
    if not is_tensor_collection(value):
        return (
            getattr(value, "requires_grad", None),
            getattr(value, "dtype", type(value)),
            getattr(value, "shape", None),
        )
    if isinstance(value, LazyStackedTensorDict):
        return [about(v) for v in value.tensordicts], value.stack_dim
    inside = (
        [(k, about(v)) for k, v in value.items()] if isinstance(value, TensorDictBase) or len(value.batch_size) else []
    )
    return type(value).__name__, inside, value.batch_size, list(value.names), value.device


def _nested(lo: int = 0) -> TensorDict:
    deep = TensorDict(
        {"y": torch.ones(3, 4, 2) * lo, "empty": TensorDict({}, [3, 4])}, [3, 4, 2][:2], names=[None, "time"]
    )
    wide = TensorDict({"k": torch.ones(3, 4, 2)}, [3, 4, 2], names=[None, "time", "kind"])
    parts = {"z": torch.full((3, 4), lo), "nested": deep, "wide": wide, "a": torch.zeros(3, 4)}
    return TensorDict(parts, [3, 4], names=["batch", "time"])


def _named_rectangle(lo: int = 0) -> Any:
    data = rectangle(lo, 2, 3)
    data.names = ["env", "time"]
    return data


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(("data", "ndim"), [(_nested, 1), (_nested, 2), (_named_rectangle, 2)])
def test_fresh_storages_are_shaped_as_they_were(data: Callable[[int], Any], ndim: int, kind: Any) -> None:
    rb, other = (buffer(storage=kind(24, ndim=ndim), plain=True, seed=seed) for seed in (0, 1))
    rb.extend(data(0))
    torchrl.restore(other, saved(rb), rank=0)
    assert about(other._storage._storage) == about(rb._storage._storage)
    for i in range(4):
        assert about(other.sample()) == about(rb.sample())
        rb.extend(data(i)), other.extend(data(i))
    assert_same_samples(rb, other, count=5)


def test_items_of_lists_are_shaped_as_they_were() -> None:
    def more(rb: Any, i: int) -> None:
        rb.extend([_nested(i)[0], TensorDict({"x": torch.ones(i % 3 + 1)}, device="cpu"), _nested(i)[1, :2]])

    rb, other = (buffer(storage=ListStorage(10), plain=True, collate_fn=lambda x: x, seed=seed) for seed in (0, 1))
    more(rb, 0), more(rb, 1)
    torchrl.restore(other, saved(rb), rank=0)
    assert [about(i) for i in other._storage._storage] == [about(i) for i in rb._storage._storage]
    assert_same_samples(rb, other, count=20, write=more)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_ragged_lazy_stacks(storage: Any) -> None:
    """Members that differ in shape and in keys; TorchRL saves them."""

    def more(rb: Any, i: int) -> None:
        members = [TensorDict({"x": torch.ones(k + 1) * i, "n": {"y": torch.ones(2, k + 1)}}) for k in range(2 + i % 2)]
        rb.extend([LazyStackedTensorDict(*members, stack_dim=0)])

    rb, other = (
        buffer(storage=storage(10), plain=True, seed=seed, batch_size=3, collate_fn=lambda x: x) for seed in (0, 1)
    )
    for i in range(4):
        more(rb, i)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=20, write=more)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_storages_that_are_ragged_lazy_stacks(storage: Any) -> None:
    def more(rb: Any, i: int) -> None:
        members = [TensorDict({"a": torch.full((5, k, 2), float(i)), "b": torch.arange(5)}, [5]) for k in (4, 3)]
        rb.extend(LazyStackedTensorDict(*members, stack_dim=1))

    rb, other = (buffer(storage=storage(12), plain=True, seed=seed, collate_fn=lambda x: x) for seed in (0, 1))
    more(rb, 1), more(rb, 2), more(rb, 3)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=20, write=more)


def test_items_that_require_gradients() -> None:
    rb, other = (buffer(storage=ListStorage(12), plain=True, seed=seed) for seed in (0, 1))
    rb.extend([torch.ones(2, requires_grad=True), torch.zeros(2)])
    torchrl.restore(other, saved(rb), rank=0)
    assert [item.requires_grad for item in other._storage._storage] == [True, False]
    assert [item.is_leaf for item in other._storage._storage] == [True, True]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage])
def test_tensorclasses(storage: Any) -> None:
    def data(i: int) -> Any:
        pair = Pair(a=torch.arange(i, i + 4), b=torch.ones(4, 2), batch_size=[4])
        return Nest(pair=pair, text="hello", batch_size=[4])

    rb, other = (buffer(storage=storage(10), plain=True, seed=seed, collate_fn=lambda x: x) for seed in (0, 1))
    rb.extend(data(0))
    torchrl.restore(other, saved(rb), rank=0)
    for i in range(4):
        ours, theirs = other.sample(), rb.sample()
        assert type(ours[0]) is type(theirs[0]) is Nest
        assert type(ours[0].pair) is Pair
        assert [(o.pair.a.tolist(), o.text, o.missing) for o in ours] == [
            (t.pair.a.tolist(), t.text, t.missing) for t in theirs
        ]
        rb.extend(data(i)), other.extend(data(i))


def test_prefetched_batches_are_as_they_were() -> None:
    def change(batch: Any) -> Any:
        batch = batch.select("observation", "next", "action")
        batch["graded"] = batch["observation"].clone().requires_grad_()
        batch["nested"] = TensorDict({"empty": TensorDict({}, batch.batch_size)}, batch.batch_size)
        batch["also"] = batch["action"]
        batch.names = ["time"]
        return batch

    rb, other = (buffer(20, prefetch=2, transform=change, seed=seed) for seed in (0, 1))
    rb.extend(steps(0, 20))
    rb.sample()
    torchrl.restore(other, saved(rb), rank=0)
    ours, theirs = other._prefetch_queue[0].result(), rb._prefetch_queue[0].result()
    assert about(ours[0]) == about(theirs[0])
    assert_same_samples(rb, other, count=1)


def test_prefetched_tensorclasses() -> None:
    rb, other = (buffer(20, prefetch=2, plain=True, seed=seed) for seed in (0, 1))
    rb.extend(Pair(a=torch.arange(10), b=torch.ones(10, 2), batch_size=[10]))
    rb.sample()
    torchrl.restore(other, saved(rb), rank=0)
    ours, theirs = other.sample(), rb.sample()
    assert type(ours) is type(theirs) is Pair
    assert ours.a.tolist() == theirs.a.tolist()
