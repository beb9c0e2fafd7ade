"""ALF's buffers saved and compared: what every step says of itself, and what a row's episodes are."""

from __future__ import annotations

import uuid
from typing import Any

import torch

import archive
from archive.adapters import alf
from tests.support.alf_buffer import FIRST, LAST, ReplayBuffer
from tests.support.worlds import save_world


def fresh() -> archive.Archive:
    return archive.create(f"memory://{uuid.uuid4().hex}")


def saved(rb: Any, step: int = 1, arc: archive.Archive | None = None) -> Any:
    arc = arc or fresh()
    with arc.writer(0, 1) as w:
        return alf.save(rb, w, step=step).result(60)


def assert_same(a: Any, b: Any) -> None:
    """All tensors equal bit for bit, and what ALF keeps outside of them."""
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
    if a._prioritized_sampling:
        assert (a._sum_tree._nnz, a._mini_batch_length) == (b._sum_tree._nnz, b._mini_batch_length)


def steps_in_shards(arc: archive.Archive) -> int:
    return int(arc.refresh().snapshot.columns(["length"])["length"].to_numpy().sum())


def returns_of(buffers: list[ReplayBuffer]) -> dict[int, tuple[float, float, float]]:
    """Step number -> (priority, episodic return, reward) of all live steps; each number once."""
    out: dict[int, tuple[float, float, float]] = {}
    for rb in buffers:
        for env in range(rb.num_environments):
            for slot in rb.live(env):
                number = int(rb.field("observation|number")[env, slot])
                assert number not in out
                assert int(rb.field("observation|image")[env, slot, 0, 0]) == number % 251
                out[number] = (
                    rb.leaf(env, slot), float(rb._episodic_discounted_return[env, slot]),
                    float(rb.field("reward")[env, slot])
                )  # fmt: skip
    return out


def check_row(rb: ReplayBuffer, env: int) -> None:
    """Episodes of a row, and what ALF's indices say of them, one by one."""
    pos, size = int(rb._current_pos[env]), int(rb._current_size[env])
    kinds = [int(rb.field("step_type")[env, p % rb._max_length]) for p in range(pos - size, pos)]
    oldest = pos - size
    single = [j for j in range(size) if kinds[j] == LAST and (j == 0 or kinds[j - 1] == LAST)]  # one step long, closed
    begins = [j for j in range(size) if kinds[j] == FIRST or j in single]
    for i in range(size):
        begin = max((j for j in begins if j <= i), default=None)
        end = oldest + min((j for j in begins if j > i), default=size) - 1
        index = int(rb._indexed_pos[env, (oldest + i) % rb._max_length])
        if begin is None or (i == begin == 0 and i in single):  # so long ago that ALF takes the end from elsewhere
            assert pos > index + rb._max_length or index == oldest == end
            assert int(rb._headless_indexed_pos[env]) in (end, 0)
        else:
            assert index == (end if i == begin else oldest + begin)
        assert int(rb.field("env_id")[env, (oldest + i) % rb._max_length]) == env


def world(sources: list[ReplayBuffer]) -> Any:
    return save_world(f"memory://{uuid.uuid4().hex}", sources, alf.save)
