"""What a share has for one of XTuner's replay buffers: its groups as items, in order, with their ids."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from archive.adapters import share_buffer
from archive.adapters.xtuner import groups, prompts, storage
from archive.adapters.xtuner.manager import RETRY, as_fields
from archive.adapters.xtuner.rollouts import Classes, Losses, decode
from archive.base import CorruptStateError, NotFoundError, UpgradeError, UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    put: Callable[[Any], Any]  # makes an object ref of what was one
    tasks: Mapping[str, str]  # old name -> new name


@dataclass
class Found:
    """Items to fill a buffer with, and what is to be said of them."""

    items: list[Any]
    following: dict[str, int]  # what uid and timestamp come next
    seen: dict[int, storage.Seen] = field(default_factory=dict)
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
    def is_identity(self) -> bool:
        return bool(self.share.plan.is_identity)

    @property
    def following(self) -> dict[str, int]:
        """What uid and timestamp come next."""
        names = ("uid", "timestamp_id")
        return {name: max(state[f"next_{name}"] for state in self.states.values()) for name in names}

    @property
    def manager(self) -> dict[str, Any]:
        """The state of this rank's manager; an error in a world of another size than that which saved it."""
        checkpoint = self.share.plan.checkpoint
        if any("manager" not in state for state in self.states.values()):
            raise UsageError(f"buffer {self.name!r} was saved without a manager: restore manager.replay_buffer")
        saved = checkpoint.world_size
        if self.share.world_size != saved or self.share.rank not in self.states:
            raise UsageError(
                f"{saved} {'rank' if saved == 1 else 'ranks'} saved a manager each, whose samplers can't be divided or "
                f"merged: plan with world_size={saved}, or restore manager.replay_buffer only, and have samplers that "
                "draw nothing twice"
            )
        return {
            "progress": checkpoint.progress if self.share.rank == 0 else None,
            **self.states[self.share.rank]["manager"],
        }


def source_of(share: Any, name: str, *, for_manager: bool) -> Source:
    """What the share has under that name; an error if it is not what is to be restored."""
    checkpoint = share.plan.checkpoint
    is_recovered = checkpoint.record.recovered is not None
    part = None if is_recovered and name not in share.buffers else share_buffer(share, name)
    ranks = [share.rank] if share.plan.is_identity else checkpoint.ranks
    states = {rank: checkpoint.state(rank, name) for rank in ranks}
    for rank, state in states.items():
        if state is None and is_recovered:
            states[rank] = _begun(checkpoint.step)
        elif not isinstance(state, dict) or "next_uid" not in state:
            raise NotFoundError(
                f"rank {rank} saved no XTuner replay buffer as {name!r}; restore with {{name: object}} to say which is "
                "meant"
            )
        elif state["format"] > groups.FORMAT:
            raise UpgradeError(f"buffer {name!r} was saved in format {state['format']}: upgrade this library")
    source = Source(share, name, part, states)
    if for_manager:
        _ = source.manager  # or why it has none
    return source


def _begun(step: int) -> dict[str, Any]:
    """The state of a rank that ended before its first save, so that all that there is comes from its journal."""
    manager = {"model_step": step, "tasks": {}}
    return {"format": groups.FORMAT, "next_uid": 1, "next_timestamp_id": 1, "manager": manager}


def read_items(buffer: Any, source: Source, wanted: Wanted) -> Found:
    """The items, made of the classes that the buffer works with."""
    maker = Maker(*storage.buffer_classes(buffer), wanted, Losses())
    made_from = _from_episodes if source.share.plan.checkpoint.replay_saved else _from_prompts
    found = made_from(source, maker)
    found.notes += [f"{n} values of {name!r} had no field here" for name, n in maker.losses.fields.items()]
    return found


@dataclass(frozen=True)
class Maker:
    """Makes items of the classes that a buffer works with."""

    kind: type
    classes: Classes
    wanted: Wanted
    losses: Losses

    def item(
        self, fields: Mapping[str, Any], metadata: Mapping[str, Any], own: Mapping[str, Any], volatile: Any
    ) -> Any:
        """own: uid, timestamp, task, status and staleness of the item.  volatile: those of each rollout."""
        task = own["task_name"]
        return self.kind(
            item=self.rollouts(fields, metadata, volatile),
            uid=own["uid"],
            timestamp_id=own["timestamp_id"],
            task_name=self.wanted.tasks.get(task, task),
            status=self.classes.named(own["status"]),
            staleness=own["staleness"],
        )

    def rollouts(self, fields: Mapping[str, Any], metadata: Mapping[str, Any], volatile: Any) -> list[Any]:
        """Those of one episode."""
        return decode(fields, metadata, volatile, self.classes, self.wanted.put, self.losses)

    def of_group(self, group: list[Any], task_name: str, status: str) -> Any:
        """An item of these rollouts, which has no place yet."""
        staleness = max((int(getattr(r, "seq_staleness", 0) or 0) for r in group), default=0)
        return self.kind(
            item=group, uid=0, timestamp_id=0, task_name=self.wanted.tasks.get(task_name, task_name),
            status=self.classes.named(status), staleness=staleness,
        )  # fmt: skip


