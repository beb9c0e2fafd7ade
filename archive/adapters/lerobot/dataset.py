"""LeRobot datasets into an archive, and episodes as a LeRobot dataset."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive import Archive
from archive.adapters import (
    LEAVE_OUT,
    Array,
    Imported,
    Report,
    Source,
    about_of,
    archive_dataset,
    check_option,
    episodes_of,
    reading,
    row,
)
from archive.adapters.lerobot import files
from archive.adapters.lerobot.files import Instructions, Names, Stats
from archive.adapters.lerobot.videos import (
    LOSSLESS,
    NAMES,
    Recorder,
    Videos,
    cells_of,
    check_depth,
    filmed,
    frames,
    is_picture,
    pictures_of,
    sampled,
)
from archive.adapters.video import decode, is_packets
from archive.base import FieldError, IntegrityError, UpgradeError, UsageError, cached_property, check_file_name, records
from archive.checkpoint import Checkpoint
from archive.fields import Ragged, Schema, unflatten
from archive.jobs import Crew, Progress
from archive.read import Episodes
from archive.store import Storage

FILE_BYTES = 100 * 1000 * 1000
_MOST_ROWS = 1 << 20  # of a row group, as Arrow writes them
Columns = dict[str, Any]  # feature -> (T, ...) array, or Ragged

# -- import ------------------------------------------------------------------------------------------------------------


def import_dataset(
    url: Any, arc: Archive, *, name: str | None = None, run: str = "main", on_video: str = "error",
    storage_options: Mapping[str, Any] | None = None, engine: str = "local", job: str | None = None,
    workers: int | None = None, num_cpus: float | None = None, progress: Progress | bool = False,
) -> Checkpoint:  # fmt: skip
    """Add a dataset's episodes, as one checkpoint named after its folder.

    on_video: "decode" makes fields of videos and images, "keep" has each episode's part of a video as it was encoded
    (and images decoded), "skip" leaves them out, "error" refuses a dataset that has some.
    engine, workers, num_cpus: as of `episodes.map`.  job: a name under which staged episodes are kept: after whatever
    stopped it, the same call goes on.  progress: as of `episodes.map`.
    """
    check_option("on_video", on_video, ("error", "skip", "decode", "keep"))
    store = Storage.connect(url, storage_options)
    where = store.full_url(files.INFO)
    info = records.parse_object(store.get(files.INFO), what=where, error=IntegrityError)
    if not isinstance(info.get("features"), dict):
        raise IntegrityError(f"{where} is not what it should be (it names no features): it is damaged")
    if info.get("codebase_version") != files.VERSION:
        raise UpgradeError(
            f"{url} is a LeRobot dataset of version {info.get('codebase_version')}; {files.VERSION} is read"
        )
    files.Info.from_json(info, what=where, error=IntegrityError)
    features = info["features"]
    pictures = [name for name, about in features.items() if about["dtype"] in ("video", "image")]
    if pictures and on_video == "error":
        raise UsageError(
            f"{url} has videos or images ({', '.join(pictures)}): on_video='decode' makes fields of them, "
            "on_video='skip' leaves them out"
        )
    read = pictures if on_video in ("decode", "keep") else []
    clips = [name for name in read if features[name]["dtype"] == "video"] if on_video == "keep" else []
    check_depth(features, read)
    numbers = {name: about for name, about in features.items() if name not in (*pictures, *files.DERIVED)}
    noted = numbers | {name: features[name] | ({"kept": True} if name in clips else {}) for name in read}
    about = {key: info.get(key) for key in ("fps", "robot_type", "splits")}
    about |= {"features": noted, "left_out": [name for name in pictures if name not in read]}
    source = _Folder(str(url), store, info, numbers, read, clips)
    schema = Schema(axes=dict.fromkeys(map(files.path_of, clips), "free"))
    given_name = name or str(url).rstrip("/").rpartition("/")[2]
    work: dict[str, Any] = {"crew": Crew(engine, workers, num_cpus), "job": job, "progress": progress}
    return archive_dataset(arc, given_name, source, {"lerobot": about}, schema, run, **work)


class _Folder(Source):
    """A dataset, with these features; of `pictures` those in `clips` as they were encoded."""

    def __init__(
        self,
        where: str,
        store: Storage,
        info: Mapping[str, Any],
        numbers: Mapping[str, Any],
        pictures: list[str],
        clips: list[str],
    ) -> None:
        self.where = where
        self.terms = {"features": sorted([*numbers, *pictures]), "kept": clips}
        self._given = where, store, info, numbers, pictures, clips
        self._store, self._info = store, info
        self._features, self._pictures, self._clips = numbers, pictures, clips
        self._films = [name for name in pictures if info["features"][name]["dtype"] == "video"]
        self._data: tuple[str, pa.Table] = "", pa.table({})  # the file that was read last

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given

    @cached_property
    def _listed(self) -> list[dict[str, Any]]:
        columns = [f"videos/{name}/{column}" for name in self._films for column in Videos.COLUMNS]
        with reading(self.where):
            return list(_listed(self._store, self._info, columns))

    @cached_property
    def _videos(self) -> Videos:
        return Videos(self._store, self._info)

    @cached_property
    def _task_of(self) -> dict[int, str]:
        return _tasks(self._store)

    def sizes(self) -> list[int]:
        known = [self._info["features"][name] for name in (*self._features, *self._pictures)]
        a_step = sum(8 * math.prod(max(1, int(n)) for n in feature["shape"]) for feature in known)
        return [a_step * int(one["length"]) for one in self._listed]

    def groups(self) -> list[int]:
        size = int(self._info.get("chunks_size") or files.FILES_A_CHUNK)
        return [one["data/chunk_index"] * size + one["data/file_index"] for one in self._listed]

    def read(self, episodes: Sequence[int]) -> Iterator[Imported]:
        for about in (self._listed[i] for i in episodes):
            place = {"chunk_index": about["data/chunk_index"], "file_index": about["data/file_index"]}
            file = files.filled(self._info.get("data_path"), **place)
            if file != self._data[0]:
                self._data = file, _table(self._store, file)
            yield self._episode(about, _rows_of(self._data[1], about, file))

    def _episode(self, about: Mapping[str, Any], rows: pa.Table) -> Imported:
        steps = {files.path_of(name): files.array_of(rows[name], feature) for name, feature in self._features.items()}
        for name in self._pictures:
            film = name in self._films
            shown = self._videos.read(name, about, keep=name in self._clips) if film else pictures_of(rows[name], name)
            steps[files.path_of(name)] = shown
        indices = rows["task_index"].to_numpy()
        tasks = [self._task_of[i] for i in sorted(set(indices.tolist()))]
        metadata: dict[str, Any] = {"episode_index": about["episode_index"]}
        if len(tasks) > 1:
            steps[("task_index",)] = indices
            metadata["tasks"] = tasks
        elif tasks:
            metadata["task"] = tasks[0]
        return Imported(unflatten(steps), truncated=True, metadata=metadata)


def _tasks(store: Storage) -> dict[int, str]:
    """Task's index -> its text."""
    columns = _table(store, files.TASKS).to_pydict()
    texts = next((column for name, column in columns.items() if name != "task_index"), None)
    if texts is None:
        raise IntegrityError(f"{store.full_url(files.TASKS)} has no texts of tasks")
    return dict(zip(columns["task_index"], texts, strict=True))


