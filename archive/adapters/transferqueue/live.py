"""The running TransferQueue: its controller at one moment as a tree of arrays and JSON, and back, never by pickle; its
samples out of the storage units and in.

Trees are made of the public attributes of its partitions. Keys and tags are no part of them: they are attributes of the
samples' episodes.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.adapters import reading, system
from archive.base import CapacityError, UpgradeError, UsageError
from archive.fields import Array

FORMAT = 1
SYSTEM = "transferqueue"
_FIELD = {"global_indexes", "dtype", "shape", "is_nested", "is_non_tensor", "per_sample_shapes"}
_PLAIN = ("created_at", "production_status", "consumption_status", "field_name_mapping", "field_custom_backend_meta")
_SETS = ("global_indexes", "pre_allocated_global_indexes")
_KEYS = ("keys_mapping", "revert_keys_mapping")
_PARTITION = {"partition_id", "field_metadata", "custom_meta", *_KEYS, *_PLAIN, *_SETS}


@dataclass(frozen=True)
class Sample:
    """One global index of a partition: who it is, and which of its fields are there."""

    index: int
    partition: str
    created_at: float  # of the partition: another one may get its name
    key: str | None
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in messages."""
        who = f"sample {self.index}" if self.key is None else f"sample {self.key!r}"
        return f"{who} of partition {self.partition!r}"


class Classes(NamedTuple):
    """The classes of TransferQueue's controller that partitions are made of."""

    partition: Any
    field: Any


@dataclass(frozen=True)
class Cut:
    """The controller at one moment: its partitions as they are, the index manager's and the sampler's state."""

    partitions: Mapping[str, Any]
    index_manager: Mapping[str, Any]
    sampler: Mapping[str, Any]
    sampler_class: str

    @property
    def samples(self) -> list[Sample]:
        """The samples of all partitions, by partition and index."""
        return [sample for name, partition in self.partitions.items() for sample in _samples(name, partition)]

    @property
    def bound(self) -> int:
        """One more than the largest index that may ever have been given out."""
        return int(self.index_manager["global_index_counter"])


def _samples(name: str, partition: Any) -> Iterable[Sample]:
    known = {*partition.global_indexes, *partition.keys_mapping.values(), *partition.custom_meta}
    status = partition.production_status.numpy()
    columns = {field: column for field, column in partition.field_name_mapping.items() if column < status.shape[1]}
    for index in sorted(known):
        row = status[index] if index < len(status) else ()
        there = tuple(field for field, column in columns.items() if len(row) and row[column])
        yield Sample(index, name, partition.created_at, partition.revert_keys_mapping.get(index), there)


# -- to a tree --------------------------------------------------------------------------------------------------------


def to_tree(cut: Cut, *, storage_saved: bool) -> dict[str, Any]:
    """The state of a checkpoint."""
    manager = cut.index_manager
    return {
        "system": SYSTEM,
        "format": FORMAT,
        "storage_saved": storage_saved,
        "sampler_class": cut.sampler_class,
        "sampler": dict(cut.sampler),
        "partitions": {name: _partition_tree(partition) for name, partition in cut.partitions.items()},
        "index_manager": {
            "partition_to_indexes": {n: _indexes(sorted(s)) for n, s in manager["partition_to_indexes"].items()},
            "reusable_indexes": _indexes(manager["reusable_indexes"]),
            "global_index_counter": int(manager["global_index_counter"]),
            "allocated_indexes": _indexes(sorted(manager["allocated_indexes"])),
        },
    }


def _partition_tree(partition: Any) -> dict[str, Any]:
    _check_known(partition, _PARTITION)
    plain = {name: getattr(partition, name) for name in _PLAIN}
    sets = {name: _indexes(sorted(getattr(partition, name))) for name in _SETS}
    fields = {name: _field_tree(field) for name, field in partition.field_metadata.items()}
    return plain | sets | {"field_metadata": fields, "keyed": _indexes(partition.keys_mapping.values())}


