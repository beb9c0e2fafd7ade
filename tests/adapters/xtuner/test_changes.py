"""XTuner's buffers: saves that were lost, restores that fail half way, and odd values in rollouts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import resharding
from archive.adapters import xtuner
from archive.base.errors import CorruptStateError, FieldError
from tests.support.xtuner_buffers import buffer, contents, fresh, group_of, rollout, saved, share_of


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_a_lost_save_wrote_is_not_taken_for_saved(is_restored: bool) -> None:
    """A job goes back to an older checkpoint and keeps its live buffer: what has changed since is uploaded anew."""
    arc, rb = fresh(), buffer()
    asyncio.run(rb.put(group_of(0), "math"))
    asyncio.run(rb.put(group_of(1), "math"))
    with arc.writer() as w:
        first = saved(rb, w)
    if is_restored:
        rb = buffer()
        asyncio.run(xtuner.restore(rb, share_of(first)))
    items = asyncio.run(rb._storage.get({}))
    with arc.writer(resume=share_of(first)) as w:
        items[0].item[0].response = "changed"
        saved(rb, w, 2)
    with arc.writer(resume=share_of(arc.refresh().checkpoints["step-1"])) as w:
        third = saved(rb, w, 3)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(third)))
    assert contents(again) == contents(rb)


def test_one_of_several_that_cannot_be_read_leaves_the_others_alone() -> None:
    named = {"replay": buffer(), "eval": buffer()}
    asyncio.run(named["replay"].put(group_of(0, 1), "math"))
    asyncio.run(named["eval"].put(group_of(1, 2), "math"))
    with fresh().writer() as w:
        ck = saved(named, w)  # type: ignore[arg-type]
    share = resharding.plan(ck, world_size=1, num_envs=1, max_length=1).share(0)  # which cuts groups of two
    again = {"replay": buffer(), "eval": buffer()}
    asyncio.run(again["replay"].put(group_of(7), "math"))
    before = contents(again["replay"])
    with pytest.raises(CorruptStateError, match="1 of 2 rollouts"):
        asyncio.run(xtuner.restore(again, share, existing="replace"))
    assert contents(again["replay"]) == before


def test_tensors_without_a_dimension_and_names_that_look_alike_come_back() -> None:
    odd = {
        "number": torch.tensor(5), "flag": torch.tensor(True), "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "zero": np.array(3), "x": [np.zeros(2000, np.int64), np.ones(2000, np.float32)],
        "x~2": np.full(2000, 7, np.int8),
    }  # fmt: skip
    arc, rb = fresh(), buffer()
    asyncio.run(rb.put([rollout(0, 0, mm_info=odd)], "math"))
    with arc.writer() as w:
        ck = saved(rb, w)
    again = buffer()
    asyncio.run(xtuner.restore(again, share_of(ck)))
    assert contents(again) == contents(rb)


def test_an_array_of_objects_is_refused_by_name() -> None:
    rb = buffer()
    asyncio.run(rb.put([rollout(0, 0, mm_info={"names": np.array(["a", None], object)})], "math"))
    with fresh().writer() as w, pytest.raises(FieldError, match=r"mm_info\.names.*not all strings"):
        saved(rb, w)
