"""An archive of a history of jobs, and what those at work with it did and were told: `promises` holds the archive
against it."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

import archive
from tests.support.simulation.scheduler import Errand, Party, here
from tests.support.simulation.store import ObjectStore

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """What a rank held from a time on (a count of requests): episodes, and prompts that are sealed or trained on."""

    live: frozenset[str]
    sealed: frozenset[str]
    trained: frozenset[str]
    at: int = field(compare=False)


@dataclass
class Rank:
    """The states of one rank, and those that it was told are durable: (state, when it asked, when it was told)."""

    states: list[State] = field(default_factory=list)
    durable: list[tuple[int, int, int]] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    added: frozenset[str] = frozenset()

    @property
    def held(self) -> int:
        """The number of its state; where what it did since failed, that of the one before."""
        return self.states.index(self.states[-1])

    @property
    def ever(self) -> frozenset[str]:
        return frozenset().union(*(one.live for one in self.states))


@dataclass
class Saved:
    """A checkpoint that was acknowledged: the state of each rank that is in it, its column's value, its own state, and
    when it was told."""

    states: dict[int, int]
    value: int
    own: Any
    told: int
    replay: bool
    whole: bool


@dataclass
class Session:
    """One start of a job. planned, looked: when it began to choose its origin, and when it had. to_train, to_reissue:
    prompts that it found."""

    name: str
    run: str
    planned: int
    size: int
    looked: int = 1 << 62
    ranks: list[Rank] = field(default_factory=list)
    saved: dict[int, Saved] = field(default_factory=dict)
    to_train: frozenset[str] | None = None
    to_reissue: frozenset[str] = frozenset()


@dataclass
class World:
    """An archive, and what those at work with it were told."""

    store: ObjectStore
    url: str
    sessions: dict[str, Session] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)  # episodes
    let_go: set[int] = field(default_factory=set)  # checkpoints that somebody wanted to forget
    forgotten: set[str] = field(default_factory=set)  # episodes
    redacted: set[str] = field(default_factory=set)  # episodes, and nobody has undone a forgetting since
    expiring: set[str] = field(default_factory=set)  # runs of which some writer forgets
    tagged: dict[str, int] = field(default_factory=dict)
    merged: dict[int, frozenset[str]] = field(default_factory=dict)  # commit of the other archive -> episodes
    made: int = 0

    @classmethod
    def created(cls, store: ObjectStore, url: str) -> World:
        archive.create(url)
        return cls(store, url)

    def actor(self, name: str) -> Job:
        return Job(self, name)

    def now(self) -> int:
        return len(self.store.seen)

    def new_name(self, stem: str) -> str:
        self.made += 1
        return f"{stem}{self.made}"


def steps_of(name: str) -> dict[str, Any]:
    """The steps of an episode of this name."""
    code = crc32(name.encode())
    return {"obs": np.arange(1 + code % 4) + code % 1000, "reward": np.ones(1 + code % 4)}


def read(episodes: Any) -> frozenset[str]:
    """The names of these episodes, which have the steps that they were added with."""
    found = {episode.id: episode.read() for episode in episodes}
    for name, data in found.items():
        for field_name, values in steps_of(name).items():
            assert np.array_equal(data[field_name], values), f"{name} has other steps than it was added with"
    return frozenset(found)


class Job:
    """One party. Of a job of several ranks it is the launcher: each writer is in a process of its own."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.processes: list[Party] = []  # of the ranks; none where the only one is in this process
        self.writers: list[Any] = []
        self.session: Session
        self.saves = 0
        self.arc: Any = None

    def open(self) -> Any:
        self.arc = self.arc.refresh() if self.arc is not None else archive.open(self.world.url)
        return self.arc

    def launch(self, size: int) -> None:
        """Begin the processes of so many ranks."""
        party = here().running.party
        names = [f"{self.name}{len(party.launched) + rank}" for rank in range(size if size > 1 else 0)]
        self.processes = [Party(name, party.rng.getrandbits(32), launcher=party) for name in names]

    def begin(self, rank: int, work: Callable[[], T]) -> Errand[T]:
        """Have a rank begin some work in its process."""
        return Errand(self.processes[rank] if self.processes else here().running.party, work)

    def at(self, rank: int, work: Callable[[], T]) -> T:
        """The result of a rank's work in its process."""
        return self.begin(rank, work).result() if self.processes else work()

    def carried(self, value: T) -> Callable[[], T]:
        """A function that gives a value in another process."""
        if not self.processes:
            return lambda: value
        data = pickle.dumps(value)
        return lambda: pickle.loads(data)

    @property
    def living(self) -> list[int]:
        """The ranks that have not died."""
        return [rank for rank in range(len(self.writers)) if not self.processes or self.processes[rank].alive]

    def one(self, rng: random.Random) -> tuple[int, Any, State]:
        """A living rank of the job, with its writer and what it holds."""
        rank = rng.choice(self.living)
        return rank, self.writers[rank], self.session.ranks[rank].states[-1]

    @contextlib.contextmanager
    def holding(self, rank: int, added: str = "", **changed: frozenset[str]) -> Iterator[None]:
        """From now on a rank may be found to hold this; if the call within fails, it holds what it held before."""
        of = self.session.ranks[rank]
        before = of.states[-1] if of.states else State(frozenset(), frozenset(), frozenset(), 0)
        of.states.append(replace(before, at=self.world.now(), **changed))
        try:
            yield
        except BaseException:
            of.states.append(replace(before, at=self.world.now()))
            raise
        of.added |= {added} - {""}
