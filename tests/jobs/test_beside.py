"""A job beside whoever else is at work on an archive: writers, compactions, forgetting and undo, prunes, another job;
on a local disk and on S3 servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import opening
from archive.errors import ConflictError, MissingObjectError, NotFoundError
from archive.maintain import verify
from tests.support.backends import Backend

STEPS, EPISODES = 4, 16


def opened(backend: Backend) -> archive.Archive:
    return opening.open(backend.url, create=True, storage_options=backend.storage_options)


def add(arc: archive.Archive, name: str, count: int) -> None:
    with arc.writer(run=name) as w:
        for i in range(count):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"{name}-{i}")
            if i % 5 == 4:
                w.commit()
    with arc.writer(run=name):
        pass


def slow(steps: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return {"twice": 2 * steps["reward"]}


def thrice(steps: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(0.005)
    return {"thrice": 3 * steps["reward"]}


def again(
    backend: Backend, action: Callable[[archive.Archive, int], Any], until: threading.Event, errors: list[Any]
) -> None:
    """Do something again and again; conflicts with others are its own to try again."""
    number = 0
    while not until.is_set():
        try:
            action(opened(backend), number)
        except (ConflictError, MissingObjectError, NotFoundError):  # the episode is forgotten already
            pass
        except Exception as e:
            errors.append(e)
        number += 1
        time.sleep(0.02)


def forget_and_undo(arc: archive.Archive, number: int) -> None:
    arc.forget(ids=[f"first-{number % EPISODES}"], dry_run=False)
    time.sleep(0.03)
    if number % 3:
        arc.undo()


ACTIONS: dict[str, Callable[[archive.Archive, int], Any]] = {
    "compact": lambda arc, number: resharding.compact(arc),
    "forget": forget_and_undo,
    "prune": lambda arc, number: arc.prune("2s", force=True, dry_run=False),
    "label": lambda arc, number: arc.label({"first-15": {"n": number}}),
    **{f"write {k}": lambda arc, number, k=k: add(arc, f"w{k}x{number}", 3) for k in range(4)},
    "map": lambda arc, number: arc.episodes.map(
        thrice, ["reward"], ["thrice"], job="other", only="missing", batch_size=5
    ),
}


@pytest.mark.parametrize(
    "backend",
    ["local", *(pytest.param(name, marks=pytest.mark.soak) for name in ("moto", "seaweedfs"))],
    indirect=True,
)
def test_a_job_beside_all_others(backend: Backend) -> None:
    add(opened(backend), "first", EPISODES)
    until, errors = threading.Event(), list[Any]()
    others = [threading.Thread(target=again, args=(backend, one, until, errors)) for one in ACTIONS.values()]
    for thread in others:
        thread.start()
    try:
        for workers in (None, 2):  # the second goes on, or finds it finished
            opened(backend).episodes.map(
                slow, ["reward"], ["twice"], job="score", batch_size=2, commit_every="0s", workers=workers
            )
    finally:
        until.set()
        for thread in others:
            thread.join()
    assert errors == []
    arc = opened(backend)
    job = arc.jobs["score"].about
    assert job["state"] == "finished"
    late = arc.late_fields.to_pylist()
    for ep, steps in arc.episodes.stream(["reward", "twice", "thrice"], missing="skip"):
        for name, times in (("twice", 2), ("thrice", 3)):
            assert name not in steps or (steps[name] == times * steps["reward"]).all(), ep.id
    mine = [row for row in late if row["fields"] == ["twice"]]
    places = [(row["session"], row["env_id"], row["position"]) for row in mine]
    assert len(set(places)) == len(places), "a row twice"
    assert sum(row["length"] for row in mine) <= job["committed"], "rows of what was forgotten since are gone"
    assert job["committed"] + job["forgotten"] >= STEPS * (EPISODES - 1)
    lack = [ep.id for ep in arc.episodes if ep.id.startswith("first-") and "twice" not in ep.read(missing="skip")]
    assert STEPS * len(lack) <= job["forgotten"], "forgotten when it was committed, and brought back"
    assert verify(arc, deep=True).findings == []
