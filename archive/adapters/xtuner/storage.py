"""XTuner's replay buffers as this package sees them: their items, their two counters, and how to fill them.

Storages are used through their own verbs `get`, `put` and `delete`, so Naive, Pandas and others alike. Only the
counters that give out uids and timestamps have no verb: they are read and set in place, so that ids of consumed items
are not given out again.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.adapters import system
from archive.adapters.xtuner import groups, prompts
from archive.adapters.xtuner.rollouts import Classes, classes_of
from archive.base import UsageError

if TYPE_CHECKING:
    from archive import Writer
    from archive.checkpoint import Checkpoint
    from archive.write import Buffer

EVERYTHING: dict[str, Any] = {}  # the query that all items meet
_COUNTERS = {"uid": "_uid_gen", "timestamp_id": "_timestamp_id_gen"}
INSTALL = "xtuner"
_SCHEMAS = "xtuner.v1.rl.agent_loop.sandbox_agent_loop.schemas"  # of `extra_fields["rollout_item"]`
_allowed: weakref.WeakKeyDictionary[Any, dict[str, type]] = weakref.WeakKeyDictionary()


def storage_of(buffer: Any) -> Any:
    """What holds the items of a replay buffer."""
    storage = getattr(buffer, "_storage", None)
    if storage is None or not hasattr(storage, "get"):
        raise UsageError(
            f"{type(buffer).__name__} is no XTuner replay buffer (or agent loop manager): it has no storage of items"
        )
    return storage


def buffer_classes(buffer: Any) -> tuple[type, Classes]:
    """(class of items, classes of rollouts): those that the modules of the buffer and its storage work with."""
    item, rollout = (_named(buffer, name) for name in ("StorageItem", "RolloutState"))
    if item is None:
        item = system("xtuner.v1.rl.replay_buffer", INSTALL).StorageItem
    if rollout is None:
        rollout = system("xtuner.v1.data_proto.rl_data", INSTALL).RolloutState
    return item, classes_of(rollout, _allowed.get(buffer, {}), [sys.modules.get(_SCHEMAS)])


def allow(buffer: Any, classes: Iterable[type] | Mapping[str, type]) -> None:
    """Let values in this buffer's rollouts be of these classes, too.  classes: as in `restore`."""
    named = dict(classes) if isinstance(classes, Mapping) else {kind.__name__: kind for kind in classes}
    for name, kind in named.items():
        if not isinstance(kind, type):
            raise UsageError(f"classes[{name!r}] is a {type(kind).__name__}: give a class")
    _allowed.setdefault(buffer, {}).update(named)


def _named(buffer: Any, name: str) -> Any:
    for kind in (*type(storage_of(buffer)).__mro__, *type(buffer).__mro__):
        found = getattr(sys.modules.get(kind.__module__), name, None)
        if isinstance(found, type):
            return found
    return None


async def items_of(buffer: Any) -> list[Any]:
    """All items, in the order in which they came."""
    return sorted(await storage_of(buffer).get(EVERYTHING), key=lambda item: int(item.uid))


def counters(buffer: Any) -> dict[str, int]:
    """What each counter gives out next."""
    storage, out = storage_of(buffer), {}
    for name, attribute in _COUNTERS.items():
        if not hasattr(storage, attribute):
            raise UsageError(f"{type(storage).__name__} has no {attribute}, which gives out the next {name}")
        out[name] = int(next(getattr(storage, attribute)))
        setattr(storage, attribute, itertools.count(out[name]))
    return out


async def fill(buffer: Any, items: Sequence[Any], following: dict[str, int]) -> None:
    """Replace all items; on an error the buffer is left empty rather than half filled."""
    storage = storage_of(buffer)
    before = counters(buffer)
    await empty(buffer)
    try:
        for name, attribute in _COUNTERS.items():
            setattr(storage, attribute, iter([getattr(item, name) for item in items]))
        for item in items:
            await storage.put(item)
    except BaseException:
        _set_counters(storage, before)
        await empty(buffer)
        raise
    _set_counters(storage, following)


async def empty(buffer: Any) -> None:
    storage = storage_of(buffer)
    await storage.delete([item.uid for item in await storage.get(EVERYTHING)])


def _set_counters(storage: Any, following: dict[str, int]) -> None:
    for name, attribute in _COUNTERS.items():
        setattr(storage, attribute, itertools.count(following[name]))


# -- what a writer has seen ----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A group as it was last written."""

    episode_id: str
    digest: str
    identity: tuple[Any, ...]  # tells another group apart that was given the same uid


def seen_as(item: Any, episode_id: str) -> Seen:
    """A group as it is now, written as that episode."""
    first = item.item[0] if item.item else None
    identity = (item.task_name, getattr(first, "group_id", None), getattr(first, "rollout_id", None))
    return Seen(episode_id, groups.fingerprint(item.item), identity)


# Replay buffer -> (archive, run, buffer's name, session) -> uid -> what was written there; what a restore found is
# under
# no session.
_Places = dict[tuple[str, str, str, str | None], dict[int, Seen]]
_seen: weakref.WeakKeyDictionary[Any, _Places] = weakref.WeakKeyDictionary()
_origins: weakref.WeakKeyDictionary[Any, dict[str, Checkpoint]] = weakref.WeakKeyDictionary()


def seen(buffer: Any, writer: Writer, name: str) -> dict[int, Seen]:
    """Uid -> the group as that writer's session wrote it, or as a restore found it.

    What another session wrote doesn't count: it may never have been committed.
    """
    places = _seen.setdefault(buffer, {})
    place = (writer.archive_id, writer.run, name)
    return places.setdefault((*place, writer.session), dict(places.get((*place, None), {})))


def restored(buffer: Any, checkpoint: Checkpoint, name: str, found: dict[int, Seen]) -> None:
    """Its items were replaced: forget what was there, and remember what came from that place."""
    _seen[buffer] = {(checkpoint.archive_id, checkpoint.run, name, None): found}
    _origins[buffer] = {name: checkpoint}


def origin_of(buffer: Any, name: str) -> Checkpoint | None:
    """The checkpoint that the buffer was restored from under that name, if it was."""
    return _origins.get(buffer, {}).get(name)


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
    _keep_only(current, target, known, live)
    return attributes


def take_out(items: Iterable[Any], target: Buffer, known: dict[int, Seen]) -> None:
    """What is there no more has left the buffer; nothing is appended."""
    current = {uid: known[uid] for item in items if (uid := int(item.uid)) in known}
    _keep_only(current, target, known, set(target.live["episode_id"].to_pylist()))


def _keep_only(current: dict[int, Seen], target: Buffer, known: dict[int, Seen], live: set[str]) -> None:
    target.remove(sorted(live - {s.episode_id for s in current.values()}))
    known.clear()
    known.update(current)


def write_one(item: Any, target: Buffer, before: Seen | None, live: Container[str]) -> Seen:
    """Append a group, unless it is there as it is; how it was written. before: how it was last."""
    now = seen_as(item, "")
    known = before if before is not None and before.episode_id in live and before.identity == now.identity else None
    if known is not None and known.digest == now.digest:
        return known
    encoded = groups.encode(item.item, item.task_name, resolve)
    about = prompts.about(item.item, attributes_of(item))
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
        "uid": int(item.uid), "timestamp_id": int(item.timestamp_id), "task_name": item.task_name,
        "status": groups.plain(item.status), "staleness": int(item.staleness), "rollouts": groups.volatile(item.item),
    }  # fmt: skip


def resolve(reference: Any) -> Any:
    """What a Ray object ref refers to."""
    return system("ray", "ray").get(reference)
