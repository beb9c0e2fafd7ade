"""Episodes as a LeRobot dataset."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive.adapters import LEAVE_OUT, Array, Report, about_of, episodes_of, row
from archive.adapters.lerobot import layout
from archive.adapters.lerobot.columns import Stats, column_of, tasks_table
from archive.adapters.lerobot.naming import Account, Names, check_times
from archive.adapters.lerobot.pictures import NAMES, cells_of, is_picture, sampled
from archive.adapters.lerobot.videos import LOSSLESS, Recorder, filmed, frames
from archive.adapters.video import decode, is_packets
from archive.base import FieldError, UsageError, check_file_name
from archive.fields import Ragged
from archive.read import Episodes
from archive.store import Storage

FILE_BYTES = 100 * 1000 * 1000
Columns = dict[str, Any]  # feature -> (T, ...) array, or Ragged


def export_dataset(
    source: Any, url: Any, *, fields: Any = None, fps: float | None = None, robot_type: str | None = None,
    video: bool | str | None = None, task: str | None = None, rename: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Write episodes that have steps as a dataset below an empty folder; the report says what was left out.

    fields: only these.  fps: steps a second; default is what the import noted, or what the field `timestamp` says.
    video: what fields of uint8 pictures become: True videos without loss, the name of a codec ("libsvtav1", as LeRobot
    records) videos with loss, False images; None what they were in LeRobot, and numbers if they are of another origin.
    Packets of `archive.adapters.video` become videos as they are encoded, unless a codec or False is given.
    task: where an episode's instruction is, as "metadata.instruction"; default is "metadata.task", or none.
    rename: features' names of fields, or of all fields below one: {"front": "observation.images.front"}.
    """
    noted = about_of(source, "lerobot")
    chosen = episodes_of(source)
    fps = fps or noted.get("fps") or _fps_of(chosen)
    if not fps:
        raise UsageError("how many steps a second? Give fps=; LeRobot's timestamps follow from it")
    store = Storage.connect(url, storage_options)
    if store.exists(layout.INFO):
        raise UsageError(f"{url} has a dataset already; give an empty folder")
    writing = _Writing(store, float(fps), noted.get("features", {}), video)
    account, names = Account(task), Names(rename or {}, chosen)
    for episode, steps in chosen.stream(fields, ragged="flat"):
        writing.add(names.named(steps), episode.length, account.tasks_of(episode))
    writing.finish(robot_type or noted.get("robot_type"))
    return account.report()


def _fps_of(episodes: Episodes) -> float | None:
    """Steps a second by the timestamps of the first episode that has several."""
    long = episodes[np.flatnonzero(episodes.lengths() > 1)][:1]
    if "timestamp" not in long.fields:
        return None
    at_s = long.read(["timestamp"])[0]["timestamp"]
    apart = (float(at_s[-1]) - float(at_s[0])) / (len(at_s) - 1) if np.ndim(at_s) == 1 else 0.0
    fps = 1 / apart if apart > 0 else 0.0
    return float(round(fps)) if abs(fps - round(fps)) < 1e-3 * fps else fps


def _check_folders(names: list[str]) -> None:
    """FieldError for features whose videos can have no folders of their own on every file system."""
    alike: dict[str, str] = {}
    for name in names:
        check_file_name(name, "a feature of pictures,")
        if (other := alike.setdefault(name.lower(), name)) != name:
            raise FieldError(f"features {other!r} and {name!r} differ by case only, so their videos meet in one folder")


