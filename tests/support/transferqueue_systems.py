"""TransferQueue on Ray, really: systems of any number of storage units, samples in them, and what they hold, as
values that compare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from archive.adapters.transferqueue import live


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and bytes; containers with their types."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(raw.tolist()))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(one) for one in value])
    return plain(vars(value)) if type(value).__name__ == "FieldMeta" else value


TASK = "train"
CAPACITY = 240


def tq() -> Any:
    return pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")


@contextlib.contextmanager
def system(units: int, sampler: str = "RankAwareSampler") -> Iterator[Any]:
    """A system that has just begun, of so many storage units."""
    sizes = {"total_storage_size": CAPACITY, "num_data_storage_units": units}
    from omegaconf import OmegaConf

    backend = {"storage_backend": "SimpleStorage", "SimpleStorage": sizes}
    tq().init(OmegaConf.create({"controller": {"polling_mode": True, "sampler": sampler}, "backend": backend}))
    try:
        yield tq()
    finally:
        tq().close()


@contextlib.contextmanager
def with_units(count: int) -> Iterator[None]:
    """The same system, as one that has only its first units."""
    from transfer_queue import interface
    from transfer_queue.client import TransferQueueClient

    conf = controller("get_config")
    infos = dict(list(conf.backend.SimpleStorage.zmq_info.items())[:count])
    client = TransferQueueClient(f"of-{count}", controller_info=conf.controller.zmq_info)
    client.initialize_storage_manager(manager_type="SimpleStorage", config={"zmq_info": infos})
    whole, interface._TQ_CLIENT = interface._TQ_CLIENT, client
    try:
        yield
    finally:
        empty()
        interface._TQ_CLIENT = whole
        client.close()


def controller(method: str, *given: Any) -> Any:
    """What a method of the controller returns."""
    import ray

    actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    return ray.get(getattr(actor, method).remote(*given))


def empty() -> None:
    """As one that has just begun, but for the numbers of its samples."""
    running = live.connect()
    now = running.cut()
    running.clear(now, now.bound)


def put(partition: str, keys: Sequence[str], first: int = 0) -> None:
    """Samples of every kind of field, which differ from each other."""
    numbers = range(first, first + len(keys))
    lengths = [1 + n % 3 for n in numbers]
    fields = {
        "tokens": torch.nested.as_nested_tensor([torch.arange(k) + n for n, k in zip(numbers, lengths, strict=True)],
                                                layout=torch.jagged),
        "image": torch.stack([torch.full((2, 3), n, dtype=torch.uint8) for n in numbers]),
        "logprobs": torch.stack([torch.full((4,), n / 3, dtype=torch.bfloat16) for n in numbers]),
        "reward": torch.tensor([n / 2 for n in numbers], dtype=torch.float64),
        "text": NonTensorStack(*(f"prompt {n}: \u00e9" for n in numbers)),
        "extra": NonTensorStack(*({"n": n, "nested": [None, {"mask": torch.ones(k, dtype=torch.bool)}]}
                                  for n, k in zip(numbers, lengths, strict=True))),
    }  # fmt: skip
    tags = [{"step": n, "score": n / 7} for n in numbers]
    tq().kv_batch_put(keys=list(keys), partition_id=partition, fields=TensorDict(fields, len(keys)), tags=tags)


def drawn(partition: str, count: int, batch: int, rank: int = 0, fields: Sequence[str] = ("tokens",)) -> list[int]:
    """Global indexes of the batch that a consumer of that rank is handed; none while there are too few."""
    config = {"dp_rank": rank, "batch_index": batch, "task_name": TASK, "partition_id": partition}
    meta = tq().get_client().get_meta(
        data_fields=list(fields), batch_size=count, partition_id=partition, mode="fetch", task_name=TASK,
        sampling_config=config,
    )  # fmt: skip
    return list(meta.global_indexes)


def contents() -> dict[str, dict[int, Any]]:
    """Partition -> global index -> what is known of the sample, and its values."""
    running = live.connect()
    cut = running.cut()
    out: dict[str, dict[int, Any]] = {name: {} for name in cut.partitions}
    for sample in cut.samples:
        values = running.read([sample], cut)[0] if sample.fields else {}
        tag = cut.partitions[sample.partition].custom_meta.get(sample.index)
        out[sample.partition][sample.index] = (sample.key, tag, plain(values))
    return out


def known() -> Any:
    """All that the controller knows."""
    cut = live.connect().cut()
    partitions = {name: plain(vars(partition)) for name, partition in cut.partitions.items()}
    return plain([partitions, dict(cut.index_manager), dict(cut.sampler)])


def spread() -> list[int]:
    """How many samples each storage unit of the client holds."""
    manager = tq().get_client().storage_manager
    probe = manager._probe_storage_unit
    run = tq().get_client()._run_coroutine
    return [run(probe(target_storage_unit=unit))["active_keys"] for unit in manager.storage_unit_infos]