def _field_tree(field: Any) -> dict[str, Any]:
    _check_known(field, _FIELD)
    plain = {name: getattr(field, name) for name in ("dtype", "shape", "is_nested", "is_non_tensor")}
    shapes = field.per_sample_shapes
    return plain | {
        "global_indexes": _indexes(sorted(field.global_indexes)),
        "shaped": _indexes(shapes),
        "dimensions": _indexes(len(shape) for shape in shapes.values()),
        "sizes": _indexes(size for shape in shapes.values() for size in shape),
        "tuples": np.array([isinstance(shape, tuple) for shape in shapes.values()], bool),
    }


def _check_known(record: Any, known: set[str]) -> None:
    strange = set(vars(record)) ^ known
    if strange:
        raise UsageError(
            f"TransferQueue's {type(record).__name__} is another than that of 0.1.11, in {', '.join(sorted(strange))}: "
            "upgrade this library, or install 'TransferQueue>=0.1.11,<0.2'"
        )


def _indexes(values: Iterable[Any]) -> Array:
    return np.fromiter(values, np.int64)


# -- from a tree ------------------------------------------------------------------------------------------------------


def check_tree(tree: Any, *, where: str) -> Mapping[str, Any]:
    """The tree as it is, if `to_tree` made it and this version reads it."""
    if not isinstance(tree, dict) or not isinstance(tree.get("system"), str) or tree["system"] != SYSTEM:
        raise UsageError(f"{where} was not saved with archive.adapters.{SYSTEM}; say which was by buffer= or run=")
    with reading(where, "state of a TransferQueue"):
        if tree["format"] > FORMAT:
            raise UpgradeError(f"{where} was saved in format {tree['format']}, known is {FORMAT}: upgrade this library")
        expected(tree), manager_of(tree)
    return tree


def expected(tree: Mapping[str, Any]) -> dict[int, str]:
    """Global index -> partition of the samples that the controller has been told of."""
    parts = tree["partitions"].items()
    return {i: n for n, part in parts for i in [*part["global_indexes"].tolist(), *part["keyed"].tolist()]}


def partition_of(
    name: str, tree: Mapping[str, Any], keys: Mapping[int, str], tags: Mapping[int, Any], of: Classes
) -> Any:
    """A partition as it was. keys, tags: those of its samples by global index."""
    plain = {one: tree[one] for one in _PLAIN}
    sets = {one: set(tree[one].tolist()) for one in _SETS}
    mapping = {keys[index]: index for index in tree["keyed"].tolist()}
    mappings = (mapping, {index: key for key, index in mapping.items()})
    fields = {field: _field_of(one, of) for field, one in tree["field_metadata"].items()}
    known = dict(zip(_KEYS, mappings, strict=True)) | {"custom_meta": dict(tags), "field_metadata": fields}
    return of.partition(partition_id=name, **plain, **sets, **known)


def _field_of(tree: Mapping[str, Any], of: Classes) -> Any:
    edges = np.cumsum([0, *tree["dimensions"].tolist()])
    sizes = [tree["sizes"][lo:hi].tolist() for lo, hi in pairwise(edges)]
    kinds = [tuple if is_tuple else list for is_tuple in tree["tuples"].tolist()]
    shapes = [kind(shape) for kind, shape in zip(kinds, sizes, strict=True)]
    plain = {name: tree[name] for name in ("dtype", "shape", "is_nested", "is_non_tensor")}
    shaped = dict(zip(tree["shaped"].tolist(), shapes, strict=True))
    return of.field(global_indexes=set(tree["global_indexes"].tolist()), per_sample_shapes=shaped, **plain)


def manager_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The index manager's state as its controller loads it."""
    saved = tree["index_manager"]
    return {
        "partition_to_indexes": {name: set(part.tolist()) for name, part in saved["partition_to_indexes"].items()},
        "reusable_indexes": saved["reusable_indexes"].tolist(),
        "global_index_counter": saved["global_index_counter"],
        "allocated_indexes": set(saved["allocated_indexes"].tolist()),
    }


# -- the running system ------------------------------------------------------------------------------------------------


class Within(NamedTuple):
    """Functions of a controller."""

    begin: Callable[[Any, str, Any], None]  # token, state to load (None: to be saved)
    end: Callable[[Any, str], Any]  # token; the state that was saved
    grow: Callable[[Any], None]


