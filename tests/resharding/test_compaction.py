"""compact: thinly live shards are written anew; what anybody reads, by episode, checkpoint or plan, is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import ConflictError, UsageError
from archive.read import Reader, Spans
from tests.support.archives import identical, looked_up_again
from tests.support.compactions import SCHEMA, Job, everything, fetched, of_checkpoint, of_plan, plain, priorities, whole
from tests.support.transfers import before_commit, failing_put


@pytest.fixture(params=["packed", "directory"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(tmp_path / "a", layout=request.param)


@pytest.fixture
def packed(tmp_path: Path) -> Job:
    return Job(tmp_path / "a")


def test_all_reads_as_before(job: Job) -> None:
    arc = job.opened()
    before, latest, old = (
        everything(arc),
        of_checkpoint(arc.checkpoints.latest),
        of_checkpoint(arc.checkpoints["step-1"]),
    )
    plans = {n: of_plan(arc.checkpoints.latest, n) for n in (1, 3)}
    cost = fetched(arc.checkpoints.latest)
    done = resharding.compact(arc)
    assert done.shards >= 2
    assert done.commit == arc.head.number
    for now in (arc, job.opened()):
        assert identical(everything(now), before)
        assert identical(of_checkpoint(now.checkpoints.latest), latest)
        assert identical(of_checkpoint(now.checkpoints["step-2"]), latest)
        assert identical(of_checkpoint(now.checkpoints["step-1"]), old)
        assert all(identical(of_plan(now.checkpoints.latest, n), plans[n]) for n in plans)
    assert fetched(arc.checkpoints.latest) < 0.6 * cost
    assert arc.checkpoints.latest.number == done.commit
    assert "would help" not in str(resharding.plan(arc.checkpoints.latest, 1))
    job.w.close()


def test_an_older_commit_still_reads(packed: Job) -> None:
    arc = packed.opened()
    number, before = arc.head.number, everything(arc)
    resharding.compact(arc)
    assert identical(everything(archive.open(packed.url, commit=number)), before)
    packed.w.close()


def test_twice_is_once(job: Job) -> None:
    assert resharding.compact(job.arc).commit is not None
    number, shards = job.arc.head.number, job.arc.storage.list("shards")
    assert resharding.compact(job.arc) == resharding.Compacted(0, 0, None)
    assert resharding.compact(job.opened()) == resharding.Compacted(0, 0, None)
    assert (job.opened().head.number, job.arc.storage.list("shards")) == (number, shards)
    job.w.close()


@pytest.mark.parametrize("verb", ["compact", "redact"])
def test_tokens_are_written_anew_in_batches_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    arc = archive.create(tmp_path / "a")
    with arc.writer() as w:
        for number in range(20):
            w.add_episode({"tokens": [np.full(10_000, number, np.int32)], "k": np.zeros(1)}, episode_id=f"{number}")
        w.commit()
        if verb == "compact":
            w.remove([f"{number}" for number in range(0, 20, 2)])
            w.checkpoint(1).result()
    monkeypatch.setattr("archive.maintain.relocation.READ_BYTES", 100_000)
    held, read = [], Reader.read_stored

    def seen(self: Reader, spans: Spans) -> Any:
        held.append(sum(data["tokens"].values.nbytes for data in read(self, spans)))
        return read(self, spans)

    monkeypatch.setattr(Reader, "read_stored", seen)
    before = [data["tokens"][0] for data in arc.refresh().episodes.read()][1:]
    if verb == "compact":
        assert resharding.compact(arc, min_alive=0.9).steps == 10
    else:
        with arc.refresh().writer() as other:  # ends the session
            other.commit()
        arc.refresh().forget(ids=["0"], redact=True, dry_run=False)
    assert sum(held) == 40_000 * (10 if verb == "compact" else 19)
    assert max(held) <= 100_000
    assert identical([data["tokens"][0] for data in arc.refresh().episodes.read()][-19:], before)


def test_nothing_to_do(tmp_path: Path) -> None:
    with archive.create(tmp_path / "a").writer() as w:
        w.add_episode(plain(0, 10))
        w.commit()
        assert resharding.compact(archive.open(tmp_path / "a")).commit is None
        w.checkpoint(1).result()
    assert resharding.compact(archive.open(tmp_path / "a")).commit is None


@pytest.mark.parametrize("min_alive", [0, -1, 1.01, float("nan")])
def test_a_threshold_that_would_never_end_is_refused(tmp_path: Path, min_alive: float) -> None:
    with pytest.raises(UsageError, match="min_alive"):
        resharding.compact(archive.create(tmp_path / "a"), min_alive=min_alive)


def test_the_writer_goes_on(job: Job) -> None:
    """A writer that knows nothing of the compaction: its open episode, its live set, its next checkpoints."""
    resharding.compact(job.opened())
    serials = np.concatenate([d["k"] for d in job.second.episodes.read("k")]).tolist()
    job.w.append(plain(1000, 30), env_ids=0, last=[j == 29 for j in range(30)])
    job.w.evict(0, positions=np.arange(980, 1000, 2))
    third = job.save(3)
    kept = [k for k in serials if k not in range(980, 1000, 2)] + list(range(1000, 1030))
    got = np.concatenate([d["k"] for d in third.episodes.read("k")]).tolist()
    assert sorted(got) == sorted(kept)
    for data in third.episodes.read():
        if "small" in data:
            assert all(
                identical(
                    {n: data[n][i : i + 1] for n in ("k", "reward", "z")},
                    {n: plain(int(k), 1)[n] for n in ("k", "reward", "z")},
                )
                for i, k in enumerate(data["k"])
            )
    done = resharding.compact(job.opened())
    assert done.commit is None or done.commit > third.number
    assert identical(of_checkpoint(job.opened().checkpoints.latest), of_checkpoint(third))
    job.w.close()


def test_resume_after_compaction(packed: Job) -> None:
    packed.w.close()
    arc = packed.opened()
    resharding.compact(arc)
    latest = arc.checkpoints.latest
    wanted = of_checkpoint(latest)
    with arc.writer(resume=latest) as w:
        assert [e["episode_id"] for e in w.live.to_pylist()]
        same = w.checkpoint(3, columns={"priority": np.concatenate(wanted["columns"])}).result()
        assert same.commit.added == {"segments": 0}
        assert identical(same.episodes.read(), wanted["steps"])
        w.append(plain(2000, 10), env_ids=0)
        assert len(w.checkpoint(4, columns={"priority": priorities(w)}).result().episodes.read()) >= len(
            wanted["steps"]
        )
    plan = resharding.plan(looked_up_again(latest), world_size=2)
    writers = [arc.writer(resume=plan.share(rank), session="two") for rank in range(2)]
    for rank, w in enumerate(writers):
        pending = w.checkpoint(5, columns={"priority": plan.share(rank).columns["priority"]})
    after = pending.result()
    serials = [np.concatenate([d["k"] for d in s]) for s in (after.episodes.read("k"), wanted["steps"])]
    assert sorted(serials[0].tolist()) == sorted(serials[1].tolist())
    for w in writers:
        w.close()


@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_removal_and_compaction(tmp_path: Path, seed: int) -> None:
    """A model of what must be live, over several rounds, with compactions of compacted segments."""
    rng = np.random.default_rng(seed)
    arc = archive.create(tmp_path / "a")
    w = arc.writer()
    live: set[int] = set()
    for round_ in range(5):
        start = round_ * 100
        w.append({"k": np.arange(start, start + 100), "reward": np.ones(100)}, env_ids=0, last=rng.random(100) < 0.1)
        live |= set(range(start, start + 100))
        gone = rng.choice(sorted(live), int(len(live) * 0.6), replace=False)
        w.evict(0, positions=np.sort(gone))
        live -= set(gone.tolist())
        ck = w.checkpoint(round_, columns={"priority": np.array(sorted(live), float)}).result()
        resharding.compact(archive.open(arc.url), min_alive=0.7)
        now = archive.open(arc.url)
        latest = now.checkpoints.latest
        assert (latest.name, latest.number >= ck.number) == (ck.name, True)
        assert np.concatenate([d["k"] for d in latest.episodes.read("k")]).tolist() == sorted(live)
        assert latest.column("priority", 0).tolist() == sorted(live)
        assert np.concatenate([d["k"] for d in now.episodes.read("k")]).tolist() == list(range(start + 100))
        assert sum(e.total_reward for e in now.episodes) == start + 100
    w.close()


def test_a_writers_commit_between_keeps_both(packed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = packed.opened()
    cost = fetched(arc.checkpoints.latest)
    packed.w.append(plain(1000, 20), env_ids=0)
    with before_commit(monkeypatch, lambda: packed.save(3)):
        resharding.compact(arc)
    now = packed.opened()
    third = now.checkpoints["step-3"]
    assert now.checkpoints.latest.name == "step-3"
    assert now.checkpoints.latest.number > third.number
    assert identical(of_checkpoint(now.checkpoints.latest), of_checkpoint(third))
    assert fetched(now.checkpoints.latest) < cost
    packed.w.close()


def test_episodes_of_several_segments_in_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields with other rows than one a step, in episodes cut into many shards; few live steps,
    read in small batches."""
    monkeypatch.setattr("archive.write.slabs.SHARD_BYTES", 6000)
    monkeypatch.setattr("archive.maintain.relocation.SHARD_BYTES", 20_000)
    monkeypatch.setattr("archive.maintain.relocation.READ_BYTES", 5000)
    arc = archive.create(tmp_path / "a")
    with arc.writer(schema=SCHEMA) as w:
        for i in range(8):
            w.add_episode(whole(i, 100), episode_id=f"long-{i}")
            w.add_episode(whole(100 + i, 3), episode_id=f"short-{i}")
        w.remove([f"short-{i}" for i in range(8)] + ["long-2", "long-5"])
        w.evict(-1, positions=np.r_[10:45, 110:150, 320:350])
        w.checkpoint(1, columns={"priority": priorities(w)}).result()
    arc.refresh()
    before, latest = everything(arc), of_checkpoint(arc.checkpoints.latest)
    assert len(arc.shards) > 8
    assert resharding.compact(arc, min_alive=1.0).shards >= 3
    assert resharding.compact(arc, min_alive=1.0).commit is None  # what goes along with live steps is not moved again
    assert identical(everything(archive.open(arc.url)), before)
    assert identical(of_checkpoint(archive.open(arc.url).checkpoints.latest), latest)


