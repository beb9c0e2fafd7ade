"""What a share has for one of XTuner's replay buffers: its groups as items, in order, with their ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from archive.adapters import share_buffer
from archive.adapters.xtuner import groups as groups
from archive.adapters.xtuner import storage as storages
from archive.adapters.xtuner.manager import RETRY, as_fields
from archive.adapters.xtuner.rollouts import Classes, Losses, decode
from archive.base import CorruptStateError, NotFoundError, UpgradeError, UsageError, cached_property


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for."""

    put: Callable[[Any], Any]
    tasks: Mapping[str, str]


@dataclass
class Found:
    """Items to fill a buffer with, and what is to be said of them."""

    items: list[Any]
    following: dict[str, int]
    seen: dict[int, storages.Seen] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Source:
    """One buffer of a share, checked before anything is changed."""

    def __init__(self, share: Any, name: str, for_manager: bool) -> None:
        self.share, self.name = share, name
        self.part = share_buffer(share, name)
        self.is_identity = bool(share.plan.is_identity)
        checkpoint = share.plan.checkpoint
        self.archive_id = str(checkpoint.commit.body["archive"])
        self.run, self.progress = checkpoint.run, share.progress
        self.replay_saved = checkpoint.replay_saved
        _ = self.states
        if for_manager:
            _ = self.manager

    @cached_property
    def states(self) -> dict[int, dict[str, Any]]:
        """Source rank -> what it saved."""
        states = {self.share.rank: self.part.state} if self.is_identity else dict(self.part.source_states)
        for rank, state in states.items():
            if not isinstance(state, dict) or "next_uid" not in state:
                raise NotFoundError(
                    f"rank {rank} saved no XTuner replay buffer as {self.name!r}; restore with {{name: object}} to say "
                    "which is meant"
                )
            if state["format"] > 1:
                raise UpgradeError(f"buffer {self.name!r} was saved in format {state['format']}: upgrade this library")
        return states

    @cached_property
    def manager(self) -> dict[str, Any]:
        """The state of the manager; of several, none can be told."""
        (state, *others) = self.states.values()
        if others:
            raise UsageError(
                f"{1 + len(others)} ranks saved a manager each, whose samplers can't be merged: plan with world_size="
                f"{1 + len(others)}, or restore their replay buffers only"
            )
        if "manager" not in state:
            raise UsageError(f"buffer {self.name!r} was saved without a manager: restore manager.replay_buffer")
        return dict(state["manager"])


def read_items(buffer: Any, source: Source, wanted: Wanted) -> Found:
    """The items, made of the classes that the buffer works with."""
    item, classes = storages.buffer_classes(buffer)
    losses = Losses()
    following = {
        "uid": max(s["next_uid"] for s in source.states.values()),
        "timestamp_id": max(s["next_timestamp_id"] for s in source.states.values()),
    }
    if source.replay_saved:
        found = _from_episodes(source, wanted, (item, classes), losses, following)
    else:
        found = _from_prompts(source, wanted, (item, classes), losses, following)
    found.notes += [f"{n} values of {name!r} had no field here" for name, n in losses.fields.items()]
    found.notes += [f"{n} values of class {name!r} stay dicts" for name, n in losses.classes.items()]
    return found


def _from_episodes(
    source: Source, wanted: Wanted, kinds: tuple[type, Classes], losses: Losses, following: dict[str, int]
) -> Found:
    attributes, made = source.part.attributes, []
    ranks = source.part.layout.source_rank.tolist()
    for (episode, fields), rank in zip(source.part.stream(), ranks, strict=True):
        own = _attributes(attributes, episode, source)
        rollouts = decode(fields, episode.metadata, own["rollouts"], kinds[1], wanted.put, losses)
        made.append((own, rank, episode.id, _item(kinds, own, rollouts, own["status"], own["staleness"], wanted)))
    order = list(storages.by_order([(own, rank) for own, rank, _, _ in made]))
    if not source.is_identity:
        _renumber([made[i][3] for i in order], following)
    made = sorted((made[i] for i in order), key=lambda m: int(m[3].uid))
    found = Found([m[3] for m in made], following)
    found.counts["renumbered"] = 0 if source.is_identity else len(made)
    for _, _, name, item in made:
        found.seen[item.uid] = storages.Seen(name, groups.fingerprint(item.item), storages.identity_of(item))
    return found


def _attributes(attributes: Mapping[str, Mapping[str, Any]], episode: Any, source: Source) -> dict[str, Any]:
    if "xtuner" not in episode.metadata or episode.id not in attributes.get("uid", {}):
        raise UsageError(
            f"episode {episode.id!r} of buffer {source.name!r} is no group that was saved with archive.adapters.xtuner"
        )
    if episode.metadata["xtuner"]["format"] > groups.FORMAT:
        raise UpgradeError(f"group {episode.id!r} was saved in a newer format: upgrade this library")
    own = {name: values[episode.id] for name, values in attributes.items() if episode.id in values}
    if len(own["rollouts"]) != episode.length or episode.metadata["size"] != episode.length:
        raise CorruptStateError(
            f"group {episode.id!r} has {episode.length} of {episode.metadata['size']} rollouts: plan with max_episodes=, "
            "which keeps groups whole, rather than capacity="
        )
    return own


def _item(
    kinds: tuple[type, Classes], own: Mapping[str, Any], rollouts: list[Any], status: Any, staleness: int, wanted: Wanted
) -> Any:  # fmt: skip
    return kinds[0](
        item=rollouts, uid=own["uid"], timestamp_id=own["timestamp_id"],
        task_name=wanted.tasks.get(own["task_name"], own["task_name"]), status=kinds[1].named(status), staleness=staleness,
    )  # fmt: skip


def _renumber(items: list[Any], following: dict[str, int]) -> None:
    """Ids of several owners repeat: new ones after all that were given out, in order of time."""
    for item in items:
        for name in following:
            setattr(item, name, following[name])
            following[name] += 1


def _from_prompts(
    source: Source, wanted: Wanted, kinds: tuple[type, Classes], losses: Losses, following: dict[str, int]
) -> Found:
    """Prompts of a checkpoint without its buffers: those of the same rank; of another world, rank 0 takes all."""
    items = []
    states = source.states.values() if source.is_identity or source.share.rank == 0 else ()
    for entry in (e for state in states for e in state.get("unconsumed", [])):
        rollouts = decode(
            as_fields(entry["fields"]), entry["metadata"], entry["volatile"], kinds[1], wanted.put, losses
        )
        items.append(_item(kinds, entry["item"], rollouts, RETRY, 0, wanted))
    if not source.is_identity:
        _renumber(items, following)
    return Found(items, following, counts={"put_back": len(items)})


def put_reference(value: Any) -> Any:
    """A new Ray object ref."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise UsageError("the groups hold Ray object refs: call ray.init() first, or restore(..., refs='values')")
    return ray.put(value)
