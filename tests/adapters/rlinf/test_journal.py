"""A buffer with journal_s: what was added between two saves comes back after a crash, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import archive
from archive.adapters.rlinf import buffer as buffers
from archive.base.errors import StorageError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from archive.store import Storage
from tests.support import trajectories
from tests.support.backends import make_backend
from tests.support.kills import said_by
from tests.support.processes import until
from tests.support.sampling import one_in
from tests.support.ticks import NEVER_S
from tests.support.trajectories import add, close, everything, make, save


def world(url: str, size: int, session: str, **options: Any) -> list[TrajectoryReplayBuffer]:
    return trajectories.world(url, size, session, **({"cache_size": 3, "journal_s": NEVER_S} | options))


def sync(buffers: Sequence[TrajectoryReplayBuffer]) -> None:
    for buffer in buffers:
        assert buffer.sync().seconds_behind == 0.0


def crash(buffers: Sequence[TrajectoryReplayBuffer]) -> None:
    """Their processes are gone: nothing more is committed, nor journaled."""
    for buffer in buffers:
        buffer._closed = True
        for sink in buffer._sinks.open.values():
            sink.stop()
            sink.writer._end()
        buffer._sinks.open.clear()


def load(buffers: Sequence[TrajectoryReplayBuffer], url: str) -> None:
    for rank, buffer in enumerate(buffers):
        buffer.load_checkpoint(f"{url}/rank_{rank}")


def held(buffers: Sequence[TrajectoryReplayBuffer]) -> list[list[int]]:
    """Their ids, of trajectories whose transitions are all there."""
    for buffer in buffers:
        assert everything(buffer) == set(buffer.trajectory_ids)
    return [buffer.trajectory_ids for buffer in buffers]


@pytest.mark.parametrize("store", ["memory", "local", "moto"])
def test_a_world_of_the_same_size_goes_on_exactly(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    backend = make_backend(request, store, tmp_path)
    url, options = backend.url, {"storage_options": backend.storage_options, "max_trajectories": 3}
    old = world(url, 2, "first", **options)
    add(old, 6, 0)
    save(old, url)
    generators = [b.random_generator.get_state() for b in old]
    add(old, 5, 6)
    sync(old)
    kept, added = held(old), [b._added for b in old]
    assert (kept, added) == ([[6, 8, 10], [5, 7, 9]], [6, 5])
    assert old[1].add_trajectories([make(11)]) == [11]  # not durable
    crash(old)
    new = world(url, 2, "second", **options)
    load(new, url)
    assert all(map(torch.equal, (b.random_generator.get_state() for b in new), generators))  # as of the checkpoint
    assert [b._added for b in new] == added
    assert held(new) == kept
    add(new, 2, 11)
    save(new, url)
    assert held(new) == [[8, 10, 12], [7, 9, 11]]
    close(new)
    arc = archive.open(url, storage_options=backend.storage_options)
    assert len(arc.episodes) == 13


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("saved", [True, False])
def test_a_world_of_another_size_goes_on(before: int, after: int, saved: bool, tmp_path: Path) -> None:
    """Rank after rank, each of which adds before the next one loads; then they crash, too."""
    url = str(tmp_path)
    old = world(url, before, "first")
    add(old, 5, 0)
    if saved:
        save(old, url)
    add(old, 6, 5)
    sync(old)
    crash(old)
    new = world(url, after, "second")
    ids: list[list[int]] = []
    for rank, buffer in enumerate(new):
        buffer.load_checkpoint(f"{url}/rank_{rank}")
        ids.append(buffer.trajectory_ids + buffer.add_trajectories([make(100 + rank)]))
    every = sorted(i for mine in ids for i in mine)
    assert len(every) == len(set(every)) == 11 + after
    assert every[:11] == list(range(11))
    sync(new)
    crash(new)
    last = world(url, after, "third")
    load(last, url)
    assert [b.trajectory_ids for b in last] == ids
    close(last)


def test_who_did_not_come_to_add_anything_keeps_what_was_loaded(tmp_path: Path) -> None:
    url = str(tmp_path)
    old = world(url, 2, "first")
    add(old, 8, 0)
    sync(old)
    crash(old)
    new = world(url, 3, "second")
    load(new, url)
    ids = [b.trajectory_ids for b in new]
    sync(new)
    crash(new)
    last = world(url, 3, "third")
    load(last, url)
    assert [b.trajectory_ids for b in last] == ids
    close(last)


def test_ids_of_trajectories_that_left_are_not_used_again(tmp_path: Path) -> None:
    url = str(tmp_path)
    old = world(url, 1, "first")
    add(old, 3, 0)
    save(old, url)
    add(old, 4, 3)
    sync(old)
    old[0].clear()
    sync(old)
    crash(old)
    new = world(url, 1, "second")
    load(new, url)
    assert (len(new[0]), new[0]._added) == (0, 0)
    assert new[0].add_trajectories([make(7)]) == [7]
    close(new)


def test_ids_that_were_given_anew_stay_through_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(buffers, "next_of", lambda first, rank, world_size: first)
        old = world(url, 2, "first")  # ranks that count each by itself
        for buffer in old:
            assert buffer.add_trajectories([make(i) for i in range(3)]) == [0, 1, 2]
        sync(old)
        crash(old)
    ids = []
    for session in ("second", "third"):
        new = world(url, 1, session)
        load(new, url)
        ids.append(new[0].trajectory_ids)
        ids[-1] += new[0].add_trajectories([make(9)])
        sync(new)
        crash(new)
    assert ids == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_buffer_that_loads_its_own_checkpoint_goes_back_to_it(tmp_path: Path) -> None:
    url = str(tmp_path)
    buffers = world(url, 1, "first")
    add(buffers, 3, 0)
    save(buffers, url)
    add(buffers, 2, 3)
    sync(buffers)
    load(buffers, url)
    assert buffers[0].trajectory_ids == [0, 1, 2]
    assert buffers[0].add_trajectories([make(5)])[0] >= 3
    close(buffers)


def test_it_ticks_by_itself_and_is_told_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (buffer,) = world(str(tmp_path), 1, "first", journal_s=0.05)
    create = Storage.create
    buffer.add_trajectories([make(0)])
    until(lambda: buffer.durable_until.seconds_behind == 0.0)
    assert buffer.durable_until.positions == {("replay", -1): 4}

    def refuse(self: Storage, key: str, data: Any) -> None:
        if key.startswith("journal/"):
            raise StorageError(f"no space for {key}; free some")
        create(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "create", refuse)
        buffer.add_trajectories([make(1)])
        with pytest.raises(StorageError, match="free some"):
            buffer.sync()
    until(lambda: buffer.durable_until.seconds_behind == 0.0)
    assert buffer.add_trajectories([make(2)]) == [2]
    buffer.close()


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="journal_s= needs auto_save=True"):
        TrajectoryReplayBuffer(journal_s=2.0)
    with pytest.raises(UsageError, match="journal_s=0"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, journal_s=0)
    with TrajectoryReplayBuffer() as buffer:
        for call in (lambda: buffer.sync(), lambda: buffer.durable_until):
            with pytest.raises(UsageError, match="this buffer keeps no journal"):
                call()


@pytest.mark.parametrize("every", one_in(20))
def test_killed_at_any_storage_operation(every: int, tmp_path: Path) -> None:
    killed = said_by("buffer_kill", tmp_path, every)
    assert len(killed) > 60 // every
    assert sorted({k["saved"] for k in killed}) == [False, True]
