"""The adapter's verbs; what they promise is written in the door of this room."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive import Archive
from archive.adapters import LEAVE_OUT, Array, Imported, about_of, archive_dataset, check_option, episodes_of, row
from archive.adapters.lerobot.columns import Stats, array_of, column_of, tasks_table
from archive.adapters.lerobot.videos import (
    LOSSLESS,
    NAMES,
    PATH,
    Recorder,
    Videos,
    cells_of,
    check_depth,
    frames_of,
    is_picture,
    pictures_of,
    sampled,
)
from archive.base import FieldError, IntegrityError, UpgradeError, UsageError, plainjson
from archive.checkpoint import Checkpoint
from archive.fields import Ragged, Schema, flatten, unflatten
from archive.read import Episodes
from archive.store import Storage

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
    """Add a dataset's episodes, as one checkpoint named after its folder.

    on_video: "decode" makes fields of videos and images, "keep" has each episode's part of a video as it was encoded (and
    images decoded), "skip" leaves them out, "error" refuses a dataset that has some.
    """
    check_option("on_video", on_video, ("error", "skip", "decode", "keep"))
    store = Storage.connect(url, dict(storage_options or {}))
    info = plainjson.parse(store.get(INFO), what=store.full_url(INFO), error=IntegrityError, shape={"features": dict})
    if info.get("codebase_version") != VERSION:
        raise UpgradeError(f"{url} is a LeRobot dataset of version {info.get('codebase_version')}; {VERSION} is read")
    pictures = [n for n, about in info["features"].items() if about["dtype"] in ("video", "image")]
    if pictures and on_video == "error":
        raise UsageError(
            f"{url} has videos or images ({', '.join(pictures)}): on_video='decode' makes fields of them, on_video='skip' "
            "leaves them out"
        )
    read = pictures if on_video in ("decode", "keep") else []
    clips = [n for n in pictures if info["features"][n]["dtype"] == "video"] if on_video == "keep" else []
    check_depth(info["features"], read)
    kept = {n: about for n, about in info["features"].items() if n not in (*pictures, *DERIVED)}
    known = kept | {n: info["features"][n] | ({"kept": True} if n in clips else {}) for n in read}
    about = {k: info.get(k) for k in ("fps", "robot_type", "splits")}
    about |= {"features": known, "left_out": [n for n in pictures if n not in read]}
    episodes = _episodes(store, info, kept, read, clips)
    schema = Schema(axes={"/".join(n.split(".")): "free" for n in clips})
    return archive_dataset(
        arc, name or str(url).rstrip("/").rpartition("/")[2], episodes, {"lerobot": about}, schema, run
    )


def export_dataset(
    source: Any, url: Any, *, fields: Any = None, fps: float | None = None, robot_type: str | None = None,
    video: bool | str | None = None, storage_options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write episodes that have steps as a dataset below an empty folder.

    fields: only these.  fps: steps a second; default is what the import noted, or what the field `timestamp` says.
    video: what fields of uint8 pictures become: True videos without loss, the name of a codec ("libsvtav1", as LeRobot
    records) videos with loss, False images; None what they were in LeRobot, and numbers if they are of another origin.
    """
    noted = about_of(source, "lerobot")
    chosen = episodes_of(source)
    fps = fps or noted.get("fps") or _fps_of(chosen)
    if not fps:
        raise UsageError("how many steps a second? Give fps=; LeRobot's timestamps follow from it")
    store = Storage.connect(url, dict(storage_options or {}))
    if store.exists(INFO):
        raise UsageError(f"{url} has a dataset already; give an empty folder")
    writing = _Writing(store, float(fps), noted, video)
    for episode, steps in chosen.stream(fields, ragged="flat"):
        writing.add(steps, episode.length, episode.metadata.get("tasks", [str(episode.metadata.get("task", ""))]))
    writing.finish(robot_type or noted.get("robot_type"))


def frames(clip: Any) -> Array:
    """(T, height, width, 3) of a field of on_video="keep"."""
    return frames_of(clip)


def _fps_of(episodes: Episodes) -> float | None:
    """Steps a second by the timestamps of the first episode that has several."""
    long = episodes[np.flatnonzero(episodes.table["length"].to_numpy() > 1)][:1]
    if "timestamp" not in long.fields:
        return None
    at_s = long.read(["timestamp"])[0]["timestamp"]
    apart = (float(at_s[-1]) - float(at_s[0])) / (len(at_s) - 1) if np.ndim(at_s) == 1 else 0.0
    fps = 1 / apart if apart > 0 else 0.0
    return float(round(fps)) if abs(fps - round(fps)) < 1e-3 * fps else fps


