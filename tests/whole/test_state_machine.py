"""A writer does anything in any order; a model in plain Python says what is live, and what everybody else reads."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from archive import Schema
from archive.write import bufferwriter
from tests.support.archives import fresh, reopened
from tests.support.sampling import examples

SCHEMA = Schema(axes={"text": "ragged"}, next_of={"next": "t"})
ENVS = st.integers(0, 2)
ROWS = st.tuples(
    ENVS, st.booleans(), st.sampled_from([False, False, True]), st.sampled_from([0, 0, 0, 2])
)  # env, first, last, skip


@dataclass
class Told:
    """One episode as the model knows it."""

    env: int | None
    values: list[int] = field(default_factory=list)
    weights: list[tuple[str | None, int | None]] = field(default_factory=list)
    first: bool = True
    last: bool = False
    reason: str | None = None
    terminated: bool | None = None


@dataclass
class World:
    """All that a commit makes visible; `open`, `next` and `live` end with the session."""

    episodes: dict[str, Told] = field(default_factory=dict)
    open: dict[int, str] = field(default_factory=dict)
    next: dict[int, int] = field(default_factory=dict)
    live: dict[tuple[int, int], str] = field(default_factory=dict)
    empty: dict[tuple[int, int], str] = field(default_factory=dict)  # live episodes without steps


class WriterMachine(RuleBasedStateMachine):
    """env -1 stands for no env."""

    @initialize(
        max_bytes=st.sampled_from([1, 300, bufferwriter.SHARD_BYTES]), layout=st.sampled_from(["packed", "directory"])
    )
    def begin(self, max_bytes: int, layout: str) -> None:
        self.patch = mock.patch.object(bufferwriter, "SHARD_BYTES", max_bytes)
        self.patch.start()
        self.arc = fresh(layout=layout)
        self.world, self.committed = World(), {}  # type: World, dict[str, Told]
        self.clock = self.names = 0
        self.weights: tuple[str | None, int | None] = (None, None)
        self.writer = self.arc.writer(schema=SCHEMA)

    def nest(self, values: list[int]) -> dict[str, Any]:
        t = np.array(values, np.int64)
        following = t + 1 if self.clock % 2 else np.concatenate([t[1:], t[-1:]])
        return {
            "t": t,
            "reward": t / 2,
            "text": [np.full(v % 3, v) for v in values] or np.zeros((0, 0), int),
            "next": following,
        }

    def take(self, n: int) -> list[int]:
        self.clock += n
        return list(range(self.clock - n, self.clock))

    def told(self, name: str, env: int, **facts: Any) -> Told:
        self.world.episodes[name] = told = Told(None if env < 0 else env, **facts)
        return told

    @rule(
        env=st.integers(-1, 2),
        n=st.integers(0, 5),
        first=st.booleans(),
        last=st.booleans(),
        reuse=st.integers(0, 9),
        data=st.data(),
    )
    def add_episode(self, env: int, n: int, first: bool, last: bool, reuse: int, data: st.DataObject) -> None:
        if env in self.world.open:
            return
        open_now = set(self.world.open.values())
        known = sorted(name for name in self.world.episodes if name not in open_now)
        replace = bool(known) and reuse < 4
        self.names += 1
        name = data.draw(st.sampled_from(known)) if replace else f"named-{self.names}"
        values = self.take(n)
        nest = self.nest(values) if n else {"t": np.zeros(0, np.int64)}
        got = self.writer.add_episode(nest, env_id=None if env < 0 else env, episode_id=name, replace=replace,
                                      first=first,
                                      last=last or n == 0, terminated=True if last else None)  # fmt: skip
        assert got == name
        for known_places in (self.world.live, self.world.empty):
            for place in [p for p, owner in known_places.items() if owner == name]:
                del known_places[place]
        self.told(name, env, values=values, weights=[self.weights] * max(1, n), first=first, last=last or n == 0,
                  terminated=True if last else None)  # fmt: skip
        at = self.world.next.get(env, 0)
        self.world.next[env] = at + max(1, n)
        self.world.live |= {(env, at + i): name for i in range(n)}
        if n == 0:
            self.world.empty[env, at] = name
        elif not last and env >= 0:
            self.world.open[env] = name

    @rule(rows=st.lists(ROWS, max_size=7), use_first=st.booleans(), jumps=st.booleans(), named=st.booleans())
    def append(self, rows: list[tuple[int, bool, bool, int]], use_first: bool, jumps: bool, named: bool) -> None:
        values = self.take(len(rows))
        following, positions, ids = dict(self.world.next), [], []
        for i, (env, _, _, skip) in enumerate(rows):
            positions.append(following.get(env, 0) + (skip if jumps else 0))
            following[env] = positions[-1] + 1
            ids.append(f"id-{self.clock}-{i}" if named else None)
        nest = self.nest(values) if rows else {"t": np.zeros(0, np.int64)}
        got = self.writer.append(
            nest, env_ids=[r[0] for r in rows], first=[r[1] for r in rows] if use_first else None,
            last=[r[2] for r in rows], terminated=[r[2] for r in rows], positions=positions if jumps else None,
            episode_ids=ids if named else None,
        )  # fmt: skip
        assert got.tolist() == positions
        owner = {
            (r["env_id"], r["position"] + i): r["episode_id"]
            for r in self.writer.live.to_pylist()
            for i in range(r["length"])
        }
        for (env, first, last, _), at, value in zip(rows, positions, values, strict=True):
            self.one_row(env, first if use_first else None, last, at, value, owner[env, at], named)

    def one_row(self, env: int, first: bool | None, last: bool, at: int, value: int, name: str, named: bool) -> None:
        world = self.world
        jumped = env in world.next and at != world.next[env]
        if env not in world.open or jumped or first or named:
            if env in world.open:
                world.episodes[world.open[env]].reason = "gap" if jumped else "interrupted"
            assert name not in world.episodes
            self.told(name, env, first=first if first is not None else not jumped)
            world.open[env] = name
        assert world.open[env] == name
        told = world.episodes[name]
        told.values.append(value)
        told.weights.append(self.weights)
        world.next[env], world.live[env, at] = at + 1, name
        if last:
            told.last, told.terminated = True, True
            del world.open[env]

    @rule(env=st.integers(-1, 2), back=st.integers(0, 6))
    def evict_before(self, env: int, back: int) -> None:
        position = max(0, self.world.next.get(env, 0) - back)
        self.writer.evict(None if env < 0 else env, before=position)
        self.world.live = {k: v for k, v in self.world.live.items() if k[0] != env or k[1] >= position}
        self.world.empty = {k: v for k, v in self.world.empty.items() if k[0] != env or k[1] >= position}

    @rule(env=st.integers(-1, 2), positions=st.lists(st.integers(0, 12), max_size=4))
    def evict(self, env: int, positions: list[int]) -> None:
        positions = [p for p in positions if p < self.world.next.get(env, 0)]
        self.writer.evict(None if env < 0 else env, positions=positions)
        for p in positions:
            self.world.live.pop((env, p), None)
            self.world.empty.pop((env, p), None)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(set(self.world.live.values()))))
        assert self.writer.remove(gone) == sum(name == gone for name in self.world.live.values())
        self.world.live = {k: v for k, v in self.world.live.items() if v != gone}

    @rule()
    def clear(self) -> None:
        self.writer.clear()
        self.world.live, self.world.empty = {}, {}

    @rule(env=st.none() | ENVS, terminated=st.booleans())
    def close_episodes(self, env: int | None, terminated: bool) -> None:
        envs = sorted(self.world.open) if env is None else [e for e in [env] if e in self.world.open]
        names = [self.world.open.pop(e) for e in envs]
        assert (
            self.writer.close_episodes(None if env is None else [env], terminated=terminated, reason="closed") == names
        )
        for name in names:
            told = self.world.episodes[name]
            told.last, told.terminated, told.reason = True, terminated, "closed"

    @rule(n=st.integers(0, 3))
    def set_weights(self, n: int) -> None:
        self.weights = (f"w{n}", 10 * n) if n else (None, None)
        self.writer.weights(*self.weights)

    @rule()
    def flush(self) -> None:
        self.writer.flush()

    @rule()
    def commit(self) -> None:
        self.writer.commit()
        self.committed = copy.deepcopy(self.world.episodes)
        self.check_contents()

    @rule()
    def reopen(self) -> None:
        self.writer.close()
        self.committed = copy.deepcopy(self.world.episodes)
        self.start_over()

    @rule()
    def crash(self) -> None:
        """What was not committed was never there."""
        self.writer.__exit__(RuntimeError, RuntimeError(), None)
        self.start_over()

    def start_over(self) -> None:
        self.world = World(copy.deepcopy(self.committed))
        self.weights = (None, None)
        self.arc = reopened(self.arc)
        self.writer = self.arc.writer(schema=SCHEMA)

    @rule()
    def look_at_live(self) -> None:
        rows = self.writer.live.to_pylist()
        place = [(-1 if r["env_id"] is None else r["env_id"], r["position"]) for r in rows]
        assert place == sorted(place)
        got = {
            (env, at + i): r["episode_id"] for (env, at), r in zip(place, rows, strict=True) for i in range(r["length"])
        }
        assert got == self.world.live
        assert {p: r["episode_id"] for p, r in zip(place, rows, strict=True) if r["length"] == 0} == self.world.empty

    def check_contents(self) -> None:
        episodes = reopened(self.arc).episodes
        assert {e.id for e in episodes} == set(self.committed)
        for e, steps in zip(episodes, episodes.read(), strict=True):
            told = self.committed[e.id]
            assert steps["t"].tolist() == told.values
            assert (e.length, e.env_id, e.complete) == (len(told.values), told.env, told.first and told.last)
            assert (e.reason, e.terminated) == (told.reason, told.terminated)
            counts = [n for _, n in told.weights if n is not None]
            assert e.update_counts == ((min(counts), max(counts) + 1) if counts else None)
            assert e.model_weights_uuids == list(dict.fromkeys(w for w, _ in told.weights if w is not None))
            if told.values:
                assert e.total_reward == sum(told.values) / 2
                start, stop = len(told.values) // 3, len(told.values) - 1
                part = e.read(["text", "t"], start, stop)
                assert [p.tolist() for p in part["text"]] == [[v] * (v % 3) for v in told.values[start:stop]]
                assert part["t"].tolist() == told.values[start:stop]

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.look_at_live()
            self.reopen()
            self.check_contents()
            self.writer.close()
            self.patch.stop()


TestWriter = WriterMachine.TestCase
TestWriter.settings = settings(max_examples=examples(50), stateful_step_count=25, deadline=None)
