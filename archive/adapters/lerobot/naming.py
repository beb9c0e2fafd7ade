"""Pure, no I/O: names of features, instructions of episodes, and an account of what a dataset has no place for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters import Report
from archive.adapters.lerobot.layout import COUNTED
from archive.base import FieldError, UsageError, show
from archive.fields import Path, flatten, to_path
from archive.read import Episode, Episodes

_NOTED = ("task", "tasks", "episode_index")  # what an import notes of an episode, and an export makes again


class Names:
    """Names of features: those that `rename` gives to fields, or to all below one; else a field's keys with dots."""

    def __init__(self, rename: Mapping[str, str], episodes: Episodes) -> None:
        if not isinstance(rename, Mapping) or not all(isinstance(n, str) and n for n in rename.values()):
            raise UsageError(f"rename={rename!r}: give names of features by field, {{'front': 'observation.front'}}")
        self._given: dict[Path, str] = {to_path(field): feature for field, feature in rename.items()}
        paths = [to_path(field) for field in episodes.fields]
        for given in self._given:
            if not any(path[: len(given)] == given for path in paths):
                listed = ", ".join(episodes.fields)
                raise UsageError(f"rename={show(given)!r}: no episode has that field; fields: {listed}")

    def named(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of an episode by their features' names; strings as objects. FieldError for a name that is no
        feature's own."""
        out: dict[str, Any] = {}
        for path, leaf in flatten(steps):
            name = self._name(path)
            if why := _refused(name, leaf, out):
                remedy = f"rename={{{'/'.join(path)!r}: ...}} gives it another name, fields= leaves it out"
                raise FieldError(f"field {show(path)!r} would be {name!r}: {why}; {remedy}")
            out[name] = leaf.astype(object) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "U" else leaf
        return out

    def _name(self, path: Path) -> str:
        for count in range(len(path), 0, -1):
            if (given := self._given.get(path[:count])) is not None:
                return ".".join([given, *path[count:]])
        return ".".join(path)


def _refused(name: str, leaf: Any, taken: Container[str]) -> str | None:
    """The reason why a field cannot be the feature of that name; None if it can."""
    if name in COUNTED:
        return "LeRobot counts it itself"
    if name in taken:
        return "two fields get that name"
    if "/" in name or "\0" in name:
        return "LeRobot takes no such name"
    numbered = isinstance(leaf, np.ndarray) and leaf.ndim == 1 and leaf.dtype.kind in "iu"
    return "LeRobot has a task's number a step there" if name == "task_index" and not numbered else None


def check_times(at_s: Any, fps: float) -> None:
    """FieldError for what is called `timestamp` and is no time since the episode's start, which LeRobot compares with
    its frames."""
    sound = isinstance(at_s, np.ndarray) and at_s.ndim == 1 and at_s.dtype.kind == "f"
    if not sound or not np.abs(at_s - np.arange(len(at_s)) / fps).max(initial=0) <= 0.5 / fps:  # NaN is no time
        raise FieldError(
            f"field 'timestamp' is not the seconds since the episode's start at {fps:g} steps a second, as LeRobot has "
            "them: rename={'timestamp': 'wall_time'}, say, keeps it beside LeRobot's own"
        )


class Account:
    """What was exported, the instruction of each episode, and what the dataset has no place for."""

    def __init__(self, task: str | None) -> None:
        if task is not None and not task.startswith("metadata."):
            raise UsageError(f"task={task!r}: give where an episode's instruction is, as 'metadata.instruction'")
        self._task = task
        self._keys = tuple((task or "metadata.task").split(".")[1:])
        self._episodes = self._steps = self._without = 0
        self._left: Counter[str] = Counter()

    def tasks_of(self, episode: Episode) -> list[str]:
        """The instructions of an episode; its export is noted."""
        self._episodes += 1
        self._steps += episode.length
        taken = (*_NOTED, self._keys[0]) if self._task else _NOTED
        self._left.update(key for key in episode.metadata if key not in taken)
        found = _at(episode.metadata, self._keys)
        if self._task is None and "tasks" in episode.metadata:
            return list(episode.metadata["tasks"])
        if found is None and self._task is not None:
            has = ", ".join(map(repr, episode.metadata)) or "none"
            raise FieldError(f"episode {episode.id!r} has no {self._task} ({has} in its metadata); filter it out")
        self._without += found is None
        return ["" if found is None else str(found)]

    def report(self) -> Report:
        """What was exported, and what was left out."""
        notes = []
        if self._without:
            notes.append(
                f"{self._without} episodes have no task: task='metadata.KEY' names the key of their metadata that is"
            )
        if self._left:
            listed = ", ".join(f"{key!r} of {count}" for key, count in self._left.most_common())
            notes.append(f"left out, as the dataset has no place for it: {listed} episodes' metadata")
        return Report(self._episodes, self._steps, notes=tuple(notes))


def _at(metadata: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        metadata = metadata.get(key) if isinstance(metadata, Mapping) else None
    return metadata