def _episodes(
    store: Storage, info: dict[str, Any], kept: dict[str, Any], pictures: list[str], clips: list[str]
) -> Iterator[Imported]:
    filmed = [name for name in pictures if info["features"][name]["dtype"] == "video"]
    videos = Videos(store, info, filmed)
    tasks = _table(store, TASKS).to_pydict()
    texts = next(column for name, column in tasks.items() if name != "task_index")
    task_of = dict(zip(tasks["task_index"], texts, strict=True))
    path, data = "", pa.table({})
    for about in _listed(store, info, filmed):
        file = info["data_path"].format(chunk_index=about["data/chunk_index"], file_index=about["data/file_index"])
        if file != path:
            path, data = file, _table(store, file)
            numbers = data["episode_index"].to_numpy()
        rows = np.flatnonzero(numbers == about["episode_index"])
        if len(rows) != about["length"]:
            raise FieldError(f"{path} has {len(rows)} steps of episode {about['episode_index']}, not {about['length']}")
        part = data.slice(int(rows[0]), len(rows)) if len(rows) else data.slice(0, 0)
        steps = {tuple(name.split(".")): array_of(part[name], feature) for name, feature in kept.items()}
        for name in pictures:
            place = tuple(name.split("."))
            if name in clips:
                steps[place] = videos.clip(name, about)
            else:
                steps[place] = videos.frames(name, about) if name in filmed else pictures_of(part[name], name)
        indices = part["task_index"].to_numpy()
        metadata: dict[str, Any] = {"episode_index": about["episode_index"]}
        if len(set(indices.tolist())) > 1:
            steps[("task_index",)] = indices
            metadata["tasks"] = [task_of[i] for i in sorted(set(indices.tolist()))]
        elif len(indices):
            metadata["task"] = task_of[int(indices[0])]
        yield Imported(unflatten(steps), truncated=True, metadata=metadata)


def _listed(store: Storage, info: Mapping[str, Any], filmed: list[str]) -> Iterator[dict[str, Any]]:
    """What is known of each episode, in order."""
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index", *Videos.columns(filmed)]
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


