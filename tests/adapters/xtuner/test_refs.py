"""XTuner's groups with Ray object refs in them, and the real classes where xtuner is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import archive
from archive.adapters import xtuner
from archive.base.errors import UsageError
from tests.support import ray_cluster
from tests.support.xtuner_buffers import PandasStorage, RolloutState, Status, buffer, fresh, rollout, share_of, uploaded
from tests.support.xtuner_managers import manager, saved


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster.cluster(1) as ray:
        yield ray


def referring(ray: Any, number: int) -> list[RolloutState]:
    """Two rollouts that share a prompt's picture and have nested refs of their own."""
    picture = ray.put(np.full((50, 60), number, np.float32))
    group = []
    for i in range(2):
        experts = [ray.put(np.full((i + 1, 300), number + i, np.int16)) for _ in range(2)]
        nested = {"deep": (ray.put({"inner": ray.put([1, number])}),)}
        group.append(rollout(number, i, mm_info={"pixel_values": picture}, routed_experts=experts, extra_fields=nested))
    return group


def test_nested_refs_come_back_as_refs(ray: Any) -> None:
    rb, arc = buffer(), fresh()
    asyncio.run(rb.put(referring(ray, 3), "math"))
    with arc.writer() as w:
        ck = asyncio.run(xtuner.save(rb, w, step=1)).result()
    again = buffer(PandasStorage)
    asyncio.run(xtuner.restore(again, share_of(ck)))
    ((first, second),) = asyncio.run(again.get(1, "math", Status.COMPLETED))
    assert isinstance(first.mm_info["pixel_values"], ray.ObjectRef)
    assert first.mm_info["pixel_values"] == second.mm_info["pixel_values"], "what they share is put once"
    assert (ray.get(first.mm_info["pixel_values"]) == np.full((50, 60), 3, np.float32)).all()
    assert [ray.get(r).shape for r in second.routed_experts] == [(2, 300)] * 2
    assert ray.get(ray.get(second.extra_fields["deep"][0])["inner"]) == [1, 3]
    assert np.sum(ck.episodes[0].read(["mm_info.pixel_values"])["mm_info.pixel_values"][1].shape) == 60, "stored once"


def test_refs_of_unchanged_groups_are_not_resolved(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rb, arc, asked = buffer(), fresh(), []
    for n in range(3):
        asyncio.run(rb.put(referring(ray, n), "math"))
    get = ray.get
    monkeypatch.setattr(ray, "get", lambda ref, **options: asked.append(ref) or get(ref, **options))
    with arc.writer() as w:
        ck = asyncio.run(xtuner.save(rb, w, step=1)).result()
        per_group = len(asked) // 3
        assert len(asked) == 3 * per_group > 0
        asyncio.run(rb.put(referring(ray, 7), "math"))
        asyncio.run(xtuner.save(rb, w, step=2)).result()
    assert len(asked) == 4 * per_group
    again, share = buffer(), share_of(ck)
    asyncio.run(xtuner.restore(again, share))
    asked.clear()
    with archive.open(arc.url).writer(resume=share) as w:
        third = asyncio.run(xtuner.save(again, w, step=3)).result()
    assert (asked, uploaded(arc, third.number - 1)) == ([], 0)


def test_without_ray_the_values_can_stand_for_the_refs(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = buffer()
    asyncio.run(rb.put(referring(ray, 3), "math"))
    with fresh().writer() as w:
        ck = asyncio.run(xtuner.save(rb, w, step=1)).result()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    again = buffer()
    with pytest.raises(UsageError, match=r"ray\.init\(\) first"):
        asyncio.run(xtuner.restore(again, share_of(ck)))
    assert len(again) == 0
    asyncio.run(xtuner.restore(again, share_of(ck), refs="values"))
    ((first, _),) = asyncio.run(again.get(1, "math", Status.COMPLETED))
    assert first.mm_info["pixel_values"].shape == (50, 60)


def test_prompts_keep_their_pictures(ray: Any) -> None:
    m = manager()
    asyncio.run(m.replay_buffer.put(referring(ray, 4), "math"))
    ck = saved(m, fresh(), no_save_replay_buffer=True)
    again = manager()
    asyncio.run(xtuner.restore(again, share_of(ck)))
    ((first, second),) = asyncio.run(again.replay_buffer.get(1, "math", Status.ABORTED))
    assert (first.routed_experts, second.response_ids) == (None, [])
    assert (ray.get(second.mm_info["pixel_values"]) == np.full((50, 60), 4, np.float32)).all()


# -- the real thing ------------------------------------------------------------------------------------------------

HAS_XTUNER = importlib.util.find_spec("xtuner") is not None


@pytest.mark.skipif(not HAS_XTUNER, reason="xtuner is not installed (it needs a CUDA build of its dependencies)")
@pytest.mark.parametrize(("before", "after"), list(itertools.product(("Naive", "Pandas"), repeat=2)))
def test_real_buffers(before: str, after: str) -> None:
    module = pytest.importorskip("xtuner.v1.rl.replay_buffer", reason="xtuner does not import here")

    def make(storage: str) -> Any:
        return module.ReplayBuffer(module.StalenessReplayPolicy(), getattr(module, f"{storage}Storage")())

    async def run() -> None:
        rb, again = make(before), make(after)
        for n in range(4):
            values = {"message": [], "response_ids": [1, n], "response_model_steps": [n, n], "rollout_id": n}
            await rb.put([module.RolloutState(**values, status=module.Status.COMPLETED)], "math")
        with fresh().writer() as w:
            ck = (await xtuner.save(rb, w, step=1)).result()
        await xtuner.restore(again, share_of(ck))
        wanted = await rb.get(4, "math", module.Status.COMPLETED)
        assert await again.get(4, "math", module.Status.COMPLETED) == wanted
        assert len(wanted) == 4

    asyncio.run(run())
