"""The running TransferQueue: its controller at one moment and back, its samples out of the storage units and in; and
all of it as a live buffer, which a journal follows."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from archive.adapters import LiveBuffer, Report, Saved, reading, system
from archive.adapters import live as buffers
from archive.adapters.transferqueue import stored
from archive.adapters.transferqueue.stored import (
    ATTRIBUTES,
    EMPTY,
    SYSTEM,
    Classes,
    Cut,
    Sample,
    check_sampler,
    check_whole,
    is_ours,
)
from archive.base import CapacityError, UsageError, logger
from archive.checkpoint import MAIN_BUFFER
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer

AT_ONCE = 256  # samples that are asked for, or put, in one request
ATTEMPTS = 3


def functions() -> tuple[Callable[..., Any], ...]:
    """Functions of a controller: begin(token, state to load, or None for one to be saved); end(token), which gives the
    state that was saved; grow(). Within a function, so that Ray sends their code: the controller's host needs no
    archive installed."""

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

        def either(real: Any, ours: Any) -> Any:
            return lambda path: ours(path) if path in states else real(path)

        def save(path: str) -> None:
            states[path] = taken(controller)

        controller.save_checkpoint = either(controller.save_checkpoint, save)
        controller.load_checkpoint = either(controller.load_checkpoint, lambda path: put(controller, states[path]))
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

    return begin, end, grow


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
        (begin, end, _), token = functions(), f"archive-{uuid.uuid4().hex}"
        self._within(begin, token, state)
        try:
            request(token)
        finally:
            found = self._within(end, token)
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
        self._within(functions()[-1])  # for samples without values, which TransferQueue has no rows to clear for
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


# -- as a live buffer --------------------------------------------------------------------------------------------------


def follow(writer: Writer, *, include_storage: bool = True, buffer: str = MAIN_BUFFER) -> None:
    """Have the writer's journal (`arc.writer(journal_s=2.0)`) take in at each tick what was put, consumed and cleared.

    Samples, who consumed them and the controller's state become durable together: `arc.recover()` makes a checkpoint of
    the newest whole tick, which `load_checkpoint` takes. Call it after `load_checkpoint`, in one process of the system.
    A tick reads the samples that are new, or have other fields or another tag; what was put again under the same fields
    and tag is read by the next `save_checkpoint`. Arguments are those of `save_checkpoint`.
    """
    queue = Queue(connect(), buffer, include_storage, whole=False)
    buffers.follow(lambda: {buffer: queue}, writer)


@dataclass
class _Known:
    """A sample as a writer's buffer has it."""

    mark: tuple[Sample, Any]  # with its tag: tells one apart that was put anew, or has other fields
    attributes: Mapping[str, Any]
    episode_id: str = ""


_known: WeakKeyDictionary[Buffer, dict[int, _Known]] = WeakKeyDictionary()  # by global index


@dataclass(frozen=True)
class _Ready:
    """A checkpoint whose tables were found to agree, and its samples with their values."""

    tree: Mapping[str, Any]
    samples: Mapping[int, Sample]
    tags: Mapping[int, Any]
    rows: Iterable[tuple[Sample, dict[str, Any]]]
    now: Cut
    bound: int  # one more than the largest index that the system gave out, or the saved one had
    name: str