class _Writing:
    """Files of a dataset, one after the other."""

    def __init__(self, store: Storage, fps: float, noted: Mapping[str, Any], video: bool | str | None) -> None:
        self.store, self.fps, self.video = store, fps, video
        self.recorders: dict[str, Recorder] = {}
        self.known = noted.get("features", {})
        self.features: dict[str, Any] = {}
        self.tasks: dict[str, int] = {}
        self.listed: list[dict[str, Any]] = []
        self.pending: list[pa.Table] = []
        self.files = self.frames = self.nbytes = 0
        self.stats: dict[str, Stats] = {}

    def add(self, steps: dict[str, Any], length: int, tasks: list[str]) -> None:
        arrays = _named(steps)
        clips = {name: arrays.pop(name) for name in [n for n in arrays if self.known.get(n, {}).get("kept")]}
        chosen = [self.tasks.setdefault(task, len(self.tasks)) for task in tasks]
        given = arrays.pop("task_index", None)
        within = np.zeros(length, np.int64) if given is None else np.unique(given, return_inverse=True)[1].reshape(-1)
        if int(within.max()) >= len(chosen):
            raise FieldError(
                f"field 'task_index' has {int(within.max()) + 1} tasks, the episode's metadata names {tasks}"
            )
        arrays.setdefault("timestamp", np.arange(length, dtype=np.float32) / np.float32(self.fps))
        arrays = {n: a if isinstance(a, Ragged) else row(a, length, n) for n, a in arrays.items()} | {
            "frame_index": np.arange(length), "episode_index": np.full(length, len(self.listed)),
            "index": np.arange(self.frames, self.frames + length), "task_index": np.array(chosen, np.int64)[within],
        }  # fmt: skip
        kinds = {name: self._picture(name, array) for name, array in arrays.items()}
        self._check(arrays, kinds)
        places = self._places("data") | self._places("meta/episodes", 0)
        for name in (n for n, kind in kinds.items() if kind == "video"):
            places |= self.recorders.setdefault(name, self._recorder(name)).add(arrays[name])
        for name, clip in clips.items():
            places |= self.recorders.setdefault(name, self._recorder(name)).keep(clip, length)
            self.features[name] = {key: value for key, value in self.known[name].items() if key != "kept"}
        columns = {n: cells_of(a) if kinds[n] else column_of(a) for n, a in arrays.items() if kinds[n] != "video"}
        self.pending.append(pa.table(columns))
        self.listed.append(
            {"episode_index": len(self.listed), "tasks": list(tasks), "length": length, "dataset_from_index": self.frames,
             "dataset_to_index": self.frames + length, **places}
        )  # fmt: skip
        self.frames += length
        self.nbytes += self.pending[-1].nbytes
        if self.nbytes >= FILE_BYTES:
            self._flush()

    def _places(self, folder: str, file: int | None = None) -> dict[str, int]:
        number = self.files if file is None else file
        return {f"{folder}/chunk_index": number // FILES_A_CHUNK, f"{folder}/file_index": number % FILES_A_CHUNK}

    def _picture(self, name: str, array: Array | Ragged) -> str | None:
        """ "video" or "image", what a field of pictures is written as; None of what is written as numbers."""
        if isinstance(array, Ragged) or not is_picture(array):
            return None
        known = str(self.known.get(name, {}).get("dtype"))
        if self.video is None:
            return known if known in ("video", "image") else None
        return "video" if self.video else "image"

    def _recorder(self, name: str) -> Recorder:
        return Recorder(self.store, name, self.fps, self.video if isinstance(self.video, str) else LOSSLESS)

    def _check(self, arrays: dict[str, Any], kinds: Mapping[str, str | None]) -> None:
        features = {name: self._feature(name, array) for name, array in arrays.items()}
        for name in (n for n, kind in kinds.items() if kind):
            features[name] = {"dtype": kinds[name], "shape": list(arrays[name].shape[1:]), "names": NAMES}
        self.features = self.features or dict(features)
        features |= {n: f for n, f in self.features.items() if self.known.get(n, {}).get("kept")}
        if odd := [n for n in features.keys() | self.features.keys() if features.get(n) != self.features.get(n)]:
            raise FieldError(f"field {min(odd)!r} differs between episodes in dtype or shape; LeRobot has one kind")
        for name, array in arrays.items():
            if kinds[name]:
                self.stats.setdefault(name, Stats()).add(sampled(array)[..., None, None])
            elif not isinstance(array, Ragged) and array.dtype != object:
                self.stats.setdefault(name, Stats()).add(array.reshape(len(array), -1) if array.ndim == 1 else array)

    def _feature(self, name: str, array: Array | Ragged) -> dict[str, Any]:
        if isinstance(array, Ragged):
            if array.values.ndim > 1:
                raise FieldError(
                    f"field {name!r} has lists of rows of several values, which LeRobot does not; {LEAVE_OUT}"
                )
            return self._feature(name, array.values) | {"shape": [-1]}
        dtype = "string" if array.dtype == object else array.dtype.name
        known = array.dtype.kind in "biuf" and 0 not in array.shape[1:]
        if not known and (dtype != "string" or array.ndim > 1):
            raise FieldError(
                f"field {name!r} of {array.dtype} {list(array.shape[1:])} is no feature that LeRobot knows; {LEAVE_OUT}"
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
        for name, recorder in self.recorders.items():
            recorder.finish()
            if recorder.info:
                self.features[name] = self.features[name] | {"info": recorder.info}
        self._put(EPISODES.format(chunk_index=0, file_index=0), pa.Table.from_pylist(self.listed))
        self._put(TASKS, tasks_table(self.tasks))
        self.store.put("meta/stats.json", json.dumps({n: s.as_json() for n, s in self.stats.items()}).encode())
        count = len(self.listed)
        fps = int(self.fps) if self.fps == int(self.fps) else self.fps
        info = {
            "codebase_version": VERSION, "robot_type": robot_type, "total_episodes": count, "total_frames": self.frames,
            "total_tasks": len(self.tasks), "chunks_size": FILES_A_CHUNK, "data_files_size_in_mb": FILE_BYTES // 1_000_000,
            "video_files_size_in_mb": 200, "fps": fps, "splits": {"train": f"0:{count}"}, "data_path": DATA,
            "video_path": PATH if self.recorders else None, "features": self.features,
        }  # fmt: skip
        self.store.put(INFO, json.dumps(info, indent=4).encode())


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