def functions() -> Within:
    """Functions in a function, so that Ray sends their code: the controller's host needs no archive installed."""

    def taken(controller: Any) -> Any:
        import copy

        manager = controller.index_manager
        names = ("partition_to_indexes", "reusable_indexes", "global_index_counter", "allocated_indexes")
        return {
            "partitions": {name: partition.to_snapshot() for name, partition in controller.partitions.items()},
            "index_manager": {name: copy.deepcopy(getattr(manager, name)) for name in names},
            "sampler": copy.deepcopy(controller.sampler.save_checkpoint()),
            "sampler_class": type(controller.sampler).__name__,
        }

    def put(controller: Any, state: Any) -> None:
        from collections import defaultdict

        controller.sampler.load_checkpoint(state["sampler"])  # first: it is the one that may refuse
        for name, value in state["index_manager"].items():
            setattr(controller.index_manager, name, value)
        controller.index_manager.partition_to_indexes = defaultdict(set, state["index_manager"]["partition_to_indexes"])
        controller.partitions = state["partitions"]

    def listen(controller: Any) -> dict[str, Any]:
        states: dict[str, Any] = {}
        save, load = controller.save_checkpoint, controller.load_checkpoint

        def on_save(path: str) -> None:
            if path not in states:
                save(path)
            else:
                states[path] = taken(controller)

        def on_load(path: str) -> None:
            if path not in states:
                load(path)
            else:
                put(controller, states[path])

        controller.save_checkpoint, controller.load_checkpoint = on_save, on_load
        return states

    def begin(controller: Any, token: str, state: Any) -> None:
        if not hasattr(controller, "archive_states"):
            controller.archive_states = listen(controller)
        controller.archive_states[token] = state

    def end(controller: Any, token: str) -> Any:
        return controller.archive_states.pop(token, None)

    def grow(controller: Any) -> None:
        for name, partition in controller.partitions.items():
            known = {*partition.global_indexes, *controller.index_manager.get_indexes_for_partition(name)}
            partition.ensure_samples_capacity(max(known, default=-1) + 1)

    return Within(begin, end, grow)


INSTALL = "'TransferQueue>=0.1.11,<0.2'"
STAGE = "archive: being loaded"  # a partition that exists while samples are put
_CONTROLLER = ("TransferQueueController", "transfer_queue")
Sampled = list[tuple[Sample, dict[str, Any]]]


class _Batch(dict[str, list[Any]]):
    """Values by field, one a sample and each as it is, where a TensorDict would pack them."""

    def __init__(self, columns: Mapping[str, list[Any]], count: int) -> None:
        super().__init__(columns)
        self.batch_size = (count,)


