"""LeRobot datasets into an archive."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from archive import Archive
from archive.adapters import Imported, archive_dataset, check_option
from archive.adapters.lerobot import layout
from archive.adapters.lerobot.columns import array_of
from archive.adapters.lerobot.pictures import check_depth, pictures_of
from archive.adapters.lerobot.videos import Videos
from archive.base import FieldError, IntegrityError, UpgradeError, UsageError, records
from archive.checkpoint import Checkpoint
from archive.fields import Schema, unflatten
from archive.store import Storage

_MOST_ROWS = 1 << 20  # of a row group, as Arrow writes them


def import_dataset(
    url: Any, arc: Archive, *, name: str | None = None, run: str = "main", on_video: str = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:  # fmt: skip
    """Add a dataset's episodes, as one checkpoint named after its folder.

    on_video: "decode" makes fields of videos and images, "keep" has each episode's part of a video as it was encoded
    (and images decoded), "skip" leaves them out, "error" refuses a dataset that has some.
    """
    check_option("on_video", on_video, ("error", "skip", "decode", "keep"))
    store = Storage.connect(url, storage_options)
    where = store.full_url(layout.INFO)
    info = records.parse_object(store.get(layout.INFO), what=where, error=IntegrityError)
    if not isinstance(info.get("features"), dict):
        raise IntegrityError(f"{where} is not what it should be (it names no features): it is damaged")
    if info.get("codebase_version") != layout.VERSION:
        raise UpgradeError(
            f"{url} is a LeRobot dataset of version {info.get('codebase_version')}; {layout.VERSION} is read"
        )
    layout.Info.from_json(info, what=where, error=IntegrityError)
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
    numbers = {name: about for name, about in features.items() if name not in (*pictures, *layout.DERIVED)}
    noted = numbers | {name: features[name] | ({"kept": True} if name in clips else {}) for name in read}
    about = {key: info.get(key) for key in ("fps", "robot_type", "splits")}
    about |= {"features": noted, "left_out": [name for name in pictures if name not in read]}
    episodes = _episodes(store, info, numbers, read, clips)
    schema = Schema(axes=dict.fromkeys(map(layout.path_of, clips), "free"))
    given_name = name or str(url).rstrip("/").rpartition("/")[2]
    return archive_dataset(arc, given_name, episodes, {"lerobot": about}, schema, run, str(url))


def _episodes(
    store: Storage, info: Mapping[str, Any], numbers: Mapping[str, Any], pictures: list[str], clips: list[str]
) -> Iterator[Imported]:
    """Episodes with these features; of `pictures` those in `clips` as they were encoded."""
    filmed = [name for name in pictures if info["features"][name]["dtype"] == "video"]
    videos, task_of = Videos(store, info), _tasks(store)
    path, data = "", pa.table({})
    for about in _listed(store, info, Videos.columns(filmed)):
        place = {"chunk_index": about["data/chunk_index"], "file_index": about["data/file_index"]}
        file = layout.filled(info.get("data_path"), **place)
        if file != path:
            path, data = file, _table(store, file)
        rows = _rows_of(data, about, path)
        steps = {layout.path_of(name): array_of(rows[name], feature) for name, feature in numbers.items()}
        for name in pictures:
            if name in clips:
                found = videos.clip(name, about)
            else:
                found = videos.frames(name, about) if name in filmed else pictures_of(rows[name], name)
            steps[layout.path_of(name)] = found
        indices = rows["task_index"].to_numpy()
        tasks = [task_of[i] for i in sorted(set(indices.tolist()))]
        metadata: dict[str, Any] = {"episode_index": about["episode_index"]}
        if len(tasks) > 1:
            steps[("task_index",)] = indices
            metadata["tasks"] = tasks
        elif tasks:
            metadata["task"] = tasks[0]
        yield Imported(unflatten(steps), truncated=True, metadata=metadata)


def _tasks(store: Storage) -> dict[int, str]:
    """Task's index -> its text."""
    columns = _table(store, layout.TASKS).to_pydict()
    texts = next((column for name, column in columns.items() if name != "task_index"), None)
    if texts is None:
        raise IntegrityError(f"{store.full_url(layout.TASKS)} has no texts of tasks")
    return dict(zip(columns["task_index"], texts, strict=True))


def _rows_of(data: pa.Table, about: Mapping[str, Any], path: str) -> pa.Table:
    """The steps of one episode in a file."""
    rows = np.flatnonzero(data["episode_index"].to_numpy() == about["episode_index"])
    if len(rows) != about["length"]:
        raise FieldError(f"{path} has {len(rows)} steps of episode {about['episode_index']}, not {about['length']}")
    return data.slice(int(rows[0]) if len(rows) else 0, len(rows))


def _listed(store: Storage, info: Mapping[str, Any], more: list[str]) -> Iterator[dict[str, Any]]:
    """What is known of each episode, in order."""
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index", *more]
    size, found = int(info.get("chunks_size") or layout.FILES_A_CHUNK), 0
    for number in itertools.count():
        key = layout.EPISODES.format(**layout.place(number, size))
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
