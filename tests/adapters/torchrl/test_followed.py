"""A buffer that a journal follows: a job that dies between two saves comes back with all that was durable, on the same
and on another number of ranks; what a journal has without a state is not put into a buffer."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.adapters.torchrl import states
from archive.adapters.torchrl.cells import TensorCells
from archive.adapters.torchrl.lists import ListCells
from tests.support.processes import exit_code
from tests.support.ticks import NEVER_S, abandoned, recovered
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, rectangle, same, steps

import torch  # isort: skip
from torchrl.data import (  # isort: skip
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from torchrl.data.replay_buffers.samplers import ConsumingSampler  # isort: skip


def opened() -> archive.Archive:
    return archive.open(f"memory://followed-{uuid.uuid4().hex}", create=True)


def prioritized(capacity: int) -> Any:
    return PrioritizedSampler(capacity, 0.7, 0.5)


KINDS: dict[str, Callable[[int], Any]] = {
    "plain": lambda seed: buffer(40, seed=seed),
    "prioritized": lambda seed: buffer(40, sampler=prioritized(40), seed=seed),
    "once": lambda seed: buffer(40, sampler=SamplerWithoutReplacement(), seed=seed),
    "list": lambda seed: buffer(storage=ListStorage(40), seed=seed),
    "best": lambda seed: buffer(40, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), seed=seed),
}


def train(rb: Any, lo: int, count: int) -> None:
    """Some steps, and what a learner changes."""
    for t in range(lo, lo + count, 3):
        rb.extend(steps(t, min(3, lo + count - t)))
        index = rb.sample().get("index", None)
        if isinstance(rb._sampler, PrioritizedSampler) and index is not None:
            rb.update_priority(index, torch.rand(len(index), generator=torch.Generator().manual_seed(t)))


@pytest.mark.parametrize("saved_first", [True, False])
@pytest.mark.parametrize("count", [9, 30, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_buffer_comes_back(kind: str, count: int, saved_first: bool) -> None:
    arc, rb, other = opened(), KINDS[kind](0), KINDS[kind](1)
    w = arc.writer(0, 1, journal_s=NEVER_S)
    train(rb, 0, 12)
    if saved_first:
        torchrl.save(rb, w, step=1).result(60)
    torchrl.follow(rb, w)
    train(rb, 12, count // 2)
    w.sync()
    train(rb, 12 + count // 2, count - count // 2)
    w.sync()
    found = abandoned(w).recover()
    assert found is not None
    report = torchrl.restore(other, resharding.plan(found, world_size=1).share(0))
    assert report.steps == len(rb)
    assert other._writer._cursor == rb._writer._cursor
    assert other.write_count == rb.write_count
    assert same(other[:], rb[:])
    assert_same_samples(rb, other, 30, write=lambda b, i: b.extend(steps(500 + i, 2)))


def job(arc: archive.Archive, rank: int, world_size: int, rb: Any) -> archive.Writer:
    """A rank that saved once, and whose journal has more."""
    w = arc.writer(rank, world_size, session="first", journal_s=NEVER_S)
    rb.extend(steps(1000 * rank, 10))
    torchrl.follow(rb, w)
    train(rb, 1000 * rank + 10, 20)
    w.sync()
    return w


def test_what_is_too_large_for_each_tick_is_made_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.adapters.torchrl.buffer._TICK_BYTES", 0)

    def make(seed: int) -> Any:
        return buffer(40, sampler=ConsumingSampler(max_sample_count=3), seed=seed, batch_size=4)

    arc, rb, other = opened(), make(0), make(1)
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rb.extend(steps(0, 30))
    torchrl.follow(rb, w)
    for _ in range(12):
        rb.sample()
    w.sync()
    torchrl.restore(other, abandoned(w).recover(), rank=0)
    assert same(other[:], rb[:])
    counts = [one._sampler._sample_count[: len(rb)].tolist() for one in (rb, other)]
    assert counts[0] == counts[1]
    assert max(counts[0]) > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_steps_and_their_priorities_on_other_ranks(world_size: int) -> None:
    arc, buffers = opened(), [buffer(100, sampler=prioritized(100)) for _ in range(2)]
    writers = [job(arc, rank, 2, rb) for rank, rb in enumerate(buffers)]
    for w in writers:
        abandoned(w)
    found = archive.open(arc.url).recover()
    assert found is not None
    others = [buffer(100, sampler=prioritized(100), seed=7) for _ in range(world_size)]
    for rank, other in enumerate(others):
        torchrl.restore(other, resharding.plan(found, world_size=world_size).share(rank))
    held = sorted(value for rb in others for value in priorities(rb).items())
    assert held == sorted(value for rb in buffers for value in priorities(rb).items())


def priorities(rb: Any) -> dict[float, float]:
    """Step -> its priority."""
    values = contents(rb)
    return dict(zip(values, rb._sampler._sum_tree[torch.arange(len(values))].tolist(), strict=True))


def test_a_rectangle_comes_back() -> None:
    arc, rb, other = opened(), *(buffer(storage=LazyTensorStorage(30, ndim=2), seed=seed) for seed in range(2))
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rb.extend(rectangle(0, 4, 3))
    torchrl.follow(rb, w)
    for lo in range(4, 24, 4):
        rb.extend(rectangle(lo, 4, 3))
        w.sync()
    torchrl.restore(other, abandoned(w).recover(), rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(rectangle(100 + 2 * i, 2, 3)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_that_dies_again_before_it_saves(world_size: int) -> None:
    """The second one goes on from what the first one journaled, on as many ranks or more, and journals more."""
    arc, first = opened(), buffer(50)
    abandoned(job(arc, 0, 1, first))
    share = resharding.plan(arc.refresh().recover(), world_size=world_size).share(0)
    second, third = buffer(50, seed=1), buffer(50, seed=2)
    torchrl.restore(second, share)
    writers = []
    for rank, rb in enumerate([second, *[buffer(50)] * (world_size - 1)]):
        if rank:
            torchrl.restore(rb, share.plan.share(rank))
        writers.append(archive.open(arc.url).writer(resume=share.plan.share(rank), session="second", journal_s=NEVER_S))
        torchrl.follow(rb, writers[rank])
    second.extend(steps(500, 5))
    for w in writers:
        w.sync()
    for w in writers:
        abandoned(w)
    torchrl.restore(third, archive.open(arc.url).recover(), rank=0)
    assert contents(third) == contents(second)
    assert third._writer._cursor == second._writer._cursor


def test_a_tick_without_a_change_is_none() -> None:
    arc, rb = opened(), buffer(50)
    w = job(arc, 0, 1, rb)
    number = w.durable_until.number
    for _ in range(3):
        w.sync()
    assert w.durable_until.number == number
    rb.extend(steps(500, 1))
    assert w.sync().number == number + 1
    abandoned(w)


def test_what_cannot_be_taken_in_is_raised_by_the_next_call() -> None:
    arc, rb = opened(), buffer(50)
    w = job(arc, 0, 1, rb)
    rb._storage = ListStorage(10)
    rb._storage.set(0, object())
    with pytest.raises(archive.ArchiveError, match="cannot be saved"):
        w.sync()
    w._tick()  # as the journal's thread does it
    with pytest.raises(archive.ArchiveError, match="cannot be saved"):
        w.add_episode({"x": torch.zeros(1)})
    abandoned(w)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_that_fails_leaves_nothing_and_the_next_has_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the steps were appended: neither the writer nor the tracker has them, and no other step is read again."""
    arc, rb, other = opened(), KINDS[kind](0), KINDS[kind](1)
    w = arc.writer(0, 1, journal_s=NEVER_S)
    train(rb, 0, 30)
    torchrl.follow(rb, w)
    w.sync()
    was, before = rb[:].clone(), w.live.to_pydict()
    train(rb, 30, 14)
    with monkeypatch.context() as patch:
        patch.setattr(states, "writer_state", lambda parts: (_ for _ in ()).throw(OSError("once")))
        with pytest.raises(OSError, match="once"):
            w.sync()
    assert w.live.to_pydict() == before
    w.commit()
    torchrl.restore(back := KINDS[kind](2), recovered(w), rank=0)
    assert same(back[:], was)
    read = tracked_cells(monkeypatch)
    w.sync()
    assert 0 < len(set(read)) <= 14
    torchrl.restore(other, recovered(w), rank=0)
    assert same(other[:], rb[:])
    assert (other._writer._cursor, other.write_count) == (rb._writer._cursor, rb.write_count)


