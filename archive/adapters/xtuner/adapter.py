"""Save and restore of XTuner's replay buffers, and of the managers that have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import (
    UNFINISHED,
    Item,
    Report,
    Saved,
    as_given,
    check_option,
    check_room,
    checkpoint,
    part_of,
    saved_share,
    several,
    share_buffer,
)
from archive.adapters.xtuner import follow as following
from archive.adapters.xtuner import groups, live
from archive.adapters.xtuner.codec import RestoredStep
from archive.adapters.xtuner.groups import FORMAT, KEPT, RETRY, rollback
from archive.adapters.xtuner.live import Maker, undisturbed
from archive.adapters.xtuner.watch import detach
from archive.base import CorruptStateError, NotFoundError, UpgradeError, UsageError

if TYPE_CHECKING:
    from archive import Writer
    from archive.checkpoint import Pending

__all__ = ["restore", "save"]

REFERENCES = ("put", "values")
_OF_ITEM = ("uid", "timestamp_id", "task_name", "status", "staleness")


# -- saving ------------------------------------------------------------------------------------------------------------


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
    if "save_replay" in options:
        raise UsageError("save_replay=... is called no_save_replay_buffer= here, as in XTuner")
    if sum(map(live.is_manager, given.values())) > 1:
        raise UsageError("a checkpoint has one progress: save one manager, and others' replay buffers")
    for target in given.values():
        live.storage_of(live.buffer_of(target))
    await following.begin(given, writer, ledger)
    async with AsyncExitStack() as stack:
        for target in given.values():
            await stack.enter_async_context(live.buffer_of(target)._lock)
        taken = {
            name: await _take(target, step if model_step is None else model_step) for name, target in given.items()
        }
        progress = _progress(given, options.pop("progress", None))

        def work() -> Pending:
            if not no_save_replay_buffer:
                saved = {name: _of_groups(given[name], *taken[name], writer, name) for name in given}
                return checkpoint(writer, step, saved, progress=progress, **options)
            listed = list(options.pop("unconsumed", None) or [])
            saved = {name: _of_prompts(given[name], *taken[name], writer, name, listed) for name in given}
            back = None if progress is None else rollback(progress)
            return checkpoint(writer, step, saved, progress=back, save_replay=False, unconsumed=listed, **options)

        return await undisturbed(work)


async def _take(target: Any, model_step: int) -> tuple[list[Any], dict[str, Any]]:
    """The items and the state of one object at the moment of the save."""
    buffer = live.buffer_of(target)
    items = await live.items_of(buffer)
    live.check_idle(target)
    state: dict[str, Any] = {
        "format": FORMAT,
        **{f"next_{name}": value for name, value in live.counters(buffer).items()},
        "policy": type(getattr(buffer, "_policy", None)).__name__,
        "storage": type(live.storage_of(buffer)).__name__,
    }
    if live.is_manager(target):
        progress, tasks = live.progress_of(target), live.samplers_state(target)
        state["manager"] = {"model_step": int(model_step), "tasks": tasks, "progress": progress}
    return items, state


def _progress(given: Mapping[str, Any], own: Any) -> Any:
    """The manager's counters, with the caller's."""
    ours: dict[str, Any] = {}
    for target in filter(live.is_manager, given.values()):
        ours = live.progress_of(target)
    if own is None or not ours:
        return own if own is not None else ours or None
    clash = set(own) & set(ours)
    if clash:
        raise UsageError(f"progress[{min(clash)!r}] is what the manager's own progress has; give it another name")
    return {**own, **ours}


def _of_groups(target: Any, items: list[Any], state: dict[str, Any], writer: Writer, name: str) -> Saved:
    part = part_of(writer, name)
    return Saved(attributes=live.write(items, part, live.known_of(live.buffer_of(target), part)), state=state)


def _of_prompts(
    target: Any, items: list[Any], state: dict[str, Any], writer: Writer, name: str, listed: list[Any]
) -> Saved:
    """The prompts alone; those that are drawn and not trained on are added to the list."""
    part, buffer = part_of(writer, name), live.buffer_of(target)  # the checkpoint has the buffer, empty
    unconsumed, names = groups.strip(items, live.resolve)
    listed += names
    if live.memory(buffer).follower is not None:  # what was trained on is in no buffer any more
        known = live.known_of(buffer, part)
        live.keep_only(part, known, {uid: known[uid].mark for item in items if (uid := int(item.uid)) in known})
    state = {**state, "unconsumed": unconsumed}
    if state.get("manager", {}).get("progress"):
        state["manager"] = {**state["manager"], "progress": rollback(state["manager"]["progress"])}
    return Saved(state=state)


# -- restoring ---------------------------------------------------------------------------------------------------------


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
    share, given, renamed = saved_share(source, rank), several(objects), dict(tasks or {})
    buffers = {name: live.buffer_of(target) for name, target in given.items()}
    out: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for name, buffer in buffers.items():
            await stack.enter_async_context(buffer._lock)
            live.memory(buffer).allow(classes)
            check_room(existing, len(live.storage_of(buffer)), f"replay buffer {name!r}", "groups")
            live.check_idle(given[name])
        sources = {n: _source(share, n, for_manager=live.is_manager(target)) for n, target in given.items()}
        found = {}
        for name, buffer in buffers.items():
            found[name] = await undisturbed(partial(sources[name].read, Maker(buffer, refs, renamed)))
        for name, target in given.items():
            detach(buffers[name])
            out[name] = await _restore_one(target, sources[name], found[name], renamed)
    if writer is not None:
        await following.follow(given, writer, ledger=ledger, refs=refs)
    return as_given(objects, out)


@dataclass
class Found:
    """The items to fill a buffer with, and what is to be said of them."""

    items: list[Any]
    following: dict[str, int]  # the next uid and timestamp
    known: dict[int, Item] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """One buffer of a share, checked before anything is changed."""

    share: Any
    name: str
    part: Any  # the share's buffer; None if nobody had put anything into it when all ranks died
    states: Mapping[int, dict[str, Any]]  # source rank -> what it saved

    @property
    def manager(self) -> dict[str, Any]:
        """The state of this rank's manager; an error in a world of another size than that which saved it."""
        record = self.share.plan.checkpoint
        if any("manager" not in state for state in self.states.values()):
            raise UsageError(f"buffer {self.name!r} was saved without a manager: restore manager.replay_buffer")
        saved = record.world_size
        if self.share.world_size != saved or self.share.rank not in self.states:
            raise UsageError(
                f"{saved} {'rank' if saved == 1 else 'ranks'} saved a manager each, whose samplers can't be divided or "
                f"merged: plan with world_size={saved}, or restore manager.replay_buffer only, and have samplers that "
                "draw nothing twice"
            )
        progress = record.progress if self.share.rank == 0 else None
        return {"progress": progress, **self.states[self.share.rank]["manager"]}

    def read(self, maker: Maker) -> Found:
        """Its items, in order, with their ids. Nothing live is changed."""
        names = ("uid", "timestamp_id")
        found = Found([], {name: max(state[f"next_{name}"] for state in self.states.values()) for name in names})
        if not self.share.plan.checkpoint.replay_saved:
            self._read_prompts(maker, found)
        elif self.part is not None:
            self._read_groups(maker, found)
        found.notes += maker.losses
        return found

    def _read_groups(self, maker: Maker, found: Found) -> None:
        made = []
        ranks = self.part.layout.source_rank.tolist()
        for (episode, fields), rank in zip(self.part.stream(), ranks, strict=True):
            own = self._attributes(episode)
            group = maker.decoder.group(fields, episode.metadata, own["rollouts"])
            item = maker.item(group, **{key: own[key] for key in _OF_ITEM})
            made.append(((own["timestamp_id"], rank, own["uid"]), episode.id, item))
        made.sort(key=lambda entry: entry[0])  # one order of time for all source ranks
        for name, first in found.following.items():  # what was journaled since came after
            found.following[name] = max([first, *(1 + int(getattr(item, name)) for _, _, item in made)])
        is_same = self.share.plan.is_identity and len({int(item.uid) for _, _, item in made}) == len(made)
        if not is_same:  # ids of several owners repeat
            live.renumber([item for _, _, item in made], found.following)
        made.sort(key=lambda entry: int(entry[2].uid))
        found.items = [item for _, _, item in made]
        found.counts["renumbered"] = 0 if is_same else len(made)
        found.known = {int(item.uid): Item(live.mark_of(item), episode_id) for _, episode_id, item in made}

    def _attributes(self, episode: Any) -> dict[str, Any]:
        attributes: Mapping[str, Mapping[str, Any]] = self.part.attributes
        known = episode.id in attributes.get("uid", {}) or KEPT in episode.metadata  # journaled since
        if "xtuner" not in episode.metadata or not known:
            raise UsageError(
                f"episode {episode.id!r} of buffer {self.name!r} is no group that was saved with "
                "archive.adapters.xtuner"
            )
        if episode.metadata["xtuner"]["format"] > FORMAT:
            raise UpgradeError(f"group {episode.id!r} was saved in a newer format: upgrade this library")
        kept: dict[str, Any] = episode.metadata.get(KEPT, {})
        own = kept | {key: values[episode.id] for key, values in attributes.items() if episode.id in values}
        if len(own["rollouts"]) != episode.length or episode.metadata["size"] != episode.length:
            raise CorruptStateError(
                f"group {episode.id!r} has {episode.length} of {episode.metadata['size']} rollouts: plan with "
                "max_episodes=, which keeps groups whole, rather than capacity="
            )
        return own

    def _read_prompts(self, maker: Maker, found: Found) -> None:
        """The prompts of a checkpoint without its buffers: those of the same rank; of another world, rank 0 takes
        all."""
        identity = self.share.plan.is_identity
        states = self.states.values() if identity or self.share.rank == 0 else ()
        for entry in (entry for state in states for entry in state.get("unconsumed", [])):
            group = maker.decoder.group(groups.as_fields(entry["fields"]), entry["metadata"], entry["volatile"])
            found.items.append(maker.item(group, **entry["item"], status=RETRY, staleness=0))
        found.counts["put_back"] = len(found.items)
        if not identity:
            live.renumber(found.items, found.following)


