"""Pure, no I/O: where the files of a LeRobot dataset of version 3 lie, and which columns it counts itself."""

from __future__ import annotations

from archive.fields import Path

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


def place(number: int, chunk_size: int = FILES_A_CHUNK) -> dict[str, int]:
    """The indices that the n-th file of a kind has in its name."""
    return {"chunk_index": number // chunk_size, "file_index": number % chunk_size}


def path_of(feature: str) -> Path:
    """Where a feature lies in the archive: nested at its dots."""
    return tuple(feature.split("."))
