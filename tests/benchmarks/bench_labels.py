"""Saying something of a million episodes in one commit, and filtering by it."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence

import pytest

try:
    from . import bench_index, common
except ImportError:  # run as a script
    import bench_index  # type: ignore[import-not-found,no-redef]
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "labels: said of many episodes in one commit, and filtered by"
MILLION = int(os.environ.get("BENCH_EPISODES", 1_000_000))
BY_LABEL, BY_COLUMN = "label.quality > 0.5", "return > 0.5"


def child_say(url: str) -> dict[str, float]:
    """Say one thing of each episode by its id; seconds, and bytes that were written."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    import archive
    from archive.read import notes  # noqa: F401

    arc = archive.open(url)
    ids = arc.episodes.table["episode_id"].to_pylist()
    said = {name: {"quality": i / len(ids)} for i, name in enumerate(ids)}
    before = arc.io_stats()
    seconds = common.timed(lambda: arc.label(said, by="anna"))
    used = arc.io_stats() - before
    return {"said_s": seconds, "requests": used.requests}


def child_filter(url: str, repeats: int = 9) -> dict[str, float]:
    """Filter by a label, first and again, and by another column again."""
    import archive

    episodes = archive.open(url).episodes
    episodes.filter(where=BY_COLUMN)
    first = common.timed(lambda: episodes.filter(where=BY_LABEL))
    warm = {
        name: statistics.median(common.timed(lambda: episodes.filter(where=condition)) for _ in range(repeats))  # noqa: B023
        for name, condition in (("label_s", BY_LABEL), ("column_s", BY_COLUMN))
    }
    return {"first_s": first, **warm, "found": len(episodes.filter(where=BY_LABEL))}


def measure(count: int = MILLION) -> Sequence[common.Row]:
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        bench_index.fill(f"{folder}/archive", count, 10)
        said = common.child(__file__, "say", f"{folder}/archive")
        found = common.child(__file__, "filter", f"{folder}/archive")
    finally:
        shutil.rmtree(folder)
    ratio = found["label_s"] / found["column_s"]
    return [
        common.bounded(f"{count:,} labels in a commit", said["said_s"], most=5, unit="s", **said),
        common.bounded(f"filter by a label, the first time, of {count:,}", found["first_s"], unit="s", **found),
        common.bounded("filter by a label, again, against another column", ratio, most=1.5),
    ]


@pytest.mark.bench
def test_labels() -> None:
    common.report(TITLE, measure())


def test_of_few() -> None:
    """What is measured is what it says."""
    rows = measure(2000)
    assert rows[1].detail is not None
    assert rows[1].detail["found"] == 999


if __name__ == "__main__":
    common.main(TITLE, measure, {"say": child_say, "filter": child_filter})