class _Writing:
    """Files of a dataset, one after the other."""

    def __init__(self, store: Storage, fps: float, known: Mapping[str, Any], video: bool | str | None) -> None:
        self._store = store
        self._fps = fps
        self._known = known  # features as an import noted them
        self._video = video
        self._recorders: dict[str, Recorder] = {}
        self._features: dict[str, Any] = {}
        self._tasks: dict[str, int] = {}
        self._listed: list[dict[str, Any]] = []  # a row an episode
        self._pending: list[pa.Table] = []  # of the file that is not full
        self._files = 0
        self._frames = 0
        self._stats: dict[str, Stats] = {}

    def add(self, arrays: Columns, length: int, tasks: list[str]) -> None:
        """Append one episode."""
        found = {name: self._clip(name, arrays) for name in [*arrays]}
        clips = {name: clip for name, clip in found.items() if clip is not None}
        columns = self._counted(arrays, length, tasks)
        kinds = {name: self._kind(name, array) for name, array in columns.items()}
        self._check(columns, kinds, {name: feature for name, (_, feature) in clips.items()})
        pictures = {name: columns.pop(name) for name, kind in kinds.items() if kind == "video"}
        _check_folders([*pictures, *clips])
        places = {f"data/{key}": value for key, value in layout.place(self._files).items()}
        places |= {f"meta/episodes/{key}": value for key, value in layout.place(0).items()}
        for name, shown in pictures.items():
            places |= self._recorder(name).add(shown)
        for name, (file, _) in clips.items():
            places |= self._recorder(name).keep(file, length)
            self._stats.setdefault(name, Stats()).add(sampled(frames(file))[..., None, None])
        self._pending.append(pa.table({n: cells_of(a) if kinds[n] else column_of(a) for n, a in columns.items()}))
        self._listed.append(
            {"episode_index": len(self._listed), "tasks": list(tasks), "length": length,
             "dataset_from_index": self._frames,
             "dataset_to_index": self._frames + length, **places}
        )  # fmt: skip
        self._frames += length
        if sum(table.nbytes for table in self._pending) >= FILE_BYTES:
            self._flush()

    def _clip(self, name: str, arrays: Columns) -> tuple[Array, dict[str, Any]] | None:
        """The video of a field that is one already, taken out of the arrays, and the feature that it is; None of any
        other. Packets that are to be pictures or another video are decoded in their place."""
        known = self._known.get(name, {})
        if known.get("kept"):
            return arrays.pop(name), {key: value for key, value in known.items() if key != "kept"}
        if not is_packets(arrays[name]):
            return None
        if self._video in (None, True):
            return filmed(arrays.pop(name), self._fps)
        arrays[name] = decode(arrays[name].split())
        return None

    def _counted(self, arrays: Columns, length: int, tasks: list[str]) -> Columns:
        """The columns, with those that LeRobot counts itself."""
        indices = np.array([self._tasks.setdefault(task, len(self._tasks)) for task in tasks], np.int64)
        given = arrays.pop("task_index", None)
        within = np.zeros(length, np.int64) if given is None else np.unique(given, return_inverse=True)[1].reshape(-1)
        if int(within.max()) >= len(indices):
            raise FieldError(
                f"field 'task_index' has {int(within.max()) + 1} tasks, the episode's metadata names {tasks}"
            )
        arrays.setdefault("timestamp", np.arange(length, dtype=np.float32) / np.float32(self._fps))
        check_times(arrays["timestamp"], self._fps)
        return {n: a if isinstance(a, Ragged) else row(a, length, n) for n, a in arrays.items()} | {
            "frame_index": np.arange(length),
            "episode_index": np.full(length, len(self._listed)),
            "index": np.arange(self._frames, self._frames + length),
            "task_index": indices[within],
        }

    def _kind(self, name: str, array: Array | Ragged) -> str | None:
        """ "video" or "image", what a field of pictures is written as; None of what is written as numbers."""
        if isinstance(array, Ragged) or not is_picture(array):
            return None
        known = str(self._known.get(name, {}).get("dtype"))
        if self._video is None:
            return known if known in ("video", "image") else None
        return "video" if self._video else "image"

    def _recorder(self, name: str) -> Recorder:
        if name not in self._recorders:
            codec = self._video if isinstance(self._video, str) else LOSSLESS
            self._recorders[name] = Recorder(self._store, name, self._fps, codec)
        return self._recorders[name]

    def _check(self, columns: Columns, kinds: Mapping[str, str | None], clips: Mapping[str, dict[str, Any]]) -> None:
        """Refuse features that differ between episodes; take the statistics of the others."""
        features = {name: self._feature(name, array, kinds[name]) for name, array in columns.items()} | dict(clips)
        self._features = self._features or dict(features)
        if odd := [n for n in features.keys() | self._features.keys() if features.get(n) != self._features.get(n)]:
            raise FieldError(f"field {min(odd)!r} differs between episodes in dtype or shape; LeRobot has one kind")
        for name, array in columns.items():
            if kinds[name]:
                self._stats.setdefault(name, Stats()).add(sampled(array)[..., None, None])
            elif not isinstance(array, Ragged) and array.dtype != object:
                self._stats.setdefault(name, Stats()).add(array[:, None] if array.ndim == 1 else array)

    def _feature(self, name: str, array: Array | Ragged, kind: str | None) -> dict[str, Any]:
        if isinstance(array, Ragged):
            if array.values.ndim > 1:
                raise FieldError(
                    f"field {name!r} has lists of rows of several values, which LeRobot does not; {LEAVE_OUT}"
                )
            return self._feature(name, array.values, None) | {"shape": [-1]}
        if kind is not None:
            return {"dtype": kind, "shape": list(array.shape[1:]), "names": NAMES}
        dtype = "string" if array.dtype == object else array.dtype.name
        known = array.dtype.kind in "biuf" and 0 not in array.shape[1:]
        if not known and (dtype != "string" or array.ndim > 1):
            raise FieldError(
                f"field {name!r} of {array.dtype} {list(array.shape[1:])} is no feature that LeRobot knows; {LEAVE_OUT}"
            )
        return {"dtype": dtype, "shape": list(array.shape[1:] or (1,)), "names": self._known.get(name, {}).get("names")}

    def _flush(self) -> None:
        if self._pending:
            self._put(layout.DATA.format(**layout.place(self._files)), pa.concat_tables(self._pending))
            self._files += 1
            self._pending = []

    def _put(self, key: str, table: pa.Table) -> None:
        out = io.BytesIO()
        pq.write_table(table, out)
        self._store.put(key, out.getvalue())

    def finish(self, robot_type: Any) -> None:
        """Write the metadata, info.json last: without it there is no dataset."""
        self._flush()
        for name, recorder in self._recorders.items():
            recorder.finish()
            if recorder.info:
                self._features[name] = self._features[name] | {"info": recorder.info}
        self._put(layout.EPISODES.format(**layout.place(0)), pa.Table.from_pylist(self._listed))
        self._put(layout.TASKS, tasks_table(self._tasks))
        self._store.put(layout.STATS, json.dumps({n: s.as_json() for n, s in self._stats.items()}).encode())
        count = len(self._listed)
        info = {
            "codebase_version": layout.VERSION, "robot_type": robot_type, "total_episodes": count,
            "total_frames": self._frames, "total_tasks": len(self._tasks), "chunks_size": layout.FILES_A_CHUNK,
            "data_files_size_in_mb": FILE_BYTES // 1_000_000, "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps.is_integer() else self._fps, "splits": {"train": f"0:{count}"},
            "data_path": layout.DATA, "video_path": layout.VIDEOS if self._recorders else None,
            "features": self._features,
        }  # fmt: skip
        self._store.put(layout.INFO, json.dumps(info, indent=4).encode())
