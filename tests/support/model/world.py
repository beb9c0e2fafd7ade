"""An archive, those who write to it, and the model beside it."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import archive
from archive.testing import faults
from tests.support.model.perfect import MAIN, Buffer, Episodes, Known, Letting, Rank, Saved, Session

NEVER_S = 3600.0  # a journal that ticks when it is told to, and where a shard is full
Rule = Callable[["World", random.Random], None]


@dataclass
class Label:
    """What was said of an episode, of which the newest row came with this stamp."""

    episode: str
    stamp: int
    key: str
    value: Any


@dataclass
class World:
    """All of it. sessions: in the order in which they were opened; writers: of each that is not dead."""

    url: str
    storage_options: Any = None
    arc: Any = None
    sessions: list[Session] = field(default_factory=list)
    active: dict[str, Session] = field(default_factory=dict)
    writers: dict[tuple[str, int], Any] = field(default_factory=dict)
    pendings: list[tuple[Session, list[Any]]] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    owner: dict[int, str] = field(default_factory=dict)  # serial -> its episode
    labels: list[Label] = field(default_factory=list)
    late: dict[str, dict[int, float]] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)  # episode -> its rows up to this stamp were forgotten
    lettings: list[Letting] = field(default_factory=list)
    tags: dict[str, tuple[Saved, dict[str, list[int]]]] = field(default_factory=dict)
    readers: list[tuple[Any, Episodes]] = field(default_factory=list)
    merged: list[tuple[str, Episodes]] = field(default_factory=list)  # archives that refer to this one
    zombies: list[Any] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    serials: int = 0
    stamps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # -- the model ---------------------------------------------------------------------------------------------------

    def take(self, count: int, name: str) -> list[int]:
        """New serials, of an episode."""
        found = self.take_some(count)
        self.owner.update(dict.fromkeys(found, name))
        return found

    def take_some(self, count: int) -> list[int]:
        self.serials += count
        return list(range(self.serials - count, self.serials))

    def new_name(self, stem: str) -> str:
        return f"{stem}{next(self.numbers)}"

    def view(self) -> Episodes:
        """Each episode as the archive shows it: of each line as its newest session that has it does, and of several
        lines as the one whose newest row is newest."""
        lines: dict[tuple[str, str], Episodes] = {}
        for session in self.sessions:
            line = lines.setdefault((session.tree, session.run), {})
            line |= session.seen()
        out: Episodes = {}
        for line in lines.values():
            for name, known in line.items():
                if name not in out or known.stamps[-1] > out[name].stamps[-1]:
                    out[name] = known
        return {name: known for name, known in out.items() if known.stamps[-1] > self.gone.get(name, 0)}

    @property
    def standing(self) -> list[Saved]:
        """The checkpoints that were not forgotten."""
        return [one for one in self.saved if not one.forgotten]

    def labels_of(self, name: str, known: Known) -> dict[str, Any]:
        """What is said of an episode as it is seen."""
        out: dict[str, Any] = {}
        for label in self.labels:
            if label.episode == name and label.stamp in known.stamps:
                out[label.key] = label.value
        return {key: value for key, value in out.items() if value is not None}

    def maybe_tick(self) -> None:
        """Journals tick by themselves, too: soon, where a shard is full."""
        for session in self.active.values():
            for rank in session.alive if session.journal else ():
                rank.maybe_ticked()

    # -- the library -------------------------------------------------------------------------------------------------

    def writer(self, session: Session, rank: Rank) -> Any:
        return self.writers[session.name, rank.number]

    def buffer(self, session: Session, rank: Rank, name: str) -> tuple[Any, Buffer]:
        """One buffer of a rank, as the library and as the model has it; made if it is not there."""
        writer = self.writer(session, rank)
        made = writer if name == MAIN else writer.buffer(name)
        return made, rank.buffers.setdefault(name, Buffer())

    def reopened(self) -> Any:
        """The archive as somebody else sees it."""
        return archive.open(self.url, storage_options=self.storage_options)

    def settle(self) -> None:
        """Wait for all checkpoints that are under way."""
        pendings, self.pendings = self.pendings, []
        for _, started in pendings:
            for one in started:
                one.result(60)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[Any]:
        """The archive as it is by now, with nothing under way."""
        self.settle()
        yield self.arc.refresh()

    def begin(self, session: Session, writers: list[Any], *, end: str) -> None:
        """A session is opened; what becomes of the one before it in its run: "close", "die" or "zombie"."""
        before = self.active.get(session.run)
        if before is not None:
            self.leave(before, end)
        self.sessions.append(session)
        self.active[session.run] = session
        for rank, writer in zip(session.ranks, writers, strict=True):
            self.writers[session.name, rank.number] = writer

    def leave(self, session: Session, end: str) -> None:
        """The ranks of a session end. Who comes too late can no longer commit."""
        for rank in session.alive:
            writer = self.writers.pop((session.name, rank.number))
            rank.dead = True
            if end == "zombie":
                self.zombies.append(writer)
            else:
                self.abandon(writer)

    def die(self, session: Session, rank: Rank) -> None:
        """A rank is killed: nothing that it would still do reaches the store."""
        rank.dead = True
        self.abandon(self.writers.pop((session.name, rank.number)))

    def idle(self) -> None:
        """Wait until nobody uploads, so that what fails now is not theirs."""
        for writer in self.writers.values():
            writer._pipeline.wait_idle(60)

    def abandon(self, writer: Any) -> None:
        self.idle()
        with faults.at(self.url, what="fail", times=None), contextlib.suppress(archive.ArchiveError):
            writer._end()

    def end(self) -> None:
        """Stop all threads; the archive stays."""
        for writer in [*self.writers.values(), *self.zombies]:
            self.abandon(writer)
        self.writers, self.zombies = {}, []
