"""A job that runs, somebody who recovers or forgets beside it, and a prune: the job's next checkpoint is whole, and
nothing that was acknowledged is lost, whatever came in between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.base import layout
from archive.errors import CheckpointError, ExpiredError
from archive.log import CommitLog, tablefiles
from archive.store import Storage
from tests.support.archives import by_hand, fresh, reopened
from tests.support.checkpoints import steps
from tests.support.letting_go import Ring
from tests.support.pruning import NOW, before_its_commit, keys_of, sound
from tests.support.sampling import few_of
from tests.support.ticks import NEVER_S


class Job:
    """Ranks that each hold whole episodes, and a column and an attribute of these that do not change by themselves."""

    def __init__(self, arc: archive.Archive, ranks: int = 1, **options: Any) -> None:
        self.arc = arc
        self.writers = [arc.writer(rank=rank, world_size=ranks, session="job", **options) for rank in range(ranks)]
        self.held: list[dict[str, float]] = [{} for _ in self.writers]  # of each rank: episode -> its column's value
        self.saved = 0
        self.serial = 0

    def add(self, rank: int = 0) -> str:
        """One more episode of five steps."""
        self.serial += 5
        given = self.writers[rank].add_episode(steps(range(self.serial - 5, self.serial)))
        self.held[rank][given] = float(self.serial)
        return given

    def remove(self, name: str, rank: int = 0) -> None:
        self.writers[rank].remove([name])
        del self.held[rank][name]

    def sync(self) -> None:
        """All of it is acknowledged."""
        for w in self.writers:
            w.journal(progress={"at": self.serial})
            w.sync()

    def start(self, rank: int, **how: Any) -> Any:
        """One rank's call of the checkpoint that comes next."""
        held = self.held[rank]
        if how.get("save_replay", True):
            columns = {"p": {name: np.full(5, value) for name, value in held.items()}}
            how = {"columns": columns, "attributes": {"value": held}, **how}
        return self.writers[rank].checkpoint(self.saved, **how)

    def save(self, **how: Any) -> Any:
        """A checkpoint of all ranks."""
        self.saved += 1
        first, *others = [self.start(rank, **how) for rank in range(len(self.writers))]
        return [one.result() for one in (*others, first)][-1]

    def half_saved(self) -> Any:
        """A checkpoint that the first rank alone has staged."""
        self.saved += 1
        pending = self.start(0, timeout_s=20.0)
        while not self.arc.storage.exists(layout.state_key("job", f"step-{self.saved}", 0)):
            pass
        return pending

    def check(self, ck: Any) -> None:
        """The checkpoint has what the ranks hold now, to the value; and the archive is sound."""
        for rank, held in enumerate(self.held):
            table = ck.episodes.filter(rank=rank).table if held else None
            assert ([] if table is None else sorted(table["episode_id"].to_pylist())) == sorted(held)
            assert ck.column("p", rank).tolist() == [held[name] for name in held for _ in range(5)]
            assert {name: value for name, value in ck.attributes(rank)["value"].items() if name in held} == held
        assert sum(len(data["serial"]) for data in ck.episodes.read()) == 5 * sum(map(len, self.held))
        assert sound(self.arc)


def let_go(arc: archive.Archive, episodes: str | None = "unreferenced") -> int:
    """All but what is protected is forgotten, and deleted; how many checkpoints went."""
    gone = reopened(arc).forget(Keep(last=1), episodes=episodes, dry_run=False).checkpoints_gone
    reopened(arc).prune(dry_run=False, **NOW)
    return gone


# -- columns and attributes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["recovered", "partial"])
def test_what_did_not_change_is_written_anew_where_the_checkpoint_that_had_it_was_pruned(how: str) -> None:
    job = Job(fresh(), ranks=2, journal_s=NEVER_S)
    job.add()
    job.add(1)
    first = job.save() if how == "recovered" else job.start(0, partial=True).result()
    if how == "recovered":
        job.sync()
        assert reopened(job.arc).recover().number > first.number
    else:
        job.save(save_replay=False)
    assert let_go(job.arc) == 1
    assert not keys_of(job.arc, "states") & {one.key for one in first.commit.checkpoint.ranks}
    second, third = job.save(), job.save()
    job.check(second)
    job.check(third)
    objects = {ref.object for ref in third.staged(0).index.columns["replay"].values()}
    assert objects == {second.staged(0).key}  # and referred to from then on


