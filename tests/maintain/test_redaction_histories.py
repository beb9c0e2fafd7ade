"""Redaction after histories at random: of compactions, forgettings, resumes, revisions, labels and late fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.maintain import verify
from tests.support.letting_go import all_told
from tests.support.pruning import NOW
from tests.support.sampling import few_of
from tests.support.traces import traces


class History:
    """An archive to which something happens at random. Each episode's rows have a number that no other's have."""

    def __init__(self, where: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arc = archive.create(where, layout=("packed", "directory")[seed % 2])
        self.w = self.arc.writer()
        self.names: list[str] = []
        self.live: list[str] = []
        self.saved = 0

    def value(self, name: str) -> float:
        return 1000.0 + self.names.index(name) + 1 / 3

    def add(self) -> None:
        self.names.append(f"episode-{len(self.names):03d}-of-somebody")
        self._append(self.names[-1], replace=False)

    def revise(self) -> None:
        if self.live:
            self._append(str(self.rng.choice(self.live)), replace=True)

    def _append(self, name: str, replace: bool) -> None:
        count = int(self.rng.integers(1, 9))
        steps = {"x": np.full((count, 3), self.value(name)), "said": [f"by {name}"] * count}
        self.w.add_episode(steps, episode_id=name, replace=replace, metadata={"who": f"metadata of {name}"})
        self.live = [*(one for one in self.live if one != name), name]

    def leave(self) -> None:
        if self.live:
            gone = self.live.pop(int(self.rng.integers(len(self.live))))
            self.w.remove([gone])

    def save(self) -> None:
        self.saved += 1
        count = int(self.w.live["length"].to_numpy().sum())
        columns = {"p": np.arange(count) + self.saved * 0.5} if count else None
        self.w.checkpoint(self.saved, columns=columns).result()

    def resume(self) -> None:
        if self.saved:
            self.w.close()
            self.w = self.arc.writer(resume=self.arc.refresh().checkpoints.latest)
            self.live = [e.id for e in self.arc.refresh().checkpoints.latest.episodes]

    def said(self) -> None:
        known = [e.id for e in self.arc.refresh().episodes]
        if known:
            name = str(self.rng.choice(known))
            length = self.arc.episodes[name].length
            self.arc.label({name: {"note": f"label of {name}"}})
            self.arc.add_fields({"late": {name: np.full(length, self.value(name))}})

    def compact(self) -> None:
        resharding.compact(self.arc.refresh(), min_alive=1)

    def forget(self) -> None:
        self.arc.refresh().forget(Keep(last=2), episodes="superseded", dry_run=False)

    def prune(self) -> None:
        self.arc.refresh().prune(dry_run=False, **NOW)

    def happen(self, count: int) -> None:
        calls = [self.add] * 6 + [self.leave] * 4 + [self.save] * 3
        calls += [self.revise, self.resume, self.said, self.said, self.compact, self.forget, self.prune]
        for at in self.rng.integers(len(calls), size=count):
            calls[at]()

    def end(self, name: str) -> None:
        """Take an episode out of the buffer, and save without it, twice: the first may have it in its staged rows."""
        if name in self.live:
            self.live.remove(name)
            self.w.remove([name])
        self.save()
        self.save()
        self.w.close()


def said_of(arc: archive.Archive) -> tuple[dict[str, Any], dict[Any, Any]]:
    """All that is there; without columns that nothing is in, as of a label that only one episode had."""
    episodes, checkpoints = all_told(arc)
    known = {
        name: ({key: one for key, one in row.items() if one is not None}, steps)
        for name, (row, steps) in episodes.items()
    }
    for one in checkpoints.values():
        one["episodes"] = [{key: v for key, v in row.items() if v is not None} for row in one["episodes"]]
    return known, checkpoints


def check(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / f"{seed}", seed)
    history.add()
    history.happen(40)
    arc = history.arc.refresh()
    name = str(history.rng.choice([e.id for e in arc.episodes] or [history.names[0]]))
    history.end(name)
    before = said_of(arc.refresh())
    wanted = (name.encode(), np.float64(history.value(name)).tobytes())
    assert traces(tmp_path / f"{seed}", wanted[0])
    arc.forget(Keep(last=1), ids=[name], redact=True, dry_run=False)
    arc.prune(dry_run=False, **NOW)
    assert traces(tmp_path / f"{seed}", *wanted) == []
    now = said_of(arc)
    np.testing.assert_equal(now[0], {key: one for key, one in before[0].items() if key != name})
    np.testing.assert_equal(now[1], {number: before[1][number] for number in now[1]})
    assert verify(archive.open(arc.url), deep=True).sound


@pytest.mark.parametrize("seed", few_of(range(6), 2))
def test_nothing_is_left_after_whatever_happened(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.soak
def test_nothing_is_left_after_whatever_happened_many_times(tmp_path: Path) -> None:
    for seed in range(6, 200):
        check(tmp_path, seed)
