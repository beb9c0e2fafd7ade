"""A million prompts in a ledger: drawn, sealed, trained on, and loaded again."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "ledger: what becomes of many prompts"
MILLION = int(os.environ.get("BENCH_KEYS", 1_000_000))
CALLS = 10


def _stored(arc: Any) -> int:
    return sum(file.bytes for file in arc.refresh().head.files("ledger"))


def child_write(url: str, keys: str) -> dict[str, float]:
    """Draw, seal and train so many, in calls of a tenth; seconds of the calls, and bytes in the table."""
    import archive

    arc, share = archive.create(url), int(keys) // CALLS
    parts = [[secrets.token_hex(8) for _ in range(share)] for _ in range(CALLS)]
    out: dict[str, float] = {}
    with arc.writer() as w:
        ledger = w.ledger("prompts")
        out["draw_s"] = sum(common.timed(lambda: ledger.draw(part, cursor=part[-1])) for part in parts)  # noqa: B023
        out["commit_drawn_s"] = common.timed(w.commit)
        out["drawn_bytes"] = _stored(arc)
        w.checkpoint(1, wait=True)
        out["seal_s"] = 0.0
        for part in parts:
            rows, ended = np.arange(len(part)), np.ones(len(part), bool)
            w.append({"reward": np.zeros(len(part))}, env_ids=rows, first=ended, last=ended, update_count=3)
            names = w.live["episode_id"].to_pylist()
            w.clear()
            out["seal_s"] += common.timed(lambda: ledger.seal(part, episode_id=names))  # noqa: B023
        w.commit()
        out["sealed_bytes"] = _stored(arc)
        out["train_s"] = sum(common.timed(lambda: ledger.train(part)) for part in parts)  # noqa: B023
        w.commit()
        out["trained_bytes"] = _stored(arc)
        w.checkpoint(2, wait=True)
        out["start_us"] = _started(ledger)
    return out


def _started(ledger: Any, count: int = 2000) -> float:
    """Microseconds of a call for one key, beside all that are there."""
    keys = [f"more-{i}" for i in range(count)]
    ledger.draw(keys)
    return 1e6 / count * common.timed(lambda: [ledger.start(key) for key in keys])


def child_load(url: str, name: str) -> dict[str, float]:
    """Go on from a checkpoint: the first look, a second one, and the memory that is held."""
    import archive
    from archive.ledger import ledger as _  # noqa: F401

    arc = archive.open(url)
    with arc.writer(resume=arc.checkpoints[name]) as w:
        ledger = w.ledger("prompts")
        with common.Peak() as peak:
            first = common.timed(ledger.to_reissue)
        held = (common.resident_bytes() - peak.before) / 1e6
        again = common.timed(ledger.to_reissue)
        counts = common.timed(lambda: ledger.counts)
        return {"first_s": first, "again_s": again, "counts_s": counts, "found": len(ledger.to_reissue()),
                "peak_mb": peak.extra_bytes / 1e6, "held_mb": held}  # fmt: skip


def measure(count: int = MILLION) -> Sequence[common.Row]:
    folder = tempfile.mkdtemp(prefix="bench-")
    url = f"{folder}/archive"
    try:
        made = common.child(__file__, "write", url, count)
        drawn = common.child(__file__, "load", url, "step-1")
        trained = common.child(__file__, "load", url, "step-2")
    finally:
        shutil.rmtree(folder)
    return [
        *(common.bounded(f"{verb} {count:,} keys, in {CALLS} calls", made[f"{verb}_s"], unit="s")
          for verb in ("draw", "seal", "train")),
        common.bounded("start one key", made["start_us"], unit="us"),
        common.bounded("stored a key that is drawn", made["drawn_bytes"] / count, unit="bytes", **made),
        common.bounded("and sealed", made["sealed_bytes"] / count, unit="bytes"),
        common.bounded("and trained on", made["trained_bytes"] / count, unit="bytes"),
        common.bounded(f"load {count:,} in flight, to_reissue()", drawn["first_s"], unit="s", **drawn),
        common.bounded(f"load {count:,} that were trained on", trained["first_s"], unit="s", **trained),
    ]  # fmt: skip


@pytest.mark.bench
def test_ledger() -> None:
    common.report(TITLE, measure())


def test_of_few() -> None:
    """What is measured is what it says."""
    rows = measure(2000)
    assert rows[-2].detail is not None
    assert rows[-2].detail["found"] == 2000
    assert rows[-1].detail is not None
    assert rows[-1].detail["found"] == 0


if __name__ == "__main__":
    common.main(TITLE, measure, {"write": child_write, "load": child_load})
