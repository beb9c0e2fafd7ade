"""Checkpoints without the replay buffer: progress goes back, what was drawn is listed, data comes with the next one."""

from __future__ import annotations

import pickle

import pytest

from archive.adapters.xtuner import rollback
from archive.base.errors import CorruptCommitError
from archive.checkpoint.checkpoints import Checkpoint
from archive.write import Resume
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps, value_of

PROGRESS = {
    "next_consumer_step": 4, "producer_future_step": 9, "consumed_samples": {"math": 8}, "target_samples": {"math": 20},
    "target_upto_future_step": 9, "raw_rewards_sum": {"math": 3.5}, "raw_rewards_count": {"math": 12},
    "produced_samples": {"math": 12}, "produced_tokens": {"math": 900}, "produce_time_s": 4.5, "mine": 1,
}  # fmt: skip


def test_without_replay_the_data_waits_for_the_next_full_checkpoint() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(5)), env_ids=0)
        full = w.checkpoint(1, columns={"p": value_of(range(5))}).result()
        w.append(steps(range(5, 9)), env_ids=0)
        light = w.checkpoint(
            2,
            save_replay=False,
            progress=rollback(PROGRESS),
            unconsumed=[{"prompt": 3}, 5],
            columns={"p": value_of(range(9))},
            state={"lr": 1.0},
        )
        assert light.result().replay_saved is False
        assert light.durable == 1, "the steps of the second are not safe yet"
        seen = reopened(arc)
        assert (len(seen.episodes), seen.episodes[0].length) == (1, 5)
        w.append(steps(range(9, 11)), env_ids=0)
        third = w.checkpoint(3)
        third.result()
        assert third.durable == 3
    points = reopened(arc).checkpoints
    assert [c.replay_saved for c in points] == [True, False, True]
    assert serials(points["step-1"]) == list(range(5))
    assert serials(points["step-2"]) == []
    assert serials(points["step-3"]) == list(range(11)), "what was pending at the second is in the third"
    assert points["step-2"].progress == rollback(PROGRESS)
    assert points["step-2"].unconsumed == [{"prompt": 3}, 5]
    assert points["step-2"].state(0) == {"lr": 1.0}
    assert (points["step-1"].column("p", 0) == value_of(range(5))).all()
    assert full.unconsumed == []


def test_what_was_not_saved_is_committed_when_the_writer_is_left() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(4)), env_ids=0)
        w.checkpoint(1, save_replay=False).result()
        assert len(reopened(arc).episodes) == 0
    assert reopened(arc).episodes[0].length == 4


def test_latest_with_replay_is_the_newest_that_has_data() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(1, save_replay=False).result()
        assert reopened(arc).checkpoints.newest(replay=True) is None
        w.append(steps([0]), env_ids=0)
        w.checkpoint(2).result()
        w.checkpoint(3, save_replay=False).result()
    latest = reopened(arc).checkpoints.latest
    assert latest is not None
    assert latest.name == "step-3"
    found = latest(replay=True)
    assert found is not None
    assert found.name == "step-2"
    assert found(replay=True) is found
    assert not any(callable(ck) for ck in reopened(arc).checkpoints), "only the latest is asked for its data"
    assert callable(pickle.loads(pickle.dumps(found)))


def test_rewind_is_called_for_the_list_and_only_if_it_is_not_given() -> None:
    arc = fresh()
    with arc.writer() as w:
        called: list[int] = []

        def rewind() -> list[int]:
            called.append(1)
            return [7, 8]

        assert w.checkpoint(1, save_replay=False, rewind=rewind).result().unconsumed == [7, 8]
        assert w.checkpoint(2, save_replay=False, rewind=rewind, unconsumed=[9]).result().unconsumed == [9]
    assert called == [1]


def test_progress_of_a_full_checkpoint_is_kept_as_it_is() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(1, progress=PROGRESS).result()
    latest = reopened(arc).checkpoints.latest
    assert latest is not None
    assert latest.progress == PROGRESS


def test_a_checkpoint_that_does_not_say_counts_as_saved() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps([0, 1]), env_ids=0)
        ck = w.checkpoint(1).result()
    body = ck.commit.to_json()
    del body["checkpoint"]["replay_saved"]
    commit = type(ck.commit).from_json(body, what="an older commit", error=CorruptCommitError)
    older = Checkpoint(ck.snapshot.storage, commit)
    assert older.replay_saved is True
    assert serials(older) == [0, 1]
    assert older.to_resume().buffers["replay"].runs.length.sum() == 2


def test_resuming_without_replay_gives_empty_buffers_and_everything_else() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(5)), env_ids=0)
        w.buffer("demo").append(steps(range(50, 55)), env_ids=1)
        w.checkpoint(1, save_replay=False, state={"cursor": 3}, unconsumed=[1]).result()
    arc = reopened(arc)
    ck = arc.checkpoints["step-1"]
    resume = ck.to_resume()
    assert isinstance(resume, Resume)
    assert sorted(resume.buffers) == ["demo", "replay"]
    with arc.writer(resume=ck) as w:
        assert w.live.num_rows == 0
        w.append(steps([90]), env_ids=0, last=True)
        again = w.checkpoint(2).result()
    assert serials(again) == [90]
    assert ck.state(0) == {"cursor": 3}
    assert ck.unconsumed == [1]


@pytest.mark.parametrize("value", [[1, {"a": [2.5, None]}], {"only": 1}], ids=["list", "one"])
def test_unconsumed_is_data(value: object) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.checkpoint(1, save_replay=False, unconsumed=value).result()
    assert reopened(arc).checkpoints["step-1"].unconsumed == (value if isinstance(value, list) else [value])
