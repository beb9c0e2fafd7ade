"""A writer that begins with episodes of the archive: they are referred to, in the order that was asked for."""

from __future__ import annotations

import numpy as np

from archive.checkpoint import Holding
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps


def test_a_writer_holds_chosen_episodes_in_an_order_of_its_own() -> None:
    arc = fresh()
    with arc.writer() as w:
        ids = [w.add_episode(steps(range(5 * i, 5 * i + 5))) for i in range(4)]
        first = w.checkpoint(1).result()
    before = len(reopened(arc).shards)
    chosen = reopened(arc).episodes[np.array([3, 1])]
    with arc.writer(resume=Holding(chosen, "replay", first.run)) as w:
        assert w.live["episode_id"].to_pylist() == [ids[3], ids[1]]
        assert w.live["position"].to_pylist() == [0, 5]
        held = w.checkpoint(2).result()
    assert serials(held) == [*range(15, 20), *range(5, 10)]
    assert len(reopened(arc).shards) == before, "nothing was copied"


def test_what_a_checkpoint_has_of_episodes_is_held_and_goes_on() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(6)), env_ids=0)
        w.evict(0, before=4)
        ck = w.checkpoint(1).result()
    with arc.writer(resume=Holding(ck.episodes, "replay", ck.run)) as w:
        w.add_episode(steps([9]))
        made = w.checkpoint(2).result()
    assert made.buffers["replay"]["steps"] == 3
    assert serials(made) == [4, 5, 9]