class Queue(LiveBuffer):
    """The running system under the name of its buffer. whole: all samples are read, also those that seem the same."""

    system = SYSTEM
    unit = "samples"

    def __init__(self, running: Live, name: str, include_storage: bool = True, *, whole: bool = True) -> None:
        super().__init__(name)
        if not include_storage and running.is_in_memory:
            logger.warning("include_storage=False has no effect: the samples of this storage are nowhere else")
            include_storage = True
        self._running = running
        self._include_storage = include_storage
        self._whole = whole

    @property
    def held(self) -> int:
        return len(self._running.cut().samples)

    # -- saved ---------------------------------------------------------------------------------------------------------

    def append(self, part: Buffer) -> Saved:
        """Add what is new or changed, take out of the buffer what is no sample any more; or, on an error, nothing."""
        there = _ids(part)
        try:
            for _ in range(ATTEMPTS):
                cut = self._running.cut()
                held, fresh = self._compared(part, cut)
                try:
                    self._add(part, cut, held, fresh)
                except Exception:
                    if _moved(cut, self._running.cut()):
                        continue
                    raise
                if not fresh or not _moved(cut, self._running.cut()):
                    return self._saved(part, cut, held, {sample.index for sample in fresh})
            raise UsageError(
                f"samples were cleared at each of {ATTEMPTS} attempts to save them: save when no partition is being "
                "cleared"
            )
        except BaseException:
            part.remove(_ids(part) - there)  # the state of none is known
            raise

    def _compared(self, part: Buffer, cut: Cut) -> tuple[dict[int, _Known], list[Sample]]:
        """The samples by index, and those that are to be read."""
        known, there = {} if self._whole else _known.get(part, {}), _ids(part)
        held: dict[int, _Known] = {}
        fresh: list[Sample] = []
        for sample, tags, attributes in _attributes(cut):
            before, mark = known.get(sample.index), (sample, tags)
            if before is not None and before.episode_id in there and _same(before.mark, mark):
                tag = {"tag": before.attributes["tag"]} if tags else {}
                held[sample.index] = _Known(mark, attributes | tag, before.episode_id)
            else:
                attributes |= {"tag": stored.check_tag(tags[0], where=sample.name)} if tags else {}
                held[sample.index] = _Known(mark, attributes)
                fresh.append(sample if self._include_storage else replace(sample, fields=()))
        return held, fresh

    def _add(self, part: Buffer, cut: Cut, held: Mapping[int, _Known], fresh: list[Sample]) -> None:
        """Read these samples, and add those that the buffer does not have."""
        there = _ids(part)
        for sample, values in self._values(cut, fresh):
            one = stored.encode(sample.index, values, where=sample.name)
            held[sample.index].episode_id = one.episode_id
            if one.episode_id not in there:
                part.add_episode(
                    one.fields, episode_id=one.episode_id, metadata=one.metadata, schema=one.schema, replace=True
                )

    def _values(self, cut: Cut, found: list[Sample]) -> Iterator[tuple[Sample, dict[str, Any]]]:
        """The samples with the values of their fields, read many at once."""
        found.sort(key=lambda sample: (sample.partition, sample.fields))
        for (_, names), alike in itertools.groupby(found, key=lambda sample: (sample.partition, sample.fields)):
            while some := list(itertools.islice(alike, AT_ONCE)):
                yield from zip(some, self._running.read(some, cut) if names else [{} for _ in some], strict=True)

    def _saved(self, part: Buffer, cut: Cut, held: dict[int, _Known], fresh: Container[int]) -> Saved:
        """Take out what is no sample any more; the attributes that have changed, and the state."""
        state = stored.to_tree(cut, storage_saved=self._include_storage)
        there, ids = _ids(part), {one.episode_id for one in held.values()}
        if part.journaled and not ids:  # a journal keeps the state at an episode
            ids.add(EMPTY)
            if EMPTY not in there:
                part.add_episode({SYSTEM: {"empty": np.zeros(1)}}, episode_id=EMPTY, replace=True)
        part.remove([one for one in there - ids if is_ours(one)])
        known = _known.get(part, {})
        part.undone(partial(_known.__setitem__, part), known)
        _known[part] = held
        attributes: dict[str, dict[str, Any]] = {name: {} for name in ATTRIBUTES}
        for index, one in held.items():
            if index in fresh or one.attributes["consumed"] != known[index].attributes["consumed"]:
                for name, value in one.attributes.items():
                    attributes[name][one.episode_id] = value
        return Saved(attributes=attributes, state=state)

    # -- restored ------------------------------------------------------------------------------------------------------

    def prepared(self, share: Any, part: Any, states: Mapping[int, Any]) -> _Ready:
        name, now = f"buffer {self.name!r} of checkpoint {part.checkpoint.name!r}", self._running.cut()
        if len(states) > 1:
            raise UsageError(f"{name}: {len(states)} ranks saved a TransferQueue in it, where one is expected")
        tree = stored.check_tree(next(iter(states.values()), None), where=name)
        index = part.attributes.get("index", {})
        found = {sample.index: sample for sample in _samples(part)}
        check_whole(tree, found, name)
        check_sampler(tree, now)
        if tree["storage_saved"]:
            self._running.check_room(list(found))
        tags = {index[one]: tag for one, tag in part.attributes.get("tag", {}).items()}
        rows: Any = _rows(part, found, index)
        bound = max(now.bound, int(tree["index_manager"]["global_index_counter"]))
        return _Ready(tree, found, tags, list(rows) if now.partitions else rows, now, bound, part.checkpoint.name)

    def put(self, ready: _Ready) -> Report:
        running = self._running
        running.clear(ready.now, ready.bound)
        try:
            running.begin()
            told = _put(running, ready.rows)
            running.switch(_state(ready, told, running))
        except BaseException:
            running.abandon(ready.bound)
            raise
        return Report(len(ready.samples), len(ready.samples))


