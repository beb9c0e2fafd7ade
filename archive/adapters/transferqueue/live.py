"""The running TransferQueue: its controller at one moment and back, its samples out of the storage units and in."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from archive.adapters import system
from archive.adapters.transferqueue.controller import Classes, Cut, Sample
from archive.base import CapacityError, UsageError


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
        """What the controller has for a request that is about a state in its memory."""
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
        """Those that its partitions are made of."""
        module = system("transfer_queue.controller", INSTALL)
        return Classes(module.DataPartitionStatus, module.FieldMeta)

    # -- the samples -------------------------------------------------------------------------------------------------

    @property
    def is_in_memory(self) -> bool:
        """Whether samples are gone with the storage units, rather than in a store of their own."""
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