def _rows_of(data: pa.Table, about: Mapping[str, Any], path: str) -> pa.Table:
    """The steps of one episode in a file."""
    rows = np.flatnonzero(data["episode_index"].to_numpy() == about["episode_index"])
    if len(rows) != about["length"]:
        raise FieldError(f"{path} has {len(rows)} steps of episode {about['episode_index']}, not {about['length']}")
    return data.slice(int(rows[0]) if len(rows) else 0, len(rows))


def _listed(store: Storage, info: Mapping[str, Any], more: list[str]) -> Iterator[dict[str, Any]]:
    """The row that the dataset's table has of each episode, in order."""
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index", *more]
    size, found = int(info.get("chunks_size") or files.FILES_A_CHUNK), 0
    for number in itertools.count():
        key = files.EPISODES.format(**files.place(number, size))
        if not store.exists(key):
            break
        rows = _table(store, key, columns).to_pylist()
        found += len(rows)
        yield from rows
    if found != info.get("total_episodes", found):
        raise FieldError(f"the dataset should have {info['total_episodes']} episodes, its files list {found}")


def _table(store: Storage, key: str, columns: list[str] | None = None) -> pa.Table:
    file = pq.ParquetFile(io.BytesIO(store.get(key)))
    if file.metadata.num_rows > _MOST_ROWS * file.num_row_groups:
        raise IntegrityError(f"{store.full_url(key)} says that it has {file.metadata.num_rows} rows: it is damaged")
    return file.read(columns=columns)


