"""What a share has for one of XTuner's replay buffers: its groups as items, in order, with their ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from archive.adapters import share_buffer
from archive.adapters.xtuner import groups, storage
from archive.adapters.xtuner.manager import RETRY, as_fields
from archive.adapters.xtuner.rollouts import Classes, Losses, decode
from archive.base import CorruptStateError, NotFoundError, UpgradeError, UsageError


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
    part: Any  # the share's buffer
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
        """The state of the manager; an error where several ranks saved one."""
        (state, *others) = self.states.values()
        if others:
            raise UsageError(
                f"{1 + len(others)} ranks saved a manager each, whose samplers can't be merged: plan with world_size="
                f"{1 + len(others)}, or restore their replay buffers only"
            )
        if "manager" not in state:
            raise UsageError(f"buffer {self.name!r} was saved without a manager: restore manager.replay_buffer")
        return dict(state["manager"])


def source_of(share: Any, name: str, *, for_manager: bool) -> Source:
    """What the share has under that name; an error if it is not what is to be restored."""
    part = share_buffer(share, name)
    states = {share.rank: part.state} if share.plan.is_identity else dict(part.source_states)
    for rank, state in states.items():
        if not isinstance(state, dict) or "next_uid" not in state:
            raise NotFoundError(
                f"rank {rank} saved no XTuner replay buffer as {name!r}; restore with {{name: object}} to say which is "
                "meant"
            )
        if state["format"] > groups.FORMAT:
            raise UpgradeError(f"buffer {name!r} was saved in format {state['format']}: upgrade this library")
    source = Source(share, name, part, states)
    if for_manager:
        _ = source.manager  # or why it has none
    return source


def read_items(buffer: Any, source: Source, wanted: Wanted) -> Found:
    """The items, made of the classes that the buffer works with."""
    maker = _Maker(*storage.buffer_classes(buffer), wanted, Losses())
    made_from = _from_episodes if source.share.plan.checkpoint.replay_saved else _from_prompts
    found = made_from(source, maker)
    found.notes += [f"{n} values of {name!r} had no field here" for name, n in maker.losses.fields.items()]
    found.notes += [f"{n} values of class {name!r} stay dicts" for name, n in maker.losses.classes.items()]
    return found


@dataclass(frozen=True)
class _Maker:
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
            item=decode(fields, metadata, volatile, self.classes, self.wanted.put, self.losses),
            uid=own["uid"],
            timestamp_id=own["timestamp_id"],
            task_name=self.wanted.tasks.get(task, task),
            status=self.classes.named(own["status"]),
            staleness=own["staleness"],
        )


def _from_episodes(source: Source, maker: _Maker) -> Found:
    made = []
    ranks = source.part.layout.source_rank.tolist()
    for (episode, fields), rank in zip(source.part.stream(), ranks, strict=True):
        own = _attributes(source.part.attributes, episode, source.name)
        item = maker.item(fields, episode.metadata, own, own["rollouts"])
        made.append(((own["timestamp_id"], rank, own["uid"]), episode.id, item))
    made.sort(key=lambda entry: entry[0])  # one order of time for all source ranks
    found = Found([], source.following)
    if not source.is_identity:
        _renumber([item for _, _, item in made], found.following)
    made.sort(key=lambda entry: int(entry[2].uid))
    found.items = [item for _, _, item in made]
    found.counts["renumbered"] = 0 if source.is_identity else len(made)
    found.seen = {item.uid: storage.seen_as(item, episode_id) for _, episode_id, item in made}
    return found


def _attributes(attributes: Mapping[str, Mapping[str, Any]], episode: Any, name: str) -> dict[str, Any]:
    if "xtuner" not in episode.metadata or episode.id not in attributes.get("uid", {}):
        raise UsageError(
            f"episode {episode.id!r} of buffer {name!r} is no group that was saved with archive.adapters.xtuner"
        )
    if episode.metadata["xtuner"]["format"] > groups.FORMAT:
        raise UpgradeError(f"group {episode.id!r} was saved in a newer format: upgrade this library")
    own = {key: values[episode.id] for key, values in attributes.items() if episode.id in values}
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


def _from_prompts(source: Source, maker: _Maker) -> Found:
    """Prompts of a checkpoint without its buffers: those of the same rank; of another world, rank 0 takes all."""
    states = source.states.values() if source.is_identity or source.share.rank == 0 else ()
    entries = [entry for state in states for entry in state.get("unconsumed", [])]
    again = {"status": RETRY, "staleness": 0}
    items = [maker.item(as_fields(e["fields"]), e["metadata"], e["item"] | again, e["volatile"]) for e in entries]
    found = Found(items, source.following, counts={"put_back": len(items)})
    if not source.is_identity:
        _renumber(items, found.following)
    return found


def put_reference(value: Any) -> Any:
    """A new Ray object ref."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise UsageError("the groups hold Ray object refs: call ray.init() first, or restore(..., refs='values')")
    return ray.put(value)
