"""Checkpoints of the running TransferQueue, its journal between them, and a checkpoint put into it again."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

import archive
from archive.adapters import (
    LiveBuffer,
    Report,
    Saved,
    checkpoint,
    planned,
    reading,
    saved_share,
    share_buffer,
    states_of,
)
from archive.adapters import live as buffers
from archive.adapters.transferqueue import live, samples
from archive.adapters.transferqueue.live import SYSTEM, Cut, Live, Sample, Sampled
from archive.base import CorruptStateError, NotFoundError, NothingThereError, UsageError, logger
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.log import DEFAULT_RUN
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Archive, Writer

__all__ = ["follow", "load_checkpoint", "save_checkpoint"]

AT_ONCE = 256  # samples that are asked for, or put, in one request
ATTEMPTS = 3
STEPS = ("step", "global_steps", "global_step")  # what trainers call the step in the metadata that they give
MAX_NAMED = 10


def save_checkpoint(
    where: Any,
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    run: str | None = None,
    buffer: str = MAIN_BUFFER,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Checkpoint:
    """Save the running TransferQueue as one checkpoint, and wait until it is there: it is there whole, or not at all.

    where: a URL or path (of an archive, made if there is none), an Archive, or a Writer. Samples that the newest
    checkpoint of the run (or the writer) has are not uploaded again.
    include_storage: False keeps the controller alone; for SimpleStorage, whose samples are in memory only, it is passed
    over, as in TransferQueue.  metadata: JSON, the checkpoint's `progress`.  step: by default what metadata has as
    "step" or, as of verl, "global_steps"; else one more than the last.  run: default "main".  buffer: the buffer of
    that name.  options: those of `Writer.checkpoint`.
    Samples may be put and consumed meanwhile: what is saved is consumed or not as of one moment. Those that are cleared
    meanwhile make it begin again; a UsageError when this happens every time.
    """
    queue = _Queue(live.connect(), buffer, include_storage)
    given = dict(metadata or {})
    with _writer(where, run, buffer, storage_options) as (writer, latest):
        at = _step(step, given, latest)
        saved = {buffer: buffers.appended(writer, buffer, queue.append)}
        return checkpoint(writer, at, saved, progress=given, **options).result()


def follow(writer: Writer, *, include_storage: bool = True, buffer: str = MAIN_BUFFER) -> None:
    """Have the writer's journal (`arc.writer(journal_s=2.0)`) take in at each tick what was put, consumed and cleared.

    Samples, who consumed them and the controller's state become durable together: `arc.recover()` makes a checkpoint of
    the newest whole tick, which `load_checkpoint` takes. Call it after `load_checkpoint`, in one process of the system.
    A tick reads the samples that are new, or have other fields or another tag; what was put again under the same fields
    and tag is read by the next `save_checkpoint`. Arguments are those of `save_checkpoint`.
    """
    queue = _Queue(live.connect(), buffer, include_storage, whole=False)
    buffers.follow(lambda: {buffer: queue}, writer)


def load_checkpoint(
    where: Any,
    *,
    step: int | None = None,
    run: str | None = None,
    buffer: str = MAIN_BUFFER,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Make the running TransferQueue what it was at a checkpoint, on any number of storage units.

    where: a URL, path or Archive, for the newest checkpoint of the run (default "main"), or the newest of that step; a
    Checkpoint; a Share of a plan for one rank. Returns the checkpoint; its `progress` is what was saved as metadata.
    What the system holds is replaced, keys, tags, consumption and sampler included. Samples go to the units that its
    storage manager puts them into, and are handed out to nobody before all are there: the controller is switched over
    last, at once. Nothing is touched before the checkpoint was found to be whole and to fit; if the system holds
    samples, all of it is read first, which takes as much memory.
    Not atomic in TransferQueue: units have no transaction, so samples that the system held are gone if putting the new
    ones fails; it is then left empty. Nobody else may put samples or clear them meanwhile.
    """
    queue = _Queue(live.connect(), buffer)
    share = _share(where, step, run, buffer, storage_options)
    buffers.restore({buffer: queue}, share, None, "replace")
    found: Checkpoint = share.plan.checkpoint
    return found


# -- where to, and where from ------------------------------------------------------------------------------------------


def _writer(
    where: Any, run: str | None, buffer: str, storage_options: Mapping[str, Any] | None
) -> AbstractContextManager[tuple[Writer, Checkpoint | None]]:
    """A writer that has what is there already, and the newest checkpoint; the caller's own is not closed."""
    if hasattr(where, "add_episode") and hasattr(where, "checkpoint"):
        if run not in (None, where.run):
            raise UsageError(f"run={run!r}: the writer's is {where.run!r}")
        return nullcontext((where, None))
    arc = where if hasattr(where, "checkpoints") else archive.open(where, create=True, storage_options=storage_options)
    return _opened(arc.refresh(), run or DEFAULT_RUN, buffer)


