"""Verification as a job: the report of any workers, after any interruption, is that of one process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import archive
from archive.base.errors import CorruptStateError, UsageError
from archive.testing import faults
from tests.support.broken_jobs import interrupted, interrupted_at_each
from tests.support.verbs import damage, of_shards


@pytest.mark.parametrize("workers", [None, 2])
def test_a_sound_archive(tmp_path: Path, workers: int | None) -> None:
    root, seen = of_shards(tmp_path / "a"), list[tuple[int, int]]()
    plain = archive.open(root).verify(deep=True)
    assert plain.sound
    arc = archive.open(root)
    found = arc.verify(True, job="check", workers=workers, progress=lambda *now: seen.append(now))
    assert asdict(found) == asdict(plain)
    assert seen == sorted(seen)
    assert seen[-1] == (arc.head.number + plain.shards,) * 2
    assert arc.jobs["check"].finished
    assert asdict(archive.open(root).verify(True, job="check")) == asdict(plain)  # a job of that name begins again
    assert arc.jobs["check"].newest.number == 1


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_shards(tmp_path_factory.mktemp("verify") / "a", 4)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers(0, 200), max_size=4), deep=st.booleans())
def test_a_damaged_archive_has_the_same_report(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, numbers: list[int], deep: bool
) -> None:
    import shutil

    root = tmp_path_factory.mktemp("damaged") / "a"
    shutil.copytree(sound, root)
    damage(root, *numbers)
    plain, found = archive.open(root).verify(deep), archive.open(root).verify(deep, job="check")
    assert asdict(found) == asdict(plain)
    results = [one.key for one in archive.open(root).storage.scan("jobs") if one.key.endswith(".zip")]
    assert len(results) == archive.open(root).jobs["check"].newest.batches
    assert results or not plain.shards, "there is nothing to do only where the tables that name shards are damaged"


def test_interrupted_at_each_batch(tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a")
    damage(root, 1, 40, 8)
    plain, jobs = archive.open(root).verify(True), archive.open(root).jobs
    call = lambda: archive.open(root).verify(True, job="check")  # noqa: E731
    interrupted(call)
    found = interrupted_at_each(call, lambda: jobs["check"].done, jobs["check"].total)
    assert asdict(found) == asdict(plain)
    assert not plain.sound


def test_it_is_as_of_the_commit_at_which_it_began(tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a")
    plain = archive.open(root).verify(True)
    interrupted(lambda: archive.open(root).verify(True, job="check"), 2)
    arc = archive.open(root)
    with arc.writer() as w:  # which begins another session, so that the earlier episodes may go
        w.add_episode({"x": np.arange(3.0), "note": ["new"] * 3})
        w.checkpoint(9, columns={"p": np.ones(3)}).result()
    arc.refresh().forget(where="length > 10", keep=archive.Keep(last=1), dry_run=False)
    arc.prune("0s", force=True, dry_run=False)
    found = archive.open(root).verify(True, job="check")
    assert found.findings == []
    assert (found.shards, found.bytes) == (plain.shards, plain.bytes)
    assert archive.open(root).verify(True).shards == 1


def test_a_store_that_does_not_answer_is_no_finding(tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a")
    shard = archive.open(root).shards[3]
    with faults.at(root, op="get", key=shard, what="reset", times=None):
        arc = archive.open(root, deadline_s=0.3)
        with pytest.raises(archive.ArchiveError, match="deadline"):
            arc.verify(True, job="check")
    assert archive.open(root).verify(True, job="check").sound


def test_what_cannot_be(tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a", 2)
    with pytest.raises(UsageError, match="engine='spark'"):
        archive.open(root).verify(engine="spark", job="check")
    with pytest.raises(UsageError, match="read only"):
        archive.open(root, commit=1).verify(job="check")
    assert archive.open(root, commit=1).verify(True).sound
    memory = archive.open("memory://verified", create=True)
    with pytest.raises(UsageError, match="in the memory of this process"):
        memory.verify(workers=2)


def test_a_job_of_other_arguments_or_with_a_damaged_result(tmp_path: Path) -> None:
    root = of_shards(tmp_path / "a", 3)
    interrupted(lambda: archive.open(root).verify(True, job="check"), 1)
    with pytest.raises(UsageError, match="begun with deep=True"):
        archive.open(root).verify(False, job="check")
    (result,) = (root / "jobs/check").glob("*.zip")
    data = bytearray(result.read_bytes())
    data[60] ^= 1
    result.write_bytes(data)
    with pytest.raises(CorruptStateError, match=r"000000000\.zip"):
        archive.open(root).verify(True, job="check")
    result.unlink()
    assert archive.open(root).verify(True, job="check").sound
