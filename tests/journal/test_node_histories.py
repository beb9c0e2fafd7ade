"""Ranks of one node in any order of what may befall them: late starts, containers of their own, uploads that fail,
land late or hang, deaths, ranks that reach nobody; beside checkpoints, recoveries and prunes. What was acknowledged is
found, once, and who was replaced acknowledges nothing."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.journal import carrier, node
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.nodes import writer

RANKS = 3


class History:
    """A node's ranks, and what they were told is durable. Of each seed the same things are tried."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.arc = fresh()
        self.folders = [folder / name for name in "ab"]
        for one in self.folders:
            one.mkdir()
        self.ws: dict[int, archive.Writer] = {}
        self.dead: set[int] = set()
        self.added: set[str] = set()
        self.acknowledged: set[str] = set()
        self.count = self.step = 0
        self.mood = "well"  # what becomes of objects of the node
        self.go_on = threading.Event()  # of uploads that hang
        self.late: list[Any] = []  # uploads that are to land

    @property
    def living(self) -> list[archive.Writer]:
        return [w for rank, w in self.ws.items() if rank not in self.dead]

    def open(self) -> None:
        """The next rank starts, in one of two containers."""
        rank = len(self.ws)
        if rank == RANKS:
            return
        tempfile.tempdir = str(self.folders[int(self.rng.integers(0, 2))])
        self.ws[rank] = w = writer(self.arc, rank, RANKS, 1)
        create = w._storage.create_once

        def moody(key: str, data: Any, **options: Any) -> None:
            if "/node-" not in key or self.mood == "well":
                return create(key, data, **options)
            if self.mood == "hangs":
                self.go_on.wait(30)
                return create(key, data, **options)
            if self.mood == "lands":
                create(key, data, **options)
            elif self.mood == "lands late":
                self.late.append((create, key, data, options))
            raise archive.StorageError("the store does not answer")

        w._storage.create_once = moody  # type: ignore[method-assign]

    def add(self, w: archive.Writer) -> str:
        self.count += 1
        name = f"{self.count}-{w.rank}"
        w.add_episode({"x": np.arange(3) + self.count}, episode_id=name)
        self.added.add(name)
        return name

    def tick(self) -> None:
        """Some ranks add, and one or all of them at once ask until it is durable."""
        some = [w for w in self.living if self.rng.integers(0, 3)]
        names = {w.rank: self.add(w) for w in some}

        def sync(w: archive.Writer) -> None:
            w.sync(timeout_s=60)
            self.acknowledged.add(names[w.rank])

        works = [threading.Thread(target=sync, args=(w,)) for w in some]
        for work in works:
            work.start()
        for work in works:
            work.join(60)

    def quiet(self) -> None:
        """Objects without steps, which a prune deletes once they are in a checkpoint."""
        for w in self.living[: int(self.rng.integers(1, 3))]:
            w.journal(progress={"at": self.count})
            w.sync()

    def change(self) -> None:
        """The store's mood; what was to land late does."""
        self.go_on.set()
        self.go_on = threading.Event()
        self.mood = str(self.rng.choice(["well", "well", "fails", "lands", "lands late", "hangs"]))
        for create, key, data, options in self.late[: int(self.rng.integers(0, 3))]:
            with contextlib.suppress(archive.AlreadyExistsError):
                create(key, data, **options)
        del self.late[:2]

    def lose(self) -> None:
        """A rank loses who carries, and comes back by itself."""
        for w in self.living[:1]:
            if w._node is not None and (link := w._node._link) is not None:
                link.close()

    def look(self) -> None:
        for w in self.living:
            if w._node is not None:
                w._node._heard = -1e9

    def kill(self) -> None:
        if self.living and not self.rng.integers(0, 3):
            w = self.living[int(self.rng.integers(0, len(self.living)))]
            self.dead.add(w.rank)
            die(w)

    def save(self) -> None:
        """A checkpoint, with ticks between the cuts of its ranks."""
        if len(self.living) < RANKS:
            return
        self.step += 1
        pending = []
        for at in self.rng.permutation(RANKS).tolist():
            pending.append(self.living[at].checkpoint(self.step))
            if self.rng.integers(0, 2):
                self.tick()
        for one in pending:
            with contextlib.suppress(archive.CheckpointError, archive.ConflictError):  # a recovery was first
                one.result(60)

    def recover(self) -> None:
        if self.ws:
            archive.open(self.arc.url).recover()

    def prune(self) -> None:
        if self.ws:
            archive.open(self.arc.url).prune("0s", dry_run=False, force=True)

    def run(self, acts: int) -> None:
        self.open()
        verbs = [self.open, self.tick, self.tick, self.tick, self.quiet, self.change, self.lose, self.look, self.kill]
        verbs += [self.save, self.recover, self.prune]
        for _ in range(acts):
            verbs[int(self.rng.integers(0, len(verbs)))]()

    def end(self) -> None:
        """All that was acknowledged is there; whoever still lives is replaced, and acknowledges nothing more."""
        world_size = int(self.rng.integers(1, 5))
        found = archive.open(self.arc.url).recover() or archive.open(self.arc.url).checkpoints.latest
        names = found.episodes.table["episode_id"].to_pylist() if found is not None else []
        assert len(names) == len({*names})
        assert self.acknowledged <= {*names} <= self.added
        if found is not None and self.living:
            share = resharding.plan(found, world_size=world_size).share(0)
            new = writer(self.arc, 0, world_size, 1, session="new", resume=share)
            for w in self.living:
                self.add(w)
                with pytest.raises(archive.SupersededError):
                    w.sync()
            die(new)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(node, "PATIENCE_S", 0.2)
    monkeypatch.setattr(node, "LOOK_S", 30.0)
    monkeypatch.setattr(carrier, "SURE_S", -1.0)  # these prunes wait for nothing
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.mark.parametrize(
    ("seed", "acts"), [(0, 20), *(pytest.param(seed, 40, marks=pytest.mark.soak) for seed in range(1, 60))]
)
def test_whatever_befalls_a_node_what_is_acknowledged_is_found(seed: int, acts: int, folder: Path) -> None:
    it = History(seed, folder)
    try:
        it.run(acts)
        it.go_on.set()
        it.mood = "well"
        it.end()
    finally:
        it.go_on.set()
        die(*it.living)