@contextmanager
def _opened(arc: Archive, run: str, buffer: str) -> Iterator[tuple[Writer, Checkpoint | None]]:
    """A writer of an archive, that goes on from the run's newest checkpoint."""
    latest = arc.checkpoints.of(run).newest(replay=True)
    share = None
    if latest is not None:
        where = f"buffer {buffer!r} of checkpoint {latest.name!r} of run {latest.run!r}"
        share = planned(latest, world_size=1).share(0)
        for rank in latest.ranks:  # not as a run that something else writes: its columns and states would be lost
            state = latest.state(rank, buffer)
            if state is not None or latest.record.recovered is None:
                live.check_tree(state, where=where)
    with arc.writer(rank=0, world_size=1, run=run, resume=share) as writer:
        yield writer, latest


def _step(step: int | None, metadata: Mapping[str, Any], latest: Checkpoint | None) -> int:
    given = [metadata.get(name) for name in STEPS] if step is None else [step]
    numbers = (int(one) for one in given if isinstance(one, (int, np.integer)) and type(one) is not bool)
    return next(numbers, 0 if latest is None else latest.step + 1)


def _share(
    where: Any, step: int | None, run: str | None, buffer: str, storage_options: Mapping[str, Any] | None
) -> Any:
    if step is not None and (isinstance(where, Checkpoint) or hasattr(where, "plan")):
        raise UsageError(f"step={step}: a checkpoint, or a share of one, is of its own step; give the archive instead")
    if isinstance(where, Checkpoint):
        return _as_saved(where)
    if hasattr(where, "plan"):
        return saved_share(where)
    if hasattr(where, "add_episode"):
        raise UsageError(
            "a Writer is what is saved to; load from its archive, or from the checkpoint that was returned"
        )
    arc = where.refresh() if hasattr(where, "checkpoints") else archive.open(where, storage_options=storage_options)
    runs = arc.checkpoints.of(run or DEFAULT_RUN)
    if step is None:
        found = _newest(arc, run or DEFAULT_RUN, buffer)
    else:
        rows = runs.table.select(["step", "whole", "replay_saved"]).to_pylist()
        places = [i for i, row in enumerate(rows) if row["step"] == step and row["whole"] and row["replay_saved"]]
        of_step = (runs[i] for i in reversed(places))
        found = next((_as_saved(ck) for ck in of_step if ck.record.recovered is None), None)
    if found is None:
        saved = ", ".join(map(str, dict.fromkeys(runs.table["step"].to_pylist()[-MAX_NAMED:]))) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise NothingThereError(
            f"{arc.url} has no whole checkpoint{wanted} of run {run or DEFAULT_RUN!r}; the newest steps are: {saved}"
        )
    return found


def _newest(arc: Archive, run: str, buffer: str) -> Any:
    """The newest that has a state. One that was recovered from a journal without it may have half of what a later save
    added and took out."""
    found = arc.checkpoints.of(run).newest(replay=True)
    while found is not None and (recovered := found.record.recovered) is not None:
        share = _as_saved(found)
        try:
            states_of(share_buffer(share, buffer), SYSTEM)
        except (NotFoundError, UsageError):
            found = None if recovered.base is None else arc.checkpoints.at_commit(recovered.base)
        else:
            return share
    return None if found is None else _as_saved(found)


def _as_saved(found: Checkpoint) -> Any:
    return planned(found, world_size=1, tails="ignore").share(0).as_saved()


# -- what --------------------------------------------------------------------------------------------------------------


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
    name: str

    @property
    def bound(self) -> int:
        """One more than the largest index that the system gave out, or the saved one had."""
        return max(self.now.bound, int(self.tree["index_manager"]["global_index_counter"]))