@pytest.mark.parametrize("pruned", [True, False])
def test_a_checkpoint_that_refers_to_what_was_let_go_of_meanwhile_is_not_made_and_the_next_one_is_whole(
    pruned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(fresh(), journal_s=NEVER_S)
    job.add()
    first = job.save()
    job.sync()

    def happens() -> None:
        reopened(job.arc).recover()
        reopened(job.arc).forget(Keep(last=1), dry_run=False)
        if pruned:
            reopened(job.arc).prune(dry_run=False, **NOW)

    before_its_commit(monkeypatch, "checkpoint", happens)
    with pytest.raises(ExpiredError, match=r"columns, attributes or states .* nothing was committed. Save another"):
        job.save()
    assert reopened(job.arc).checkpoints.latest.number > first.number
    job.check(job.save())


def test_the_name_of_a_checkpoint_that_was_pruned_is_not_taken_again() -> None:
    job = Job(fresh())
    for _ in range(2):
        job.add()
        job.save()
    assert let_go(job.arc) == 1
    job.saved = 0
    with pytest.raises(CheckpointError, match=r"exists or existed.*another name"):
        job.save()
    job.saved = 5
    job.check(job.save())


@pytest.mark.parametrize("opened", [True, False])
def test_nobody_goes_on_from_a_checkpoint_that_was_forgotten_whoever_opened_the_session(opened: bool) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(range(5)))
        w.checkpoint(1).result()
        w.clear()
        w.checkpoint(2).result()
    share = resharding.plan(arc.refresh().checkpoints["step-1"], world_size=2).share(1)
    if opened:
        arc.writer(rank=0, world_size=2, session="next")
    reopened(arc).forget(Keep(last=1), dry_run=False)
    with pytest.raises(ExpiredError, match=r"checkpoint of commit 2 .* was forgotten by commit \d"):
        reopened(arc).writer(resume=share, session="next")


# -- journals ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_half_staged_while_somebody_recovered_takes_nothing_back() -> None:
    job = Job(fresh(), ranks=2, journal_s=NEVER_S)
    removed = job.add()
    job.add(1)
    job.save()
    job.add()
    job.sync()
    pending = job.half_saved()
    job.remove(removed)
    job.sync()
    job.add()
    job.sync()
    recovered = reopened(job.arc).recover()
    assert recovered is not None
    let_go(job.arc)
    other = job.start(1, timeout_s=20.0)
    for one in (pending, other):
        with pytest.raises(CheckpointError, match=r"'step-2' was not committed: '.*', which has \d+ objects of the "):
            one.result()
    job.add()
    job.sync()  # acknowledged
    found = reopened(job.arc).recover()
    assert found is not None
    assert sorted(found.episodes.table["episode_id"].to_pylist()) == sorted({**job.held[0], **job.held[1]})
    job.check(job.save())


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_commit_whose_tables_were_pruned_while_it_was_made_is_made_of_the_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(fresh())
    for _ in range(3):
        job.add()
        job.writers[0].commit()
    job.save()
    job.remove(next(iter(job.held[0])))
    job.save()
    fetch, done = tablefiles.fetch, [False]

    def fetch_after(storage: Any, refs: Any) -> Any:
        if any(".segments." in ref.path for ref in refs) and not done[0]:
            done[0] = True
            let_go(job.arc)
        return fetch(storage, refs)

    job.add()
    job.writers[0]._log._held = {}  # as a writer has it that did not make the newest tables
    with monkeypatch.context() as patch:
        patch.setattr(tablefiles, "fetch", fetch_after)
        job.writers[0].commit()
    assert done[0]
    job.check(job.save())


# -- archives that take in others --------------------------------------------------------------------------------------


