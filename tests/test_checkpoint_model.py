"""Random histories of a writer, with checkpoints and resumes from any of them, against a model in plain lists."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from checkpoint_helpers import fresh, reopened, steps, value_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

ENVS = 3
NO_ENV = -1


@dataclass
class Known:
    """An episode: whether its first and its last step are in the archive, and its steps so far."""

    first: bool
    last: bool = False
    steps: int = 0


@dataclass
class Model:
    """What the writer's buffer is: live steps of each env row by position, and what is open there."""

    live: dict[int, dict[int, int]] = field(default_factory=dict)  # env -> position -> serial
    empty: dict[tuple[int, int], str] = field(default_factory=dict)  # (env, position) -> live episode without steps
    next: dict[int, int] = field(default_factory=dict)
    open: dict[int, str] = field(default_factory=dict)
    episode: dict[int, str] = field(default_factory=dict)  # serial -> its episode
    known: dict[str, Known] = field(default_factory=dict)

    def serials(self) -> list[int]:
        return [row[p] for _, row in sorted(self.live.items()) for p in sorted(row)]

    def episodes(self) -> list[tuple[str, list[int]]]:
        """Live episodes in order, and their live steps."""
        at = [(env, p, self.episode[s], [s]) for env, row in self.live.items() for p, s in row.items()]
        at += [(env, p, name, []) for (env, p), name in self.empty.items()]
        out: list[tuple[str, list[int]]] = []
        for _, _, name, serial in sorted(at, key=lambda a: a[:2]):
            if out and out[-1][0] == name:
                out[-1][1].extend(serial)
            else:
                out.append((name, list(serial)))
        return out

    def put(self, env: int, position: int, serials: list[int]) -> None:
        self.live.setdefault(env, {}).update({position + i: s for i, s in enumerate(serials)})
        self.next[env] = position + max(1, len(serials))


@dataclass
class Saved:
    model: Model
    columns: dict[str, int]
    replay: bool


