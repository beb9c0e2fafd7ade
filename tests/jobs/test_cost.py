"""The cost of a job on paper: a real job on a store that counts sends the same requests, and writes no more."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.records import MAX_SMALL_BYTES
from archive.jobs import cost, estimate, folds

STEPS, EPISODES = 5, 4


def filled(url: str, shards: int, commits: int, width: int) -> archive.Archive:
    rng, arc = np.random.default_rng(0), archive.create(url)
    with arc.writer() as w:
        for shard in range(shards):
            for i in range(EPISODES):
                w.add_episode({"obs": rng.standard_normal((STEPS, width))}, episode_id=f"e{shard}-{i}")
            w.flush()
            if (shard + 1) % (shards // commits) == 0:
                w.commit()
    return archive.open(url)


def counted(arc: archive.Archive, wide: int) -> dict[str, int]:
    """The requests of a job whose function gives so many values a step."""

    def fn(steps: Mapping[str, Any]) -> dict[str, Any]:
        return {"made": np.random.default_rng(0).standard_normal((len(steps["obs"]), wide))}

    before = arc.io_stats()
    arc.episodes.map(fn, ["obs"], ["made"], job="job", batch_size=EPISODES, commit_every=None)
    return (arc.io_stats() - before).as_dict()


@pytest.mark.parametrize(
    ("shards", "commits", "width", "wide", "folded"),
    [(16, 1, 10, 1, 2048), (16, 4, 10, 1, 4), (6, 6, 10, 1, 1), (8, 2, 10, 30_000, 4), (3, 1, 100_000, 1, 2048)],
)
def test_a_real_job_sends_these_requests(
    shards: int, commits: int, width: int, wide: int, folded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cost, folds):
        monkeypatch.setattr(module, "FOLDED", folded)
    arc = filled(f"memory://cost/{shards}-{commits}-{width}-{wide}-{folded}", shards, commits, width)
    made = STEPS * EPISODES * 8
    told = estimate(
        objects=shards, nbytes=shards * made * width, episodes=shards * EPISODES, workers=1, commits=commits,
        result_bytes=made * wide, commit_every_s=None,
    )  # fmt: skip
    sent = counted(arc, wide)
    assert {verb: sent[verb] for verb in told["requests"]} == told["requests"]
    job = arc.jobs["job"].about
    assert (job["of"], len(job["commits"])) == (told["batches"], told["commits"]) == (shards, ceil(shards / folded))
    check_sizes(arc, told)


def test_a_bucket_gets_the_same(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_endpoint)
    arc = filled("s3://bucket/cost", 12, 3, 10)
    told = estimate(objects=12, nbytes=12, episodes=48, workers=1, commits=3, commit_every_s=None)
    sent = counted(arc, 1)
    assert {verb: sent[verb] for verb in told["requests"]} == told["requests"]


def check_sizes(arc: archive.Archive, told: Mapping[str, Any]) -> None:
    """No object is larger than it was said to be; those of batches not much smaller."""
    stored = {one.key: one.bytes for one in arc.storage.scan("")}
    results = [size for key, size in stored.items() if key.endswith(".zip") and key.startswith("jobs/")]
    folds = [size for key, size in stored.items() if key.startswith("jobs/job/fold-")]
    commits = [size for key, size in stored.items() if key.startswith("commits/")]
    assert max(commits) <= told["bytes of a commit"]
    assert max(folds) <= told["bytes of a fold"]
    assert told["bytes of a result"] / 4 < max(results) <= 4 * told["bytes of a result"]


def test_a_petabyte_has_small_commits() -> None:
    told = estimate(objects=16_000_000, nbytes=10**15, episodes=2 * 10**9, workers=1000, result_bytes=100_000)
    assert told["bytes of a commit"] < 1_000_000
    assert told["bytes of a fold"] < MAX_SMALL_BYTES
    assert told["requests"]["head"] == told["batches"] == 16_000_000
