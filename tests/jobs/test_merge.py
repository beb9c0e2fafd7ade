"""A merge of copies as a job, kept in the target: whatever stops it, each shard is copied once, and committed once."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.layout import is_temporary
from archive.errors import JobError, NotFoundError, UsageError
from archive.testing import steps
from resharding import archives, transfer
from tests.support.broken_jobs import interrupted, interrupted_at_each
from tests.support.commands import document
from tests.support.compactions import everything
from tests.support.kills import die_at
from tests.support.pruning import NOW, keys_of, killed_at, sound
from tests.support.sampling import one_in, sampled

SHARDS = 5  # of both sources, with one of derived columns


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sources, below a folder."""
    for name, first, count in (("a", 0, 4), ("b", 4, 4)):
        arc = archive.create(tmp_path / "r" / name)
        with arc.writer() as w:
            for i in range(first, first + count):
                w.add_episode(steps(4 + i, i), episode_id=f"e{i}")
                if i % 2:
                    w.commit()
    archive.open(tmp_path / "r" / "a").add_fields({"late": {"e1": np.arange(5.0)}})
    return tmp_path / "r"


def merge(root: Path, **how: Any) -> archive.Archive:
    return resharding.merge([root / "a", root / "b"], to=root / "to", copy=True, job="both", **how)


def job(root: Path) -> Any:
    return archive.open(root / "to").jobs["both"]


def check(root: Path, renamed: bool = False) -> None:
    """Both are there once, and so is each of their shards, under its name unless a prune had listed that."""
    arc, sources = archive.open(root / "to"), [archive.open(root / name) for name in ("a", "b")]
    found = everything(arc)
    np.testing.assert_equal(found, everything(sources[0]) | everything(sources[1]))
    there = {key for key in keys_of(arc, "shards") if not is_temporary(key)}  # which a killed put leaves on a disk
    shards = there, keys_of(sources[0], "shards") | keys_of(sources[1], "shards")
    assert len(shards[0]) == len(shards[1])
    assert (shards[0] == shards[1]) != renamed
    assert [one.kind for one in arc.commits].count("merge") == 1
    assert arc.jobs.unfinished() == []
    assert sound(arc)


@pytest.mark.parametrize("workers", [None, 2])
def test_it_is_as_one_process_makes_it(root: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None) -> None:
    monkeypatch.setattr(archives, "BATCH_BYTES", 1)
    seen: list[tuple[int, int]] = []
    merge(root, workers=workers, progress=lambda *now: seen.append(now))
    assert seen[-1] == (SHARDS, SHARDS)
    check(root)
    assert merge(root, workers=workers).head.number == 1  # nothing came since
    archive.open(root / "to").prune(dry_run=False, **NOW)
    check(root)


def test_each_shard_is_copied_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "BATCH_BYTES", 1)
    stream, copies = archives._stream, list[str]()

    def counted(source: Any, target: Any, shard: str, key: str, members: Any) -> None:
        copies.append(key)
        stream(source, target, shard, key, members)

    monkeypatch.setattr(archives, "_stream", counted)
    interrupted_at_each(partial(merge, root), lambda: job(root).done, SHARDS)
    check(root)
    assert len(copies) == len({*copies}) == SHARDS


def merge_and_die(url: str, k: int) -> None:
    archives.BATCH_BYTES = 1
    die_at(k)
    merge(Path(url))


@pytest.mark.parametrize("count", one_in(25))
def test_killed_at_any_operation_it_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    for k in sampled(range(300), count):
        where = tmp_path / f"killed-{k}"
        shutil.copytree(root, where)
        killed = killed_at(str(where), k, merge_and_die)
        try:
            made = archive.open(where / "to")
        except NotFoundError:
            made = None
        assert made is None or made.head.number in (0, 1)
        if made is None or made.head.number == 0 or made.jobs.unfinished():
            merge(where)
        check(where)
        shutil.rmtree(where)
        if not killed:
            break
    assert not killed
    assert k > 20


