"""Checkpoints of the running TransferQueue at a URL, and put into it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

import archive
from archive.adapters import checkpoint, part_of, planned, saved_share, share_buffer, states_of
from archive.adapters import live as buffers
from archive.adapters.transferqueue import live, stored
from archive.adapters.transferqueue.stored import SYSTEM
from archive.base import NotFoundError, NothingThereError, UsageError
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.log import DEFAULT_RUN

if TYPE_CHECKING:
    from archive import Archive, Writer

__all__ = ["load_checkpoint", "save_checkpoint"]

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
    queue = live.Queue(live.connect(), buffer, include_storage)
    given = dict(metadata or {})
    with _writer(where, run, buffer, storage_options) as (writer, latest):
        at = _step(step, given, latest)
        part = part_of(writer, buffer)  # whose lock is held meanwhile where a journal is to have all of it at once
        saved = buffers.appended(writer, buffer, queue.append) if part.journaled else queue.append(part)
        return checkpoint(writer, at, {buffer: saved}, progress=given, **options).result()


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
    queue = live.Queue(live.connect(), buffer)
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
                stored.check_tree(state, where=where)
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
