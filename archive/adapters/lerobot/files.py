"""Pure, no I/O: the paths of a LeRobot dataset's files, the columns of its tables, their statistics, and the names of
its features."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from archive.adapters import Array
from archive.base import Count, FieldError, IntegrityError, Positive, Record, UsageError, show, stored
from archive.fields import Path, Ragged, flatten, to_path
from archive.read import Episode, Episodes

VERSION = "v3.0"
INFO = "meta/info.json"
TASKS = "meta/tasks.parquet"
STATS = "meta/stats.json"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_A_CHUNK = 1000
COUNTED = ("frame_index", "episode_index", "index")
DERIVED = (*COUNTED, "task_index")
_NOTED = ("task", "tasks", "episode_index")  # what an import notes of an episode, and an export makes again
_PLACEHOLDER = re.compile(r"\{(\w+)(?::0?(\d)d)?\}")


@dataclass(frozen=True, slots=True)
class Feature(Record):
    """The entry of a feature in `meta/info.json`."""

    dtype: str
    shape: tuple[int, ...]
    names: Any = stored(None, null=True)
    info: Mapping[str, Any] | None = stored(None, null=True)
    video_info: Mapping[str, Any] | None = stored(None, null=True)


@dataclass(frozen=True, slots=True)
class Info(Record):
    """The content of `meta/info.json` that is relied on."""

    features: Mapping[str, Feature]
    data_path: str
    video_path: str | None = stored(None, null=True)
    fps: float | None = stored(None, null=True)
    total_episodes: Count | None = stored(None, null=True)
    chunks_size: Positive | None = stored(None, null=True)


# -- paths -------------------------------------------------------------------------------------------------------------


def place(number: int, chunk_size: int = FILES_A_CHUNK) -> dict[str, int]:
    """The indices that the n-th file of a kind has in its name."""
    return {"chunk_index": number // chunk_size, "file_index": number % chunk_size}


def filled(template: object, **values: str | int) -> str:
    """The path of a file by a template that a dataset gives; IntegrityError for one that asks for anything else.

    Only `{name}` and `{name:03d}` are known: str.format would look up attributes, and pad to any width.
    """
    rest = _PLACEHOLDER.sub("", template) if isinstance(template, str) else "{"
    asked = set(_PLACEHOLDER.findall(str(template)))
    if "{" in rest or "}" in rest or not {name for name, _ in asked} <= set(values):
        raise IntegrityError(
            f"meta/info.json has paths like {str(template)[:200]!r}, which is none of a LeRobot dataset"
        )
    return _PLACEHOLDER.sub(lambda found: str(values[found[1]]).zfill(int(found[2] or 0)), str(template))


# -- columns -----------------------------------------------------------------------------------------------------------


def array_of(column: Any, feature: Mapping[str, Any]) -> Array | Ragged:
    """(T, ...) of a feature; one number a step where its shape is [1], lists of any length where it is [-1]."""
    kind = np.dtype(object if feature["dtype"] == "string" else feature["dtype"])
    if kind.kind not in "biufO":
        raise FieldError(f"a feature of dtype {feature['dtype']!r:.80} is not read")
    if list(feature["shape"]) == [-1]:
        rows = column.to_pylist()
        return Ragged(np.array([one for row in rows for one in row], kind), np.array([*map(len, rows)], np.int64))
    if feature["dtype"] == "string":
        return np.array(column.to_pylist(), object)
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    length = len(flat)
    while pa.types.is_nested(flat.type):
        flat = getattr(flat, "storage", flat).flatten()
    shape = tuple(feature["shape"])
    array = np.asarray(flat.to_numpy(zero_copy_only=False)).astype(kind, copy=False)
    return array if shape in ((), (1,)) else array.reshape(length, *shape)


def column_of(array: Array | Ragged) -> Any:
    """A column of a row a step: numbers, fixed lists of them, text, or lists of any length."""
    if isinstance(array, Ragged):
        offsets = np.concatenate([[0], np.cumsum(array.lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, column_of(array.values))
    if array.dtype == object:
        return pa.array(array.tolist(), pa.string())
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:] if array.shape[1:] != (1,) else ()):
        column = pa.FixedSizeListArray.from_arrays(column, width)
    return column


def tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """The table of tasks, as pandas writes one whose index is the task's text."""
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
        for name, (kind, numpy_kind) in kinds.items()
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "pandas_version": "2.0.0", "columns": columns}
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


