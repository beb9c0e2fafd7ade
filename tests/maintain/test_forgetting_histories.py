"""Histories of any kind, forgotten by any policy: what stays reads as before, once all that went is deleted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.maintain import verify
from tests.support.archives import fresh
from tests.support.checkpoints import steps
from tests.support.letting_go import Ring, all_told, forgotten, remove_forgotten
from tests.support.sampling import few_of

POLICIES = (
    {"keep": Keep(last=1), "episodes": "unreferenced"}, {"keep": Keep(last=2), "episodes": "superseded"},
    {"keep": Keep(every=3, last=1)}, {"episodes": "superseded"}, {"episodes": "unreferenced"},
    {"keep": Keep(best=("return", 2)), "where": "return > 100"},
    {"keep": Keep(within="7d"), "where": "complete = false"},
    {"keep": Keep(last=1), "run": "main", "episodes": "unreferenced"},
)  # fmt: skip


class History:
    """A job that is interrupted, resumed, forked, compacted and labelled at random, on a clock of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arc = fresh()
        self.ring = Ring(self.arc, held=3)
        self.serial = 0

    def go_on(self, moves: int) -> None:
        for _ in range(moves):
            getattr(
                self, str(self.rng.choice(["save", "save", "save", "lose", "resume", "revise", "open_", "compact"]))
            )()

    def save(self) -> None:
        self.ring.turn(incomplete=str(self.rng.choice(["keep", "drop"])) if self.rng.random() < 0.2 else "keep")

    def lose(self) -> None:
        """Committed, and in no checkpoint if the job ends now."""
        self.ring.turn(save=False)
        self.ring.w.commit()

    def open_(self) -> None:
        self.serial += 5
        self.ring.w.append(steps(range(5000 + self.serial, 5003 + self.serial)), env_ids=7)

    def resume(self) -> None:
        found = [ck for ck in self.arc.refresh().checkpoints.of("main") if ck.whole]
        if found:
            chosen = found[int(self.rng.integers(max(0, len(found) - 3), len(found)))]
            self.ring = Ring(self.arc, held=3, begin=self.ring.made + 10, resume=chosen)

    def revise(self) -> None:
        self.serial += 10
        revision = steps(range(9000 + self.serial, 9004 + self.serial))
        known = "revised" in self.arc.refresh().episodes
        with self.arc.writer(run="other") as w:
            w.add_episode(revision, episode_id="revised", replace=known)
            w.checkpoint(self.serial, metrics={"return": float(self.serial)}).result()

    def compact(self) -> None:
        resharding.compact(self.arc.refresh(), min_alive=0.9)


def _left(told: tuple[Any, Any], of: tuple[Any, Any]) -> None:
    for part, earlier in zip(told, of, strict=True):
        np.testing.assert_equal(part, {key: earlier[key] for key in part})


@pytest.mark.parametrize("seed", few_of(range(8), 3))
def test_what_stays_reads_as_before(seed: int) -> None:
    history = History(seed)
    history.save()
    for policy in history.rng.permutation(len(POLICIES))[:3]:
        history.go_on(6)
        arc = history.arc.refresh()
        before = all_told(arc)
        plan = arc.forget(**POLICIES[int(policy)], dry_run=False)
        now = all_told(arc)
        _left(now, before)
        assert len(before[0]) - len(now[0]) == plan.episodes_gone
        assert len(before[1]) - len(now[1]) == plan.checkpoints_gone
        if plan.made is not None and history.rng.random() < 0.3:
            archive.open(arc.url).undo()
            np.testing.assert_equal(all_told(arc), before)
            assert not forgotten(arc) & {ref.path for ref in archive.open(arc.url).head.all_files}
            continue
        remove_forgotten(arc)
        np.testing.assert_equal(all_told(arc), now)
        assert verify(archive.open(arc.url), deep=True).sound
    before = all_told(history.arc)
    history.save()
    _left(before, all_told(history.arc))


def test_a_large_past_costs_nothing_once_it_is_forgotten() -> None:
    arc = fresh()
    ring = Ring(arc, held=3)
    ring.turns(8)
    arc.refresh().forget(Keep(last=5), episodes="unreferenced", dry_run=False)
    few = _costs(arc)
    ring.turns(92)
    arc.refresh().forget(Keep(last=5), episodes="unreferenced", dry_run=False)
    many = _costs(arc)
    assert len(archive.open(arc.url).checkpoints) == 5
    assert many[0] <= few[0]
    assert many[1] <= 1.1 * few[1]
    shards = arc.refresh().snapshot.columns(["shard"])["shard"].combine_chunks()
    assert len(shards.dictionary) == len(set(shards.to_pylist())), "names of what went are not written"


def _costs(arc: archive.Archive) -> tuple[int, int]:
    """Requests and bytes of an open and a plan."""
    opened = archive.open(arc.url)
    latest = opened.checkpoints.latest
    assert latest is not None
    resharding.plan(latest, world_size=2).share(0)
    spent = opened.io_stats()
    return spent.requests, spent.bytes_in
