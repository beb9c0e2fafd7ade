"""kill -9 of a writing process before every change it makes to the store, and after each: nothing is half there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import NotFoundError
from archive.testing import steps
from tests.support import servers
from tests.support.backends import Backend, make_backend
from tests.support.processes import import_core
from tests.support.sampling import ALL, sampled
from tests.support.tampering import same

GROUPS = (("a0", "a1"), ("b0",), ("c0", "c1"))
CHANGES = ("open", "writev", "link", "replace", "unlink", "mkdir")
WAIT_S = 120


def length(name: str) -> int:
    return 3 + int(name[1])


def expected(name: str) -> dict[str, Any]:
    return steps(length(name), ord(name[0]) + int(name[1]))


def add(writer: archive.Writer, names: tuple[str, ...]) -> None:
    for name in names:
        writer.add_episode(expected(name), episode_id=name)


def save(backend: Backend, acknowledge: Callable[[str], None]) -> None:
    """What is killed: two commits and a checkpoint, each acknowledged once it is made."""
    arc = archive.open(backend.url, storage_options=backend.storage_options, create=True)
    with arc.writer(session="killed") as w:
        for group in GROUPS[:2]:
            add(w, group)
            w.commit()
            acknowledge("".join(group))
        add(w, GROUPS[2])
        priority = np.arange(sum(length(name) for group in GROUPS for name in group), dtype=np.float32)
        w.checkpoint(step=7, columns={"priority": priority}, state={"cursor": np.arange(5)}, wait=True)
        acknowledge("".join(GROUPS[2]))


class Fatal:
    """Kills the process at the k-th change that it is about to make, or has made."""

    def __init__(self, at: int, after: bool) -> None:
        self._at, self._after, self._count, self._lock = at, after, 0, threading.Lock()

    def wrap(self, function: Callable[..., Any], counts: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            turn = self._turn() if counts(*args) else False
            if turn and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:  # what was refused has been asked for as well
                if turn:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    def _turn(self) -> bool:
        with self._lock:
            self._count += 1
            return self._count == self._at


def arm_local(fatal: Fatal) -> None:
    """Every system call by which the local driver changes something."""
    counts: dict[str, Callable[..., bool]] = {"open": _opens_for_writing, "writev": _writes_a_document}
    for name in CHANGES:
        setattr(os, name, fatal.wrap(getattr(os, name), counts.get(name, lambda *_: True)))


def _writes_a_document(_: int, parts: Any) -> bool:
    """Commits, claims, tables; not the many parts of a shard."""
    begin = bytes(parts[0][:4])
    return begin[:1] == b"{" or begin == b"PAR1"


def _opens_for_writing(path: Any, flags: int, *_: Any) -> bool:
    return bool(flags & os.O_CREAT)


def arm_remote(fatal: Fatal) -> None:
    """Every request that changes something."""
    from archive.store.drivers.obstore import ObstoreDriver
    from archive.store.drivers.plain import BucketDriver, FsspecDriver
    from archive.store.drivers.s3 import S3Driver

    FsspecDriver.put = fatal.wrap(FsspecDriver.put)  # type: ignore[method-assign]
    BucketDriver.create = fatal.wrap(BucketDriver.create)  # type: ignore[method-assign]
    S3Driver.create = fatal.wrap(S3Driver.create)  # type: ignore[method-assign]
    ObstoreDriver.put = fatal.wrap(ObstoreDriver.put)  # type: ignore[method-assign]
    ObstoreDriver.create = fatal.wrap(ObstoreDriver.create)  # type: ignore[method-assign]


def kill_again_and_again(roots: Mapping[int, Backend], after: bool, logs: Path) -> None:
    """In a process without threads: forks one that saves and dies, for each k, until one lives to the end."""
    import_core()
    servers.set_environment()
    for k, backend in roots.items():
        child = os.fork()
        if child == 0:
            _child(backend, Fatal(k, after), logs / f"{k}.log")
        _, status = os.waitpid(child, 0)
        with (logs / f"{k}.log").open("a") as log:
            print("killed" if os.WIFSIGNALED(status) else "lived", file=log)
        if not os.WIFSIGNALED(status):
            return


def _child(backend: Backend, fatal: Fatal, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write  # not the armed one
    (arm_remote if backend.is_s3 else arm_local)(fatal)
    try:
        save(backend, lambda name: (write(descriptor, f"{name}\n".encode()), None)[1])
    finally:
        os._exit(0)


@pytest.fixture
def numbered(request: pytest.FixtureRequest, tmp_path: Path) -> dict[int, Backend]:
    first = make_backend(request, request.param, tmp_path)
    return {k: replace(first, url=f"{first.url}-{k}") for k in range(1, 1000)}


def killed(numbered: dict[int, Backend], after: bool, logs: Path) -> Iterator[tuple[Backend, list[str]]]:
    """Each archive whose writer was killed, and what had been acknowledged; last the one that lived."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=kill_again_and_again, args=(numbered, after, logs))
    process.start()
    process.join(WAIT_S)
    process.kill()
    for k, backend in numbered.items():
        *told, end = (logs / f"{k}.log").read_text().split()
        yield backend, told
        if end == "lived":
            assert told == ["".join(group) for group in GROUPS]
            assert k > (15 if backend.is_s3 else 50)
            return


