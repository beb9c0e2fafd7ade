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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from archive.adapters import system
from archive.adapters.xtuner import groups
from archive.adapters.xtuner.codec import Decoder
from archive.adapters.xtuner.values import Classes, classes_of
from archive.base import UsageError

if TYPE_CHECKING:
    from archive import Writer
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
    """All items, in the order in which they came."""
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


class Seen(NamedTuple):
    """A group as it was last written."""

    episode_id: str
    digest: str
    identity: tuple[Any, ...]  # tells another group apart that was given the same uid


class Memory:
    """What is known of one replay buffer, for as long as it lives."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}  # by name, those that values may be of beside those of its modules
        self.origin: tuple[str, Checkpoint] | None = None  # the name and checkpoint that it was restored from
        self.follower: Any = None  # says in a ledger what becomes of its groups
        # (archive, run, buffer's name, session) -> uid -> what was written there; under no session what a restore found
        self._seen: dict[tuple[str, str, str, str | None], dict[int, Seen]] = {}

    def allow(self, classes: Iterable[type] | Mapping[str, type]) -> None:
        """Let values in rollouts be of these classes, too.  classes: as in `restore`."""
        named = dict(classes) if isinstance(classes, Mapping) else {kind.__name__: kind for kind in classes}
        for name, kind in named.items():
            if not isinstance(kind, type):
                raise UsageError(f"classes[{name!r}] is a {type(kind).__name__}: give a class")
        self.classes |= named

    def seen(self, writer: Writer, name: str) -> dict[int, Seen]:
        """Uid -> the group as that writer's session wrote it, or as a restore found it.

        What another session wrote doesn't count: it may never have been committed.
        """
        place = (writer.archive_id, writer.run, name)
        return self._seen.setdefault((*place, writer.session), dict(self._seen.get((*place, None), {})))

    def restored(self, checkpoint: Checkpoint, name: str, found: dict[int, Seen]) -> None:
        """Its items were replaced: forget what was there, and remember what came from that place."""
        self._seen = {(checkpoint.archive_id, checkpoint.run, name, None): found}
        self.origin = (name, checkpoint)


_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def memory(buffer: Any) -> Memory:
    """The memory of this replay buffer."""
    return _memories.setdefault(buffer, Memory())


def seen_as(item: Any, episode_id: str) -> Seen:
    """A group as it is now, written as that episode."""
    first = item.item[0] if item.item else None
    identity = (item.task_name, getattr(first, "group_id", None), getattr(first, "rollout_id", None))
    return Seen(episode_id, groups.fingerprint(item.item), identity)


def write(items: Iterable[Any], target: Buffer, known: dict[int, Seen]) -> dict[str, dict[str, Any]]:
    """Append what is new or changed, take out what has left; the attributes of what is there."""
    live = set(target.live["episode_id"].to_pylist())
    attributes: dict[str, dict[str, Any]] = {}
    current: dict[int, Seen] = {}
    for item in items:
        uid = int(item.uid)
        current[uid] = known[uid] = write_one(item, target, known.get(uid), live)  # known even if a later one fails
        for name, value in attributes_of(item).items():
            attributes.setdefault(name, {})[current[uid].episode_id] = value
    keep_only(current, target, known)
    return attributes


def keep_only(current: Mapping[int, Seen], target: Buffer, known: dict[int, Seen]) -> None:
    """All other groups have left the buffer."""
    live = set(target.live["episode_id"].to_pylist())
    target.remove(sorted(live - {s.episode_id for s in current.values()}))
    known.clear()
    known.update(current)


def write_one(item: Any, target: Buffer, before: Seen | None, live: Container[str]) -> Seen:
    """Append a group, unless it is there as it is; how it was written. before: how it was last."""
    now = seen_as(item, "")
    known = before if before is not None and before.episode_id in live and before.identity == now.identity else None
    if known is not None and known.digest == now.digest:
        return known
    encoded, key = groups.encode(item.item, item.task_name, resolve), groups.key_of(item.item)
    about = {} if key is None else {groups.PROMPT: key, groups.KEPT: attributes_of(item)}
    episode_id = target.add_episode(
        encoded.fields,
        update_count=encoded.updates,
        metadata=encoded.metadata | about,
        episode_id=known.episode_id if known else None,
        replace=known is not None,
    )
    return now._replace(episode_id=episode_id)


def attributes_of(item: Any) -> dict[str, Any]:
    """What is said of a group beside its content: its place in the buffer, and what changes."""
    return {
        "uid": int(item.uid),
        "timestamp_id": int(item.timestamp_id),
        "task_name": item.task_name,
        "status": groups.plain(item.status),
        "staleness": int(item.staleness),
        "rollouts": groups.volatile(item.item),
    }
