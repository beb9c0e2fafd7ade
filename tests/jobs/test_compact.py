"""A compaction as a job: whatever stops it, the same call goes on; one process would have made the same archive."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from archive.errors import ConflictError, JobError, UsageError
from archive.maintain import relocation
from tests.support.broken_jobs import interrupted, interrupted_at_each
from tests.support.checkpoints import steps
from tests.support.compactions import everything
from tests.support.kills import die_at
from tests.support.letting_go import all_told
from tests.support.pruning import NOW, keys_of, killed_at, sound
from tests.support.sampling import one_in, sampled

RANKS = 3


class Ranks:
    """Writers of several ranks, each of whose buffers holds the last episodes of many."""

    def __init__(self, where: Path) -> None:
        self.arc = archive.create(where)
        self.writers = [self.arc.writer(rank=rank, world_size=RANKS, session="job") for rank in range(RANKS)]
        for number in range(6):
            self.add(number)
        self.save(1, keep=2)

    def add(self, number: int) -> None:
        for rank, w in enumerate(self.writers):
            first = 100 * rank + 10 * number
            w.add_episode(steps(range(first, first + 10)), episode_id=f"e{rank}-{number}")

    def save(self, step: int, keep: int) -> None:
        """A checkpoint with the newest `keep` episodes of each rank."""
        pending = []
        for w in self.writers:
            names = w.live["episode_id"].to_pylist()
            w.remove(names[: len(names) - keep])
            pending.append(w.checkpoint(step, columns={"p": np.arange(10.0 * keep)}))
        for one in pending:
            one.result()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Ranks(tmp_path / "a")
    return tmp_path / "a"


def compact(root: Path, **how: Any) -> resharding.Compacted:
    return resharding.compact(archive.open(root), job="tidy", **how)


def same(root: Path, before: Any) -> None:
    """All reads as before, and again from the new shards alone once the old ones were pruned."""
    told = all_told(archive.open(root))
    np.testing.assert_equal(told[0], before[0])
    np.testing.assert_equal({number: told[1][number] for number in before[1]}, before[1])
    assert sound(archive.open(root))


@pytest.mark.parametrize("workers", [None, 2])
def test_it_is_as_one_process_makes_it(root: Path, tmp_path: Path, workers: int | None) -> None:
    before, seen = all_told(archive.open(root)), list[tuple[int, int]]()
    shutil.copytree(root, tmp_path / "b")
    alone = resharding.compact(archive.open(tmp_path / "b"))
    done = compact(root, workers=workers, progress=lambda *now: seen.append(now))
    assert done == alone
    assert done.steps == 20 * RANKS
    assert seen[-1] == (RANKS, RANKS)
    same(root, before)
    one, other = (keys_of(archive.open(where), "shards") for where in (root, tmp_path / "b"))
    assert len(one) == len(other)
    arc = archive.open(root)
    assert arc.jobs["tidy"].finished
    assert compact(root) == resharding.Compacted(0, 0, None)  # of the same name, on what came since
    assert arc.jobs["tidy"].newest.number == 1


def test_batches_end_where_shards_do(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "SHARD_BYTES", 1)  # an episode each
    monkeypatch.setattr(relocation, "BATCH_SHARDS", 1)
    before = all_told(archive.open(root))
    shutil.copytree(root, tmp_path / "b")
    alone = resharding.compact(archive.open(tmp_path / "b"))
    assert interrupted_at_each(partial(compact, root), lambda: job(root).done, 2 * RANKS) == alone
    same(root, before)
    for where in (root, tmp_path / "b"):  # and what was written for results that were never put
        archive.open(where).prune(dry_run=False, **NOW)
    assert len(keys_of(archive.open(root), "shards")) == len(keys_of(archive.open(tmp_path / "b"), "shards"))


def job(root: Path) -> Any:
    return archive.open(root).jobs["tidy"]


def compact_and_die(url: str, k: int) -> None:
    arc = archive.open(url)
    die_at(k)
    resharding.compact(arc, job="tidy")


@pytest.mark.parametrize("count", one_in(20))
def test_killed_at_any_operation_it_goes_on(root: Path, tmp_path: Path, count: int) -> None:
    before, number = all_told(archive.open(root)), archive.open(root).head.number
    for k in sampled(range(200), count):
        where = tmp_path / f"killed-{k}"
        shutil.copytree(root, where)
        killed = killed_at(str(where), k, compact_and_die)
        kinds = [one.kind for one in archive.open(where).commits][number:]
        assert kinds in ([], ["compact"])
        going = archive.open(where).jobs.unfinished()
        if going or not kinds:
            assert compact(where).steps == 20 * RANKS
        assert [one.kind for one in archive.open(where).commits][number:] == ["compact"]
        assert archive.open(where).jobs.unfinished() == []
        archive.open(where).prune(dry_run=False, **NOW)
        same(where, before)
        shutil.rmtree(where)
        if not killed:
            break
    assert not killed
    assert k > 20


def test_beside_writers_a_forgetting_and_a_prune(tmp_path: Path) -> None:
    """What is forgotten between the first batch and the commit does not come back; what was written stays."""
    ranks, root = Ranks(tmp_path / "a"), tmp_path / "a"
    interrupted(lambda: compact(root), 1)
    ranks.add(6)
    ranks.save(2, keep=1)
    for w in ranks.writers:
        w.close()
    with archive.open(root).writer(run="another") as w:
        w.add_episode(steps(range(10)), episode_id="another")
    with archive.open(root).writer():  # which may no longer commit
        pass
    arc = archive.open(root)
    arc.forget(Keep(last=1), "unreferenced", dry_run=False)
    assert set(everything(archive.open(root))) == {"e0-6", "e1-6", "e2-6", "another"}
    arc.prune(dry_run=False, **NOW)
    before = all_told(archive.open(root))
    assert compact(root).commit is not None
    same(root, before)
    archive.open(root).prune(dry_run=False, **NOW)
    same(root, before)


@pytest.mark.parametrize("meanwhile", ["compact", "cancel"])
def test_a_job_that_came_too_late_begins_anew(root: Path, meanwhile: str) -> None:
    before = all_told(archive.open(root))
    happens: dict[str, Callable[[], Any]] = {
        "compact": lambda: resharding.compact(archive.open(root)),
        "cancel": lambda: job(root).cancel(),
    }
    interrupted(lambda: compact(root), 1)
    happens[meanwhile]()
    if meanwhile == "compact":
        with pytest.raises(ConflictError, match="run it again"):
            compact(root)
    assert job(root).state == "cancelled"
    assert (compact(root).commit is None) == (meanwhile == "compact")
    assert job(root).newest.number == 1
    archive.open(root).prune(dry_run=False, **NOW)
    same(root, before)


def test_who_was_cancelled_commits_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, number = relocation.write, archive.open(root).head.number

    def cancelled(*args: Any) -> Any:
        made = write(*args)
        job(root).cancel()
        return made

    monkeypatch.setattr(relocation, "write", cancelled)
    with pytest.raises(JobError, match="was cancelled by another process"):
        compact(root)
    assert archive.open(root).head.number == number


def test_arguments_that_make_no_sense(root: Path) -> None:
    for given, told in (
        ({"engine": "spark"}, "engine='spark'"),
        ({"workers": 0}, "workers=0"),
        ({"job": ""}, "a name"),
    ):
        with pytest.raises(UsageError, match=told):
            resharding.compact(archive.open(root), **given)  # type: ignore[arg-type]
    assert archive.open(root).jobs.unfinished() == []
    interrupted(lambda: compact(root), 1)
    with pytest.raises(UsageError, match=r"was begun with min_alive=0\.5, not 0\.9"):
        compact(root, min_alive=0.9)
