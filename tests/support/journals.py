"""Jobs that keep journals, the plain model of what their buffers hold, and what is there once they have died."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import archive
from archive.base import layout
from tests.support.ticks import NEVER_S

BUFFERS = ("replay", "demo")


def die(*writers: Any) -> None:
    """The processes are gone, with what they have not journaled."""
    for w in writers:
        w._journal = None
        w._end()


def copy_of(arc: archive.Archive) -> archive.Archive:
    """A copy of an archive in memory, to try something out."""
    url = f"memory://{uuid.uuid4().hex}"
    other = archive.create(url)
    keys = [one.key for one in arc.storage.scan("")]
    other.storage.put_many(zip(keys, arc.storage.get_all(keys), strict=True))
    return archive.open(url)


def cut(arc: archive.Archive, session: str, rank: int, number: int) -> None:
    """Take a rank's objects from this number on away."""
    while arc.storage.exists(key := layout.journal_key(session, rank, number)):
        arc.storage.delete([key])
        number += 1


@dataclass
class Held:
    """What one buffer of one rank holds: plain Python."""

    steps: dict[tuple[int, int], int] = field(default_factory=dict)  # env row, position -> the step's number
    empty: dict[tuple[int, int], str] = field(default_factory=dict)  # of episodes without steps their ids
    owner: dict[int, str] = field(default_factory=dict)  # number of a step -> its episode
    next: dict[int, int] = field(default_factory=dict)
    open: dict[int, str] = field(default_factory=dict)
    column: dict[int, float] | None = None  # number of a step -> value
    attribute: dict[str, int] | None = None  # episode -> value

    def copy(self) -> Held:
        return Held(
            dict(self.steps), dict(self.empty), dict(self.owner), dict(self.next), dict(self.open),
            None if self.column is None else dict(self.column),
            None if self.attribute is None else dict(self.attribute),
        )  # fmt: skip

    @property
    def order(self) -> list[int]:
        """Numbers of the live steps in live order."""
        return [self.steps[at] for at in sorted(self.steps)]

    @property
    def episodes(self) -> set[str]:
        return {self.owner[number] for number in self.steps.values()} | set(self.empty.values())

    def leave(self, gone: Any) -> None:
        self.steps = {at: n for at, n in self.steps.items() if not gone(at, self.owner[n])}
        self.empty = {at: name for at, name in self.empty.items() if not gone(at, name)}