def maker_of(buffer: Any, refs: str) -> Maker:
    """What makes items for a replay buffer.  refs: as in `restore`."""
    put = put_reference if refs == "put" else lambda value: value
    return Maker(*storage.buffer_classes(buffer), Wanted(put, {}), Losses())


def _from_episodes(source: Source, maker: Maker) -> Found:
    if source.part is None:
        return Found([], source.following)
    made = []
    ranks = source.part.layout.source_rank.tolist()
    for (episode, fields), rank in zip(source.part.stream(), ranks, strict=True):
        own = _attributes(source.part.attributes, episode, source.name)
        item = maker.item(fields, episode.metadata, own, own["rollouts"])
        made.append(((own["timestamp_id"], rank, own["uid"]), episode.id, item))
    made.sort(key=lambda entry: entry[0])  # one order of time for all source ranks
    found = Found([], source.following)
    for name, following in found.following.items():  # what was journaled since came after
        found.following[name] = max([following, *(1 + int(getattr(item, name)) for _, _, item in made)])
    is_same = source.is_identity and len({int(item.uid) for _, _, item in made}) == len(made)
    if not is_same:
        _renumber([item for _, _, item in made], found.following)
    made.sort(key=lambda entry: int(entry[2].uid))
    found.items = [item for _, _, item in made]
    found.counts["renumbered"] = 0 if is_same else len(made)
    found.seen = {item.uid: storage.seen_as(item, episode_id) for _, episode_id, item in made}
    return found


def _attributes(attributes: Mapping[str, Mapping[str, Any]], episode: Any, name: str) -> dict[str, Any]:
    known = episode.id in attributes.get("uid", {}) or prompts.KEPT in episode.metadata  # journaled since
    if "xtuner" not in episode.metadata or not known:
        raise UsageError(
            f"episode {episode.id!r} of buffer {name!r} is no group that was saved with archive.adapters.xtuner"
        )
    if episode.metadata["xtuner"]["format"] > groups.FORMAT:
        raise UpgradeError(f"group {episode.id!r} was saved in a newer format: upgrade this library")
    kept: dict[str, Any] = episode.metadata.get(prompts.KEPT, {})
    own = kept | {key: values[episode.id] for key, values in attributes.items() if episode.id in values}
    if len(own["rollouts"]) != episode.length or episode.metadata["size"] != episode.length:
        raise CorruptStateError(
            f"group {episode.id!r} has {episode.length} of {episode.metadata['size']} rollouts: plan with "
            "max_episodes=, which keeps groups whole, rather than capacity="
        )
    return own


def _renumber(items: list[Any], following: dict[str, int]) -> None:
    """Ids of several owners repeat: new ones after all that were given out, in order of time."""
    for item in items:
        for name in following:
            setattr(item, name, following[name])
            following[name] += 1


def _from_prompts(source: Source, maker: Maker) -> Found:
    """Prompts of a checkpoint without its buffers: those of the same rank; of another world, rank 0 takes all."""
    states = source.states.values() if source.is_identity or source.share.rank == 0 else ()
    entries = [entry for state in states for entry in state.get("unconsumed", [])]
    again = {"status": RETRY, "staleness": 0}
    items = [maker.item(as_fields(e["fields"]), e["metadata"], e["item"] | again, e["volatile"]) for e in entries]
    found = Found(items, source.following, counts={"put_back": len(items)})
    if not source.is_identity:
        _renumber(items, found.following)
    return found


async def undisturbed(work: Callable[[], T]) -> T:
    """In a thread, to its end even when the caller is cancelled: the locks are held that long."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def put_reference(value: Any) -> Any:
    """A new Ray object ref."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise UsageError("the groups hold Ray object refs: call ray.init() first, or restore(..., refs='values')")
    return ray.put(value)
