"""Steps that a ring overwrote before anybody appended them, and steps that a plan leaves behind: logged and counted."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import archive
import resharding
from archive.base.losses import Losses
from archive.torch import ring


def fresh(name: str) -> archive.Archive:
    return archive.create(f"memory://losses-{name}")


def a_ring(length: int, rows: int = 2) -> dict[str, Any]:
    return {"obs": torch.zeros(rows, length, 3)}


def at(*values: int) -> Any:
    return np.array(values)


def test_overwritten_steps_are_told_once_and_counted_in_each_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "archive")
    with fresh("ring").writer() as w:
        ring.append(w, a_ring(10), pos=at(5, 5), size=at(5, 5))
        assert w.checkpoint(1).result().discarded == {}
        assert not caplog.messages
        ring.append(w, a_ring(10), pos=at(22, 15), size=at(10, 10))  # row 0 lost steps 5 to 12
        assert len(caplog.messages) == 1
        assert "7 steps of 1 env rows were overwritten" in caplog.messages[0]
        ring.append(w, a_ring(10), pos=at(35, 28), size=at(10, 10))  # 3 of each
        assert len(caplog.messages) == 1
        assert w.checkpoint(2).result().discarded == {"overwritten": {"episodes": 3, "steps": 13}}
        assert w.checkpoint(3).result().discarded == {}


def test_what_no_committed_checkpoint_has_is_counted_in_the_next() -> None:
    with fresh("failed").writer() as w:
        ring.append(w, a_ring(4), pos=at(4, 4), size=at(4, 4))
        ring.append(w, a_ring(4), pos=at(9, 8), size=at(4, 4))
        assert w.checkpoint(1, save_replay=False).result().discarded == {}
        w.checkpoint(2).result()
        ring.append(w, a_ring(4), pos=at(14, 12), size=at(4, 4))
        with pytest.raises(archive.CheckpointError):
            w.checkpoint(9, name="step-2").result()  # a name that was used
        assert w.checkpoint(4).result().discarded == {"overwritten": {"episodes": 1, "steps": 1}}


def test_a_ring_that_was_full_before_the_first_append_has_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with fresh("first").writer() as w:
        ring.append(w, a_ring(4), pos=at(100, 4), size=at(4, 4))
        assert w.checkpoint(1).result().discarded == {}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_row_that_was_cleared_and_goes_on_higher_up_has_lost_nothing() -> None:
    with fresh("cleared").writer() as w:
        ring.append(w, a_ring(4), pos=at(6, 4), size=at(4, 4))
        ring.append(w, a_ring(4), pos=at(10, 4), size=at(2, 4), begin=at(8, 0))
        assert w.checkpoint(1).result().discarded == {}
        ring.append(w, a_ring(4), pos=at(24, 4), size=at(4, 4), begin=at(18, 0))  # cleared again, and two are lost
        assert w.checkpoint(2).result().discarded == {"overwritten": {"episodes": 1, "steps": 2}}


def test_a_share_that_drops_logs_it_and_the_next_checkpoint_records_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "archive")
    arc = fresh("plan")
    with arc.writer() as w:
        for env in range(3):
            w.append({"obs": np.zeros((10, 2))}, env_ids=env)
        w.checkpoint(1).result()
    plan = resharding.plan(arc.refresh().checkpoints.latest, 2, max_length=8)
    gone = sum(n["steps"] for n in plan.dropped.values())
    assert gone > 0
    assert not caplog.messages
    shares = [plan.share(rank) for rank in range(2)]
    told = [m for m in caplog.messages if "drops" in m]
    assert len(told) == len(plan.dropped)
    assert f"drops {gone} of 30 steps" in told[0]
    writers = [arc.writer(resume=share, session="second") for share in shares]
    pending = [w.checkpoint(2) for w in writers]
    assert [p.result().discarded for p in pending] == [plan.dropped] * 2
    pending = [w.checkpoint(3) for w in writers]
    assert pending[0].result().discarded == {}
    for w in writers:
        w.close()


def test_a_share_that_drops_nothing_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh("all")
    with arc.writer() as w:
        w.append({"obs": np.zeros((10, 2))}, env_ids=0)
        w.checkpoint(1).result()
    resharding.plan(arc.refresh().checkpoints.latest, 2).share(0)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_counts_are_what_no_committed_checkpoint_has() -> None:
    losses = Losses()
    losses.add("a", 1, 10)
    mark = losses.counts
    losses.add("a", 1, 5)
    losses.add("b", 2, 3)
    more = {"a": {"episodes": 1, "steps": 1}}
    assert losses.unreported(more) == {"a": {"episodes": 3, "steps": 16}, "b": {"episodes": 2, "steps": 3}}
    assert more == {"a": {"episodes": 1, "steps": 1}}
    losses.reported(mark)
    assert losses.unreported({}) == {"a": {"episodes": 1, "steps": 5}, "b": {"episodes": 2, "steps": 3}}
