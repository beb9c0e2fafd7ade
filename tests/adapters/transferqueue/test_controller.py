"""What TransferQueue's controller knows, as a tree and back: by its own classes, without a running system."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the adapter needs torch")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

import torch
from transfer_queue import controller as tq_controller

from archive.adapters.transferqueue import stored as controller
from archive.adapters.transferqueue.stored import Classes, Cut
from archive.base.errors import StateError, UpgradeError, UsageError
from archive.fields import trees
from tests.support.transferqueue_systems import plain

CLASSES = Classes(tq_controller.DataPartitionStatus, tq_controller.FieldMeta)
FIELDS = {
    "tokens": {"dtype": torch.int64, "shape": None, "is_nested": True, "per_sample_shapes": {3: [2], 5: [0], 6: [7]}},
    "image": {"dtype": torch.uint8, "shape": torch.Size([2, 3]), "is_nested": False},
    "reward": {"dtype": torch.bfloat16, "shape": [1], "is_nested": False},
    "odd": {"dtype": torch.bool, "shape": None, "is_nested": True, "per_sample_shapes": {3: (2, 0), 5: [1], 6: ()}},
    "text": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True},
}


def partition() -> Any:
    """One with indexes that are not of its samples, a sample without a key, and fields that only some have."""
    one = tq_controller.DataPartitionStatus("p")
    one.register_pre_allocated_indexes([9])
    assert one.update_production_status([3, 5, 6], [], FIELDS, {3: {"image": {"where": ["host", 7]}}})
    assert one.update_production_status([3], [], {"late": {"dtype": torch.float32, "shape": [4], "is_nested": False}})
    one.mark_consumed("train", [5])
    one.get_consumption_status("value")
    one.set_custom_meta({3: {"score": 1}, 5: {}})
    one.keys_mapping = {"b": 5, "a": 3}
    one.revert_keys_mapping = {5: "b", 3: "a"}
    return one


def cut(*partitions: Any, sampler: Any = None) -> Cut:
    manager = tq_controller.PartitionIndexManager()
    manager.allocate_indexes("p", 10)
    manager.release_indexes("p", [8, 2])
    return Cut({one.partition_id: one for one in partitions}, vars(manager), sampler or {"_states": {}}, "Sampler")


def through_a_tree(before: Cut) -> Any:
    """As a checkpoint keeps it."""
    return trees.unflatten(*trees.flatten(controller.to_tree(before, storage_saved=True)))


def test_a_partition_comes_back() -> None:
    one = partition()
    tree = through_a_tree(cut(one))
    back = controller.partition_of("p", tree["partitions"]["p"], one.revert_keys_mapping, one.custom_meta, CLASSES)
    assert plain(vars(back)) == plain(vars(one))
    assert list(back.keys_mapping) == ["b", "a"]
    assert back.scan_data_status(["tokens"], "train") == one.scan_data_status(["tokens"], "train") == [3, 6]
    assert back.update_production_status([7], [], {"reward": FIELDS["reward"]})


def test_an_empty_partition_comes_back() -> None:
    one = tq_controller.DataPartitionStatus("p")
    tree = through_a_tree(cut(one))
    assert plain(vars(controller.partition_of("p", tree["partitions"]["p"], {}, {}, CLASSES))) == plain(vars(one))


def test_indexes_are_given_out_as_before() -> None:
    before = cut(partition())
    back = controller.manager_of(through_a_tree(before))
    assert back == dict(before.index_manager)
    assert back["reusable_indexes"] == [8, 2]


def test_samples_of_a_cut() -> None:
    found = {sample.index: sample for sample in cut(partition()).samples}
    assert {index: sample.key for index, sample in found.items()} == {3: "a", 5: "b", 6: None}
    assert found[3].fields == (*FIELDS, "late")
    assert found[6].fields == (*FIELDS,)
    assert [found[index].name for index in (3, 6)] == ["sample 'a' of partition 'p'", "sample 6 of partition 'p'"]
    assert controller.expected(through_a_tree(cut(partition()))) == dict.fromkeys((3, 5, 6), "p")


def test_states_of_samplers() -> None:
    sampler = {
        "_states": {"p": {"train": {0: {0: ([1, 2], [1, 2]), 1: [3]}, 1: {None: []}}}},
        "_balanced_cache": {("p", "train", 0): [[1, 2], [3]]},
    }
    assert through_a_tree(cut(sampler=sampler))["sampler"] == sampler
    with pytest.raises(StateError, match="sampler"):
        through_a_tree(cut(sampler={"_states": object()}))


def test_a_version_that_keeps_more_is_refused() -> None:
    one = partition()
    one.priority = {}
    with pytest.raises(UsageError, match=r"in priority: .*TransferQueue>=0\.1\.11"):
        controller.to_tree(cut(one), storage_saved=True)


def test_what_is_no_tree_of_ours() -> None:
    for other in (None, {}, {"system": "xtuner"}, [1]):
        with pytest.raises(UsageError, match="here was not saved"):
            controller.check_tree(other, where="here")
    with pytest.raises(UpgradeError, match="upgrade"):
        controller.check_tree(through_a_tree(cut()) | {"format": 2}, where="here")