def test_sources_are_as_they_were_and_a_prune_spares_copies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "BATCH_BYTES", 1)
    interrupted(lambda: merge(root), 2)
    before = {name: everything(archive.open(root / name)) for name in ("a", "b")}
    with archive.open(root / "a").writer(run="another") as w:
        w.add_episode(steps(3, 30), episode_id="new")
    with archive.open(root / "to").writer() as w:
        w.add_episode(steps(3, 31), episode_id="own")
    copies = keys_of(archive.open(root / "to"), "shards")
    assert len(copies) == 4  # and one whose result was not put
    archive.open(root / "to").prune(dry_run=False, **NOW)
    assert keys_of(archive.open(root / "to"), "shards") == copies
    found = everything(merge(root))
    assert found.keys() == {*before["a"], *before["b"], "own"}
    np.testing.assert_equal({name: found[name] for name in found if name != "own"}, before["a"] | before["b"])
    assert everything(merge(root)).keys() == {*found, "new"}  # a round of what came since
    assert sound(archive.open(root / "to"))


def test_copies_of_a_cancelled_job_are_garbage(root: Path) -> None:
    interrupted(lambda: merge(root), 1)
    job(root).cancel()
    archive.open(root / "to").prune(dry_run=False, **NOW)
    assert keys_of(archive.open(root / "to"), "shards") == set()
    merge(root)
    check(root, renamed=True)


def test_a_copy_that_was_pruned_meanwhile_ends_the_job(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who cancels the job makes a prune delete what it has; then nothing is committed that is not whole."""
    finished = transfer.copied

    def cancelled(*args: Any) -> Any:
        made = finished(*args)
        job(root).cancel()
        archive.open(root / "to").prune(dry_run=False, **NOW)
        return made

    monkeypatch.setattr(transfer, "copied", cancelled)
    with pytest.raises(JobError, match="was cancelled by another process"):
        merge(root)
    assert archive.open(root / "to").head.kind == "prune"
    assert len(archive.open(root / "to").episodes) == 0


def test_parts_of_an_archive(root: Path) -> None:
    how: dict[str, Any] = {"copy": True, "job": "some", "workers": 2}
    assert {*everything(resharding.split(root / "a", root / "half", 2, **how))} == {"e0", "e1"}
    assert {*everything(resharding.filter(root / "b", root / "half", where="length > 10", **how))} >= {"e0", "e7"}
    arc = archive.open(root / "a")
    with arc.writer() as w:
        w.add_episode(steps(5, 40), episode_id="e40")
        w.checkpoint(1).result()
    plan = resharding.plan(arc.refresh().checkpoints.latest, 2)
    made = resharding.reshard(arc, plan, root / "two", **how)
    assert (made.world_size, [one.id for one in made.episodes]) == (2, ["e40"])
    assert archive.open(root / "two").jobs["some"].finished


def test_commands_take_a_job_and_workers(root: Path) -> None:
    how = ("--copy", "--job", "all", "--workers", "2")
    made = document("merge", root / "a", str(root / "b"), "--to", str(root / "to"), *how)
    assert made["episodes"] == 8
    document("filter", root / "a", "--where", "length > 5", "--to", str(root / "some"), *how)
    with archive.open(root / "to").writer(run="last") as w:
        w.checkpoint(1).result()
    document("reshard", root / "to", "2", "--to", str(root / "two"), *how)
    document("split", root / "to", "2", "--to", str(root / "half"), *how)
    document("forget", root / "to", "--id", "e0", "--redact", "--job", "gone", "--yes")
    document("compact", root / "to", "--job", "tidy", "--workers", "2", "--yes")
    assert sorted(archive.open(root / "to").jobs) == ["all", "gone", "tidy"]
    for name in ("to", "some", "two", "half"):
        assert all(one.finished for one in archive.open(root / name).jobs.values())


def test_arguments_that_make_no_sense(root: Path) -> None:
    for given in ({"job": "x"}, {"engine": "ray"}, {"workers": 2}):
        with pytest.raises(UsageError, match="give copy=True"):
            resharding.merge([root / "a"], to=root / "to", **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="engine='spark'"):
        merge(root, engine="spark")
    with pytest.raises(UsageError, match="in the memory of this process"):
        resharding.merge([root / "a"], to="memory://jobs/merged", copy=True, workers=2)
    assert not (root / "to").exists()
    interrupted(lambda: merge(root), 1)
    with pytest.raises(UsageError, match="was begun with sources="):
        resharding.merge([root / "a"], to=root / "to", copy=True, job="both")
    with pytest.raises(UsageError, match="was begun with verify=False, not True"):
        merge(root, verify=True)
    with pytest.raises(UsageError, match="of kind 'merge', not 'compact'"):
        resharding.compact(archive.open(root / "to"), job="both")
