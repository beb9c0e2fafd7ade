"""LeRobot datasets of version 3 (Parquet files and their metadata) into an archive and back; no package needed.

```python
ck = lerobot.import_dataset("pusht", arc, on_video="skip")  # a folder, or any fsspec URL
print(ck.episodes.filter(where="metadata.task = 'push'").table)
lerobot.export_dataset(ck, "pusht-again")  # episodes of another origin: fps=10
```

| of LeRobot | in the archive |
|---|---|
| features of numbers, `observation.state` | fields, nested at the dots: `observation/state`; with `timestamp` |
| `frame_index`, `index`, `episode_index`, `task_index` | derived; an episode's number is in its metadata |
| tasks | `task` in an episode's metadata; where it changes within one, `tasks` and the field `task_index` |
| `fps`, `robot_type`, names of features | progress of the checkpoint that the import makes: `ck.progress["lerobot"]` |
| videos and images | not read: refused, or with on_video="skip" left out and noted |

All episodes count as ended: LeRobot does not say how.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive import plainjson
from archive.adapters._datasets import (
    Array,
    Imported,
    about_of,
    archive_dataset,
    episodes_of,
    row,
    streamed,
)
from archive.adapters.common import check_option
from archive.checkpoints import Checkpoint
from archive.errors import FieldError, IntegrityError, UpgradeError, UsageError
from archive.facade import Archive
from archive.schema import Schema
from archive.storage import Storage
from archive.tree import flatten, unflatten

VERSION = "v3.0"
INFO, TASKS = "meta/info.json", "meta/tasks.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DERIVED = ("frame_index", "episode_index", "index", "task_index")
FILES_A_CHUNK = 1000
FILE_BYTES = 100 * 1000 * 1000


def import_dataset(
    url: Any, arc: Archive, *, name: str | None = None, run: str = "main", on_video: str = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:  # fmt: skip
    """Add a dataset's episodes, as one checkpoint named after its folder.  on_video: "error" or "skip"."""
    check_option("on_video", on_video, ("error", "skip"))
    store = Storage.connect(url, dict(storage_options or {}))
    info = plainjson.parse(store.get(INFO), what=store.full_url(INFO), error=IntegrityError, shape={"features": dict})
    if info.get("codebase_version") != VERSION:
        raise UpgradeError(f"{url} is a LeRobot dataset of version {info.get('codebase_version')}; {VERSION} is read")
    pictures = [n for n, about in info["features"].items() if about["dtype"] in ("video", "image")]
    if pictures and on_video == "error":
        raise UsageError(f"{url} has videos or images ({', '.join(pictures)}), which are not read; on_video='skip'")
    kept = {n: about for n, about in info["features"].items() if n not in (*pictures, *DERIVED)}
    about = {k: info.get(k) for k in ("fps", "robot_type", "splits")} | {"features": kept, "left_out": pictures}
    episodes = _episodes(store, info, kept)
    return archive_dataset(
        arc, name or str(url).rstrip("/").rpartition("/")[2], episodes, {"lerobot": about}, Schema(), run
    )


