"""XTuner's replay buffers and agent loop managers as this package sees them: their items, where samplers and counters
stand, and how to set them; and what writers have of a buffer already.

Storages are used through their own verbs `get`, `put` and `delete`, so Naive, Pandas and others alike. Only the
counters that give out uids and timestamps have no verb: they are read and set in place, so that ids of consumed items
are not given out again.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from archive.adapters import Item, Tracked, kept_items, system
from archive.adapters.xtuner import groups
from archive.adapters.xtuner.codec import Decoder
from archive.adapters.xtuner.values import Classes, classes_of
from archive.base import UsageError

if TYPE_CHECKING:
    from archive.checkpoint import Checkpoint
    from archive.write import Buffer

T = TypeVar("T")
EVERYTHING: dict[str, Any] = {}  # the query that all items meet
_COUNTERS = {"uid": "_uid_gen", "timestamp_id": "_timestamp_id_gen"}
INSTALL = "xtuner"
_SCHEMAS = "xtuner.v1.rl.agent_loop.sandbox_agent_loop.schemas"  # of `extra_fields["rollout_item"]`


async def undisturbed(work: Callable[[], T]) -> T:
    """In a thread, to its end even when the caller is cancelled: the locks are held that long."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


# -- replay buffers ----------------------------------------------------------------------------------------------------


def is_manager(target: Any) -> bool:
    """True for an agent loop manager, False for a replay buffer."""
    return hasattr(target, "task_runners") and hasattr(target, "replay_buffer")


def buffer_of(target: Any) -> Any:
    """The replay buffer of a manager, or the replay buffer itself."""
    return target.replay_buffer if is_manager(target) else target


def runners_of(target: Any) -> Sequence[Any]:
    """The task runners of a manager; none of a replay buffer."""
    return target.task_runners if is_manager(target) else ()


def storage_of(buffer: Any) -> Any:
    """The storage that holds the items of a replay buffer."""
    storage = getattr(buffer, "_storage", None)
    if storage is None or not hasattr(storage, "get"):
        raise UsageError(
            f"{type(buffer).__name__} is no XTuner replay buffer (or agent loop manager): it has no storage of items"
        )
    return storage


async def items_of(buffer: Any) -> list[Any]:
    """The items, in the order in which they came."""
    return sorted(await storage_of(buffer).get(EVERYTHING), key=lambda item: int(item.uid))


def counters(buffer: Any) -> dict[str, int]:
    """The number that each counter gives out next."""
    storage, out = storage_of(buffer), {}
    for name, attribute in _COUNTERS.items():
        if not hasattr(storage, attribute):
            raise UsageError(f"{type(storage).__name__} has no {attribute}, which gives out the next {name}")
        out[name] = int(next(getattr(storage, attribute)))
        setattr(storage, attribute, itertools.count(out[name]))
    return out


async def fill(buffer: Any, items: Sequence[Any], following: dict[str, int]) -> None:
    """Replace all items; on an error the buffer is left empty rather than half filled."""
    storage, last = storage_of(buffer), counters(buffer)
    await _empty(storage)
    try:
        for name, attribute in _COUNTERS.items():
            setattr(storage, attribute, iter([getattr(item, name) for item in items]))
        for item in items:
            await storage.put(item)
        last = following
    except BaseException:
        await _empty(storage)
        raise
    finally:
        for name, attribute in _COUNTERS.items():
            setattr(storage, attribute, itertools.count(last[name]))


async def _empty(storage: Any) -> None:
    await storage.delete([item.uid for item in await storage.get(EVERYTHING)])


def renumber(items: Iterable[Any], following: dict[str, int]) -> None:
    """Give items new places, after all that were given out."""
    for item in items:
        for name in following:
            setattr(item, name, following[name])
            following[name] += 1