@dataclass(frozen=True)
class Live:
    """A client of the running system, and its controller."""

    client: Any
    controller: Any
    ray: Any

    # -- the controller ----------------------------------------------------------------------------------------------

    def cut(self) -> Cut:
        """The controller's state between two requests."""
        return Cut(**self._asked(self.client.save_controller_checkpoint, None))

    def switch(self, state: Mapping[str, Any]) -> None:
        """Make that the controller's state, between two requests."""
        self._asked(self.client.load_controller_checkpoint, dict(state))

    def _asked(self, request: Callable[[str], None], state: Any) -> Any:
        """The controller's answer to a request that is about a state in its memory."""
        within, token = functions(), f"archive-{uuid.uuid4().hex}"
        self._within(within.begin, token, state)
        try:
            request(token)
        finally:
            found = self._within(within.end, token)
        return found

    def _within(self, act: Callable[..., Any], *given: Any) -> Any:
        return self.ray.get(self.controller.__ray_call__.remote(act, *given))

    @property
    def classes(self) -> Classes:
        """The classes that its partitions are made of."""
        module = system("transfer_queue.controller", INSTALL)
        return Classes(module.DataPartitionStatus, module.FieldMeta)

    # -- the samples ------------------------------------------------------------------------------------------------

    @property
    def is_in_memory(self) -> bool:
        """True if samples are gone with the storage units, rather than in a store of their own."""
        return hasattr(self.client.storage_manager, "storage_unit_infos")

    def read(self, samples: Sequence[Sample], cut: Cut) -> list[dict[str, Any]]:
        """The values of samples of one partition that have the same fields."""
        names, indexes = list(samples[0].fields), [sample.index for sample in samples]
        partition = cut.partitions[samples[0].partition]
        known = partition.get_field_schema(names, indexes)
        backend = partition.get_field_custom_backend_meta(indexes, names)
        meta = self._meta(
            samples,
            field_schema={name: known.get(name, {}) for name in names},
            _custom_backend_meta=[backend.get(index, {}) for index in indexes],
        )
        found = self.client.get_data(meta)
        columns = {name: _unpacked(found[name]) for name in names}
        return [{name: column[i] for name, column in columns.items()} for i in range(len(samples))]

    def put(self, rows: Sampled) -> dict[int, Any]:
        """Put samples that have the same fields where the storage manager has them; what the store says of each."""
        samples = [sample for sample, _ in rows]
        columns = {name: [values[name] for _, values in rows] for name in rows[0][1]}
        meta = self._meta([replace(sample, partition=STAGE) for sample in samples])
        manager = self.client.storage_manager
        self.client._run_coroutine(manager.put_data(_Batch(columns, len(rows)), meta))
        told = zip(samples, meta._custom_backend_meta, strict=True)
        return {sample.index: dict(said) for sample, said in told if said}

    def _meta(self, samples: Sequence[Sample], **more: Any) -> Any:
        indexes, partitions = [s.index for s in samples], [s.partition for s in samples]
        return system("transfer_queue.metadata", INSTALL).BatchMeta(indexes, partitions, **more)

    def check_room(self, indexes: Sequence[int]) -> None:
        """Refuse more samples than a storage unit holds."""
        manager = self.client.storage_manager
        config = self.ray.get(self.controller.get_config.remote()).backend.get("SimpleStorage")
        if not self.is_in_memory or config is None or config.get("total_storage_size") is None:
            return
        size = math.ceil(config.total_storage_size / int(config.num_data_storage_units))
        most = max((len(group.global_indexes) for group in manager._group_by_hash(list(indexes)).values()), default=0)
        if most > size:
            raise CapacityError(
                f"{most} of {len(indexes)} samples would go to one of {len(manager.storage_unit_infos)} storage units, "
                f"which holds {size}: start TransferQueue with a larger total_storage_size"
            )

    # -- what is there now -------------------------------------------------------------------------------------------

    def clear(self, cut: Cut, bound: int) -> None:
        """Take out all samples, and what earlier ones left in the units below that index."""
        self._within(functions().grow)  # for samples without values, which TransferQueue has no rows to clear for
        for name, partition in cut.partitions.items():
            if partition.field_metadata:
                self.client.clear_partition(name)
            else:  # of which a store of keys and values could not say what to take out
                self.ray.get(self.controller.clear_partition.remote(name))
        if self.is_in_memory and bound:
            meta = self._meta([Sample(index, STAGE, 0.0, None, ()) for index in range(bound)])
            self.client._run_coroutine(self.client.storage_manager.clear_data(meta))

    def begin(self) -> None:
        """Let samples be put that nobody is handed before `switch`."""
        self.ray.get(self.controller.create_partition.remote(STAGE))

    def abandon(self, bound: int) -> None:
        """Take out what was put since `begin`."""
        now = self.cut()
        self.clear(replace(now, partitions={STAGE: now.partitions[STAGE]}), bound)


def connect() -> Live:
    """The system that this process has joined, or a UsageError."""
    tq, ray = system("transfer_queue", INSTALL), system("ray", "ray")
    try:
        return Live(tq.get_client(), ray.get_actor(_CONTROLLER[0], namespace=_CONTROLLER[1]), ray)
    except (AssertionError, ValueError) as e:
        raise UsageError("TransferQueue is not initialized in this process: call transfer_queue.init() first") from e


def _unpacked(column: Any) -> list[Any]:
    """The values of a field, one a sample, of what TransferQueue packed them into."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return list(column) if isinstance(column, list) else list(column.tolist())
