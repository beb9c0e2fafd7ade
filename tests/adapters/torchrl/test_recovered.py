"""A save that died after it was journaled and before it was committed: what the buffer's saved state does not know of
is not put into it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import torchrl
from tests.support.torchrl_buffers import buffer, contents, same, steps

NEVER_S = 3600.0


def died_while_saving(rb: Any, more: int) -> archive.Archive:
    """A buffer that was saved once, and journaled `more` steps of the next save."""
    arc = archive.open(f"memory://recovered-{uuid.uuid4().hex}", create=True)
    w = arc.writer(0, 1, session="first", journal_s=NEVER_S)
    torchrl.save(rb, w, step=1).result(60)
    rb.extend(steps(500, more))
    w._saver.start = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        torchrl.save(rb, w, step=2)
    w.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    return arc.refresh()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restore_refuses_what_its_state_does_not_know(world_size: int) -> None:
    rb = buffer(40)
    rb.extend(steps(0, 12))
    before = contents(rb)
    arc = died_while_saving(rb, 5)
    saved = arc.checkpoints["step-1"]
    other = buffer(40, seed=3)
    plan = resharding.plan(saved, world_size=world_size)
    assert plan.checkpoint.record.recovered is not None
    with pytest.raises(archive.UsageError, match=r"'step-1\+tail-.*checkpoint 'step-1'.*tails='ignore'"):
        torchrl.restore(other, plan.share(0))
    with pytest.raises(archive.UsageError, match="recovered from journals"):
        torchrl.restore(other, arc.recover(), rank=0)
    assert len(other) == 0
    torchrl.restore(other, resharding.plan(saved, world_size=1, tails="ignore").share(0))
    assert same(contents(other), before)


def test_a_checkpoint_is_restored_as_it_was_saved() -> None:
    rb = buffer(40)
    rb.extend(steps(0, 12))
    before = contents(rb)
    arc = died_while_saving(rb, 5)
    other = buffer(40, seed=3)
    torchrl.restore(other, arc.checkpoints["step-1"], rank=0)
    assert same(contents(other), before)
