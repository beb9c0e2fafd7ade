"""Random histories of a writer, with checkpoints and resumes from any of them, against a model in plain lists.

What comes after a checkpoint (steps, ends, plain commits) is in no branch that goes on from there; the archive shows
each episode as the newest session that has it does.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import unittest.mock
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import resharding
from archive.maintain import maintenance
from archive.manifest import tablefiles
from tests.support.checkpoints import fresh, reopened, steps, value_of
from tests.support.sampling import examples

ENVS = 3
NO_ENV = -1


@dataclass
class Known:
    """An episode: whether its first and its last step are in the archive, its steps so far, and what is said of it."""

    first: bool
    last: bool = False
    serials: list[int] = field(default_factory=list)
    terminated: bool | None = None
    truncated: bool | None = None
    reason: str | None = None
    metadata: dict[str, int] = field(default_factory=dict)
    updates: set[int] = field(default_factory=set)

    @property
    def steps(self) -> int:
        return len(self.serials)

    @property
    def told(self) -> tuple[Any, ...]:
        """What its row of the table says of it, whichever of its steps are live."""
        updates = (min(self.updates), max(self.updates)) if self.updates else (None, None)
        ends = (self.terminated, self.truncated, self.reason)
        return *ends, sum(self.serials) / 2, self.metadata, *updates


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    ends = (row["terminated"], row["truncated"], row["reason"])
    metadata = json.loads(row["metadata"] or "{}")
    return *ends, row["return"], metadata, row["update_count_min"], row["update_count_max"]


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
        self.sessions: list[dict[str, Known]] = [{}]  # of each session, what it has committed and gone on from

    def _committed(self) -> None:
        self.sessions[-1] = copy.deepcopy(self.model.known)

    def _take(self, count: int) -> list[int]:
        self.serial += count
        return list(range(self.serial - count, self.serial))

    @rule(
        env=st.integers(0, ENVS - 1), count=st.integers(1, 4), first=st.sampled_from([None, None, True]),
        last=st.booleans(), jump=st.sampled_from([0, 0, 0, 2]), terminated=st.sampled_from([None, True, False]),
    )  # fmt: skip
    def append(
        self, env: int, count: int, first: bool | None, last: bool, jump: int, terminated: bool | None
    ) -> None:  # fmt: skip
        model, begin = self.model, self.model.next.get(env, 0)
        serial = self._take(count)
        positions = np.arange(begin + jump, begin + jump + count) if jump else None
        got = self.w.append(
            steps(serial), env_ids=env, first=first, last=last or None, positions=positions, metadata={"n": serial[0]},
            terminated=terminated if last else None, update_count=serial[-1],
        )  # fmt: skip
        assert got.tolist() == list(range(begin + jump, begin + jump + count))
        name = model.open.get(env)
        if name is None or first or (jump and begin):
            names = self.w.live.to_pylist()
            (name,) = {r["episode_id"] for r in names if r["env_id"] == env and r["position"] == begin + jump}
            assert name not in model.known
            if env in model.open:
                model.known[model.open[env]].reason = "gap" if jump and begin else "interrupted"
            model.known[name] = Known(first=bool(first) or not (jump and begin), metadata={"n": serial[0]})
        model.put(env, begin + jump, serial)
        model.episode.update(dict.fromkeys(serial, name))
        model.known[name].serials += serial
        model.known[name].updates.add(serial[-1])
        model.known[name].last = last
        model.known[name].terminated = terminated if last else None
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
        model.known[name] = Known(first, last, serial)
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

    @rule(env=st.integers(0, ENVS - 1), terminated=st.booleans(), reason=st.sampled_from([None, "closed"]))
    def close_episode(self, env: int, terminated: bool, reason: str | None) -> None:
        name = self.model.open.pop(env, None)
        closed = self.w.close_episodes([env], terminated=terminated, reason=reason)
        assert closed == ([] if name is None else [name])
        if name is not None:
            known = self.model.known[name]
            known.last, known.terminated, known.truncated, known.reason = True, terminated, True, reason

    @rule(how=st.sampled_from(["commit", "flush"]))
    def commit(self, how: str) -> None:
        getattr(self.w, how)()
        if how == "commit":
            self._committed()

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
        if replay:
            self._committed()

    @precondition(lambda self: any(s.replay for s in self.saved.values()))
    @rule(data=st.data(), close=st.booleans(), plan=st.booleans(), look=st.booleans())
    def resume(self, data: st.DataObject, close: bool, plan: bool, look: bool) -> None:
        name = data.draw(st.sampled_from([n for n, s in self.saved.items() if s.replay]))
        if close:
            self._committed()
        self.w.close() if close else self.w._end()
        self.arc = reopened(self.arc)
        point = self.arc.checkpoints[name]
        self.w = self.arc.writer(resume=resharding.plan(point, world_size=1).share(0) if plan else point)
        self.model = copy.deepcopy(self.saved[name].model)
        self.sessions.append(copy.deepcopy(self.model.known))
        if look:
            self._check_archive()

    @invariant()
    def the_writer_lists_what_is_live(self) -> None:
        if hasattr(self, "w"):
            assert sum(self.w.live["length"].to_pylist()) == len(self.model.serials())

    def teardown(self) -> None:
        if not hasattr(self, "w"):
            return
        self._committed()
        self.w.close()
        self._check_archive()
        assert maintenance.verify(reopened(self.arc)).findings == []
        points = reopened(self.arc).checkpoints
        assert [c.name for c in points] == list(self.saved)
        for name, saved in self.saved.items():
            self._check(points[name], saved)

    def _check_archive(self) -> None:
        """Each episode is as the newest session has it that has it at all."""
        want: dict[str, Known] = {}
        for committed in self.sessions:
            want |= committed
        episodes = reopened(self.arc).episodes
        rows = episodes.table.to_pylist()
        found = {r["episode_id"]: (r, d["serial"].tolist()) for r, d in zip(rows, episodes.read(), strict=True)}
        assert found.keys() == want.keys()
        for name, known in want.items():
            row, serial = found[name]
            whole = known.first and known.last
            assert (serial, row["length"], row["complete"]) == (known.serials, known.steps, whole), (row, known)
            assert told(row) == known.told, (row, known)

    def _check(self, ck: Any, saved: Saved) -> None:
        assert ck.replay_saved == saved.replay
        assert set(ck.state(0)) == {"at"}
        if not saved.replay:
            assert len(ck.episodes) == 0
            return
        found = list(zip(ck.episodes, ck.episodes.read(), strict=True))
        assert [(e.id, d["serial"].tolist()) for e, d in found] == saved.model.episodes()
        for (episode, data), row in zip(found, ck.episodes.table.to_pylist(), strict=True):
            assert (data["obs"]["image"] == data["serial"][:, None]).all()
            assert told(row) == saved.model.known[episode.id].told
            known = saved.model.known[episode.id]
            whole = known.first and known.last and known.steps == episode.length
            assert episode.complete == whole, (episode, known)
        for column, factor in saved.columns.items():
            assert (ck.column(column, 0) == value_of(saved.model.serials()) * factor).all()


class HistoriesInManyFiles(Histories):
    """The same, where each commit's segments are in a file of their own at first, so that checkpoints find what is live
    in the newest ones."""

    @initialize()
    def begin(self) -> None:
        self.small = unittest.mock.patch.multiple(tablefiles, _RECENT_ROWS=1, _RECENT_COMMITS=1)
        self.small.start()
        super().begin()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "small"):
            self.small.stop()


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None, suppress_health_check=QUIET
)
TestHistoriesInManyFiles = HistoriesInManyFiles.TestCase
TestHistoriesInManyFiles.settings = settings(TestHistories.settings, max_examples=examples(30))
SEEDS = 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [Histories, HistoriesInManyFiles])
@pytest.mark.parametrize("number", range(SEEDS))
def test_long_histories_of_many_seeds(number: int, kind: type[Histories]) -> None:
    """Seeds are drawn anew each time, and printed; SOAK_SEED=... runs those from there on again."""
    drawn = int(os.environ.get("SOAK_SEED") or secrets.randbits(32)) + number
    print(f"SOAK_SEED={drawn - number}, number {number}")
    longer = settings(
        max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=QUIET, database=None,
        print_blob=True,
    )  # fmt: skip
    run_state_machine_as_test(seed(drawn)(type("Seeded", (kind,), {})), settings=longer)
