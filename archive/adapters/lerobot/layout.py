"""Pure, no I/O: where the files of a LeRobot dataset of version 3 lie, and which columns it counts itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from archive.base import Count, IntegrityError, Positive, Record, stored
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


@dataclass(frozen=True, slots=True)
class Feature(Record):
    """What a dataset says of one of its features."""

    dtype: str
    shape: tuple[int, ...]
    names: Any = stored(None, null=True)
    info: Mapping[str, Any] | None = stored(None, null=True)
    video_info: Mapping[str, Any] | None = stored(None, null=True)


@dataclass(frozen=True, slots=True)
class Info(Record):
    """What a dataset says of itself."""

    features: Mapping[str, Feature]
    data_path: str
    video_path: str | None = stored(None, null=True)
    fps: float | None = stored(None, null=True)
    total_episodes: Count | None = stored(None, null=True)
    chunks_size: Positive | None = stored(None, null=True)


def place(number: int, chunk_size: int = FILES_A_CHUNK) -> dict[str, int]:
    """The indices that the n-th file of a kind has in its name."""
    return {"chunk_index": number // chunk_size, "file_index": number % chunk_size}


_PLACEHOLDER = re.compile(r"\{(\w+)(?::0?(\d)d)?\}")


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


def path_of(feature: str) -> Path:
    """Where a feature lies in the archive: nested at its dots."""
    return tuple(feature.split("."))