# -- export ------------------------------------------------------------------------------------------------------------


def export_dataset(
    source: Any,
    url: Any,
    *,
    fields: Any = None,
    fps: float | None = None,
    robot_type: str | None = None,
    video: bool | str | None = None,
    task: str | None = None,
    rename: Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
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
    if store.exists(files.INFO):
        raise UsageError(f"{url} has a dataset already; give an empty folder")
    made = _Export(store, float(fps), noted.get("features", {}), video)
    instructions, names = Instructions(task), Names(rename or {}, chosen)
    for episode, steps in chosen.stream(fields, ragged="flat"):
        made.add(names.named(steps), episode.length, instructions.of(episode))
    made.finish(robot_type or noted.get("robot_type"))
    return Report(len(made.listed), made.steps, notes=instructions.notes())


def _fps_of(episodes: Episodes) -> float | None:
    """Steps a second by the timestamps of the first episode that has several."""
    long = episodes[np.flatnonzero(episodes.lengths() > 1)][:1]
    if "timestamp" not in long.fields:
        return None
    at_s = long.read(["timestamp"])[0]["timestamp"]
    apart = (float(at_s[-1]) - float(at_s[0])) / (len(at_s) - 1) if np.ndim(at_s) == 1 else 0.0
    fps = 1 / apart if apart > 0 else 0.0
    return float(round(fps)) if abs(fps - round(fps)) < 1e-3 * fps else fps


class _Export:
    """A dataset that is written, one file after the other."""

    def __init__(self, store: Storage, fps: float, known: Mapping[str, Any], video: bool | str | None) -> None:
        self._store = store
        self._fps = fps
        self._known = known  # features as an import noted them
        self._video = video
        self._recorders: dict[str, Recorder] = {}
        self._features: dict[str, Any] = {}
        self._stats: dict[str, Stats] = {}
        self._tasks: dict[str, int] = {}
        self._pending: list[pa.Table] = []  # of the file that is not full
        self._files = 0
        self.listed: list[dict[str, Any]] = []  # a row an episode
        self.steps = 0

    def add(self, arrays: Columns, length: int, tasks: list[str]) -> None:
        """Append one episode."""
        clips = {name: clip for name in [*arrays] if (clip := self._clip(name, arrays)) is not None}
        columns = self._counted(arrays, length, tasks)
        features = {name: self._feature(name, array) for name, array in columns.items()}
        features |= {name: feature for name, (_, feature) in clips.items()}
        self._check(features)
        places = {f"data/{key}": value for key, value in files.place(self._files).items()}
        places |= {f"meta/episodes/{key}": value for key, value in files.place(0).items()}
        cells = {}
        for name, array in columns.items():
            dtype = features[name]["dtype"]
            if dtype == "video":
                places |= self._recorder(name).add(array)
            else:
                cells[name] = cells_of(array) if dtype == "image" else files.column_of(array)
            if dtype in ("video", "image"):
                self._count(name, sampled(array))
            elif not isinstance(array, Ragged) and array.dtype != object:
                self._count(name, array[:, None] if array.ndim == 1 else array)
        for name, (file, _) in clips.items():
            places |= self._recorder(name).keep(file, length)
            self._count(name, sampled(frames(file)))
        self._pending.append(pa.table(cells))
        about = {"episode_index": len(self.listed), "tasks": list(tasks), "length": length}
        extent = {"dataset_from_index": self.steps, "dataset_to_index": self.steps + length}
        self.listed.append(about | extent | places)
        self.steps += length
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
        files.check_times(arrays["timestamp"], self._fps)
        return {n: a if isinstance(a, Ragged) else row(a, length, n) for n, a in arrays.items()} | {
            "frame_index": np.arange(length),
            "episode_index": np.full(length, len(self.listed)),
            "index": np.arange(self.steps, self.steps + length),
            "task_index": indices[within],
        }

    def _feature(self, name: str, array: Array | Ragged) -> dict[str, Any]:
        """The feature that a column is: of numbers, texts or lists, or of pictures that become a "video" or "image"."""
        known = self._known.get(name, {})
        if isinstance(array, Ragged):
            if array.values.ndim > 1:
                raise FieldError(
                    f"field {name!r} has lists of rows of several values, which LeRobot does not; {LEAVE_OUT}"
                )
            return self._plain(name, array.values) | {"shape": [-1]}
        if is_picture(array) and (self._video is not None or known.get("dtype") in ("video", "image")):
            dtype = known["dtype"] if self._video is None else "video" if self._video else "image"
            return {"dtype": dtype, "shape": list(array.shape[1:]), "names": NAMES}
        return self._plain(name, array)

    def _plain(self, name: str, array: Array) -> dict[str, Any]:
        dtype = "string" if array.dtype == object else array.dtype.name
        known = array.dtype.kind in "biuf" and 0 not in array.shape[1:]
        if not known and (dtype != "string" or array.ndim > 1):
            raise FieldError(
                f"field {name!r} of {array.dtype} {list(array.shape[1:])} is no feature that LeRobot knows; {LEAVE_OUT}"
            )
        return {"dtype": dtype, "shape": list(array.shape[1:] or (1,)), "names": self._known.get(name, {}).get("names")}

    def _check(self, features: dict[str, Any]) -> None:
        """FieldError for features that differ between episodes, and for those whose videos can have no folders of
        their own on every file system."""
        self._features = self._features or dict(features)
        if odd := [n for n in features.keys() | self._features.keys() if features.get(n) != self._features.get(n)]:
            raise FieldError(f"field {min(odd)!r} differs between episodes in dtype or shape; LeRobot has one kind")
        alike: dict[str, str] = {}
        for name in (name for name, feature in features.items() if feature["dtype"] == "video"):
            check_file_name(name, "a feature of pictures,")
            if (other := alike.setdefault(name.lower(), name)) != name:
                raise FieldError(
                    f"features {other!r} and {name!r} differ by case only, so their videos meet in one folder"
                )

    def _recorder(self, name: str) -> Recorder:
        if name not in self._recorders:
            codec = self._video if isinstance(self._video, str) else LOSSLESS
            self._recorders[name] = Recorder(self._store, name, self._fps, codec)
        return self._recorders[name]

    def _count(self, name: str, values: Array) -> None:
        self._stats.setdefault(name, Stats()).add(values)

    def _flush(self) -> None:
        if self._pending:
            self._put(files.DATA.format(**files.place(self._files)), pa.concat_tables(self._pending))
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
        self._put(files.EPISODES.format(**files.place(0)), pa.Table.from_pylist(self.listed))
        self._put(files.TASKS, files.tasks_table(self._tasks))
        self._store.put(files.STATS, json.dumps({n: s.as_json() for n, s in self._stats.items()}).encode())
        count = len(self.listed)
        info = {
            "codebase_version": files.VERSION,
            "robot_type": robot_type,
            "total_episodes": count,
            "total_frames": self.steps,
            "total_tasks": len(self._tasks),
            "chunks_size": files.FILES_A_CHUNK,
            "data_files_size_in_mb": FILE_BYTES // 1_000_000,
            "video_files_size_in_mb": 200,
            "fps": int(self._fps) if self._fps.is_integer() else self._fps,
            "splits": {"train": f"0:{count}"},
            "data_path": files.DATA,
            "video_path": files.VIDEOS if self._recorders else None,
            "features": self._features,
        }
        self._store.put(files.INFO, json.dumps(info, indent=4).encode())