# What a system call left behind is what the next one finds; a request is cut off on both sides.
@pytest.mark.parametrize(
    ("numbered", "after", "count"),
    [
        pytest.param("local", False, 3, id="local"),
        pytest.param("local", False, ALL, id="local-all", marks=pytest.mark.soak),
        pytest.param("seaweedfs", False, 2, id="seaweedfs-before"),
        pytest.param("seaweedfs", False, ALL, id="seaweedfs-before-all", marks=pytest.mark.soak),
        pytest.param("seaweedfs", True, 2, id="seaweedfs-after"),
        pytest.param("seaweedfs", True, ALL, id="seaweedfs-after-all", marks=pytest.mark.soak),
    ],
    indirect=["numbered"],
)
def test_killed_at_every_change(numbered: dict[int, Backend], after: bool, count: int, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    seen = set()
    for backend, told in killed(dict(sampled(numbered.items(), count)), after, logs):
        seen.add(check(backend, told))
    assert seen >= {0, 1, 2, 3}


def check(backend: Backend, told: list[str]) -> int:
    """How many groups are visible; they are whole, none that was acknowledged lacks, and the next session goes on."""
    try:
        arc = archive.open(backend.url, storage_options=backend.storage_options)
    except NotFoundError:
        assert told == []
        return -1
    names = tuple(arc.episodes.table["episode_id"].to_pylist())
    visible = next(n for n in range(len(GROUPS) + 1) if names == sum(GROUPS[:n], ()))
    assert visible >= len(told)
    assert all(same(episode.read(), expected(episode.id)) for episode in arc.episodes)
    check_checkpoint(arc, visible)
    if not backend.is_s3 or backend.url.endswith(("2", "5", "8")):  # a third of them, for speed
        next_session(backend, names)
    return visible


def check_checkpoint(arc: archive.Archive, visible: int) -> None:
    latest = arc.checkpoints.latest
    assert (latest is not None) == (visible == len(GROUPS))
    if latest is not None:
        assert latest.whole
        assert latest.column("priority", 0).tolist() == list(range(sum(episode.length for episode in arc.episodes)))
        assert same(latest.state(0), {"cursor": np.arange(5)})


def next_session(backend: Backend, names: tuple[str, ...]) -> None:
    with archive.open(backend.url, storage_options=backend.storage_options).writer(session="next") as w:
        add(w, ("z0",))
    after = archive.open(backend.url, storage_options=backend.storage_options)
    assert after.episodes.table["episode_id"].to_pylist() == [*names, "z0"]
    assert same(after.episodes["z0"].read(), expected("z0"))
    assert after.head.runs["main"].session == "next"
