"""Several ranks and one checkpoint: all or nothing, once, and never of two incarnations; crashes save what there is."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import archive
from archive.base.errors import (
    CheckpointError,
    DuplicateEpisodeError,
    NotFoundError,
    PartialCheckpointError,
    RanksMissingError,
    SupersededError,
    UsageError,
)
from archive.base.layout import state_key
from archive.checkpoint import Joint, assembly, saver
from archive.log import CommitLog
from archive.saved import Part
from archive.testing import trace
from tests.support.archives import fresh, looked_up_again, reopened
from tests.support.backends import Backend
from tests.support.checkpoints import serials, steps, value_of
from tests.support.processes import answers_in_processes
from tests.support.sampling import few_of


def _segments_once(arc: archive.Archive) -> None:
    """No segment is in the table twice."""
    table = arc.checkpoints.latest.snapshot.columns(["session", "rank", "sequence"])  # type: ignore[union-attr]
    rows = Counter(zip(*(table[n].to_pylist() for n in table.column_names), strict=True))
    assert rows
    assert max(rows.values()) == 1


# -- real processes ------------------------------------------------------------------------------------------------


def _rank(rank: int, url: str, options: dict[str, Any]) -> list[int]:
    arc = archive.open(url, create=True, storage_options=options)
    with arc.writer(rank, 4, session="start") as w:
        numbers = []
        for number in range(3):
            w.append(
                steps(range(rank * 1000 + number * 10, rank * 1000 + number * 10 + 10)), env_ids=0, first=number == 0
            )
            ck = w.checkpoint(number, columns={"p": value_of(np.arange(number * 10 + 10) + rank * 1000)}).result(60)
            numbers.append(ck.number)
    return numbers


@pytest.mark.parametrize("backend", few_of(["local", "seaweedfs", "moto"], 2), indirect=True)
def test_four_processes_commit_together(backend: Backend) -> None:
    calls = [(rank, backend.url, backend.storage_options) for rank in range(4)]
    numbers = dict(enumerate(answers_in_processes(_rank, calls, timeout_s=90)))
    assert all(numbers[r] == numbers[0] for r in range(4)), "all ranks were given the same commits"
    arc = archive.open(backend.url, storage_options=backend.storage_options)
    assert [c.number for c in arc.checkpoints] == numbers[0]
    for count, ck in enumerate(arc.checkpoints):
        for rank in range(4):
            want = list(range(rank * 1000, rank * 1000 + 10 * count + 10))
            assert serials(ck, rank=rank) == want
            assert (ck.column("p", rank) == value_of(want)).all()
    assert len(arc.episodes) == 4
    _segments_once(arc)


# -- requests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_reads_nothing_of_its_own_part_back(ranks: int) -> None:
    arc = fresh()
    with arc.writer(0, ranks, session="s") as w, trace(arc) as seen:
        w.append(steps([1]), env_ids=0, first=True)
        w.checkpoint(1, columns={"p": np.ones(1)}, state={"a": 1}, partial=ranks > 1).result()
    assert [one.verb for one in seen.rows if one.key == state_key("s", "step-1", 0)] == ["create"]


# -- two that complete the same checkpoint ---------------------------------------------------------------------------


def _held(*args: Any, **more: Any) -> Any:
    raise RanksMissingError("held back by the test")


def _race(arc: archive.Archive, w: list[archive.Writer], name: str) -> list[int]:
    """Both ranks complete what both have staged, at the same moment; the commits they are given."""
    gate = threading.Barrier(2)
    storage = arc.storage
    logs = [CommitLog(storage, arc.id, arc.refresh().head) for _ in w]

    def complete(rank: int) -> int:
        joint = Joint(w[rank]._place, name, 1)
        staged = {r: Part(storage, state_key(w[rank].session, name, r)) for r in range(2)}
        gate.wait(20)
        return assembly.commit(logs[rank], joint, staged).number

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(complete, range(2)))


def _races(backend: Backend, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(saver, "join", _held)
    arc = archive.create(backend.url, storage_options=backend.storage_options)
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    for number in range(count):
        for rank, w in enumerate(writers):
            w.append(steps([rank * 1000 + number]), env_ids=0, first=number == 0)
            w.evict(0, before=max(0, number - 9))
            with pytest.raises(RanksMissingError, match="held back"):
                w.checkpoint(number).result()
        numbers = _race(arc, writers, f"step-{number}")
        assert numbers[0] == numbers[1]
        # what these two were not told of is staged again by the next one, and must not be committed again
        assert arc.refresh().head.number == numbers[0], "committed once"
    ring = list(range(max(0, count - 10), count))
    latest = arc.checkpoints.latest
    assert latest is not None
    assert [c.name for c in arc.checkpoints] == [f"step-{n}" for n in range(count)]
    assert serials(latest) == [*ring, *(1000 + n for n in ring)]
    assert [e.length for e in arc.episodes] == [count, count]
    _segments_once(arc)
    for w in writers:
        w._end()


@pytest.mark.parametrize("rounds", few_of([30, 100], 1))
@pytest.mark.parametrize("backend", ["local"], indirect=True)
def test_two_completers_commit_once(backend: Backend, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    _races(backend, monkeypatch, rounds)


@pytest.mark.parametrize("backend", ["seaweedfs"], indirect=True)
def test_two_completers_commit_once_on_s3(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    _races(backend, monkeypatch, 8)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["seaweedfs"], indirect=True)
def test_two_completers_commit_once_on_s3_a_hundred_times(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    _races(backend, monkeypatch, 100)


# -- incarnations ----------------------------------------------------------------------------------------------------


def test_what_a_dead_incarnation_staged_never_joins_a_new_one() -> None:
    arc = fresh()
    dead = [arc.writer(r, 3, session="first") for r in range(3)]
    for rank, w in enumerate(dead[:2]):
        w.append(steps([rank]), env_ids=0)
        with pytest.raises(RanksMissingError, match=r"rank (1, )?2 of 3"):
            w.checkpoint(1, timeout_s=0.05).result()
    alive = [archive.open(arc.url).writer(r, 3, session="second") for r in range(3)]
    late = dead[2]
    late.append(steps([2]), env_ids=0)
    with pytest.raises(SupersededError, match="session 'first' of run 'main' was replaced by session 'second'"):
        late.checkpoint(1, timeout_s=5).result()
    assert len(reopened(arc).checkpoints) == 0
    alive[2].append(steps([12]), env_ids=0)
    pendings = [alive[2].checkpoint(1, timeout_s=0.1)]
    with pytest.raises(RanksMissingError, match="rank 0, 1 of 3 has not staged"):
        pendings[0].result()
    for rank, w in enumerate(alive[:2]):
        w.append(steps([10 + rank]), env_ids=0)
        pendings.append(w.checkpoint(1, timeout_s=20))
    assert {p.result().number for p in pendings[1:]} == {pendings[0].result(20).number}
    assert serials(reopened(arc).checkpoints["step-1"]) == [10, 11, 12]
    for w in dead:
        w._end()
    for w in alive:
        w.close()


def test_ranks_must_agree_on_what_they_checkpoint() -> None:
    arc = fresh()
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    pendings = [writers[0].checkpoint(1, "same", timeout_s=5), writers[1].checkpoint(2, "same", timeout_s=5)]
    for pending in pendings:
        with pytest.raises(CheckpointError, match="step"):
            pending.result()
    assert len(reopened(arc).checkpoints) == 0
    for w in writers:
        w._end()


def test_ranks_must_go_on_from_the_same_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old start of the job commits once more, between the loads of two ranks of the new one: the second is refused
    at once or, by a library that did not know how, with its checkpoint."""
    arc = fresh()
    found: list[archive.Checkpoint] = []
    for number in range(2):
        old = [arc.writer(r, 2, session=f"old-{number}", resume=found[-1] if found else None) for r in range(2)]
        for rank, w in enumerate(old):
            w.add_episode(steps(range(10 * number + 5 * rank, 10 * number + 5 * rank + 3)))
        found.append([w.checkpoint(number) for w in old][1].result(10))
        for w in old:
            w.close()
    found = list(map(looked_up_again, found))
    arc.writer(0, 2, session="refused", resume=found[0])
    with pytest.raises(UsageError, match=f"from commit {found[1].number}, but another rank .* {found[0].number}"):
        arc.writer(1, 2, session="refused", resume=found[1])
    monkeypatch.setattr("archive.log.sessions._check_same_origin", lambda *_: None)
    new = [arc.writer(r, 2, session="new", resume=ck) for r, ck in enumerate(map(looked_up_again, found))]
    pending = [w.checkpoint(2) for w in new]
    with pytest.raises(CheckpointError, match=f"different checkpoints.*0: {found[0].number}, 1: {found[1].number}"):
        pending[0].result(10)
    for w, made in zip(new, pending, strict=True):
        with pytest.raises(CheckpointError):
            made.result(10)
        w.close()
    found = list(map(looked_up_again, found))
    assert reopened(arc).checkpoints.latest.number == found[1].number  # type: ignore[union-attr]
    again = [arc.writer(r, 2, session="again", resume=found[1]) for r in range(2)]
    assert len([w.checkpoint(3) for w in again][1].result(10).episodes) == 4
    for w in again:
        w.close()


