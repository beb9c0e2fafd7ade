"""Run as a program: a job is killed at its k-th storage operation, somebody else commits, and the same call goes on.

Usage: python -m tests.support.job_kill '{"url": ..., "options": {...}, "folder": ..., "kills": [0, 5, ...] or null for
all}' Prints one JSON line: what each kill led to. Processes are forked off this one, which has only imported things,
so that many kills take little time.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import archive
from archive import opening
from archive.maintain import verify
from tests.support.kills import at_each, code_of, die_at, forked, killed
from tests.support.processes import import_core

EPISODES, STEPS, BATCH = 8, 3, 2
WIDE = 150_000  # a column of a batch of which is above the size from which on it has a shard of its own


def score(folder: Path, steps: dict[str, Any]) -> dict[str, Any]:
    """The columns of an episode, and a line in a file for each call; it fails at one episode."""
    first = int(steps["reward"][0])
    with (folder / "calls").open("a") as file:
        file.write(f"{first}\n")
    if first == 5:
        raise ValueError("no five")
    wide = {"wide": np.full((STEPS, WIDE), first, "u1")} if folder.name.endswith("wide") else {}
    return {"twice": 2 * steps["reward"], **wide}


def work(arc: archive.Archive, folder: Path, k: int | None = None) -> None:
    names = ["twice", "wide"] if folder.name.endswith("wide") else ["twice"]
    if k is not None:
        die_at(k)
    arc.episodes.map(
        partial(score, folder), ["reward"], names, job="score", batch_size=BATCH, on_error="skip", commit_every="0s",
        max_bytes=2**20,
    )  # fmt: skip


def check(arc: archive.Archive, folder: Path, kills: int) -> None:
    """Each episode has its columns once, and no batch but the one under way at a kill was made twice."""
    for ep, steps in arc.episodes.stream(missing="skip"):
        first = steps["reward"][0]
        assert ("twice" in steps) == (first != 5), ep.id
        assert first == 5 or (steps["twice"] == 2 * steps["reward"]).all()
        assert "wide" not in steps or (steps["wide"] == first).all()
    assert sum(arc.late_fields["length"].to_pylist()) == STEPS * (EPISODES - 1)
    calls = sorted(map(int, (folder / "calls").read_text().split()))
    assert {*calls} == {*range(EPISODES)}
    assert len(calls) <= EPISODES + kills * BATCH, (calls, kills)
    job = arc.jobs["score"]
    assert (job.done, job.total, job.state) == (EPISODES // BATCH, EPISODES // BATCH, "finished")
    assert job.failed == {"e5": "ValueError: no five"}
    assert job.about["committed"] == STEPS * (EPISODES - 1)
    assert verify(arc, deep=True).sound


def go_on(arc: archive.Archive, folder: Path, kills: int) -> int:
    """Commit something else, run the same call to its end, and again; the number of batches that were found done."""
    done = arc.jobs["score"].done if len(arc.jobs) else 0
    arc.label({"e0": {"seen": True}})
    work(arc, folder)
    check(arc.refresh(), folder, kills)
    work(arc, folder)
    check(arc.refresh(), folder, kills)
    arc.prune("0s", force=True, dry_run=False)
    check_pruned(arc.refresh())
    return int(done)


def check_pruned(arc: archive.Archive) -> None:
    """Nothing is left of a job but its records, and of shards only what is read."""
    names = {one.key.rpartition("/")[2].partition("-")[0] for one in arc.storage.scan("jobs")}
    assert names == {"round", "fold", "made", "end"}, names
    late = arc.snapshot.annotations.late
    named = {*late["shard"].to_pylist(), *arc.snapshot.columns(["shard"])["shard"].to_pylist()}
    assert {one.key for one in arc.storage.scan("shards")} == named


def once(url: str, options: dict[str, Any], folder: str, k: int) -> tuple[bool, int]:
    """Whether the job was killed, and how many batches the next call found done."""
    own = Path(f"{folder}-{k}-{'wide' if k % 3 == 2 else 'small'}")
    own.mkdir()

    def opened() -> archive.Archive:
        return opening.open(f"{url}/{k}", storage_options=options)

    def fill() -> None:
        arc = opening.open(f"{url}/{k}", create=True, storage_options=options)
        for first in (0, EPISODES // 2):
            with arc.writer() as w:
                for i in range(first, first + EPISODES // 2):
                    w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"e{i}")

    assert code_of(forked(fill)) == 0
    kills = was_killed = killed(lambda: work(opened(), own, k))
    if was_killed and random.Random(k).random() < 0.3:  # and whoever goes on dies, too
        kills += killed(lambda: work(opened(), own, random.Random(k).randrange(60)))
    done = code_of(forked(lambda: go_on(opened(), own, kills)))
    assert 0 <= done <= EPISODES // BATCH, done
    return was_killed, done


def main() -> None:
    given = json.loads(sys.argv[1])
    import_core()
    at_each(given["kills"], partial(once, given["url"], given["options"], given["folder"]))


if __name__ == "__main__":
    main()
