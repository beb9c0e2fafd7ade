"""Save and restore of XTuner's replay buffers, and of the managers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import (
    UNFINISHED,
    Report,
    Saved,
    as_given,
    check_option,
    check_room,
    checkpoint,
    part_of,
    saved_share,
    several,
)
from archive.adapters.xtuner import following, hooks
from archive.adapters.xtuner import manager as managers
from archive.adapters.xtuner import storage as storages
from archive.adapters.xtuner.groups import FORMAT
from archive.adapters.xtuner.progress import RestoredStep, renamed, rollback
from archive.adapters.xtuner.restoring import (
    Found,
    Source,
    Wanted,
    put_reference,
    read_items,
    source_of,
    undisturbed,
)
from archive.base import UsageError

if TYPE_CHECKING:
    from archive import Writer
    from archive.checkpoint import Pending

__all__ = ["RestoredStep", "restore", "save"]

REFERENCES = ("put", "values")


# -- saving --------------------------------------------------------------------------------------------------------


@dataclass
class _Taken:
    """One object at the moment of the save."""

    buffer: Any
    items: list[Any]
    state: dict[str, Any]


async def save(
    objects: Any,
    writer: Writer,
    *,
    step: int,
    no_save_replay_buffer: bool = False,
    model_step: int | None = None,
    ledger: str | None = None,
    **options: Any,
) -> Pending:
    """Checkpoint an agent loop manager or a replay buffer, or several by name, under their locks.

    Returns when everything is copied. model_step: what `restore` returns for a manager (default: step).
    ledger: `follow` them from now on with the ledger of that name; where the writer keeps a journal, by default.
    options: those of `Writer.checkpoint`.
    """
    given = several(objects)
    _check_options(given, options)
    await following.begin(given, writer, ledger)
    async with AsyncExitStack() as stack:
        for target in given.values():
            await stack.enter_async_context(managers.buffer_of(target)._lock)
        taken = {
            name: await _take(target, step if model_step is None else model_step) for name, target in given.items()
        }
        progress = _progress(given, options.pop("progress", None))

        def work() -> Pending:
            if not no_save_replay_buffer:
                saved = {name: _of_groups(part, writer, name) for name, part in taken.items()}
                return checkpoint(writer, step, saved, progress=progress, **options)
            listed = list(options.pop("unconsumed", None) or [])
            saved = {name: _of_prompts(part, writer, name, listed) for name, part in taken.items()}
            back = None if progress is None else rollback(progress)
            return checkpoint(writer, step, saved, progress=back, save_replay=False, unconsumed=listed, **options)

        return await undisturbed(work)


def _check_options(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    if "save_replay" in options:
        raise UsageError("save_replay=... is called no_save_replay_buffer= here, as in XTuner")
    if sum(map(managers.is_manager, given.values())) > 1:
        raise UsageError("a checkpoint has one progress: save one manager, and others' replay buffers")
    for target in given.values():
        storages.storage_of(managers.buffer_of(target))


async def _take(target: Any, model_step: int) -> _Taken:
    buffer = managers.buffer_of(target)
    items = await storages.items_of(buffer)
    managers.check_idle(target)
    following = storages.counters(buffer)
    state: dict[str, Any] = {
        "format": FORMAT,
        "next_uid": following["uid"],
        "next_timestamp_id": following["timestamp_id"],
        "policy": type(getattr(buffer, "_policy", None)).__name__,
        "storage": type(storages.storage_of(buffer)).__name__,
    }
    if managers.is_manager(target):
        state["manager"] = {
            "model_step": int(model_step),
            "tasks": managers.samplers_state(target),
            "progress": managers.progress_of(target),
        }
    return _Taken(buffer, items, state)


def _progress(given: Mapping[str, Any], own: Any) -> Any:
    """The manager's counters, with the caller's."""
    ours: dict[str, Any] = {}
    for target in filter(managers.is_manager, given.values()):
        ours = managers.progress_of(target)
    if own is None or not ours:
        return own if own is not None else ours or None
    clash = set(own) & set(ours)
    if clash:
        raise UsageError(f"progress[{min(clash)!r}] is what the manager's own progress has; give it another name")
    return {**own, **ours}


def _of_groups(part: _Taken, writer: Writer, name: str) -> Saved:
    known = storages.seen(part.buffer, writer, name)
    return Saved(attributes=storages.write(part.items, part_of(writer, name), known), state=part.state)


def _of_prompts(part: _Taken, writer: Writer, name: str, listed: list[Any]) -> Saved:
    """The prompts alone; those that are drawn and not trained on are added to the list."""
    part_of(writer, name)  # so that the checkpoint has the buffer, if without its groups
    prompts = managers.strip(part.items, storages.resolve)
    listed += prompts.listed
    watch = hooks.watch_of(part.buffer)
    if watch is not None:
        watch.saved(part.items)
    state = {**part.state, "unconsumed": prompts.state}
    if state.get("manager", {}).get("progress"):
        state["manager"] = {**state["manager"], "progress": rollback(state["manager"]["progress"])}
    return Saved(state=state)


# -- restoring -----------------------------------------------------------------------------------------------------


async def restore(
    objects: Any,
    source: Any,
    *,
    rank: int | None = None,
    existing: str = "error",
    unfinished: str = "close",
    tasks: Mapping[str, str] | None = None,
    refs: str = "put",
    classes: Iterable[type] | Mapping[str, type] = (),
    writer: Writer | None = None,
    ledger: str = following.LEDGER,
) -> Any:
    """Fill a manager or a replay buffer, or several by name, from a share or a checkpoint, under their locks.

    Returns for a manager the model step it was saved at (a `RestoredStep`), for a buffer a Report; for a dict a dict.
    existing: "replace" groups that are there.  tasks: {old name: new name} of tasks that were renamed.  refs: "values"
    leaves what object refs referred to in their place, where there is no Ray.  unfinished: groups are whole; no effect.
    classes: that values in rollouts may be of, beside those that RolloutState and its module know; {saved name: class}
    where one was renamed, or `dict` for what such values hold, as a plain value.
    writer: that resumes from this share: what the ledger of that name keeps is brought back, too, as `follow` does it.
    """
    check_option("unfinished", unfinished, UNFINISHED)
    check_option("refs", refs, REFERENCES)
    share, given = saved_share(source, rank), several(objects)
    wanted = Wanted(put_reference if refs == "put" else lambda value: value, dict(tasks or {}))
    out: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for name, target in given.items():
            buffer = managers.buffer_of(target)
            await stack.enter_async_context(buffer._lock)
            storages.allow(buffer, classes)
            check_room(existing, len(storages.storage_of(buffer)), f"replay buffer {name!r}", "groups")
            managers.check_idle(target)
        sources = {n: source_of(share, n, for_manager=managers.is_manager(target)) for n, target in given.items()}
        found = {}
        for name, target in given.items():
            found[name] = await undisturbed(partial(read_items, managers.buffer_of(target), sources[name], wanted))
        for name, target in given.items():
            hooks.detach(managers.buffer_of(target))
            out[name] = await _restore_one(target, sources[name], found[name], wanted)
    if writer is not None:
        await following.follow(given, writer, ledger=ledger, refs=refs)
    return as_given(objects, out)


async def _restore_one(target: Any, source: Source, found: Found, wanted: Wanted) -> Any:
    buffer, checkpoint = managers.buffer_of(target), source.share.plan.checkpoint
    notes = list(found.notes)
    if managers.is_manager(target):
        saved = {wanted.tasks.get(task, task): state for task, state in source.manager["tasks"].items()}
        fresh = managers.restore_samplers(target, saved)
        notes += [f"task {name!r} was not saved: its prompts begin anew" for name in fresh]
        notes += _strange_tasks(target, found.items)
    await storages.fill(buffer, found.items, found.following)
    storages.restored(buffer, checkpoint, source.name, found.seen)
    report = Report(len(found.items), sum(len(i.item) for i in found.items), found.counts, tuple(notes))
    if not managers.is_manager(target):
        return report
    saved = source.manager
    step = RestoredStep(saved["model_step"])
    managers.restore_progress(target, renamed(saved["progress"], wanted.tasks), saved["model_step"])
    step.report = report
    return step


def _strange_tasks(manager: Any, items: list[Any]) -> list[str]:
    names = {task.task_name for task in manager.task_runners}
    strange = sorted({item.task_name for item in items} - names)
    return [
        f"groups of task {name!r} are kept, but the manager has no such task; if it was renamed: "
        f"restore(tasks={{{name!r}: "
        "NEW}})"
        for name in strange
    ]
