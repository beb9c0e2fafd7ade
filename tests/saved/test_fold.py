"""A fold of a checkpoint and of the ticks after it gives what the writer itself would have cut."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import archive
from archive.index import Snapshot
from archive.journal import recovery, tails
from archive.write import Cut
from tests.support.archives import fresh
from tests.support.journals import die
from tests.support.ticks import NEVER_S

ENVS = 3


def folded(arc: archive.Archive) -> Cut:
    """What rank 0 held, by what lies in the store."""
    head = arc.refresh().head
    entry, found = head.runs["main"], tails.read(arc.storage, head, "main")
    base = recovery.RecoveryBase.of(arc.storage, head, entry, found)
    (cut,) = recovery._folded(Snapshot(arc.storage, head), entry, base, found).cuts(0)
    return cut


def values_of(w: archive.Writer) -> dict[str, Any]:
    """A value for each live step that no other step has."""
    live = w.live.to_pylist()
    rows = [(-1 if row["env_id"] is None else row["env_id"], row["position"], row["length"]) for row in live]
    return {"p": np.array([env * 1e6 + position + i for env, position, length in rows for i in range(length)])}


def step(arc: archive.Archive, w: archive.Writer, rng: Random) -> None:
    """One call of a user."""
    match rng.choice(
        ["append"] * 5
        + ["episode", "evict", "remove", "clear", "sync", "sync", "values", "checkpoint", "recover", "close"]
    ):
        case "append":
            count = rng.randint(1, 4)
            steps = {"x": np.arange(count, dtype=np.float32)}
            w.append(steps, env_ids=rng.randrange(ENVS), first=rng.random() < 0.3, last=rng.random() < 0.3)
        case "episode":
            w.add_episode({"x": np.arange(rng.randint(0, 3), dtype=np.float32)})
        case "evict":
            w.evict(env_id=rng.randrange(ENVS), before=rng.randint(0, 20))
        case "remove":
            ids = sorted({row["episode_id"] for row in w.live.to_pylist() if row["env_id"] is None})
            w.remove(ids[:1])
        case "clear" if rng.random() < 0.2:
            w.clear()
        case "sync":
            w.sync()
        case "values":
            w.journal(columns=values_of(w))
        case "close":
            w.close_episodes([rng.randrange(ENVS)])
        case "recover":
            archive.open(arc.url).recover()
        case "checkpoint":
            w.checkpoint(0, f"at-{rng.random()}", columns=values_of(w), wait=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_fold_is_what_the_writer_holds(seed: int) -> None:
    arc, rng = fresh(), Random(seed)
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(1, np.float32)}, env_ids=0, first=True)
    for _ in range(60):
        step(arc, w, rng)
    w.journal(columns=values_of(w))
    w.sync()
    own = w._cut_of("replay", {"columns": values_of(w)}, "keep")
    found = folded(arc)
    assert found.live.sort_by("lo").to_pylist() == own.live.sort_by("lo").to_pylist()
    assert found.open_episodes == own.open_episodes
    for env, position in own.next_positions.items():
        assert found.next_positions.get(env, 0) == position
    assert found.columns["p"].array.tolist() == own.columns["p"].array.tolist()
    die(w)


@pytest.mark.parametrize(("together", "values"), [(2, 1 << 20), (256, 0)])
def test_values_of_many_ticks_are_kept_once(together: int, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are found in all of them, by dtypes too."""
    arc, rng = fresh(), np.random.default_rng(0)
    w = arc.writer(journal_s=NEVER_S)
    w.append({"x": np.zeros(40)}, env_ids=0)
    for _ in range(30):
        at = rng.choice(40, 3, replace=False)
        name = str(rng.choice(["p", "q"]))
        w.journal(changes={name: (0, at, rng.random(3))})
        if rng.integers(0, 4) == 0:
            w.journal(columns={"q": rng.integers(0, 9, 40).astype(str(rng.choice(["i4", "f8"])))})
            w._journal.saying._kinds = {}
        w.sync()
    die(w)
    wanted = folded(arc)
    monkeypatch.setattr("archive.saved.fold._TOGETHER", together)
    monkeypatch.setattr("archive.saved.fold._MOST_VALUES", values)
    found = folded(arc)
    for name in ("p", "q"):
        np.testing.assert_array_equal(found.columns[name].array, wanted.columns[name].array)
    (tail,) = tails.read(arc.storage, arc.head, "main").values()
    assert sum(len(one.column.array) for one in tail.held.columns["replay"]["p"]) <= 2 * 40