class Stats:
    """Least, greatest, mean and deviation of a feature over all steps."""

    def __init__(self) -> None:
        self._count = 0
        self._low: Any = np.inf
        self._high: Any = -np.inf
        self._sums: Any = np.zeros(2)  # of values, of their squares

    def add(self, array: Array) -> None:
        """Count the values of some steps."""
        values = array.astype(np.float64)
        if not len(values):
            return
        self._count += len(values)
        self._low = np.minimum(self._low, values.min(0))
        self._high = np.maximum(self._high, values.max(0))
        self._sums = self._sums[0] + values.sum(0), self._sums[1] + (values**2).sum(0)

    def as_json(self) -> dict[str, Any]:
        """The statistics as `meta/stats.json` has them."""
        mean, squares = (total / max(1, self._count) for total in self._sums)
        deviation = np.sqrt(np.maximum(squares - mean**2, 0))
        found = {"min": self._low, "max": self._high, "mean": mean, "std": deviation}
        return {name: np.asarray(value).tolist() for name, value in found.items()} | {"count": [self._count]}


def check_times(at_s: Any, fps: float) -> None:
    """FieldError for what is called `timestamp` and is no time since the episode's start, which LeRobot compares with
    its frames."""
    sound = isinstance(at_s, np.ndarray) and at_s.ndim == 1 and at_s.dtype.kind == "f"
    if not sound or not np.abs(at_s - np.arange(len(at_s)) / fps).max(initial=0) <= 0.5 / fps:  # NaN is no time
        raise FieldError(
            f"field 'timestamp' is not the seconds since the episode's start at {fps:g} steps a second, as LeRobot has "
            "them: rename={'timestamp': 'wall_time'}, say, keeps it beside LeRobot's own"
        )


# -- names -------------------------------------------------------------------------------------------------------------


def path_of(feature: str) -> Path:
    """The path of a feature in the archive: nested at its dots."""
    return tuple(feature.split("."))


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
            if why := _refused(name, leaf, taken=name in out):
                remedy = f"rename={{{'/'.join(path)!r}: ...}} gives it another name, fields= leaves it out"
                raise FieldError(f"field {show(path)!r} would be {name!r}: {why}; {remedy}")
            out[name] = leaf.astype(object) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "U" else leaf
        return out

    def _name(self, path: Path) -> str:
        for count in range(len(path), 0, -1):
            if (given := self._given.get(path[:count])) is not None:
                return ".".join([given, *path[count:]])
        return ".".join(path)


def _refused(name: str, leaf: Any, *, taken: bool) -> str | None:
    """The reason why a field cannot be the feature of that name; None if it can."""
    if name in COUNTED:
        return "LeRobot counts it itself"
    if taken:
        return "two fields get that name"
    if "/" in name or "\0" in name:
        return "LeRobot takes no such name"
    numbered = isinstance(leaf, np.ndarray) and leaf.ndim == 1 and leaf.dtype.kind in "iu"
    return "LeRobot has a task's number a step there" if name == "task_index" and not numbered else None


class Instructions:
    """The instruction of each episode, and an account of the metadata that a dataset has no place for."""

    def __init__(self, task: str | None) -> None:
        if task is not None and not task.startswith("metadata."):
            raise UsageError(f"task={task!r}: give where an episode's instruction is, as 'metadata.instruction'")
        self._task = task
        self._keys = (task or "metadata.task").split(".")[1:]
        self._without = 0
        self._left: Counter[str] = Counter()

    def of(self, episode: Episode) -> list[str]:
        """The instructions of an episode."""
        taken = (*_NOTED, self._keys[0]) if self._task else _NOTED
        self._left.update(key for key in episode.metadata if key not in taken)
        if self._task is None and "tasks" in episode.metadata:
            return list(episode.metadata["tasks"])
        found: Any = episode.metadata
        for key in self._keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None and self._task is not None:
            has = ", ".join(map(repr, episode.metadata)) or "none"
            raise FieldError(f"episode {episode.id!r} has no {self._task} ({has} in its metadata); filter it out")
        self._without += found is None
        return ["" if found is None else str(found)]

    def notes(self) -> tuple[str, ...]:
        """Sentences that say which episodes have no instruction, and what was left out."""
        notes = []
        if self._without:
            notes.append(
                f"{self._without} episodes have no task: task='metadata.KEY' names the key of their metadata that is"
            )
        if self._left:
            listed = ", ".join(f"{key!r} of {count}" for key, count in self._left.most_common())
            notes.append(f"left out, as the dataset has no place for it: {listed} episodes' metadata")
        return tuple(notes)
