"""What rings cost to read after eviction, at the sizes that they have: the bounds hold, whatever part is left."""

from __future__ import annotations

import uuid

import fsspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import archive
import resharding
from archive.arrays.ranges import MAX_GAP_BYTES, MIN_GAP_BYTES, widest_gap
from archive.checkpoint.checkpoints import Checkpoint
from archive.shard.writer import rows_per_chunk
from archive.torch import ring
from tests.support.reading_bounds import bound


class Frames:
    """A ring of `envs` rows that advance together, saved as a training job saves it."""

    def __init__(self, envs: int, length: int, width: int) -> None:
        self.arc = archive.create(f"memory://{uuid.uuid4().hex}")
        self.w = self.arc.writer(compression=None)
        self.shape, self.pos, self.saves = (envs, length), 0, 0
        self.row_bytes = width + 8 * 8 + 4
        self.buffers = {
            "image": np.zeros((*self.shape, width), np.uint8), "state": np.zeros((*self.shape, 8)),
            "reward": np.zeros(self.shape, np.float32),
        }  # fmt: skip

    def run(self, steps: int) -> Checkpoint:
        """So many more steps of each env row; the oldest are overwritten."""
        envs, length = self.shape
        self.pos += steps
        size = min(self.pos, length)
        last = np.broadcast_to(np.arange(length) % 50 == 49, self.shape)
        ring.append(self.w, self.buffers, pos=[self.pos] * envs, size=[size] * envs, last=last)
        return self.saved()

    def keep(self, steps: int) -> Checkpoint:
        """No more than so many steps of each env row, the newest, stay in the buffer."""
        for env in range(self.shape[0]):
            self.w.evict(env, before=self.pos - steps)
        return self.saved()

    def saved(self) -> Checkpoint:
        self.saves += 1
        self.w.checkpoint(self.saves).result()
        return archive.open(self.arc.url).checkpoints[f"step-{self.saves}"]

    def close(self) -> None:
        self.w.close()
        fsspec.filesystem("memory").store.clear()


def excess(ck: Checkpoint, targets: int, row_bytes: int) -> float:
    """Bytes read of all shares against those that are needed; each share is within its bound."""
    plan = resharding.plan(ck, world_size=targets)
    needed = read = 0
    for share in map(plan.share, range(targets)):
        cost, limit = share.cost(), bound(share, row_bytes)
        assert cost["bytes"] <= limit.bytes, (share.rank, cost, limit)
        assert cost["requests"] <= limit.requests, (share.rank, cost, limit)
        needed, read = needed + limit.needed, read + cost["bytes"]
    return read / needed


LEFT = [  # steps of each env row: 20, 50 and 80 % evicted, with the cut at several places of a slab
    (64, 1200, 1000, (960, 955, 930, 600, 575, 240, 235, 225)),
    (16, 600, 7056, (480, 475, 300, 291, 120, 111)),
    (4096, 200, 24, (193, 153, 96, 40)),  # slabs are 8 steps deep, so of few steps they are cut between slabs
]


@pytest.mark.parametrize(("envs", "length", "width", "left"), LEFT)
def test_whatever_is_left_of_a_ring(envs: int, length: int, width: int, left: tuple[int, ...]) -> None:
    frames = Frames(envs, length, width)
    frames.run(length)
    for steps in left:
        ck = frames.keep(steps)
        assert excess(ck, 1, frames.row_bytes) < 1.06
    excess(ck, 3, frames.row_bytes)
    frames.close()


@pytest.mark.parametrize(("envs", "length", "width"), [(64, 1200, 1000), (4096, 160, 24)])
def test_a_ring_that_is_overwritten(envs: int, length: int, width: int) -> None:
    frames = Frames(envs, length, width)
    frames.run(length)
    for overwritten in (0.2, 0.3, 0.3):
        ck = frames.run(int(length * overwritten) + 1)
        assert excess(ck, 1, frames.row_bytes) < 1.05
    frames.close()


@example(sizes=[(0, 1)], spare=-1)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3 * MAX_GAP_BYTES), st.integers(1, 9)), min_size=1, max_size=12),
    spare=st.integers(-5, 5 * MAX_GAP_BYTES),
)
def test_gaps_are_read_over_while_they_are_affordable(sizes: list[tuple[int, int]], spare: int) -> None:
    """The narrowest first, all of a width or none; headers in any case."""
    stops = np.cumsum([gap + size for gap, size in sizes])
    starts = stops - [size for _, size in sizes]
    gaps = sorted(gap for gap, _ in sizes[1:])
    widest = widest_gap(starts, stops, spare)
    assert MIN_GAP_BYTES <= widest <= MAX_GAP_BYTES
    assert widest == MIN_GAP_BYTES or sum(gap for gap in gaps if gap <= widest) <= spare
    wider = [gap for gap in gaps if widest < gap <= MAX_GAP_BYTES]
    assert not wider or sum(gap for gap in gaps if gap <= wider[0]) > spare


@pytest.mark.parametrize(("envs", "rows"), [(1, 1000), (64, 64 * 36), (64, 64 * 37), (4096, 4096 * 8)])
def test_chunks_are_parts_of_a_run_of_an_env_row(envs: int, rows: int) -> None:
    per_chunk = rows_per_chunk(rows, rows * 1000, None, envs)
    run = rows // envs
    assert per_chunk <= rows_per_chunk(rows, rows * 1000)
    if envs == 64:
        assert run >= 2 * per_chunk
        assert run % 4 or run % per_chunk == 0, "no chunk has steps of two env rows"


@pytest.mark.parametrize("removed", ["e1", "e2"])
def test_rows_with_holes_are_put_end_to_end_where_rows_are_asked_for(removed: str) -> None:
    """Also if nothing is too much: a ring has no place for a hole, inside of a row or before its next step."""
    arc = archive.create(f"memory://{uuid.uuid4().hex}")
    with arc.writer(0, 1) as w:
        for i in range(3):
            w.add_episode({"x": np.arange(4) + 10 * i}, env_id=0, episode_id=f"e{i}")
        whole = w.checkpoint(1).result()
        w.remove([removed])
        holes = w.checkpoint(2).result()
    assert resharding.plan(whole, world_size=1, num_envs=1, max_length=16).is_identity
    plan = resharding.plan(holes, world_size=1, num_envs=1, max_length=16)
    assert not plan.is_identity
    assert plan.dropped == {}
    filled = ring.fill(plan.share(0), num_envs=1, max_length=16)
    kept = [10 * i + n for i in range(3) if f"e{i}" != removed for n in range(4)]
    assert filled.buffers["x"][0, :8].tolist() == kept
    assert resharding.plan(holes, world_size=1).is_identity  # who does not ask gets all as it was
