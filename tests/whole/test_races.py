"""Processes commit at the same time, again and again: every commit is there once, and none was overwritten."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

import archive
from archive.testing import steps
from tests.support import servers
from tests.support.backends import Backend, make_backend
from tests.support.processes import FORKSERVER, answers_in_processes
from tests.support.tampering import same

ROUNDS = [30, pytest.param(100, marks=pytest.mark.soak)]
RANKS = ({"rank": 0, "world_size": 2, "session": "job"}, {"rank": 1, "world_size": 2, "session": "job"})
RUNS = ({"run": "left"}, {"run": "right"})
WAIT_S = 30

Acknowledged = list[tuple[int, str, str]]  # number, digest, episode


@pytest.fixture(params=("local", "seaweedfs"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request, request.param, tmp_path)


def commit_many(
    backend: Backend,
    who: Mapping[str, Any],
    side: int,
    rounds: int,
    barrier: Barrier,
    answers: multiprocessing.SimpleQueue[Any],
) -> None:
    """One of the processes: what it was told of each of its commits."""
    servers.set_environment()
    told: Acknowledged = []
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    with arc.writer(**who) as w:
        for i in range(rounds):
            name = w.add_episode(steps(1, side * rounds + i))
            w.flush()
            barrier.wait(WAIT_S)
            commit = w.commit()
            told.append((commit.number, commit.digest, name))
    answers.put((side, told, arc.io_stats().create))


def race(backend: Backend, sides: Sequence[Mapping[str, Any]], rounds: int) -> tuple[list[Acknowledged], int]:
    """What both were told, and how many creates it took."""
    archive.create(backend.url, storage_options=backend.storage_options)
    barrier, answers = FORKSERVER.Barrier(len(sides)), FORKSERVER.SimpleQueue()
    children = [
        FORKSERVER.Process(target=commit_many, args=(backend, who, side, rounds, barrier, answers))
        for side, who in enumerate(sides)
    ]
    run_all(children)
    found = sorted(answers.get() for _ in children)
    answers.close()
    return [told for _, told, _ in found], sum(creates for _, _, creates in found)


def run_all(children: Sequence[BaseProcess]) -> None:
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(2 * WAIT_S)
        assert [child.exitcode for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill()
            child.join()


def raw_commits(backend: Backend) -> list[tuple[int, bytes]]:
    """Number and bytes of every object below commits/, without the code under test."""
    if not backend.is_s3:
        paths = [path for path in Path(backend.url).glob("commits/**/*") if path.is_file()]
        return sorted((int(path.stem), path.read_bytes()) for path in paths)
    client = servers.s3_client(backend.endpoint)
    bucket, folder = backend.place
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{folder}/commits/")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    found = [(int(Path(key).stem), client.get_object(Bucket=bucket, Key=key)["Body"].read()) for key in keys]
    client.close()
    return sorted(found)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("sides", [RUNS, RANKS], ids=["runs", "ranks"])
def test_two_committers(store: Backend, sides: Sequence[Mapping[str, Any]], rounds: int) -> None:
    told, creates = race(store, sides, rounds)
    opening = len({side.get("run", "main") for side in sides})
    raw = raw_commits(store)
    assert [number for number, _ in raw] == list(range(1, opening + 2 * rounds + 1))
    bodies, digests = check_chain(raw)
    assert len({body["transaction"] for body in bodies}) == len(bodies)
    for number, digest, _ in (one for side in told for one in side):  # what was acknowledged is what is there
        assert digests[number] == digest
    assert len({number for side in told for number, _, _ in side}) == 2 * rounds
    assert creates > len(raw) + 10  # they did collide; the rest are claims and looks
    check_episodes(store, told, rounds)


def check_chain(raw: Sequence[tuple[int, bytes]]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Bodies and digests of all commits, each of which names its parent's, and has the marks of those before it."""
    bodies: list[dict[str, Any]] = []
    digests: dict[int, str] = {}
    parent = None
    for number, data in raw:
        line, digest, _ = data.split(b"\n")
        assert hashlib.sha256(line).hexdigest() == digest.decode()
        bodies.append(json.loads(line))
        assert (bodies[-1]["number"], bodies[-1]["parent"]) == (number, parent)
        before = [hashlib.sha256(one["transaction"].encode()).hexdigest()[:6] for one in bodies[:-1]]
        assert bodies[-1].get("recent", []) == before[::-1][:64]
        parent = digests[number] = digest.decode()
    return bodies, digests


def check_episodes(store: Backend, told: Sequence[Acknowledged], rounds: int) -> None:
    arc = archive.open(store.url, storage_options=store.storage_options)
    expected = {name: side * rounds + i for side, mine in enumerate(told) for i, (_, _, name) in enumerate(mine)}
    names = arc.episodes.table["episode_id"].to_pylist()
    assert sorted(names) == sorted(expected)
    read = arc.episodes.read()
    assert all(same(data, steps(1, expected[name])) for name, data in zip(names, read, strict=True))


def commit_with_ids(backend: Backend, side: int, count: int) -> tuple[int, float]:
    """How many requests these commits take, and how long the slowest."""
    servers.set_environment()
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    slowest = 0.0
    with arc.writer(run=f"run-{side}") as w:
        w.add_episode(steps(1), episode_id=f"{side}")
        w.commit()
        before = arc.io_stats()
        for i in range(count):
            w.add_episode(steps(1), episode_id=f"{side}-{i}")
            w.flush()
            began = time.monotonic()
            w.commit()
            slowest = max(slowest, time.monotonic() - began)
        return (arc.io_stats() - before).requests, slowest


def is_prompt(store: Backend, writers: int, count: int) -> bool:
    """True if no commit of writers that each give their own ids took long; how much they write is checked, too."""
    archive.create(store.url, storage_options=store.storage_options)
    found = answers_in_processes(commit_with_ids, [(store, side, count) for side in range(writers)])
    assert sum(requests for requests, _ in found) / (writers * count) <= 20
    assert max(requests for requests, _ in found) / count <= 30
    arc = archive.open(store.url, storage_options=store.storage_options)
    assert max(len(commit.files("segments")) for commit in arc.commits) <= 40
    ids = [f"{side}{i}" for side in range(writers) for i in ("", *(f"-{n}" for n in range(count)))]
    assert sorted(arc.episodes.table["episode_id"].to_pylist()) == sorted(ids)
    slowest, alone = max(seconds for _, seconds in found), commit_with_ids(store, writers, count)[1]
    return slowest <= max(2.0, 4 * writers * alone)


@pytest.mark.parametrize(("writers", "count"), [(4, 6), pytest.param(16, 20, marks=pytest.mark.soak)])
def test_many_writers_of_runs_of_their_own(
    request: pytest.FixtureRequest, tmp_path: Path, writers: int, count: int
) -> None:
    """None starves. A machine that stalls may do so once; a protocol that starves does each time."""
    assert any(is_prompt(make_backend(request, "seaweedfs", tmp_path), writers, count) for _ in range(3))


def open_one(backend: Backend, barrier: Barrier, answers: multiprocessing.SimpleQueue[Any]) -> None:
    servers.set_environment()
    barrier.wait(WAIT_S)
    arc = archive.open(backend.url, storage_options=backend.storage_options, create=True)
    answers.put(arc.id)


def test_many_processes_create_one_archive(store: Backend) -> None:
    barrier, answers = FORKSERVER.Barrier(4), FORKSERVER.SimpleQueue()
    children = [FORKSERVER.Process(target=open_one, args=(store, barrier, answers)) for _ in range(4)]
    run_all(children)
    assert len({answers.get() for _ in children}) == 1
    answers.close()
