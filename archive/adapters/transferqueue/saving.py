"""TransferQueue as one checkpoint: its samples into a writer's buffer, its controller into the state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import archive
from archive.adapters import Saved, checkpoint, part_of, planned
from archive.adapters.transferqueue import controller, live, samples
from archive.adapters.transferqueue.controller import Cut, Sample
from archive.adapters.transferqueue.live import Live
from archive.base import UsageError, logger
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.log import DEFAULT_RUN
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Archive, Writer

__all__ = ["save_checkpoint"]

AT_ONCE = 256  # samples that are asked for in one request
ATTEMPTS = 3
STEPS = ("step", "global_steps", "global_step")  # what trainers call the step in the metadata that they give


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
    system = live.connect()
    if not include_storage and system.is_in_memory:
        logger.warning("include_storage=False has no effect: the samples of this storage are nowhere else")
        include_storage = True
    given = dict(metadata or {})
    with _writer(where, run, buffer, storage_options) as (writer, latest):
        at = _step(step, given, latest)
        saved = _collect(system, part_of(writer, buffer), include_storage=include_storage)
        return checkpoint(writer, at, {buffer: saved}, progress=given, **options).result()


# -- where to --------------------------------------------------------------------------------------------------------


def _writer(
    where: Any, run: str | None, buffer: str, storage_options: Mapping[str, Any] | None
) -> AbstractContextManager[tuple[Writer, Checkpoint | None]]:
    """A writer that has what is there already, and the newest checkpoint; the caller's own is not closed."""
    if hasattr(where, "add_episode") and hasattr(where, "checkpoint"):
        if run not in (None, where.run):
            raise UsageError(f"run={run!r}: the writer's is {where.run!r}")
        return nullcontext((where, None))
    arc = where if hasattr(where, "checkpoints") else archive.open(where, create=True, storage_options=storage_options)
    return _Opened(arc.refresh(), run or DEFAULT_RUN, buffer)


class _Opened(AbstractContextManager["tuple[Writer, Checkpoint | None]"]):
    """A writer of an archive, that goes on from the run's newest checkpoint."""

    def __init__(self, arc: Archive, run: str, buffer: str) -> None:
        self._latest = arc.checkpoints.of(run).newest(replay=True)
        if self._latest is not None:
            _check_ours(self._latest, buffer)
        share = None if self._latest is None else planned(self._latest, world_size=1).share(0)
        self._writer = arc.writer(rank=0, world_size=1, run=run, resume=share)

    def __enter__(self) -> tuple[Writer, Checkpoint | None]:
        return self._writer.__enter__(), self._latest

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)


def _check_ours(latest: Checkpoint, buffer: str) -> None:
    """Refuse to go on as a run that something else writes: its buffers' columns and states would be lost."""
    where = f"buffer {buffer!r} of checkpoint {latest.name!r} of run {latest.run!r}"
    for rank in latest.ranks:
        controller.check_tree(latest.state(rank, buffer), where=where)


def _step(step: int | None, metadata: Mapping[str, Any], latest: Checkpoint | None) -> int:
    given = [metadata.get(name) for name in STEPS] if step is None else [step]
    numbers = (int(one) for one in given if isinstance(one, (int, np.integer)) and type(one) is not bool)
    return next(numbers, 0 if latest is None else latest.step + 1)


# -- what ------------------------------------------------------------------------------------------------------------


def _collect(system: Live, part: Buffer, *, include_storage: bool) -> Saved:
    """Add what is new or changed, take out of the buffer what is no sample any more."""
    for _ in range(ATTEMPTS):
        before = system.cut()
        try:
            held = _add(system, part, before, include_storage=include_storage)
        except Exception:
            if _moved(before, system.cut()):
                continue
            raise
        if not _moved(before, system.cut()):
            live_ids = set(part.live["episode_id"].to_pylist())
            part.remove(sorted(i for i in live_ids - set(held) if samples.is_ours(i)))
            state = controller.to_tree(before, storage_saved=include_storage)
            return Saved(attributes=_attributes(before, held), state=state)
    raise UsageError(
        f"samples were cleared at each of {ATTEMPTS} attempts to save them: save when no partition is being cleared"
    )


def _moved(before: Cut, after: Cut) -> bool:
    """Whether samples were cleared in between, so that what was read may be another's of the same index."""
    now = {sample.index: sample for sample in after.samples}
    return any(_other(sample, now.get(sample.index)) for sample in before.samples)


def _other(before: Sample, now: Sample | None) -> bool:
    return now is None or replace(now, fields=()) != replace(before, fields=()) or not {*before.fields} <= {*now.fields}


def _add(system: Live, part: Buffer, cut: Cut, *, include_storage: bool) -> dict[str, Sample]:
    """Episode id -> sample of all samples; those that the buffer does not have are added to it."""
    live_ids = set(part.live["episode_id"].to_pylist())
    held: dict[str, Sample] = {}
    for sample, values in _values(system, cut, include_storage=include_storage):
        one = samples.encode(sample.index, values, where=sample.name)
        held[one.episode_id] = sample
        if one.episode_id not in live_ids:
            part.add_episode(
                one.fields, episode_id=one.episode_id, metadata=one.metadata, schema=one.schema, replace=True
            )
    return held


def _values(system: Live, cut: Cut, *, include_storage: bool) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """Each sample with the values of its fields, read many at once."""
    found = [sample if include_storage else replace(sample, fields=()) for sample in cut.samples]
    found.sort(key=lambda sample: (sample.partition, sample.fields))
    for (_, names), alike in itertools.groupby(found, key=lambda sample: (sample.partition, sample.fields)):
        while some := list(itertools.islice(alike, AT_ONCE)):
            yield from zip(some, system.read(some, cut) if names else [{} for _ in some], strict=True)


def _attributes(cut: Cut, held: Mapping[str, Sample]) -> dict[str, dict[str, Any]]:
    """What may change of a sample that was put: who it is, its tag, which tasks have consumed it."""
    out: dict[str, dict[str, Any]] = {"index": {}, "partition": {}, "key": {}, "tag": {}, "consumed": {}}
    for episode_id, sample in held.items():
        partition = cut.partitions[sample.partition]
        out["index"][episode_id] = sample.index
        out["partition"][episode_id] = sample.partition
        out["consumed"][episode_id] = _consumed(partition, sample.index)
        if sample.key is not None:
            out["key"][episode_id] = sample.key
        if sample.index in partition.custom_meta:
            tag = partition.custom_meta[sample.index]
            out["tag"][episode_id] = samples.check_tag(tag, where=sample.name)
    return out


def _consumed(partition: Any, index: int) -> list[str]:
    tasks = partition.consumption_status.items()
    return sorted(task for task, status in tasks if index < len(status) and bool(status[index]))