def _source(share: Any, name: str, *, for_manager: bool) -> Source:
    """The buffer of that name; an error if it is not what is to be restored."""
    record = share.plan.checkpoint
    is_recovered = record.record.recovered is not None
    part = None if is_recovered and name not in share.buffers else share_buffer(share, name)
    states = {rank: record.state(rank, name) for rank in ([share.rank] if share.plan.is_identity else record.ranks)}
    for rank, state in states.items():
        if state is None and is_recovered:  # it ended before its first save: all that there is comes from its journal
            manager = {"model_step": record.step, "tasks": {}}
            states[rank] = {"format": FORMAT, "next_uid": 1, "next_timestamp_id": 1, "manager": manager}
        elif not isinstance(state, dict) or "next_uid" not in state:
            raise NotFoundError(
                f"rank {rank} saved no XTuner replay buffer as {name!r}; restore with {{name: object}} to say which is "
                "meant"
            )
        elif state["format"] > FORMAT:
            raise UpgradeError(f"buffer {name!r} was saved in format {state['format']}: upgrade this library")
    source = Source(share, name, part, states)
    if for_manager:
        _ = source.manager  # or why it has none
    return source


async def _restore_one(target: Any, source: Source, found: Found, renamed: Mapping[str, str]) -> Any:
    buffer, saved = live.buffer_of(target), source.manager if live.is_manager(target) else None
    notes = list(found.notes)
    if saved is not None:
        known = {renamed.get(task, task): state for task, state in saved["tasks"].items()}
        notes += [
            f"task {name!r} was not saved: its prompts begin anew" for name in live.restore_samplers(target, known)
        ]
        strange = {item.task_name for item in found.items} - {task.task_name for task in target.task_runners}
        notes += [
            f"groups of task {name!r} are kept, but the manager has no such task; if it was renamed: "
            f"restore(tasks={{{name!r}: NEW}})"
            for name in sorted(strange)
        ]
    await live.fill(buffer, found.items, found.following)
    live.memory(buffer).origin = (source.name, source.share.plan.checkpoint)
    live.written.forget(buffer)
    if source.part is not None:
        live.written.restored(buffer, source.part, found.known)
    report = Report(len(found.items), sum(len(i.item) for i in found.items), found.counts, tuple(notes))
    if saved is None:
        return report
    step = RestoredStep(saved["model_step"])
    live.restore_progress(target, saved["progress"], saved["model_step"], renamed)
    step.report = report
    return step