class _Queue(LiveBuffer):
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
        """All samples by index, and those that are to be read."""
        known, there = {} if self._whole else _known.get(part, {}), _ids(part)
        held: dict[int, _Known] = {}
        fresh: list[Sample] = []
        for sample, tags, attributes in _attributes(cut):
            before, mark = known.get(sample.index), (sample, tags)
            if before is not None and before.episode_id in there and _same(before.mark, mark):
                tag = {"tag": before.attributes["tag"]} if tags else {}
                held[sample.index] = _Known(mark, attributes | tag, before.episode_id)
            else:
                attributes |= {"tag": samples.check_tag(tags[0], where=sample.name)} if tags else {}
                held[sample.index] = _Known(mark, attributes)
                fresh.append(sample if self._include_storage else replace(sample, fields=()))
        return held, fresh

    def _add(self, part: Buffer, cut: Cut, held: Mapping[int, _Known], fresh: list[Sample]) -> None:
        """Read these samples, and add those that the buffer does not have."""
        there = _ids(part)
        for sample, values in self._values(cut, fresh):
            one = samples.encode(sample.index, values, where=sample.name)
            held[sample.index].episode_id = one.episode_id
            if one.episode_id not in there:
                part.add_episode(
                    one.fields, episode_id=one.episode_id, metadata=one.metadata, schema=one.schema, replace=True
                )

    def _values(self, cut: Cut, found: list[Sample]) -> Iterator[tuple[Sample, dict[str, Any]]]:
        """Each sample with the values of its fields, read many at once."""
        found.sort(key=lambda sample: (sample.partition, sample.fields))
        for (_, names), alike in itertools.groupby(found, key=lambda sample: (sample.partition, sample.fields)):
            while some := list(itertools.islice(alike, AT_ONCE)):
                yield from zip(some, self._running.read(some, cut) if names else [{} for _ in some], strict=True)

    def _saved(self, part: Buffer, cut: Cut, held: dict[int, _Known], fresh: Container[int]) -> Saved:
        there, ids = _ids(part), {one.episode_id for one in held.values()}
        if part.journaled and not ids:  # a journal keeps the state at an episode
            ids.add(samples.EMPTY)
            if samples.EMPTY not in there:
                part.add_episode({samples.OWN: {"empty": np.zeros(1)}}, episode_id=samples.EMPTY, replace=True)
        part.remove([one for one in there - ids if samples.is_ours(one)])
        known = _known.get(part, {})
        attributes: dict[str, dict[str, Any]] = {name: {} for name in samples.ATTRIBUTES}
        for index, one in held.items():
            if (
                index in fresh
                or index not in known
                or one.attributes["consumed"] != known[index].attributes["consumed"]
            ):
                for name, value in one.attributes.items():
                    attributes[name][one.episode_id] = value
        _known[part] = held
        return Saved(attributes=attributes, state=live.to_tree(cut, storage_saved=self._include_storage))

    # -- restored ------------------------------------------------------------------------------------------------------

    def prepared(self, share: Any, part: Any, states: Mapping[int, Any]) -> _Ready:
        name, now = f"buffer {self.name!r} of checkpoint {part.checkpoint.name!r}", self._running.cut()
        if len(states) > 1:
            raise UsageError(f"{name}: {len(states)} ranks saved a TransferQueue in it, where one is expected")
        tree = live.check_tree(next(iter(states.values()), None), where=name)
        index = part.attributes.get("index", {})
        found = {sample.index: sample for sample in _samples(part)}
        _check_whole(tree, found, name)
        _check_sampler(tree, now)
        if tree["storage_saved"]:
            self._running.check_room(list(found))
        tags = {index[one]: tag for one, tag in part.attributes.get("tag", {}).items()}
        rows: Any = _rows(part, found, index)
        return _Ready(tree, found, tags, list(rows) if now.partitions else rows, now, part.checkpoint.name)

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
    """Each sample with its tag, if it has one, and what else may change of it: who it is, which tasks consumed it."""
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
    """Each sample with its values, in order."""
    for episode, fields in part.stream():
        if episode.id != samples.EMPTY:
            sample = found[index[episode.id]]
            yield sample, samples.decode(fields, episode.metadata, where=sample.name)


def _samples(part: Any) -> Iterator[Sample]:
    """The samples of a buffer, without the names of their fields."""
    found: Mapping[str, Mapping[str, Any]] = part.attributes
    keys, partitions = found.get("key", {}), found.get("partition", {})
    for episode_id, index in found.get("index", {}).items():
        yield Sample(index, partitions[episode_id], 0.0, keys.get(episode_id), ())


def _check_whole(tree: Mapping[str, Any], found: Mapping[int, Sample], where: str) -> None:
    """Refuse a checkpoint whose controller and samples do not speak of the same."""
    expected = live.expected(tree)
    if lacking := sorted(expected.keys() - found.keys()):
        raise CorruptStateError(f"{where}: samples {lacking[:5]} of {len(expected)} are not in it: load another one")
    if strange := [i for i, partition in expected.items() if found[i].partition != partition]:
        raise CorruptStateError(f"{where}: samples {strange[:5]} are in two partitions: load another one")


def _check_sampler(tree: Mapping[str, Any], now: Cut) -> None:
    """Refuse the state of a sampler that keeps other things than the running one."""
    if tree["sampler"].keys() != now.sampler.keys():
        raise UsageError(
            f"the checkpoint has the state of a {tree['sampler_class']} ({', '.join(tree['sampler'])}), the running "
            f"sampler is a {now.sampler_class} ({', '.join(now.sampler)}): start TransferQueue with the one that was "
            "saved"
        )


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
    tags, said = _by_partition(ready, ready.tags), _by_partition(ready, told)
    partitions = {}
    for name, tree in ready.tree["partitions"].items():
        with reading(f"partition {name!r} of checkpoint {ready.name!r}", "state of a TransferQueue"):
            partitions[name] = live.partition_of(name, tree, keys, tags.get(name, {}), running.classes)
        partitions[name].field_custom_backend_meta.update(said.get(name, {}))
    manager = live.manager_of(ready.tree)
    return {"partitions": partitions, "index_manager": manager, "sampler": ready.tree["sampler"]}


def _by_partition(ready: _Ready, values: Mapping[int, Any]) -> dict[str, dict[int, Any]]:
    """Partition -> global index -> value."""
    out: dict[str, dict[int, Any]] = {}
    for index, value in values.items():
        out.setdefault(ready.samples[index].partition, {})[index] = value
    return out