def test_a_merge_that_found_a_shard_there_which_is_pruned_meanwhile_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = archive.create(tmp_path / "source"), archive.create(tmp_path / "target")
    with source.writer() as w:
        names = [w.add_episode(steps(range(5 * k, 5 * k + 5))) for k in range(2)]
    resharding.filter(source.refresh(), to=target, episode_id=names[:1], copy=True)

    def happens() -> None:
        reopened(target).forget(ids=names[:1], dry_run=False)
        assert reopened(target).prune(dry_run=False, **NOW).deleted

    before_its_commit(monkeypatch, "merge", happens)
    with pytest.raises(ExpiredError, match=r"were pruned by commit \d+.*nothing was committed"):
        resharding.merge([source], to=target.refresh(), copy=True)
    merged = resharding.merge([source], to=target.refresh(), copy=True)
    assert sorted(merged.episodes.table["episode_id"].to_pylist()) == sorted(names)
    assert sound(merged)


@pytest.mark.parametrize("how", [{}, {"layout": "directory"}, {"journal_s": NEVER_S}])
def test_a_prune_that_was_stalled_deletes_nothing_that_was_merged_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    layouts = {"layout": how.pop("layout")} if "layout" in how else {}
    source = archive.create(tmp_path / "source", **layouts)
    target = archive.create(tmp_path / "target", **layouts)
    with source.writer(**how) as w:
        name = w.add_episode(steps(range(5)))
        if how:
            w.sync()
    resharding.merge([source.refresh()], to=target, copy=True)
    reopened(target).forget(ids=[name], dry_run=False)
    late: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete_many", lambda self, keys, **how: late.extend(keys) or {})
        reopened(target).prune(dry_run=False, **NOW)
    merged = resharding.merge([source], to=target.refresh(), copy=True)
    target.storage.delete(late)  # what had committed its list before
    assert [len(data["serial"]) for data in merged.refresh().episodes.read()] == [5]
    assert sound(merged)
    assert resharding.merge([source], to=merged, copy=True).head.number == merged.head.number


# -- histories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", few_of(range(60), 6))
def test_any_history_of_a_job_beside_recoveries_and_prunes(seed: int) -> None:
    dice = random.Random(seed)
    job = Job(fresh(), ranks=dice.randint(1, 2), journal_s=NEVER_S)
    ranks = range(len(job.writers))

    def leave() -> None:
        rank = dice.choice(ranks)
        if job.held[rank]:
            job.remove(dice.choice([*job.held[rank]]), rank)

    def partial() -> None:
        job.saved += 1
        job.start(dice.choice(ranks), partial=True).result()

    def recover() -> None:
        job.sync()
        reopened(job.arc).recover()

    acts = {
        (lambda: job.add(dice.choice(ranks))): 4, leave: 2, partial: 1, recover: 3, job.sync: 2,
        (lambda: job.save()): 3, (lambda: job.save(save_replay=False)): 1,
        (lambda: let_go(job.arc, dice.choice(["unreferenced", "superseded", None]))): 4,
        (lambda: [w.commit() for w in job.writers]): 1,
    }  # fmt: skip
    job.save()
    for act in dice.choices(list(acts), list(acts.values()), k=24):
        act()
    job.sync()
    recovered = reopened(job.arc).recover()
    assert recovered is not None
    assert sorted(recovered.episodes.table["episode_id"].to_pylist()) == sorted(k for of in job.held for k in of)
    job.check(job.save())


def test_no_checkpoint_is_made_of_live_steps_that_were_forgotten() -> None:
    arc = fresh()
    ring = Ring(arc, held=1)
    ring.turns(3)
    ring.w.close()
    held = arc.refresh().commits[arc.checkpoints["step-0"].number - 1].live
    arc.forget(archive.Keep(last=1), episodes="unreferenced", dry_run=False)
    log = CommitLog(arc.storage, arc.id, arc.refresh().head)
    forgotten = rf"were forgotten by commit {arc.head.number} .* nothing was committed"
    log.commit("of no live steps", by_hand("label"))
    with pytest.raises(ExpiredError, match=forgotten):
        log.commit("of what is gone", by_hand("checkpoint", live=held))
    kept = arc.commits[arc.checkpoints.latest.number - 1].live
    assert log.commit("of what is there", by_hand("checkpoint", live=kept)).live == kept