class Maker:
    """Makes items of the classes that the modules of a replay buffer and its storage work with.

    refs: "put" makes object refs of what was one, "values" leaves the values.  tasks: old name -> new name.
    """

    def __init__(self, buffer: Any, refs: str = "put", tasks: Mapping[str, str] | None = None) -> None:
        item, rollout = (_named(buffer, name) for name in ("StorageItem", "RolloutState"))
        self._item = item or system("xtuner.v1.rl.replay_buffer", INSTALL).StorageItem
        rollout = rollout or system("xtuner.v1.data_proto.rl_data", INSTALL).RolloutState
        self.classes: Classes = classes_of(rollout, memory(buffer).classes, [sys.modules.get(_SCHEMAS)])
        self.decoder = Decoder(self.classes, put_reference if refs == "put" else lambda value: value)
        self._tasks = tasks or {}

    def item(
        self, group: Sequence[Any], *, task_name: str, status: str, staleness: int, uid: int = 0, timestamp_id: int = 0
    ) -> Any:
        """An item of these rollouts; without uid and timestamp it has no place yet."""
        return self._item(
            item=group,
            uid=uid,
            timestamp_id=timestamp_id,
            task_name=self._tasks.get(task_name, task_name),
            status=self.classes.named(status),
            staleness=staleness,
        )

    @property
    def losses(self) -> list[str]:
        """A note for each field that the classes here do not have."""
        return [f"{count} values of {name!r} had no field here" for name, count in self.decoder.lost.items()]


def _named(buffer: Any, name: str) -> Any:
    for kind in (*type(storage_of(buffer)).__mro__, *type(buffer).__mro__):
        found = getattr(sys.modules.get(kind.__module__), name, None)
        if isinstance(found, type):
            return found
    return None


def put_reference(value: Any) -> Any:
    """A new Ray object ref."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise UsageError("the groups hold Ray object refs: call ray.init() first, or restore(..., refs='values')")
    return ray.put(value)


def resolve(reference: Any) -> Any:
    """The value that a Ray object ref refers to."""
    return system("ray", "ray").get(reference)


# -- managers ----------------------------------------------------------------------------------------------------------


def check_idle(target: Any) -> None:
    """Refuse while rollouts are under way: they are in no buffer."""
    counts = {task.task_name: task.produce_strategy.pending_task_count() for task in runners_of(target)}
    pending = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    if pending:
        raise UsageError(
            f"rollouts are still under way ({pending}); await manager.pause_produce() before the checkpoint"
        )


def samplers_state(manager: Any) -> dict[str, Any]:
    """Task -> where its sampler and its dataloader stand."""
    samplers = {task.task_name: task.sampler for task in manager.task_runners}
    return {
        name: {
            "dataloader": sampler.dataloader.get_state_dict(),
            "epoch": int(sampler.cur_epoch),
            "drawn": int(sampler._consumed_samples),
        }
        for name, sampler in samplers.items()
    }


def restore_samplers(target: Any, saved: Mapping[str, Any], *, ahead: bool = False) -> list[str]:
    """Set the samplers of the tasks that were saved, or those alone that are to go `ahead`; the names of other tasks
    of the manager."""
    for task in runners_of(target):
        state, sampler = saved.get(task.task_name), task.sampler
        if state is None or (ahead and state["drawn"] <= int(sampler._consumed_samples)):
            continue
        sampler.dataloader.load_state_dict(state["dataloader"])
        sampler.dataloader_iter = iter(sampler.dataloader)
        sampler.cur_epoch, sampler._consumed_samples = state["epoch"], state["drawn"]
    return [t.task_name for t in runners_of(target) if t.task_name not in saved]


def progress_of(manager: Any) -> dict[str, Any]:
    """The counters of producer and consumer, where the manager keeps them (in disaggregated mode), and its status."""
    progress = getattr(manager, "_produce_progress", None)
    return {} if progress is None else {**progress.state_dict(), "status": manager._status.name}


def train_step(target: Any) -> int | None:
    """The training step that takes groups now, where a manager keeps count (in disaggregated mode)."""
    progress = getattr(target, "_produce_progress", None)
    return None if progress is None else int(progress.next_consumer_step)


def restore_progress(manager: Any, saved: Any, model_step: int, renamed: Mapping[str, str]) -> None:
    """Set the counters, and leave the producer waiting for `continue_produce`."""
    progress = getattr(manager, "_produce_progress", None)
    if progress is None:
        return
    known = groups.of_tasks(saved, [t.task_name for t in manager.task_runners], renamed)
    if known is not None:
        progress.load_state_dict(known)
    manager._update_event, manager._finish_event = asyncio.Event(), asyncio.Event()
    manager._update_event.set()
    manager._status = type(manager._status)["UPDATE_WEIGHT_AND_ABORT"]
    manager._pause_time_s, manager._model_step = 0.0, model_step


# -- what writers have of a buffer -------------------------------------------------------------------------------------


class Memory:
    """The memory of one replay buffer, for as long as it lives."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}  # by name, those that values may be of beside those of its modules
        self.origin: tuple[str, Checkpoint] | None = None  # the name and checkpoint that it was restored from
        self.follower: Any = None  # says in a ledger what becomes of its groups

    def allow(self, classes: Iterable[type] | Mapping[str, type]) -> None:
        """Let values in rollouts be of these classes, too.  classes: as in `restore`."""
        named = dict(classes) if isinstance(classes, Mapping) else {kind.__name__: kind for kind in classes}
        for name, kind in named.items():
            if not isinstance(kind, type):
                raise UsageError(f"classes[{name!r}] is a {type(kind).__name__}: give a class")
        self.classes |= named


