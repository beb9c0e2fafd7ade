"""A live buffer of RLinf that a journal follows: a job that dies between two saves comes back with all that was
durable, on the same and on another number of ranks."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import rlinf
from archive.adapters.rlinf.live import RLinfBuffer
from tests.support import rlinf_objects as objects
from tests.support.processes import exit_code
from tests.support.rlinf_objects import assert_same
from tests.support.ticks import NEVER_S, recovered


@pytest.fixture(autouse=True)
def package() -> Any:
    return objects.package()


def opened() -> archive.Archive:
    return archive.open(f"memory://followed-{uuid.uuid4().hex}", create=True)


def add(made: Any, *numbers: int, steps: int = 4) -> None:
    for number in numbers:
        made.add_trajectories([objects.trajectory(number, steps=steps + number % 3)])


def trees(made: Any) -> dict[int, Any]:
    """What the buffer has of each trajectory."""
    objects.wait_for_files(made)
    if made.auto_save:
        index = made._trajectory_index
        return {n: vars(made._load_trajectory(n, index[n]["model_weights_id"])) for n in made._trajectory_id_list}
    cache = made._flat_trajectory_cache
    return {n: cache.get(n) for n in sorted(cache.cache)}


def followed_state(made: Any) -> dict[str, Any]:
    """What comes back: all but what RLinf has dropped, or computes anew."""
    known = objects.plain_state(made)
    return {key: known[key] for key in ("counter", "seed", "generator", "cache", "held")}


def test_a_trajectory_that_cannot_be_read_is_awaited_and_no_other_is_added_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, other = objects.buffer(cache=8), objects.buffer(cache=8)
    made.add_trajectories([objects.trajectory(n, steps=4) for n in range(2)])
    w, real = opened().writer(0, 1, journal_s=NEVER_S), RLinfBuffer._tree
    rlinf.follow(made, w)
    w.sync()

    def tree(self: Any, number: int, *args: Any) -> Any:
        if number == 4:
            raise OSError("half a file")
        return real(self, number, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RLinfBuffer, "_tree", tree)
        made.add_trajectories([objects.trajectory(n, steps=4) for n in (2, 3, 4)])
        for _ in range(3):
            with pytest.raises(OSError, match="half a file"):
                w.sync()
            assert w.live.num_rows == 2
        w.commit()
    rlinf.restore(other, recovered(w), rank=0)
    assert (other._trajectory_id_list, other._trajectory_counter) == ([0, 1], 2)
    w.sync()
    found = recovered(w)
    rlinf.restore(other, found, rank=0, existing="replace")
    assert len(found.episodes) == len(made._flat_trajectory_cache.cache)
    assert_same(trees(made), trees(other))
    assert_same(followed_state(made), followed_state(other))


@pytest.mark.parametrize("cleared", [False, True])
def test_the_newest_state_counts_though_the_episode_of_an_earlier_one_is_spared(cleared: bool) -> None:
    """The training that its prompt had is undone, so a recovery keeps the episode, and the state that lay at it."""
    made, other = objects.buffer(), objects.buffer()
    w = opened().writer(0, 1, journal_s=NEVER_S)
    prompts = w.ledger("prompts")
    add(made, 0)
    rlinf.save(made, w, step=1).result(60)
    rlinf.follow(made, w)
    prompts.draw(["k1"])
    add(made, 3)
    w.sync()
    spared = w.live["episode_id"].to_pylist()[-1]
    prompts.seal("k1", episode_id=spared)
    prompts.train(["k1"])
    if cleared:
        made.clear()
    add(made, 6, 9)
    w.sync()
    found = recovered(w)
    assert spared in [one.id for one in found.episodes]
    assert (spared in w.live["episode_id"].to_pylist()) is not cleared
    rlinf.restore(other, found, rank=0)
    assert other._trajectory_id_list == sorted(other._trajectory_id_list)
    assert_same(objects.plain_state(made)["generator"], objects.plain_state(other)["generator"])
    add(other, 12)
    assert len(set(other._trajectory_id_list)) == len(other._trajectory_id_list) == len(found.episodes) + 1


@pytest.mark.parametrize("saved_first", [True, False])
@pytest.mark.parametrize("auto_save", [False, True])
def test_the_same_buffer_comes_back(tmp_path: Path, auto_save: bool, saved_first: bool) -> None:
    folders = (tmp_path / "a", tmp_path / "b") if auto_save else (None, None)
    arc, made = opened(), objects.buffer(range(2), folder=folders[0])
    w = arc.writer(0, 1, journal_s=NEVER_S)
    if saved_first:
        rlinf.save(made, w, step=1).result(60)
    rlinf.follow(made, w)
    add(made, 2, 3)
    w.sync()
    add(made, 4, 5, steps=9)
    objects.samples(made, 2)
    w.sync()
    other = objects.buffer(folder=folders[1], seed=99)
    report = rlinf.restore(other, recovered(w), rank=0)
    assert report.episodes == len(other) == (6 if auto_save else 3)
    assert_same(trees(made), trees(other))
    assert_same(followed_state(made), followed_state(other))
    assert_same(objects.samples(made), objects.samples(other))
    for one in (made, other):
        add(one, 6)
        objects.wait_for_files(one)
    assert_same(objects.samples(made), objects.samples(other))
    made.close()
    other.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_trajectories_on_other_ranks(world_size: int) -> None:
    arc, made = opened(), [objects.buffer(range(10 * rank, 10 * rank + 3), window=7) for rank in range(3)]
    writers = [arc.writer(rank, 3, session="first", journal_s=NEVER_S) for rank in range(3)]
    for rank, (one, w) in enumerate(zip(made, writers, strict=True)):
        rlinf.follow(one, w)
        add(one, *range(10 * rank + 3, 10 * rank + 7))
        w.sync()
    found, got = recovered(*writers), []
    for share in (resharding.plan(found, world_size=world_size).share(rank) for rank in range(world_size)):
        other = objects.buffer(window=30)
        assert rlinf.restore(other, share).episodes == len(share)
        got += [other._flat_trajectory_cache.get(n) for n in other._trajectory_id_list]
    assert len(got) == 21
    assert_same([tree for one in made for tree in trees(one).values()], got)


def test_what_left_does_not_come_back() -> None:
    arc, made, other = opened(), objects.buffer(range(3)), objects.buffer()
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rlinf.save(made, w, step=1).result(60)
    rlinf.follow(made, w)
    made.clear()
    w.sync()
    found = recovered(w)
    assert rlinf.restore(other, found, rank=0).episodes == 0
    assert_same(trees(other), {})
    add(other, 5)
    assert len(other.sample(3)["actions"]) == 3


def test_a_number_given_anew_between_two_ticks_is_another_trajectory() -> None:
    arc, made, other = opened(), objects.buffer([1]), objects.buffer()
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rlinf.follow(made, w)
    made.clear()
    add(made, 4)  # of the same length and weights as far as an index says
    made._trajectory_index[0] = dict(made._trajectory_index[0])
    w.sync()
    rlinf.restore(other, recovered(w), rank=0)
    assert_same(trees(made), trees(other))


def test_a_job_that_dies_again_before_it_saves() -> None:
    """The second one goes on from what the first one journaled, on another number of ranks, with new numbers."""
    arc, made = opened(), [objects.buffer(range(3), window=9), objects.buffer([7], window=9)]
    writers = [arc.writer(rank, 2, session="first", journal_s=NEVER_S) for rank in range(2)]
    for one, w in zip(made, writers, strict=True):
        rlinf.follow(one, w)
        w.sync()
    share = resharding.plan(recovered(*writers), world_size=1).share(0)
    second, third = objects.buffer(window=9), objects.buffer(window=9)
    rlinf.restore(second, share)
    w = archive.open(arc.url).writer(resume=share, session="second", journal_s=NEVER_S)
    rlinf.follow(second, w)
    add(second, 11)
    w.sync()
    assert len(arc.refresh().episodes) == 4  # the new one is in the journal alone, and nothing was written twice
    rlinf.restore(third, recovered(w), rank=0)
    assert third._trajectory_id_list == second._trajectory_id_list == [0, 1, 2, 3, 4]
    assert_same(trees(second), trees(third))


def test_a_tick_without_a_change_is_none() -> None:
    arc, made = opened(), [objects.buffer(range(2)), objects.buffer([5])]
    writers = [arc.writer(rank, 2, session="first", journal_s=NEVER_S) for rank in range(2)]
    for one, w in zip(made, writers, strict=True):
        rlinf.save(one, w, step=1)
    for w in writers:
        w._saver.settle()
        w.close()
    share = resharding.plan(arc.refresh().checkpoints["step-1"], world_size=1).share(0)
    rlinf.restore(other := objects.buffer(), share)  # with other numbers than its episodes say
    w = arc.refresh().writer(resume=share, session="second", journal_s=NEVER_S)
    rlinf.follow(other, w)
    number = w.sync().number
    for _ in range(3):
        assert w.sync().number == number
    add(other, 6)
    assert w.sync().number == number + 1
    recovered(w)


def test_the_journal_takes_turns_with_who_adds() -> None:
    """Slots of the cache are overwritten all the time, and no trajectory is of two."""
    arc, made = opened(), objects.buffer(range(2), window=2)
    w = arc.writer(0, 1, journal_s=NEVER_S)
    rlinf.follow(made, w)
    stop = threading.Event()

    def ticking() -> None:
        while not stop.is_set():
            w.sync()

    thread = threading.Thread(target=ticking)
    thread.start()
    for number in range(2, 30):
        add(made, number)
    stop.set()
    thread.join()
    w.sync()
    assert len(recovered(w).episodes) == 2
    every = archive.open(arc.url).episodes
    assert every[-1].metadata["trajectory_id"] == 29
    for ep in every[2:]:
        wanted = objects.tree(ep.metadata["trajectory_id"], steps=4 + ep.metadata["trajectory_id"] % 3)
        assert_same(wanted["actions"].numpy(), ep.read(["actions"])["actions"])


def test_saves_go_on_beside_it() -> None:
    arc, made, other = opened(), objects.buffer(range(2)), objects.buffer()
    with arc.writer(0, 1, journal_s=NEVER_S) as w:
        rlinf.follow(made, w)
        add(made, 2)
        w.sync()
        ck = rlinf.save(made, w, step=1).result(60)
        add(made, 3)
        assert len(arc.refresh().episodes) == 3
        again = rlinf.save(made, w, step=2).result(60)
    assert [len(one.episodes) for one in (ck, again)] == [3, 3]
    rlinf.restore(other, again, rank=0)
    assert_same(objects.plain_state(made), objects.plain_state(other))


def test_a_writer_without_a_journal_follows_nothing() -> None:
    made = objects.buffer(range(2))
    with opened().writer(0, 1) as w, pytest.raises(archive.UsageError, match="has no journal"):
        rlinf.follow(made, w)
    assert "add_trajectories" not in vars(made)


def test_a_journal_without_the_buffers_state_is_not_put_into_it() -> None:
    arc, made, other = opened(), objects.buffer(range(3)), objects.buffer([9])
    w = arc.writer(0, 1, session="first", journal_s=NEVER_S)
    rlinf.save(made, w, step=1).result(60)
    rlinf.trajectory.to_steps(objects.tree(8), 8).add(w)  # beside the buffer
    w.sync()
    found, before = recovered(w), objects.plain_state(other)
    with pytest.raises(archive.UsageError, match=r"recovered from journals.*checkpoint 'step-1'"):
        rlinf.restore(other, found, rank=0, existing="replace")
    assert_same(before, objects.plain_state(other))


def _killed(url: str) -> None:
    objects.package()
    made = objects.buffer(range(3), window=40)
    w = archive.open(url, create=True).writer(0, 1, journal_s=NEVER_S)
    rlinf.follow(made, w)
    add(made, *range(3, 21))
    w.sync()
    add(made, 21)  # in no tick
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_is_killed(tmp_path: Path) -> None:
    assert exit_code(_killed, str(tmp_path)) == -signal.SIGKILL
    rlinf.restore(made := objects.buffer(window=40), archive.open(tmp_path).recover(), rank=0)
    assert made._trajectory_id_list == list(range(21))