class Histories(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.arc = fresh()
        self.w = self.arc.writer()
        self.model = Model()
        self.saved: dict[str, Saved] = {}
        self.serial = 0

    def _take(self, count: int) -> list[int]:
        self.serial += count
        return list(range(self.serial - count, self.serial))

    @rule(
        env=st.integers(0, ENVS - 1), count=st.integers(1, 4), first=st.sampled_from([None, None, True]),
        last=st.booleans(), jump=st.sampled_from([0, 0, 0, 2]),
    )  # fmt: skip
    def append(self, env: int, count: int, first: bool | None, last: bool, jump: int) -> None:
        model, begin = self.model, self.model.next.get(env, 0)
        serial = self._take(count)
        positions = np.arange(begin + jump, begin + jump + count) if jump else None
        got = self.w.append(steps(serial), env_ids=env, first=first, last=last or None, positions=positions)
        assert got.tolist() == list(range(begin + jump, begin + jump + count))
        name = model.open.get(env)
        if name is None or first or (jump and begin):
            names = self.w.live.to_pylist()
            (name,) = {r["episode_id"] for r in names if r["env_id"] == env and r["position"] == begin + jump}
            assert name not in model.known
            model.known[name] = Known(first=bool(first) or not (jump and begin))
        model.put(env, begin + jump, serial)
        model.episode.update(dict.fromkeys(serial, name))
        model.known[name].steps += count
        model.known[name].last = last
        model.open.pop(env, None)
        if not last:
            model.open[env] = name

    @rule(env=st.sampled_from([NO_ENV, 0, 1]), count=st.integers(0, 3), first=st.booleans(), last=st.booleans())
    def add_episode(self, env: int, count: int, first: bool, last: bool) -> None:
        model = self.model
        if env in model.open:
            return
        serial = self._take(count)
        name = self.w.add_episode(steps(serial), env_id=None if env == NO_ENV else env, first=first, last=last)
        begin = model.next.get(env, 0)
        if not serial:
            model.empty[(env, begin)] = name
        model.put(env, begin, serial)
        model.episode.update(dict.fromkeys(serial, name))
        model.known[name] = Known(first, last, count)
        if not last and env != NO_ENV:
            model.open[env] = name

    @rule(env=st.integers(0, ENVS - 1), share=st.floats(0, 1))
    def evict_oldest(self, env: int, share: float) -> None:
        before = int(self.model.next.get(env, 0) * share)
        self.w.evict(env, before=before)
        self.model.live[env] = {p: s for p, s in self.model.live.get(env, {}).items() if p >= before}
        self.model.empty = {k: v for k, v in self.model.empty.items() if k[0] != env or k[1] >= before}

    @rule(data=st.data(), env=st.sampled_from([NO_ENV, 0, 1, 2]))
    def evict_some(self, data: st.DataObject, env: int) -> None:
        if not self.model.next.get(env, 0):
            return
        gone = data.draw(st.sets(st.integers(0, self.model.next[env] - 1), max_size=5))
        self.w.evict(None if env == NO_ENV else env, positions=sorted(gone, reverse=True))
        for position in gone:
            self.model.live.get(env, {}).pop(position, None)
            self.model.empty.pop((env, position), None)

    @precondition(lambda self: self.model.episodes())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(self.model.episodes()))
        count = self.w.remove(name)
        gone = {s for s in self.model.serials() if self.model.episode[s] == name}
        assert count == len(gone)
        for row in self.model.live.values():
            for position in [p for p, s in row.items() if s in gone]:
                del row[position]
        self.model.empty = {k: v for k, v in self.model.empty.items() if v != name}

    @rule(chance=st.integers(0, 4))
    def clear(self, chance: int) -> None:
        if chance == 0:
            self.w.clear()
            self.model.live, self.model.empty = {}, {}

    @rule(env=st.integers(0, ENVS - 1))
    def close_episode(self, env: int) -> None:
        name = self.model.open.pop(env, None)
        assert self.w.close_episodes([env]) == ([] if name is None else [name])
        if name is not None:
            self.model.known[name].last = True

    @rule(how=st.sampled_from(["commit", "flush"]))
    def commit(self, how: str) -> None:
        getattr(self.w, how)()

    @rule(
        replay=st.sampled_from([True, True, True, False]),
        factor=st.integers(1, 2),
        names=st.sets(st.sampled_from("abc")),
        wait=st.booleans(),
    )
    def checkpoint(self, replay: bool, factor: int, names: set[str], wait: bool) -> None:
        name = f"c{len(self.saved)}"
        columns = {n: value_of(self.model.serials()) * factor for n in names}
        state = {"at": self.serial}
        self.w.checkpoint(self.serial, name, columns=columns, state=state, save_replay=replay, wait=wait)
        self.saved[name] = Saved(copy.deepcopy(self.model), dict.fromkeys(names, factor), replay)

    @precondition(lambda self: any(s.replay for s in self.saved.values()))
    @rule(data=st.data(), close=st.booleans())
    def resume(self, data: st.DataObject, close: bool) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.saved.items() if s.replay]))
        self.w.close() if close else self.w._end()
        self.arc = reopened(self.arc)
        self.w = self.arc.writer(resume=self.arc.checkpoints[name])
        self.model = copy.deepcopy(self.saved[name].model)

    @invariant()
    def the_writer_lists_what_is_live(self) -> None:
        if hasattr(self, "w"):
            assert sum(self.w.live["length"].to_pylist()) == len(self.model.serials())

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        self.w.close()
        points = reopened(self.arc).checkpoints
        assert [c.name for c in points] == list(self.saved)
        for name, saved in self.saved.items():
            self._check(points[name], saved)

    def _check(self, ck: Any, saved: Saved) -> None:
        assert ck.replay_saved == saved.replay
        assert set(ck.state(0)) == {"at"}
        if not saved.replay:
            assert len(ck.episodes) == 0
            return
        found = list(zip(ck.episodes, ck.episodes.read(), strict=True))
        assert [(e.id, d["serial"].tolist()) for e, d in found] == saved.model.episodes()
        for episode, data in found:
            assert (data["obs"]["image"] == data["serial"][:, None]).all()
            known = saved.model.known[episode.id]
            whole = known.first and known.last and known.steps == episode.length
            assert episode.complete == whole, (episode, known)
        for column, factor in saved.columns.items():
            assert (ck.column(column, 0) == value_of(saved.model.serials()) * factor).all()


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


class Long(Histories):
    """The same, for longer."""


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=QUIET)
TestLong = pytest.mark.soak(Long.TestCase)
TestLong.settings = settings(max_examples=2000, stateful_step_count=60, deadline=None, suppress_health_check=QUIET)