def test_ids_that_two_ranks_give_at_once_are_refused() -> None:
    arc = fresh()
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    for w in writers:
        w.add_episode(steps([w.rank]), episode_id="mine")
    pendings = [w.checkpoint(1, timeout_s=5) for w in writers]
    for pending in pendings:
        with pytest.raises(DuplicateEpisodeError, match="'mine'"):
            pending.result()
    assert len(reopened(arc).episodes) == 0
    for w in writers:
        w._end()


def test_an_id_that_another_run_committed_meanwhile_is_refused() -> None:
    arc = fresh()
    one, other = arc.writer(run="one"), arc.writer(run="other")
    one.add_episode(steps([0]), episode_id="a")
    other.add_episode(steps([1]), episode_id="a")
    other.checkpoint(1).result()
    with pytest.raises(DuplicateEpisodeError, match="'a'"):
        one.checkpoint(1).result()
    assert [e.read()["serial"].tolist() for e in reopened(arc).episodes] == [[1]]
    one._end()
    other.close()


# -- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_saves_what_there_is_and_names_what_is_missing() -> None:
    arc = fresh()
    writers = [arc.writer(r, 4, session="s") for r in range(4)]
    for rank, w in enumerate(writers):
        w.append(steps([rank * 100]), env_ids=0)
    pendings = [w.checkpoint(1, timeout_s=20) for w in writers]
    whole = pendings[0].result()
    for rank, w in enumerate(writers):
        w.append(steps([rank * 100 + 1]), env_ids=0)
    with pytest.raises(RanksMissingError, match="has not staged"):
        writers[3].checkpoint(2, "two", timeout_s=0.05, columns={"p": [1.0, 2.0]}).result()
    partial = writers[1].checkpoint(2, "two", partial=True, columns={"p": [1.0, 2.0]}).result()
    seen = reopened(arc)
    ck = seen.checkpoints["two"]
    assert ck.number == partial.number
    assert (ck.whole, ck.missing_ranks, ck.ranks) == (False, [0, 2], [1, 3])
    assert ck.missing == [{"rank": 0, "last_whole": whole.number}, {"rank": 2, "last_whole": whole.number}]
    assert serials(ck) == [100, 101, 300, 301]
    assert seen.checkpoints.latest is not None
    assert seen.checkpoints.latest.number == whole.number
    with pytest.raises(PartialCheckpointError, match=r"lacks ranks \[0, 2\]"):
        ck.to_resume(1)
    with pytest.raises(NotFoundError, match="rank 0 is missing from it"):
        ck.state(0)
    assert [c.name for c in seen.checkpoints.kept()] == ["step-1", "two"]

    late = [writers[r].checkpoint(2, "two", timeout_s=20, columns={"p": [1.0, 2.0]}) for r in (0, 2)]
    done = late[0].result()
    assert late[1].result().number == done.number
    seen = reopened(arc)
    assert seen.checkpoints["two"].number == done.number, "a later whole one of the same name supersedes it"
    assert serials(seen.checkpoints["two"]) == [r * 100 + i for r in range(4) for i in (0, 1)]
    assert [c.whole for c in seen.checkpoints] == [True, False, True]
    assert [c.number for c in seen.checkpoints.kept()] == [whole.number, done.number]
    assert [e.length for e in seen.episodes] == [2] * 4
    _segments_once(seen)
    for w in writers:
        w._end()


