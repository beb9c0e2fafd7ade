"""A redaction as a job: whatever stops it, the same plan goes on, nothing of the episode is left in the end, and no job
makes it stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.errors import ConflictError, NotFoundError, UsageError
from archive.jobs import JobCall
from archive.maintain import relocation, verify
from archive.testing import faults
from tests.support.broken_jobs import interrupted, interrupted_at_each
from tests.support.checkpoints import steps
from tests.support.compactions import everything
from tests.support.kills import die_at
from tests.support.pruning import NOW, killed_at
from tests.support.sampling import one_in, sampled
from tests.support.traces import traces

GONE = "the-episode-that-goes"
SECRET = np.float32([3.14159, 2.71828, 1.41421, 1.73205])
TRACES = (GONE.encode(), SECRET.tobytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Episodes in three shards; parts of the one that is to go are in two, and in one with derived columns."""
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        for number in range(9):
            w.append(steps(range(10 * number, 10 * number + 10)), env_ids=0, last=[i == 9 for i in range(10)])
            if number % 3 == 1:
                secret = steps(range(200, 210))
                secret["obs"]["image"][:] = SECRET
                w.add_episode(secret, episode_id=f"{GONE}{number}", metadata={"number": number})
            if number % 3 == 2:
                w.commit()
    with arc.writer():  # a session of its own: what an earlier one wrote may be forgotten
        pass
    names = [episode.id for episode in arc.refresh().episodes]
    arc.add_fields({"late": {name: np.arange(10.0) for name in names[:4]}})
    return tmp_path / "a"


def plan(root: Path) -> Any:
    arc = archive.open(root)
    return arc.forget(ids=[one.id for one in arc.episodes if one.id.startswith(GONE)] or [GONE], redact=True)


def redact(root: Path, **how: Any) -> Any:
    return plan(root).commit(job="redact-17", **how)


def job(root: Path) -> Any:
    return archive.open(root).jobs["redact-17"]


def others(root: Path) -> dict[str, Any]:
    return {name: one for name, one in everything(archive.open(root)).items() if not name.startswith(GONE)}


def check_gone(root: Path, before: dict[str, Any]) -> None:
    """Nothing is found of it after a prune, and all others are as they were."""
    archive.open(root).prune(dry_run=False, **NOW)
    assert traces(root, *TRACES) == []
    np.testing.assert_equal(everything(archive.open(root)), before)
    assert verify(archive.open(root), deep=True).sound


@pytest.mark.parametrize("workers", [None, 2])
def test_nothing_is_left_and_others_are_as_they_were(root: Path, workers: int | None) -> None:
    before, seen = others(root), list[tuple[int, int]]()
    assert traces(root, *TRACES)
    done = redact(root, workers=workers, progress=lambda *now: seen.append(now))
    assert done.made is not None
    assert done.made.kind == "forget"
    assert seen[-1] == (2, 2)  # of the segments, and of derived columns
    assert job(root).finished
    check_gone(root, before)


def test_each_shard_is_written_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relocation, "SHARD_BYTES", 1)
    before, total = others(root), 4
    monkeypatch.setattr(relocation, "BATCH_SHARDS", 3)
    done = interrupted_at_each(lambda: redact(root), lambda: job(root).done, total)
    assert done.made is not None
    check_gone(root, before)


def redact_and_die(url: str, k: int) -> None:
    found = plan(Path(url))
    die_at(k)
    found.commit(job="redact-17")


@pytest.mark.parametrize("count", one_in(25))
def test_killed_at_any_operation_it_goes_on(root: Path, tmp_path: Path, count: int) -> None:
    before, every, number = others(root), everything(archive.open(root)), archive.open(root).head.number
    for k in sampled(range(200), count):
        where = tmp_path / f"killed-{k}"
        shutil.copytree(root, where)
        killed = killed_at(str(where), k, redact_and_die)
        arc = archive.open(where)
        if arc.head.number == number:
            np.testing.assert_equal(everything(arc), every)
            redact(where)
            assert job(where).finished
        else:
            with pytest.raises(NotFoundError, match="there is no episode"):
                plan(where)
        assert archive.open(where).head.number == number + 1
        check_gone(where, before)  # also where its driver died after the commit, and the job seems to go on
        shutil.rmtree(where)
        if not killed:
            break
    assert not killed
    assert k > 20


def test_what_is_written_meanwhile_stays(root: Path) -> None:
    interrupted(lambda: redact(root), 1)
    archive.open(root).prune(dry_run=False, **NOW)
    with archive.open(root).writer(run="another") as w:
        w.add_episode(steps(range(10)), episode_id="another")
    before = others(root)
    made = redact(root).made
    assert made.session != job(root).newest.session
    assert "another" in before
    check_gone(root, before)


def test_steps_that_were_moved_meanwhile(root: Path) -> None:
    """The results of the job are of no use: it ends, and the next call begins anew."""
    interrupted(lambda: redact(root), 1)
    other = plan(root)
    with archive.open(root).writer(run="another") as w:
        w.add_episode(steps(range(10)), episode_id="another")
        w.checkpoint(1).result()
    archive.open(root).forget(ids=[next(iter(others(root)))], redact=True, dry_run=False)
    with pytest.raises(ConflictError, match="plan again"):
        other.commit(job="redact-17")
    assert job(root).state == "cancelled"
    before = others(root)
    redact(root)
    check_gone(root, before)


def test_its_driver_died_after_the_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune deletes all the same, and the name may be used again."""
    before = others(root)
    with monkeypatch.context() as patch:
        patch.setattr(JobCall, "finish", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            redact(root)
    assert job(root).state == "unfinished"
    check_gone(root, before)
    name = next(iter(before))
    archive.open(root).forget(ids=[name], redact=True).commit(job="redact-17")
    assert job(root).finished
    assert (job(root).newest.number, archive.open(root).jobs.unfinished()) == (1, [])
    del before[name]
    check_gone(root, before)


def raising(error: type[BaseException]) -> Any:
    def call(*_: Any) -> None:
        raise error

    return call


def test_other_jobs_that_read_it_are_an_obstacle(root: Path) -> None:
    arc = archive.open(root)
    interrupted(lambda: arc.episodes.map(lambda read: {"x": read["reward"]}, ["reward"], ["x"], job="score"))
    (why,) = plan(root).obstacles
    assert "jobs that have not ended read them: score; finish them" in why
    with pytest.raises(UsageError, match="score"):
        redact(root)
    arc.jobs["score"].cancel()
    before = others(root)
    redact(root)
    check_gone(root, before)


def test_arguments_that_make_no_sense(root: Path) -> None:
    with pytest.raises(UsageError, match="are of a redaction"):
        archive.open(root).forget(episodes="superseded").commit(job="redact-17")
    with pytest.raises(UsageError, match="engine='spark'"):
        redact(root, engine="spark")
    assert len(archive.open(root).jobs) == 0
    interrupted(lambda: redact(root), 1)
    with pytest.raises(UsageError, match="was begun with ids="):
        archive.open(root).forget(ids=[next(iter(others(root)))], redact=True).commit(job="redact-17")
    assert not any(GONE.encode() in one.read_bytes() for one in (root / "jobs").rglob("*") if one.is_file())


def test_a_full_disk_stops_it_and_nothing_is_committed(root: Path) -> None:
    number = archive.open(root).head.number
    with faults.at(root, key="shards/", what="full"), pytest.raises(archive.errors.StorageFullError):
        redact(root)
    assert archive.open(root).head.number == number
    before = others(root)
    redact(root)
    check_gone(root, before)
    assert resharding.compact(archive.open(root)).commit is None