def export_dataset(
    source: Any, url: Any, *, fps: float | None = None, robot_type: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write episodes that have steps as a dataset below an empty folder.  fps: where the episodes did not come from LeRobot."""
    noted = about_of(source, "lerobot")
    fps = noted.get("fps") if fps is None else fps
    if not fps:
        raise UsageError("how many steps a second? Give fps=; LeRobot's timestamps follow from it")
    store = Storage.connect(url, dict(storage_options or {}))
    if store.exists(INFO):
        raise UsageError(f"{url} has a dataset already; give an empty folder")
    writing = _Writing(store, float(fps), noted)
    for episode, steps in streamed(episodes_of(source)):
        writing.add(steps, episode.length, episode.metadata.get("tasks", [str(episode.metadata.get("task", ""))]))
    writing.finish(robot_type or noted.get("robot_type"))


def _episodes(store: Storage, info: dict[str, Any], kept: dict[str, Any]) -> Iterator[Imported]:
    tasks = _table(store, TASKS).to_pydict()
    texts = next(column for name, column in tasks.items() if name != "task_index")
    task_of = dict(zip(tasks["task_index"], texts, strict=True))
    path, data = "", pa.table({})
    for about in _listed(store, info):
        found = info["data_path"].format(chunk_index=about["data/chunk_index"], file_index=about["data/file_index"])
        if found != path:
            path, data = found, _table(store, found)
            numbers = data["episode_index"].to_numpy()
        rows = np.flatnonzero(numbers == about["episode_index"])
        if len(rows) != about["length"]:
            raise FieldError(f"{path} has {len(rows)} steps of episode {about['episode_index']}, not {about['length']}")
        part = data.slice(int(rows[0]), len(rows)) if len(rows) else data.slice(0, 0)
        steps = {tuple(name.split(".")): _array(part[name], feature) for name, feature in kept.items()}
        indices = part["task_index"].to_numpy()
        metadata: dict[str, Any] = {"episode_index": about["episode_index"]}
        if len(set(indices.tolist())) > 1:
            steps[("task_index",)] = indices
            metadata["tasks"] = [task_of[i] for i in sorted(set(indices.tolist()))]
        elif len(indices):
            metadata["task"] = task_of[int(indices[0])]
        yield Imported(unflatten(steps), truncated=True, metadata=metadata)


def _listed(store: Storage, info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is known of each episode, in order."""
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    size, found = int(info.get("chunks_size") or FILES_A_CHUNK), 0
    for number in itertools.count():
        key = EPISODES.format(chunk_index=number // size, file_index=number % size)
        if not store.exists(key):
            break
        rows = pq.read_table(io.BytesIO(store.get(key)), columns=columns).to_pylist()
        found += len(rows)
        yield from rows
    if found != info.get("total_episodes", found):
        raise FieldError(f"the dataset should have {info['total_episodes']} episodes, its files list {found}")


def _table(store: Storage, key: str) -> pa.Table:
    return pq.read_table(io.BytesIO(store.get(key)))


def _array(column: Any, feature: Mapping[str, Any]) -> Array:
    """(T, ...) of a feature; one number a step where its shape is [1]."""
    if feature["dtype"] == "string":
        return np.array(column.to_pylist(), object)
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    length = len(flat)
    while pa.types.is_nested(flat.type):
        flat = getattr(flat, "storage", flat).flatten()
    shape = tuple(feature["shape"])
    array = np.asarray(flat.to_numpy(zero_copy_only=False)).astype(feature["dtype"], copy=False)
    return array if shape in ((), (1,)) else array.reshape(length, *shape)


class _Writing:
    """Files of a dataset, one after the other."""

    def __init__(self, store: Storage, fps: float, noted: Mapping[str, Any]) -> None:
        self.store, self.fps = store, fps
        self.known = noted.get("features", {})
        self.features: dict[str, Any] = {}
        self.tasks: dict[str, int] = {}
        self.listed: list[dict[str, Any]] = []
        self.pending: list[pa.Table] = []
        self.files = self.frames = self.nbytes = 0
        self.stats: dict[str, _Stats] = {}

    def add(self, steps: dict[str, Any], length: int, tasks: list[str]) -> None:
        arrays = _named(steps)
        chosen = [self.tasks.setdefault(task, len(self.tasks)) for task in tasks]
        given = arrays.pop("task_index", None)
        within = np.zeros(length, np.int64) if given is None else np.unique(given, return_inverse=True)[1].reshape(-1)
        if int(within.max()) >= len(chosen):
            raise FieldError(
                f"field 'task_index' has {int(within.max()) + 1} tasks, the episode's metadata names {tasks}"
            )
        arrays.setdefault("timestamp", np.arange(length, dtype=np.float32) / np.float32(self.fps))
        arrays = {name: row(array, length, name) for name, array in arrays.items()} | {
            "frame_index": np.arange(length), "episode_index": np.full(length, len(self.listed)),
            "index": np.arange(self.frames, self.frames + length), "task_index": np.array(chosen, np.int64)[within],
        }  # fmt: skip
        self._check(arrays)
        self.pending.append(pa.table({name: _column(array) for name, array in arrays.items()}))
        self.listed.append(
            {"episode_index": len(self.listed), "tasks": list(tasks), "length": length, "dataset_from_index": self.frames,
             "dataset_to_index": self.frames + length, **self._places("data"), **self._places("meta/episodes", 0)}
        )  # fmt: skip
        self.frames += length
        self.nbytes += self.pending[-1].nbytes
        if self.nbytes >= FILE_BYTES:
            self._flush()

    def _places(self, folder: str, file: int | None = None) -> dict[str, int]:
        number = self.files if file is None else file
        return {f"{folder}/chunk_index": number // FILES_A_CHUNK, f"{folder}/file_index": number % FILES_A_CHUNK}

    def _check(self, arrays: dict[str, Array]) -> None:
        features = {name: self._feature(name, array) for name, array in arrays.items()}
        self.features = self.features or features
        if odd := [n for n in features.keys() | self.features.keys() if features.get(n) != self.features.get(n)]:
            raise FieldError(f"field {min(odd)!r} differs between episodes in dtype or shape; LeRobot has one kind")
        for name, array in arrays.items():
            if array.dtype != object:
                self.stats.setdefault(name, _Stats()).add(array.reshape(len(array), -1) if array.ndim == 1 else array)

    def _feature(self, name: str, array: Array) -> dict[str, Any]:
        dtype = "string" if array.dtype == object else array.dtype.name
        known = array.dtype.kind in "biuf" and 0 not in array.shape[1:]
        if not known and (dtype != "string" or array.ndim > 1):
            raise FieldError(
                f"field {name!r} of {array.dtype} {list(array.shape[1:])} is no feature that LeRobot knows"
            )
        return {"dtype": dtype, "shape": list(array.shape[1:] or (1,)), "names": self.known.get(name, {}).get("names")}

    def _flush(self) -> None:
        if self.pending:
            place = {key.partition("/")[2]: value for key, value in self._places("data").items()}
            self._put(DATA.format(**place), pa.concat_tables(self.pending))
            self.files, self.nbytes, self.pending = self.files + 1, 0, []

    def _put(self, key: str, table: pa.Table) -> None:
        out = io.BytesIO()
        pq.write_table(table, out)
        self.store.put(key, out.getvalue())

    def finish(self, robot_type: Any) -> None:
        """The metadata, info.json last: without it there is no dataset."""
        self._flush()
        self._put(EPISODES.format(chunk_index=0, file_index=0), pa.Table.from_pylist(self.listed))
        self._put(TASKS, _tasks(self.tasks))
        self.store.put("meta/stats.json", json.dumps({n: s.as_json() for n, s in self.stats.items()}).encode())
        count = len(self.listed)
        fps = int(self.fps) if self.fps == int(self.fps) else self.fps
        info = {
            "codebase_version": VERSION, "robot_type": robot_type, "total_episodes": count, "total_frames": self.frames,
            "total_tasks": len(self.tasks), "chunks_size": FILES_A_CHUNK, "data_files_size_in_mb": FILE_BYTES // 1_000_000,
            "video_files_size_in_mb": 200, "fps": fps, "splits": {"train": f"0:{count}"}, "data_path": DATA,
            "video_path": None, "features": self.features,
        }  # fmt: skip
        self.store.put(INFO, json.dumps(info, indent=4).encode())


class _Stats:
    """Least, greatest, mean and deviation of a feature over all steps."""

    def __init__(self) -> None:
        self.count, self.low, self.high, self.total, self.squares = 0, np.inf, -np.inf, np.float64(0), np.float64(0)

    def add(self, array: Array) -> None:
        values = array.astype(np.float64)
        if not len(values):
            return
        self.count += len(values)
        self.low, self.high = np.minimum(self.low, values.min(0)), np.maximum(self.high, values.max(0))
        self.total, self.squares = self.total + values.sum(0), self.squares + (values**2).sum(0)

    def as_json(self) -> dict[str, Any]:
        mean = self.total / max(1, self.count)
        deviation = np.sqrt(np.maximum(self.squares / max(1, self.count) - mean**2, 0))
        found = {"min": self.low, "max": self.high, "mean": mean, "std": deviation}
        return {name: np.asarray(value).tolist() for name, value in found.items()} | {"count": [self.count]}


def _named(steps: dict[str, Any]) -> dict[str, Any]:
    """Fields by the names that they get; strings as objects."""
    out: dict[str, Any] = {}
    for path, leaf in flatten(steps):
        name = ".".join(path)
        if name in out or name in DERIVED[:3]:
            why = "LeRobot counts it itself" if name in DERIVED else "two fields get that name"
            raise FieldError(f"field {'/'.join(path)!r} would be {name!r}: {why}; rename it or leave it out")
        out[name] = leaf.astype(object) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "U" else leaf
    return out


def _column(array: Array) -> Any:
    if array.dtype == object:
        return pa.array(array.tolist(), pa.string())
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:] if array.shape[1:] != (1,) else ()):
        column = pa.FixedSizeListArray.from_arrays(column, width)
    return column


def _tasks(tasks: Mapping[str, int]) -> pa.Table:
    """As pandas writes a table whose index is the task's text."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    about = {
        "index_columns": ["task"], "column_indexes": [], "pandas_version": "2.0.0",
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
        ],
    }  # fmt: skip
    return table.replace_schema_metadata({"pandas": json.dumps(about)})