def _moved(before: Cut, after: Cut) -> bool:
    """True if samples were cleared in between, so that what was read may be another's of the same index."""
    now = {sample.index: sample for sample in after.samples}
    return any(_other(sample, now.get(sample.index)) for sample in before.samples)


def _other(before: Sample, now: Sample | None) -> bool:
    return now is None or replace(now, fields=()) != replace(before, fields=()) or not {*before.fields} <= {*now.fields}


def _ids(part: Buffer) -> set[str]:
    return set(part.live["episode_id"].to_pylist())


def _same(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except (RuntimeError, ValueError):  # tags may be arrays
        return False


def _attributes(cut: Cut) -> Iterator[tuple[Sample, list[Any], dict[str, Any]]]:
    """The samples with their tags, if they have one, and their other attributes."""
    status = {
        name: {task: one.numpy().astype(bool) for task, one in sorted(partition.consumption_status.items())}
        for name, partition in cut.partitions.items()
    }
    for sample in cut.samples:
        index, meta = sample.index, cut.partitions[sample.partition].custom_meta
        consumed = [task for task, by in status[sample.partition].items() if index < len(by) and by[index]]
        key = {} if sample.key is None else {"key": sample.key}
        about = {"index": index, "partition": sample.partition, "consumed": consumed, **key}
        yield sample, [meta[index]] if index in meta else [], about


def _rows(part: Any, found: Mapping[int, Sample], index: Mapping[str, int]) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """The samples with their values, in order."""
    for episode, fields in part.stream():
        if episode.id != EMPTY:
            sample = found[index[episode.id]]
            yield sample, stored.decode(fields, episode.metadata, where=sample.name)


def _samples(part: Any) -> Iterator[Sample]:
    """The samples of a buffer, without the names of their fields."""
    found: Mapping[str, Mapping[str, Any]] = part.attributes
    keys, partitions = found.get("key", {}), found.get("partition", {})
    for episode_id, index in found.get("index", {}).items():
        yield Sample(index, partitions[episode_id], 0.0, keys.get(episode_id), ())


def _put(running: Live, rows: Iterable[tuple[Sample, dict[str, Any]]]) -> dict[int, Any]:
    """Put all samples; what the store says of each."""
    told: dict[int, Any] = {}
    rows = iter(rows)
    while some := list(itertools.islice(rows, AT_ONCE)):
        alike: dict[tuple[str, ...], Sampled] = {}
        for sample, values in some:
            alike.setdefault(tuple(values), []).append((sample, values))
        for names, group in alike.items():
            told |= running.put(group) if names else {}
    return told


def _state(ready: _Ready, told: Mapping[int, Any], running: Live) -> dict[str, Any]:
    """The state that the controller loads."""
    keys = {index: sample.key for index, sample in ready.samples.items() if sample.key is not None}
    partitions = {}
    for name, tree in ready.tree["partitions"].items():
        tags, said = (
            {index: value for index, value in of.items() if ready.samples[index].partition == name}
            for of in (ready.tags, told)
        )
        with reading(f"partition {name!r} of checkpoint {ready.name!r}", "state of a TransferQueue"):
            partitions[name] = stored.partition_of(name, tree, keys, tags, running.classes)
        partitions[name].field_custom_backend_meta.update(said)
    manager = stored.manager_of(ready.tree)
    return {"partitions": partitions, "index_manager": manager, "sampler": ready.tree["sampler"]}