_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
written: Tracked[dict[int, Item]] = Tracked()  # uid -> the group as a writer's buffer has it


def memory(buffer: Any) -> Memory:
    """The memory of this replay buffer."""
    return _memories.setdefault(buffer, Memory())


def known_of(buffer: Any, part: Buffer) -> dict[int, Item]:
    """Uid -> the group as a writer's buffer has it, to be kept up to date."""
    found = written.of(buffer, part)
    return written.keep(buffer, part, {}) if found is None else found


def mark_of(item: Any) -> tuple[Any, str]:
    """A mark that tells another group of the same uid apart, and a digest of the content."""
    first = item.item[0] if item.item else None
    identity = (item.task_name, getattr(first, "group_id", None), getattr(first, "rollout_id", None))
    return identity, groups.fingerprint(item.item)


def append(item: Any, part: Buffer, mark: Any, before: Item | None = None) -> Item:
    """Append a group of this mark, as a revision of the episode that it was before."""
    encoded, key = groups.encode(item.item, item.task_name, resolve), groups.key_of(item.item)
    about = {} if key is None else {groups.PROMPT: key, groups.KEPT: attributes_of(item)}
    episode_id = part.add_episode(
        encoded.fields,
        update_count=encoded.updates,
        metadata=encoded.metadata | about,
        episode_id=None if before is None else before.episode_id,
        replace=before is not None,
    )
    return Item(mark, episode_id)


def write(items: Iterable[Any], part: Buffer, known: dict[int, Item]) -> dict[str, dict[str, Any]]:
    """Append what is new or changed, take out what has left; the attributes of what is there."""
    there = set(part.live["episode_id"].to_pylist())
    by_uid = {int(item.uid): item for item in items}
    marks = {uid: mark_of(item) for uid, item in by_uid.items()}

    def add(uid: int) -> str:
        before = known.get(uid)
        is_revised = before is not None and before.episode_id in there and before.mark[0] == marks[uid][0]
        known[uid] = append(by_uid[uid], part, marks[uid], before if is_revised else None)  # also if a later one fails
        return known[uid].episode_id

    keep_only(part, known, marks, add)
    attributes: dict[str, dict[str, Any]] = {}
    for uid, item in by_uid.items():
        for name, value in attributes_of(item).items():
            attributes.setdefault(name, {})[known[uid].episode_id] = value
    return attributes


def keep_only(
    part: Buffer,
    known: dict[int, Item],
    marks: Mapping[int, Any],
    add: Callable[[int], str | None] = lambda uid: None,
) -> None:
    """Groups that have no mark here have left the buffer. add: writes one that is not there as it is."""
    held = kept_items(part, known, marks.items(), add)
    known.clear()
    known.update(held)


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of a group beside its content: its place in the buffer, and what changes."""
    return {
        "uid": int(item.uid),
        "timestamp_id": int(item.timestamp_id),
        "task_name": item.task_name,
        "status": groups.plain(item.status),
        "staleness": int(item.staleness),
        "rollouts": groups.volatile(item.item),
    }
