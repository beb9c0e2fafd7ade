"""What a field costs that comes after its steps: bytes against its own, seconds. `BENCH_STEPS=100000` makes it less."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import numpy as np
import pytest

import archive
from tests.benchmarks import common

STEPS = int(os.environ.get("BENCH_STEPS", 1_000_000))
LENGTH = 1000  # of an episode
TITLE = "late fields"


def measure(steps: int = STEPS) -> Sequence[common.Row]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=os.environ.get("BENCH_FOLDER")) as folder:
        arc = archive.create(folder)
        with arc.writer() as w:
            for _ in range(steps // LENGTH):
                w.add_episode({"reward": rng.random(LENGTH, np.float32)})
        arc.refresh()
        rows = {ep.id: rng.random(LENGTH, np.float32) for ep in arc.episodes}
        before = arc.io_stats()
        seconds = common.timed(lambda: arc.add_fields({"advantage": rows}))
        cost = arc.io_stats() - before
        read_s = common.timed(lambda: arc.episodes.read(["advantage"]))
        plain_s = common.timed(lambda: arc.episodes.read(["reward"]))
    own = sum(values.nbytes for values in rows.values())
    what = f"a float32 field of {steps:,} steps"
    return [
        common.bounded(f"{what}: bytes, against its own", cost.bytes_out / own, most=1.05),
        common.bounded("added", seconds, unit="s", requests=cost.requests),
        common.bounded("read, against a field that came with the steps", read_s / plain_s),
    ]


@pytest.mark.bench
def test_late_fields() -> None:
    common.report(TITLE, measure())


def test_of_few() -> None:
    """What is measured is what it says."""
    assert measure(100_000)[0].met


if __name__ == "__main__":
    common.main(TITLE, measure, {})