def test_a_partial_checkpoint_never_supersedes_a_whole_one() -> None:
    arc = fresh()
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    for rank, w in enumerate(writers):
        w.append(steps([rank]), env_ids=0)
    for pending in [w.checkpoint(1, timeout_s=20) for w in writers]:
        pending.result()
    storage, place = arc.storage, writers[0]._place
    staged = {0: Part(storage, state_key("s", "step-1", 0))}
    with pytest.raises(CheckpointError, match="'step-1' was not committed: 'step-1', which is whole"):
        assembly.commit(CommitLog(storage, arc.id, arc.head), Joint(place, "step-1", 1), staged, partial=True)
    assert [c.whole for c in reopened(arc).checkpoints] == [True]
    for w in writers:
        w.close()


def test_a_crash_does_not_wait_for_the_checkpoint_under_way() -> None:
    arc = fresh()
    w = arc.writer(1, 2, session="s")
    w.append(steps([1]), env_ids=0)
    under_way = w.checkpoint(1, timeout_s=600)
    w.append(steps([2]), env_ids=0)
    partial = w.checkpoint(2, "crash", partial=True)
    ck = partial.result(20)
    assert (ck.missing_ranks, serials(ck)) == ([0], [1, 2])
    with pytest.raises(RanksMissingError, match="rank 0 of 2"):
        under_way.result(0.1)
    w._end()


def test_a_partial_checkpoint_of_a_whole_world_is_whole() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([1]), env_ids=0)
        assert w.checkpoint(1, partial=True).result().whole
    assert reopened(arc).checkpoints.latest is not None


def test_resume_needs_to_know_which_rank_it_is() -> None:
    arc = fresh()
    writers = [arc.writer(r, 2, session="s") for r in range(2)]
    for w in writers:
        w.append(steps([w.rank]), env_ids=0)
    for pending in [w.checkpoint(1, timeout_s=20) for w in writers]:
        ck = pending.result()
    for w in writers:
        w.close()
    arc = reopened(arc)
    with pytest.raises(UsageError, match="has 2 ranks; give one"):
        arc.writer(resume=ck)
    with pytest.raises(NotFoundError, match="rank 2 is not of its world of 2"):
        arc.writer(rank=2, resume=ck)
    resumed = [arc.writer(rank=r, resume=ck, session="t") for r in (0, 1)]
    assert [w.world_size for w in resumed] == [2, 2]
    for w in resumed:
        w.append(steps([10 + w.rank]), env_ids=0)
    for pending in [w.checkpoint(2, timeout_s=20) for w in resumed]:
        again = pending.result()
    assert serials(again) == [0, 10, 1, 11]
    for w in resumed:
        w.close()
