"""Adapters: the episodes of ALF, TorchRL and RLinf as what all of them mean: transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archive.adapters.alf import LAST
from archive.base import FieldError, UsageError
from archive.fields import Array, Path, flatten, leaves, lookup, unflatten

Leaves = dict[Path, Array]
NOT_SEEN = ("reward", "done", "terminated", "truncated")


@dataclass(frozen=True)
class Transitions:
    """Consecutive transitions of one episode: in `observation`, `action` was taken, `reward` and `next` came of it."""

    observation: dict[Path, Array]  # () for an array without a name; (T, ...) each
    following: dict[Path, Array]
    action: dict[Path, Array]
    reward: Array  # (T, ...)
    terminated: Array  # (T,) bool
    truncated: Array  # (T,) bool
    closed: bool  # the last one is truncated here, and was not
    priority: Array | None = None  # (T,)
    model_weights_uuid: str | None = None
    update_count: int | None = None

    @property
    def length(self) -> int:
        return len(self.reward)

    def part(self, which: slice) -> Transitions:
        """Some of them."""
        rows = ("reward", "terminated", "truncated", *(["priority"] if self.priority is not None else []))
        cut: dict[str, Any] = {name: getattr(self, name)[which] for name in rows}
        fields: dict[str, Any] = {
            name: _each(getattr(self, name), which) for name in ("observation", "following", "action")
        }
        return replace(self, **cut, **fields)


def transitions_of(part: Any) -> Iterator[Transitions]:
    """Of a share's buffer, episode by episode; one of a single ALF step has none."""
    priority = part.columns.get("priority")
    at = 0
    for episode, steps in part.stream():
        column = None if priority is None else np.asarray(priority[at : at + episode.length])
        at += episode.length
        for found in _READERS[system_of(steps)](leaves(steps), column):
            yield replace(found, model_weights_uuid=episode.model_weights_uuid, update_count=episode.update_count)


def system_of(steps: Mapping[str, Any]) -> str:
    """Which system's fields these are."""
    if any(path[-1] == "step_type" for path, _ in flatten(steps)):
        return "alf"
    if lookup(steps, ("next", "reward")) is not None:
        return "torchrl"
    if "curr_obs" in steps and "actions" in steps:
        return "rlinf"
    raise UsageError(f"these are steps of neither ALF, TorchRL nor RLinf; their fields: {', '.join(sorted(steps))}")


def _of_alf(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """ALF's step has the reward that led to it, so n steps are n - 1 transitions."""
    root = min((path for path in steps if path[-1] == "step_type"), key=len)[:-1]
    seen, done = _below(steps, (*root, "observation")), _below(steps, ("action",))
    kinds, reward = steps[*root, "step_type"], steps.get((*root, "reward"))
    if reward is None or not seen or not done:
        raise FieldError(f"ALF's steps need reward, observation and action; there are: {_listed(steps)}")
    if len(kinds) < 2:
        return
    last = kinds[1:] == LAST
    terminated = last & (steps.get((*root, "discount"), np.ones(len(kinds)))[1:] == 0)
    truncated, closed = last & ~terminated, not bool(last[-1])
    truncated[-1] |= closed
    now, later = slice(None, -1), slice(1, None)
    yield Transitions(
        _each(seen, now), _each(seen, later), _each(done, now), reward[1:], terminated, truncated, closed,
        None if priority is None else priority[:-1],
    )  # fmt: skip


def _of_torchrl(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """What is in the root and below "next" is what was seen."""
    after = _below(steps, ("next",))
    seen = [path for path in after if path in steps and path[-1] not in NOT_SEEN]
    done = _below(steps, ("action",))
    if not seen or not done:
        raise FieldError(f"TorchRL's steps need an observation and an action; there are: {_listed(steps)}")
    length = len(after[("reward",)])
    flags = {name: _flag(after.get((name,)), length) for name in ("done", "terminated", "truncated")}
    terminated = flags["terminated"] if ("terminated",) in after else flags["done"] & ~flags["truncated"]
    truncated = flags["truncated"] | (flags["done"] & ~terminated)
    closed = bool(length) and not bool((terminated | truncated)[-1])
    if closed:
        truncated[-1] = True
    inside = all(path[0] == "observation" for path in seen)  # as ALF calls it, too: no part of the names in it
    names = {path: path[1:] if inside else path for path in seen}
    yield Transitions(
        {name: steps[p] for p, name in names.items()}, {name: after[p] for p, name in names.items()}, done,
        after[("reward",)], terminated, truncated, closed, priority,
    )  # fmt: skip


def _of_rlinf(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """A trajectory's envs one after the other."""
    rewards = steps[("rewards",)]
    length, envs = rewards.shape[:2]
    now, after = _below(steps, ("curr_obs",)), _below(steps, ("next_obs",))
    for env in range(envs):
        own: Any = (slice(None), env)
        flags = {name: steps.get((name,)) for name in ("terminations", "truncations")}
        ends = {name: _flag(None if v is None else v[len(v) - length :, env], length) for name, v in flags.items()}
        closed = not bool(ends["terminations"][-1] | ends["truncations"][-1])
        ends["truncations"][-1] |= closed
        yield Transitions(
            _each(now, own), _each(after, own), {(): steps[("actions",)][own]}, rewards[own], ends["terminations"],
            ends["truncations"], closed,
        )  # fmt: skip


_READERS = {"alf": _of_alf, "torchrl": _of_torchrl, "rlinf": _of_rlinf}


def _below(steps: Leaves, folder: Path) -> Leaves:
    """The arrays in a folder by their paths in it; () for one that has its name."""
    n = len(folder)
    return {path[n:]: leaf for path, leaf in steps.items() if path[:n] == folder and isinstance(leaf, np.ndarray)}


def _each(fields: Leaves, which: Any) -> Leaves:
    return {path: leaf[which] for path, leaf in fields.items()}


def _listed(steps: Leaves) -> str:
    return ", ".join(map("/".join, steps))


def _flag(values: Any, length: int) -> Array:
    """(T,) bool; a fresh array."""
    if values is None:
        return np.zeros(length, bool)
    flags: Array = np.logical_or.reduce(np.asarray(values).reshape(length, -1) != 0, axis=1)
    return flags


def nest_of(leaves: Mapping[Path, Array], convert: Callable[[Array], Any]) -> Any:
    """An array where there is but one without a name, else a nest."""
    return convert(leaves[()]) if () in leaves else unflatten({path: convert(leaf) for path, leaf in leaves.items()})