def test_two_compactions_at_once(packed: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = packed.opened()
    before = everything(arc)
    rival = packed.opened()
    with (
        before_commit(monkeypatch, lambda: resharding.compact(rival)),
        pytest.raises(ConflictError, match="run it again"),
    ):
        resharding.compact(arc)
    assert resharding.compact(packed.opened()).commit is None
    assert identical(everything(packed.opened()), before)
    packed.w.close()


@pytest.mark.parametrize("part", ["shards/", "manifest/"])
def test_a_failure_changes_nothing(packed: Job, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arc = packed.opened()
    number, before = arc.head.number, everything(arc)
    with failing_put(monkeypatch, 0, part), pytest.raises(OSError, match="gone"):
        resharding.compact(arc)
    assert packed.opened().head.number == number
    assert resharding.compact(packed.opened()).commit == number + 1
    assert identical(everything(packed.opened()), before)
    packed.w.close()


def test_merge_sees_the_same_episodes_before_and_after(packed: Job, tmp_path: Path) -> None:
    """What was merged before a compaction of the source is not merged again after it."""
    packed.w.close()
    before = everything(packed.arc.refresh())
    for copy in (True, False):
        resharding.merge([packed.url], to=tmp_path / f"early-{copy}", copy=copy)
    resharding.compact(packed.opened())
    for copy in (True, False):
        again = resharding.merge([packed.url], to=tmp_path / f"early-{copy}", copy=copy, allow_bases=tmp_path)
        assert again.head.number == 1
        assert identical(everything(again), before)
        late = resharding.merge([packed.url], to=tmp_path / f"late-{copy}", copy=copy, allow_bases=tmp_path)
        assert identical(everything(late), before)