class Job:
    """One rank: a writer and the model beside it. `seen[n]`: what was held when object n came next."""

    def __init__(self, writer: Any, rng: np.random.Generator, held: Mapping[str, Held] | None = None) -> None:
        self.w = writer
        self.rng = rng
        self.buffers = {"replay": writer, "demo": writer.buffer("demo")}
        self.held = {name: Held() for name in BUFFERS} if held is None else {n: h.copy() for n, h in held.items()}
        self.progress: Any = None
        self.seen: dict[int, tuple[dict[str, Held], Any]] = {}
        self.count = int(rng.integers(1, 1 << 40)) << 10

    def _numbers(self, n: int) -> list[int]:
        self.count += n
        return list(range(self.count - n, self.count))

    def add(self, name: str) -> None:
        """An episode of its own, sometimes without a step."""
        held, numbers = self.held[name], self._numbers(int(self.rng.integers(0, 5)))
        given = self.buffers[name].add_episode({"obs": np.array(numbers, np.int64)})
        start = held.next.get(-1, 0)
        held.next[-1] = start + max(len(numbers), 1)
        held.steps |= {(-1, start + i): number for i, number in enumerate(numbers)}
        held.owner |= dict.fromkeys(numbers, given)
        if not numbers:
            held.empty[-1, start] = given

    def append(self, name: str) -> None:
        """Steps of an env row, whose episode may end."""
        held, env = self.held[name], int(self.rng.integers(0, 3))
        numbers, last = self._numbers(int(self.rng.integers(1, 5))), bool(self.rng.integers(0, 2))
        flags = [False] * (len(numbers) - 1) + [last]
        episode = held.open.get(env) or f"episode-{numbers[0]}"
        self.buffers[name].append(
            {"obs": np.array(numbers, np.int64)}, env_ids=env, last=flags, episode_ids=[episode] * len(numbers)
        )
        start = held.next.get(env, 0)
        held.next[env] = start + len(numbers)
        held.steps |= {(env, start + i): number for i, number in enumerate(numbers)}
        held.owner |= dict.fromkeys(numbers, episode)
        held.open.pop(env, None)
        if not last:
            held.open[env] = episode

    def evict(self, name: str) -> None:
        """Some steps of an env row, or all before one."""
        held = self.held[name]
        if not held.next:
            return
        env = int(self.rng.choice(sorted(held.next)))
        known = None if env < 0 else env
        if self.rng.integers(0, 2):
            before = int(self.rng.integers(0, held.next[env] + 1))
            self.buffers[name].evict(env_id=known, before=before)
            held.leave(lambda at, _: at[0] == env and at[1] < before)
        else:
            places = set(self.rng.integers(0, held.next[env], 3).tolist())
            self.buffers[name].evict(env_id=known, positions=np.array(sorted(places)))
            held.leave(lambda at, _: at[0] == env and at[1] in places)

    def remove(self, name: str) -> None:
        """An episode that is closed."""
        held = self.held[name]
        names = sorted(held.episodes - set(held.open.values()))
        if names:
            gone = str(self.rng.choice(names))
            self.buffers[name].remove([gone])
            held.leave(lambda _, episode: episode == gone)

    def close(self, name: str) -> None:
        """The open episodes."""
        self.buffers[name].close_episodes(truncated=True, reason="enough")
        self.held[name].open.clear()

    def say(self, name: str) -> None:
        """Values of a column and an attribute, of some episodes; progress."""
        held = self.held[name]
        names = sorted(held.episodes)
        chosen = [n for n in names if self.rng.integers(0, 2)]
        with_steps = [n for n in chosen if n in {held.owner[number] for number in held.steps.values()}]
        column: dict[str, list[float]] = {}
        for episode in with_steps:
            mine = [number for number in held.order if held.owner[number] == episode]
            column[episode] = self.rng.random(len(mine)).tolist()
            held.column = {**(held.column or {}), **dict(zip(mine, column[episode], strict=True))}
        attribute = {n: int(self.rng.integers(0, 100)) for n in chosen}
        if attribute:
            held.attribute = {**(held.attribute or {}), **attribute}
        self.progress = int(self.rng.integers(0, 1000))
        said = {"columns": {"p": column} if column else None, "attributes": {"q": attribute} if attribute else None}
        self.w.journal(**said, progress=self.progress, buffer=name)

    def say_all(self, name: str) -> None:
        """A value of each live step, of which few are others than before."""
        held = self.held[name]
        known = held.column or {}
        new = {number: known.get(number, np.nan) for number in held.order}
        for number in held.order:
            if number not in known or not self.rng.integers(0, 4):
                new[number] = float(self.rng.integers(0, 3))
        held.column = {**known, **new}
        self.w.journal(columns={"p": np.array([new[number] for number in held.order])}, buffer=name)

    def change(self, name: str) -> None:
        """Values of some steps by their positions, of some that have left and of one step twice, too."""
        held = self.held[name]
        env = int(self.rng.choice(sorted(held.next))) if held.next else 0
        if not held.next.get(env):
            return
        places = self.rng.integers(0, held.next[env], 4).tolist()
        values = self.rng.integers(0, 3, 4).astype(float).tolist()
        held.column = dict(held.column or {})
        for place, value in zip(places, values, strict=True):
            if (env, place) in held.steps:
                held.column[held.steps[env, place]] = value
        known = None if env < 0 else env
        self.w.journal(changes={"p": (known, np.array(places), np.array(values))}, buffer=name)

    def tick(self) -> None:
        """All that was done is durable."""
        number = self.w.sync().number
        self.seen[number] = ({name: held.copy() for name, held in self.held.items()}, self.progress)

    def checkpoint(self, step: int) -> Any:
        """Begin one, with a value for each live step, now and then without, and some episodes."""
        given = {}
        for name, held in self.held.items():
            column, some = self.rng.integers(0, 3, len(held.order)).astype(float), sorted(held.episodes)[:3]
            held.column = dict(zip(held.order, column.tolist(), strict=True)) if self.rng.integers(0, 4) else None
            held.attribute = dict.fromkeys(some, step)
            given[name] = {
                "columns": {"p": column} if held.column is not None else {},
                "attributes": {"q": held.attribute},
                "state": {"at": step, "name": name},
            }
        self.progress = {"step": step}
        main = given.pop("replay")
        return self.w.checkpoint(step, **main, buffers=given, progress=self.progress)

    def act(self, count: int) -> None:
        """So many things at random, and a tick now and then."""
        verbs = [self.add, self.append, self.append, self.evict, self.remove, self.close, self.say]
        verbs += [self.say_all, self.change]
        for _ in range(count):
            verbs[int(self.rng.integers(0, len(verbs)))](BUFFERS[int(self.rng.integers(0, 4)) // 3])
            if not self.rng.integers(0, 3):
                self.tick()


def job(arc: archive.Archive, seed: int, held: Any = None, **options: Any) -> Job:
    """A rank that journals when it is told to."""
    return Job(arc.writer(journal_s=NEVER_S, **options), np.random.default_rng(seed), held)


def whole(one: Job, number: int) -> int:
    """The number after the last whole tick, if only objects below this number are there."""
    return max(n for n in one.seen if n <= number)


def expected(one: Job, number: int) -> Any:
    """What a rank held then."""
    return one.seen[whole(one, number)]


def check(checkpoint: Any, rank: int, held: Mapping[str, Held], progress: Any) -> None:
    """A recovered checkpoint must hold for a rank what the model says."""
    index = checkpoint.staged(rank).index
    for name, want in held.items():
        got = steps_of(checkpoint, rank, name)
        assert got == want.order
        if name not in index.buffers:
            assert want.next == {}
            continue
        about = index.buffers[name]
        assert dict(about.next_positions) == want.next
        assert dict(about.open_episodes) == want.open
        assert about.steps == len(want.order)
        assert about.episodes == len(want.episodes)
        if want.column is not None:
            values = [want.column.get(number, np.nan) for number in want.order]
            np.testing.assert_array_equal(checkpoint.column("p", rank, name), values)
        if want.attribute is not None:
            live = {k: v for k, v in want.attribute.items() if k in want.episodes}
            assert checkpoint.attributes(rank, name)["q"] == live
    if rank == 0 and progress is not None:
        assert checkpoint.progress == progress


def steps_of(checkpoint: Any, rank: int, name: str) -> list[int]:
    """Numbers of the live steps of a rank's buffer, in live order."""
    live = checkpoint.live.to_pylist()
    mine = {i for i, row in enumerate(live) if row["rank"] == rank and row["buffer"] == name}
    heads, _ = checkpoint.groups
    runs = checkpoint.located["run"][heads].tolist()
    return [
        number
        for episode, run in zip(checkpoint.episodes, runs, strict=True)
        if run in mine
        for number in episode.read()["obs"].tolist()
    ]
