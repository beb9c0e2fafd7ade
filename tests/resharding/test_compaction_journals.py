"""compact joins the many small objects of journals; who writes goes on, and what is recovered is what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import UsageError
from archive.maintain import verify
from resharding import compaction
from tests.support.archives import fresh, identical
from tests.support.compactions import everything, of_checkpoint
from tests.support.journals import die
from tests.support.ticks import NEVER_S, live_of, steps

TICKS = 12


def writers(arc: archive.Archive, world_size: int = 2, **options: Any) -> list[Any]:
    return [
        arc.writer(rank=rank, world_size=world_size, session="one", journal_s=NEVER_S, **options)
        for rank in range(world_size)
    ]


def tick(w: Any, number: int) -> None:
    """One more object, with an episode of so many steps."""
    w.add_episode(steps(20, 1000 * w.rank + 20 * number), episode_id=f"{w.rank}-{number}", update_count=number)
    w.sync()


def saved(ranks: list[Any], step: int) -> Any:
    """A checkpoint of all ranks, with a value a live step."""
    for w in ranks:
        pending = w.checkpoint(step, columns={"priority": np.arange(len(live_of(w))) * 0.5}, progress={"at": step})
    return pending.result()


def filled() -> tuple[archive.Archive, list[Any]]:
    """Two ranks, of each a checkpoint of twelve ticks."""
    arc = fresh()
    ranks = writers(arc)
    for w in ranks:
        for number in range(TICKS):
            tick(w, number)
    saved(ranks, 1)
    return arc.refresh(), ranks


def requests(arc: archive.Archive, ranks: int) -> list[int]:
    return [cost["requests"] for cost in resharding.plan(arc.checkpoints.latest, ranks, tails="ignore").cost()]


def of_journals(arc: archive.Archive) -> list[str]:
    """The objects of journals in which live steps of the newest checkpoint lie."""
    rows = arc.snapshot.take(np.unique(arc.checkpoints.latest.located.stream), ["shard"])
    return sorted(key for key in set(rows["shard"].to_pylist()) if key.startswith("journal/"))


def test_objects_of_journals_are_joined_and_plans_take_fewer_requests() -> None:
    arc, ranks = filled()
    before, latest = everything(arc), of_checkpoint(arc.checkpoints.latest)
    assert requests(arc, 2) == [TICKS, TICKS]
    assert sum(requests(arc, 3)) <= 2 * TICKS + 2
    done = resharding.compact(arc)
    assert (done.shards, done.steps) == (2 * TICKS, 2 * TICKS * 20)
    assert requests(arc, 2) == [1, 1]
    assert sum(requests(arc, 3)) <= 4
    assert of_journals(arc) == []
    for now in (arc, archive.open(arc.url)):
        assert identical(everything(now), before)
        assert identical(of_checkpoint(now.checkpoints.latest), latest)
    assert resharding.compact(arc) == resharding.Compacted(0, 0, None)
    assert verify(arc, deep=True).sound
    die(*ranks)


def test_what_has_left_is_not_rewritten_and_a_share_of_none_joins_none() -> None:
    arc, ranks = filled()
    assert resharding.compact(arc, min_full=0).commit is None
    ranks[0].remove([f"0-{number}" for number in range(TICKS - 2)])
    saved(ranks, 2)
    arc.refresh()
    left = {key for key in arc.shards if "rank-00000" in key}
    assert resharding.compact(arc).shards == TICKS  # of the other rank: two are left here
    assert left <= set(arc.shards)
    ranks[1].clear()
    saved(ranks, 3)
    assert resharding.compact(arc.refresh()).commit is None
    die(*ranks)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="min_full"):
            resharding.compact(arc, min_full=share)


def test_who_writes_goes_on_and_what_is_beyond_the_checkpoint_stays_where_it_is() -> None:
    arc, ranks = filled()
    for w in ranks:
        tick(w, 50)
    ranks[0].commit()  # committed, and not in a checkpoint: it can still be recovered from its journal
    arc.refresh()
    beyond = [key for key in arc.storage.list("journal/one/rank-00000") if key > f"{TICKS - 1:09d}"]
    tails = [one.objects for one in arc.tails().ranks]
    resharding.compact(arc)
    assert [one.objects for one in arc.tails().ranks] == tails
    assert [key for key in arc.shards if key.startswith("journal/one/rank-00000") and key[-13:] in beyond]
    for w in ranks:
        tick(w, 51)
    kept = {w.rank: sorted(live_of(w)) for w in ranks}
    uploaded = arc.storage.list("shards")
    second = saved(ranks, 2)
    assert arc.refresh().storage.list("shards") == uploaded
    assert len(second.episodes) == 2 * (TICKS + 2)
    assert sum(map(len, kept.values())) == sum(episode.length for episode in second.episodes)
    assert [second.column("priority", rank).tolist() for rank in (0, 1)] == [
        (np.arange(len(kept[rank])) * 0.5).tolist() for rank in (0, 1)
    ]
    die(*ranks)


@pytest.mark.parametrize("committed", [False, True])
def test_a_tail_is_recovered_after_a_compaction_and_compacted_after_its_recovery(committed: bool) -> None:
    arc, ranks = filled()
    for w in ranks:
        for number in range(TICKS, TICKS + 4):
            tick(w, number)
    if committed:
        ranks[1].commit()
    die(*ranks)
    resharding.compact(arc.refresh())
    made = arc.recover()
    assert sorted(e.id for e in made.episodes) == sorted(f"{r}-{n}" for r in (0, 1) for n in range(TICKS + 4))
    arc.refresh()
    before, latest = everything(arc), of_checkpoint(arc.checkpoints.latest)
    assert len(of_journals(arc)) == 8
    assert resharding.compact(arc).shards == 10
    assert of_journals(arc) == []
    assert arc.checkpoints.latest.name == made.name
    assert identical(everything(archive.open(arc.url)), before)
    assert identical(of_checkpoint(archive.open(arc.url).checkpoints.latest), latest)
    assert not arc.recover().number > arc.head.number
    plan = resharding.plan(arc.checkpoints.latest, 3)
    resumed = [arc.writer(resume=plan.share(rank), session="two", journal_s=NEVER_S) for rank in range(3)]
    assert len(saved(resumed, 9).episodes) == 2 * (TICKS + 4)
    die(*resumed)


def test_labels_late_fields_and_forgetting_are_as_before() -> None:
    arc, ranks = filled()
    ranks[0].remove(["0-3"])
    ranks[1].remove(["1-4"])
    saved(ranks, 2)
    arc.refresh().label({"0-0": {"good": True}})
    arc.add_fields({"advantage": {"0-0": np.arange(20.0)}})
    resharding.compact(arc.refresh())
    arc.refresh()
    assert dict(arc.episodes["0-0"].labels) == {"good": True}
    assert arc.episodes["0-0"].read(["advantage"])["advantage"].tolist() == list(range(20))
    assert arc.episodes["0-3"].read()["obs"][0] == 60
    die(*ranks)
    end = archive.open(arc.url)
    end.forget(archive.Keep(last=1), ids=["0-3"], dry_run=False)
    end.prune(older_than="0s", dry_run=False, force=True)
    left = {one.key for one in end.storage.scan("journal/")}
    assert left == {"journal/one/rank-00001/000000004.zip"}  # "1-4": in no buffer, but not forgotten
    assert verify(end.refresh(), deep=True).sound


def test_what_compactions_made_of_text_is_not_rewritten_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text takes other room than tables say, so that a full shard of it seems small."""
    arc = fresh()
    (w,) = writers(arc, 1)
    for number in range(20):
        w.add_episode({"text": np.array(["x" * 1000] * 10, object)}, episode_id=f"{number}")
        w.sync()
    w.checkpoint(1, wait=True)
    monkeypatch.setattr("archive.maintain.relocation.SHARD_BYTES", 30_000)
    monkeypatch.setattr(compaction, "SHARD_BYTES", 30_000)
    assert resharding.compact(arc.refresh()).shards == 20
    assert sum(key.startswith("shards/") for key in arc.shards) > compaction.MANY
    assert resharding.compact(arc.refresh()).commit is None
    die(w)