def tracked_cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cells that are read from now on."""
    read: list[int] = []
    for kind in (TensorCells, ListCells):
        real = kind.read
        monkeypatch.setattr(
            kind, "read", lambda self, chosen, real=real: read.extend(chosen.tolist()) or real(self, chosen)
        )
    return read


def test_a_writer_without_a_journal_follows_nothing() -> None:
    with opened().writer(0, 1) as w, pytest.raises(archive.UsageError, match="journal_s="):
        torchrl.follow(buffer(50), w)


def test_a_journal_without_the_buffers_state_is_not_put_into_it() -> None:
    """Steps that somebody appended beside the buffer."""
    arc, rb, other = opened(), buffer(40), buffer(40, seed=3)
    rb.extend(steps(0, 12))
    w = arc.writer(0, 1, session="first", journal_s=NEVER_S)
    torchrl.save(rb, w, step=1).result(60)
    w.append(steps(500, 5), env_ids=7)
    w.sync()
    abandoned(w)
    saved = arc.refresh().checkpoints["step-1"]
    for world_size in (1, 2):
        plan = resharding.plan(saved, world_size=world_size)
        assert plan.checkpoint.record.recovered is not None
        with pytest.raises(archive.UsageError, match=r"'step-1\+tail-.*checkpoint 'step-1'.*tails='ignore'"):
            torchrl.restore(other, plan.share(0))
    assert len(other) == 0
    torchrl.restore(other, resharding.plan(saved, world_size=1, tails="ignore").share(0))
    assert same(contents(other), contents(rb))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [True, False])
def test_a_job_that_died_again_before_the_journal_looked_at_its_buffer(kind: str, saved: bool) -> None:
    """Its first tick says what the buffer holds; its state is that of the checkpoint that it went on from."""
    arc, rb, other = opened(), KINDS[kind](0), KINDS[kind](1)
    w = arc.writer(0, 1, session="0", journal_s=NEVER_S)
    train(rb, 0, 50)
    torchrl.save(rb, w, step=1).result(60) if saved else torchrl.follow(rb, w)
    w.sync()
    found = arc.refresh().checkpoints.latest if saved else recovered(w)
    for session in "12":
        share = resharding.plan(found, world_size=1).share(0)
        w = arc.refresh().writer(resume=share, session=session, journal_s=NEVER_S)
        w.sync()
        found = recovered(w)
    torchrl.restore(other, found, rank=0)
    assert same(other[:], rb[:])
    assert_same_samples(rb, other, 30, write=lambda b, i: b.extend(steps(500 + i, 2)))


def test_a_tick_of_another_buffer_leaves_this_ones_state_as_it_was_saved() -> None:
    arc, rb, other = opened(), buffer(40), buffer(40, seed=3)
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rb.extend(steps(0, 12))
    torchrl.save(rb, w, step=1).result(60)
    w.buffer("demo").append(steps(500, 5), env_ids=7)
    w.sync()
    torchrl.restore(other, recovered(w), rank=0)
    assert same(other[:], rb[:])
    assert other._writer._cursor == rb._writer._cursor == 12


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_that_died_once_it_was_journaled(world_size: int) -> None:
    arc, rb = opened(), buffer(40)
    w = arc.writer(0, 1, session="first", journal_s=NEVER_S)
    rb.extend(steps(0, 12))
    torchrl.save(rb, w, step=1).result(60)
    before = contents(rb)
    rb.extend(steps(500, 5))
    w._saver.start = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        torchrl.save(rb, w, step=2)
    w.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    saved = arc.refresh().checkpoints["step-1"]
    plan, held = resharding.plan(saved, world_size=world_size), []
    for rank in range(world_size):
        torchrl.restore(other := buffer(40, seed=3), plan.share(rank))
        held += contents(other)
    assert held == contents(rb)
    torchrl.restore(other := buffer(40, seed=3), saved, rank=0)  # the checkpoint itself is as it was saved
    assert contents(other) == before


def _killed(url: str) -> None:
    job(archive.open(url, create=True), 0, 1, rb := buffer(50, sampler=prioritized(50)))
    rb.extend(steps(700, 7))  # in no tick
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_is_killed(tmp_path: Path) -> None:
    assert exit_code(_killed, str(tmp_path)) == -signal.SIGKILL
    torchrl.restore(rb := buffer(50, sampler=prioritized(50)), archive.open(tmp_path).recover(), rank=0)
    assert contents(rb) == [float(t) for t in range(30)]


def test_ticks_of_the_journals_own_thread_beside_training_and_saves() -> None:
    arc = opened()
    rb, other = (buffer(40, sampler=prioritized(40), prefetch=2, seed=seed) for seed in range(2))
    w = arc.writer(0, 1, journal_s=0.01)
    torchrl.follow(rb, w)
    for i in range(30):
        train(rb, 3 * i, 3)
        if i % 10 == 5:
            torchrl.save(rb, w, step=i).result(60)
    w.sync()
    torchrl.restore(other, abandoned(w).recover(), rank=0)
    assert same(other[:], rb[:])
    assert priorities(other) == priorities(rb)
    assert (other._writer._cursor, other.write_count) == (rb._writer._cursor, rb.write_count)


@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_were_drawn_ahead_are_counted_as_dropped(world: int) -> None:
    w = opened().writer(journal_s=NEVER_S)
    rb = buffer(40, sampler=SamplerWithoutReplacement(drop_last=False), prefetch=2)
    rb.extend(steps(0, 20))
    torchrl.follow(rb, w)
    rb.sample()
    waiting = len(rb._prefetch_queue)
    w.sync()
    plan = resharding.plan(recovered(w), world_size=world)
    made = [torchrl.restore(buffer(40, prefetch=2), plan.share(rank)) for rank in range(world)]
    assert waiting > 0
    assert {report.counts["prefetched_batches_dropped"] for report in made} == {waiting}
