"""Adapters: the episodes of ALF, TorchRL and RLinf as what all of them mean: transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.adapters import Array, lookup
from archive.base import FieldError, UsageError
from archive.fields import Path, flatten, unflatten

FIRST, LAST = 0, 2
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


def transitions_of(part: Any) -> Iterator[Transitions]:
    """Of a share's buffer, episode by episode; one of a single ALF step has none."""
    priority = part.columns.get("priority")
    at = 0
    for episode, steps in part.stream():
        column = None if priority is None else np.asarray(priority[at : at + episode.length])
        at += episode.length
        for found in _reader(steps)(steps, column, not episode.complete):
            about = {"model_weights_uuid": episode.model_weights_uuid, "update_count": episode.update_count}
            yield Transitions(**{**vars(found), **about})


def system_of(steps: Mapping[str, Any]) -> str:
    """Which system's fields these are."""
    if any(path[-1] == "step_type" for path, _ in flatten(steps)):
        return "alf"
    if lookup(steps, ("next", "reward")) is not None:
        return "torchrl"
    if "curr_obs" in steps and "actions" in steps:
        return "rlinf"
    raise UsageError(f"these are steps of neither ALF, TorchRL nor RLinf; their fields: {', '.join(sorted(steps))}")


def _reader(steps: Mapping[str, Any]) -> Callable[[Any, Any, bool], Iterator[Transitions]]:
    return {"alf": _of_alf, "torchrl": _of_torchrl, "rlinf": _of_rlinf}[system_of(steps)]


def _of_alf(steps: Mapping[str, Any], priority: Any, unended: bool) -> Iterator[Transitions]:
    """ALF's step has the reward that led to it, so n steps are n - 1 transitions."""
    leaves = {path: leaf for path, leaf in flatten(steps) if isinstance(leaf, np.ndarray)}
    root = min((path for path in leaves if path[-1] == "step_type"), key=len)[:-1]

    def own(key: str) -> dict[Path, Array]:
        folder = (*root, key)
        return {path[len(folder) :]: leaf for path, leaf in leaves.items() if path[: len(folder)] == folder}

    kinds, reward, seen = own("step_type")[()], own("reward").get(()), own("observation")
    done = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == "action"}
    if reward is None or not seen or not done:
        raise FieldError(
            f"ALF's steps need reward, observation and action; there are: {', '.join(map('/'.join, leaves))}"
        )
    if len(kinds) < 2:
        return
    last = kinds[1:] == LAST
    terminated = last & (own("discount").get((), np.ones(len(kinds)))[1:] == 0)
    truncated, closed = last & ~terminated, not bool(last[-1])
    truncated[-1] |= closed
    yield Transitions(
        {p: leaf[:-1] for p, leaf in seen.items()}, {p: leaf[1:] for p, leaf in seen.items()},
        {p: leaf[:-1] for p, leaf in done.items()}, reward[1:], terminated, truncated, closed,
        None if priority is None else priority[:-1],
    )  # fmt: skip


def _of_torchrl(steps: Mapping[str, Any], priority: Any, unended: bool) -> Iterator[Transitions]:
    """What is in the root and below "next" is what was seen."""
    after = {path: leaf for path, leaf in flatten(steps["next"]) if isinstance(leaf, np.ndarray)}
    leaves = {path: leaf for path, leaf in flatten(steps) if isinstance(leaf, np.ndarray)}
    seen = {path: leaf for path, leaf in after.items() if path in leaves and path[-1] not in NOT_SEEN}
    done = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == "action"}
    if not seen or not done:
        raise FieldError(
            f"TorchRL's steps need an observation and an action; there are: {', '.join(map('/'.join, leaves))}"
        )
    length = len(after[("reward",)])
    flags = {name: _flag(after.get((name,)), length) for name in ("done", "terminated", "truncated")}
    terminated = flags["terminated"] if ("terminated",) in after else flags["done"] & ~flags["truncated"]
    truncated = flags["truncated"] | (flags["done"] & ~terminated)
    closed = bool(length) and not bool((terminated | truncated)[-1])
    if closed:
        truncated[-1] = True
    names = _without_folder(seen)
    yield Transitions(
        {names[p]: leaves[p] for p in seen}, {names[p]: seen[p] for p in seen}, done, after[("reward",)], terminated,
        truncated, closed, priority,
    )  # fmt: skip


def _of_rlinf(steps: Mapping[str, Any], priority: Any, unended: bool) -> Iterator[Transitions]:
    """A trajectory's envs one after the other."""
    rewards = steps["rewards"]
    length, envs = rewards.shape[:2]
    now, after = dict(flatten(steps["curr_obs"])), dict(flatten(steps["next_obs"]))
    flags = {name: steps.get(name) for name in ("terminations", "truncations")}
    for env in range(envs):
        ends = {name: _flag(None if v is None else v[len(v) - length :, env], length) for name, v in flags.items()}
        closed = not bool(ends["terminations"][-1] | ends["truncations"][-1])
        ends["truncations"][-1] |= closed
        yield Transitions(
            {path: leaf[:, env] for path, leaf in now.items()}, {path: leaf[:, env] for path, leaf in after.items()},
            {(): steps["actions"][:, env]}, rewards[:, env], ends["terminations"], ends["truncations"], closed,
        )  # fmt: skip


def _flag(values: Any, length: int) -> Array:
    """(T,) bool; a fresh array."""
    if values is None:
        return np.zeros(length, bool)
    flags: Array = np.logical_or.reduce(np.asarray(values).reshape(length, -1) != 0, axis=1)
    return flags


def _without_folder(paths: Mapping[Path, Any]) -> dict[Path, Path]:
    """`observation` is what ALF calls so too: its name is no part of what lies in it."""
    inside = all(path[0] == "observation" for path in paths)
    return {path: path[1:] if inside else path for path in paths}


def nest_of(leaves: Mapping[Path, Array], convert: Callable[[Array], Any]) -> Any:
    """An array where there is but one without a name, else a nest."""
    return convert(leaves[()]) if () in leaves else unflatten({path: convert(leaf) for path, leaf in leaves.items()})
