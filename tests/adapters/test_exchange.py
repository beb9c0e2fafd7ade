"""What ALF saved in a buffer of TorchRL, and that in one of RLinf: every transition, with what it is made of."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import archive
from archive.adapters import alf, exchange
from archive.base.errors import CapacityError, FieldError, NotFoundError, UsageError
from tests.support.alf_buffer import LAST, ReplayBuffer, check_row, priority, run
from tests.support.worlds import save_world, shares

Seen = dict[int, tuple[float, bool, bool, int, list[float]]]


def sources() -> list[ReplayBuffer]:
    return [run(ReplayBuffer(2, 16), [20, 13], seed=rank) for rank in range(3)]


def alf_share(buffers: list[ReplayBuffer], **plan: Any) -> Any:
    (share,) = shares(save_world(f"memory://{uuid.uuid4().hex}", buffers, alf.save), 1, **plan)
    return share


def expected(buffers: list[ReplayBuffer]) -> Seen:
    """Number of the step it begins at -> reward, terminated, truncated, number of the next step, action."""
    out: Seen = {}
    for rb in buffers:
        for env in range(rb.num_environments):
            slots = rb.live(env)
            for k in range(len(slots) - 1):
                now, after = slots[k], slots[k + 1]
                if rb.field("step_type")[env, now] == LAST:
                    continue
                last = bool(rb.field("step_type")[env, after] == LAST)
                terminated = last and float(rb.field("discount")[env, after]) == 0
                closed = k == len(slots) - 2 and not last
                out[int(rb.field("observation|number")[env, now])] = (
                    float(rb.field("reward")[env, after]), terminated, (last and not terminated) or closed,
                    int(rb.field("observation|number")[env, after]), rb.field("action")[env, now].float().tolist(),
                )  # fmt: skip
    return out


def in_torchrl(rb: Any) -> Seen:
    items = rb[:]
    after = items["next"]
    return {
        int(items["observation", "number"][i]): (
            float(after["reward"][i, 0]), bool(after["terminated"][i, 0]), bool(after["truncated"][i, 0]),
            int(after["observation", "number"][i]), items["action"][i].float().tolist(),
        )
        for i in range(len(items))
    }  # fmt: skip


def in_rlinf(trajectories: list[Any]) -> Seen:
    return {
        int(one.curr_obs["number"][t, 0]): (
            float(one.rewards[t, 0, 0]), bool(one.terminations[t, 0, 0]), bool(one.truncations[t, 0, 0]),
            int(one.next_obs["number"][t, 0]), one.actions[t, 0].float().tolist(),
        )
        for one in trajectories
        for t in range(len(one.rewards))
    }  # fmt: skip


def torchrl_buffer(size: int = 300) -> Any:
    data = pytest.importorskip("torchrl.data", reason="torchrl is not installed")
    return data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(size), batch_size=8)


def torchrl_items(count: int) -> Any:
    return pytest.importorskip("tensordict").TensorDict({"x": torch.arange(count)}, [count])


def rlinf_buffer() -> Any:
    """A buffer that keeps what it was given, to look at."""
    module = pytest.importorskip("rlinf.data.replay_buffer", reason="rlinf is not installed")
    buffer = module.TrajectoryReplayBuffer(cache_size=100)
    buffer.given, add = [], buffer.add_trajectories
    buffer.add_trajectories = lambda several: (buffer.given.extend(several), add(several))
    return buffer


def test_alf_to_torchrl_to_rlinf() -> None:
    torchrl = pytest.importorskip("archive.adapters.torchrl")
    buffers, rb, other = sources(), torchrl_buffer(), rlinf_buffer()
    every = expected(buffers)
    share = alf_share(buffers, num_envs=2)
    report = exchange.restore(rb, share)
    assert in_torchrl(rb) == every
    assert report.steps == len(every) > 60
    with archive.open(f"memory://{uuid.uuid4().hex}", create=True).writer(0, 1) as w:
        ck = torchrl.save(rb, w, step=5).result(60)
    report = exchange.restore(other, ck, rank=0)
    assert in_rlinf(other.given) == every
    assert report.episodes == other.size == len(other.given)
    assert all(one.actions.dtype == torch.bfloat16 for one in other.given)
    batch = other.sample(16)
    assert batch["curr_obs"]["image"].shape == (16, 2, 2)
    assert torch.equal(batch["next_obs"]["number"] - 1, batch["curr_obs"]["number"])
    rlinf = pytest.importorskip("archive.adapters.rlinf")
    with archive.open(f"memory://{uuid.uuid4().hex}", create=True).writer(0, 1) as w:
        last = rlinf.save(other, w, step=6).result(60)
    assert sum(e.length for e in last.episodes) == len(every)
    back = torchrl_buffer()
    exchange.restore(back, last, rank=0)  # and from RLinf to TorchRL again
    assert in_torchrl(back) == every


@pytest.mark.parametrize("way", ["torchrl", "rlinf"])
def test_back_to_alf(way: str) -> None:
    adapter = pytest.importorskip(f"archive.adapters.{way}")
    buffers, between = sources(), torchrl_buffer() if way == "torchrl" else rlinf_buffer()
    every = expected(buffers)
    exchange.restore(between, alf_share(buffers))
    with archive.open(f"memory://{uuid.uuid4().hex}", create=True).writer(0, 1) as w:
        ck = adapter.save(between, w, step=5).result(60)
    small, rb = ReplayBuffer(2, 16), ReplayBuffer(3, 64)
    with pytest.raises(CapacityError, match="the buffer takes 16"):
        exchange.restore(small, ck, rank=0)
    if way == "rlinf":  # its observations have no nesting
        rb.register_buffer("unknown", torch.ones(3, 64))
    report = exchange.restore(rb, ck, rank=0)
    assert expected([rb]) == every
    assert ("nothing is known of unknown" in str(report)) == (way == "rlinf")
    assert not rb.get_buffer("unknown").any() if way == "rlinf" else True
    for env in range(3):
        assert set(rb.field("env_id")[env, rb.live(env)].tolist()) == {env}
        check_row(rb, env)
    assert rb._sum_tree._nnz > 0


class Prioritized:
    """What a prioritized sampler has, beside that of torchrl, whose trees do not load everywhere."""

    def __init__(self) -> None:
        self._sum_tree: dict[int, float] = {}
        self._alpha, self._eps = 0.6, 1e-8


def test_leaves_of_alfs_trees_become_those_of_torchrls(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = pytest.importorskip("torchrl.data.replay_buffers.samplers", reason="torchrl is not installed")

    class Sampler(Prioritized, samplers.RandomSampler):
        def update_priority(self, index: Any, priority: Any, **_: Any) -> None:
            self._sum_tree |= dict(zip(index.tolist(), ((priority + self._eps) ** self._alpha).tolist(), strict=True))

    rb, buffers = torchrl_buffer(), sources()
    rb._sampler = sampler = Sampler()
    exchange.restore(rb, alf_share(buffers))
    numbers = rb[:]["observation", "number"].tolist()
    assert sorted(sampler._sum_tree) == list(range(len(numbers)))
    for i, number in enumerate(numbers):
        assert sampler._sum_tree[i] == pytest.approx(priority(number))


def test_trajectories_stay_together_and_unfinished_ones_are_closed() -> None:
    buffers, rb = sources(), torchrl_buffer()
    report = exchange.restore(rb, alf_share(buffers))
    items = rb[:]
    ids, numbers = items["collector", "traj_ids"], items["observation", "number"]
    for i in range(len(ids) - 1):
        if ids[i] == ids[i + 1]:
            assert numbers[i + 1] == numbers[i] + 1
            assert not items["next", "done"][i]
        else:
            assert items["next", "done"][i]
    unended = sum(int(b.field("step_type")[env, b.live(env)[-1]] != LAST) for b in buffers for env in range(2))
    assert report.counts["closed"] == unended - report.counts["without_a_transition"] > 0


def test_leaves_of_priority_trees_are_the_same_under_another_exponent() -> None:
    leaves = np.array([0.25, 1.0, 3.5])
    for alpha, eps in ((0.7, 1e-8), (1.0, 0.0)):
        raw = exchange._before_alpha(SimpleNamespace(_alpha=alpha, _eps=eps), leaves)
        np.testing.assert_allclose((raw.numpy() + eps) ** alpha, leaves, rtol=1e-6)


def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    share, rb = alf_share(sources()), torchrl_buffer(10)
    with pytest.raises(UsageError, match="plan with capacity=10"):
        exchange.restore(rb, share)
    with pytest.raises(UsageError, match="dict is no buffer of TorchRL, RLinf or ALF"):
        exchange.restore({}, share)
    with pytest.raises(NotFoundError, match="no buffer 'demo'"):
        exchange.restore(rb, share, buffer="demo")
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    with arc.writer(0, 1) as w:
        w.append({"x": np.zeros(3)}, env_ids=0)
        ck = w.checkpoint(1).result(60)
    with pytest.raises(UsageError, match="neither ALF, TorchRL nor RLinf; their fields: x"):
        exchange.restore(rb, ck, rank=0)
    assert len(rb) == 0
    small = torchrl_buffer(10)
    small.extend(full_items := torchrl_items(3))
    with pytest.raises(UsageError, match="plan with capacity=10"):
        exchange.restore(small, share, existing="replace")
    assert torch.equal(small[:]["x"], full_items["x"])
    other = torchrl_buffer(100)
    other.extend(full_items)
    with pytest.raises(FieldError, match=r"field '\w+.* in the share, .* in the buffer"):
        exchange.restore(other, share, existing="replace")
    assert torch.equal(other[:]["x"], full_items["x"])
    full = torchrl_buffer()
    exchange.restore(full, share)
    with pytest.raises(UsageError, match="already holds"):
        exchange.restore(full, share)
    before = in_torchrl(full)
    exchange.restore(full, share, existing="replace")
    assert in_torchrl(full) == before
