"""A small replay buffer with the tensors and attributes of ALF's, computed the slow way; every step is recognisable.
Such buffers are saved and compared: what every step says of itself, and what a row's episodes are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import archive
from archive.adapters import alf
from tests.support.archives import fresh
from tests.support.worlds import save_world

FIRST, MID, LAST = 0, 1, 2
DEFAULT_RETURN, GAMMA = -1000.0, 0.9


class Tree(nn.Module):
    """A priority tree, made anew for each change."""

    def __init__(self, capacity: int, combine: Any) -> None:
        super().__init__()
        self.register_buffer("_values", torch.zeros(2 * capacity))
        self._nnz, self._capacity, self._combine = 0, capacity, combine
        self._left = 1
        while self._left < capacity:
            self._left *= 2

    def leaf(self, index: int) -> int:
        place = index + self._left
        return place - self._capacity if place >= 2 * self._capacity else place

    def set(self, index: int, value: float) -> None:
        node = self.leaf(index)
        self._nnz += int(value != 0) - int(self._values[node] != 0)
        self._values[node] = value
        while node > 1:
            node //= 2
            self._values[node] = self._combine(self._values[2 * node], self._values[2 * node + 1])


class ReplayBuffer(nn.Module):
    """num_envs rows of max_length slots. `numbers[env]` are the numbers of all steps that it was ever given, `kinds`
    their step types and discounts."""

    def __init__(
        self, num_envs: int, max_length: int, *, prioritized: bool = True, episodic: bool = True,
        mini_batch_length: int = 1, ignored: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._num_envs, self._max_length, self._lock = num_envs, max_length, None
        self._prioritized_sampling, self._keep_episodic_info, self._record_episodic_return = (
            prioritized,
            episodic,
            episodic,
        )
        self._mini_batch_length, self._num_earliest_frames_ignored = mini_batch_length, ignored
        self._initial_priority, self._default_return, self._gamma = torch.tensor(1.0), DEFAULT_RETURN, GAMMA
        shape = (num_envs, max_length)
        for name, dtype, inner in [
            ("step_type", torch.int32, ()), ("reward", torch.float32, ()), ("discount", torch.float32, ()),
            ("env_id", torch.int64, ()), ("observation|image", torch.uint8, (2, 2)),
            ("observation|number", torch.int64, ()),
        ]:  # fmt: skip
            self.register_buffer(f"time_step|{name}", torch.zeros(*shape, *inner, dtype=dtype))
        self.register_buffer("action", torch.zeros(*shape, 2, dtype=torch.bfloat16))
        self.register_buffer("_current_size", torch.zeros(num_envs, dtype=torch.int64))
        self.register_buffer("_current_pos", torch.zeros(num_envs, dtype=torch.int64))
        if episodic:
            self.register_buffer("_indexed_pos", torch.zeros(shape, dtype=torch.int64))
            self.register_buffer("_headless_indexed_pos", torch.zeros(num_envs, dtype=torch.int64))
            self.register_buffer("_prev_disc_0_pos", torch.zeros(shape, dtype=torch.int64))
            self.register_buffer("_episodic_discounted_return", torch.full(shape, DEFAULT_RETURN))
        if prioritized:
            self._sum_tree = Tree(num_envs * max_length, torch.add)
            self._max_tree = Tree(num_envs * max_length, torch.maximum)
        self.kinds: list[list[tuple[int, float]]] = [[] for _ in range(num_envs)]

    @property
    def num_environments(self) -> int:
        return self._num_envs

    def field(self, name: str) -> torch.Tensor:
        found = self.get_buffer(name if name == "action" else f"time_step|{name}")
        return found

    def live(self, env: int) -> list[int]:
        """Slots of a row's live steps, oldest first."""
        pos, size = int(self._current_pos[env]), int(self._current_size[env])
        return [p % self._max_length for p in range(pos - size, pos)]

    def add(self, env: int, number: int, step_type: int, discount: float) -> None:
        pos, slot = int(self._current_pos[env]), int(self._current_pos[env]) % self._max_length
        self.field("step_type")[env, slot] = step_type
        self.field("discount")[env, slot] = discount
        self.field("env_id")[env, slot] = env
        self.field("reward")[env, slot] = number % 7
        self.field("observation|number")[env, slot] = number
        self.field("observation|image")[env, slot] = number % 251
        self.field("action")[env, slot] = number % 13
        self._current_pos[env] += 1
        self._current_size[env] = min(int(self._current_size[env]) + 1, self._max_length)
        self.kinds[env].append((step_type, discount))
        if self._keep_episodic_info:
            self._episodes(env, pos)
        if self._prioritized_sampling:
            self._priorities(env, pos, number)

    def _episodes(self, env: int, pos: int) -> None:
        """Where the episodes of a row begin and end, from all that it was given."""
        kinds, oldest = self.kinds[env], pos + 1 - int(self._current_size[env])
        begins = [max(q for q in range(p + 1) if kinds[q][0] == FIRST) for p in range(pos + 1)]
        for p in range(oldest, pos + 1):
            slot = p % self._max_length
            same = [q for q in range(pos + 1) if begins[q] == begins[p]]
            self._indexed_pos[env, slot] = same[-1] if p == begins[p] else begins[p]
            zero = [q for q in range(p + 1) if kinds[q][0] == FIRST or kinds[q][1] == 0]
            self._prev_disc_0_pos[env, slot] = zero[-1]
        gone = [p for p in range(oldest) if kinds[p][0] == FIRST]
        if gone:  # the last one that was overwritten
            self._headless_indexed_pos[env] = max(q for q in range(pos + 1) if begins[q] == gone[-1])
        self._episodic_discounted_return[env, pos % self._max_length] = DEFAULT_RETURN
        if kinds[pos][1] == 0:
            total = torch.zeros(())
            self._episodic_discounted_return[env, pos % self._max_length] = DEFAULT_RETURN
            for p in range(pos - 1, max(begins[pos], oldest) - 1, -1):
                total = self.field("reward")[env, (p + 1) % self._max_length] + GAMMA * total
                self._episodic_discounted_return[env, p % self._max_length] = total

    def _priorities(self, env: int, pos: int, number: int) -> None:
        """A step gets its priority once enough follow it; the earliest of a row have none."""
        begin = pos - self._mini_batch_length + 1
        self._set(env, pos, 0.0)
        if begin >= 0:
            self._set(env, begin, priority(int(self.field("observation|number")[env, begin % self._max_length])))
        oldest = pos + 1 - int(self._current_size[env])
        for p in range(oldest, min(oldest + self._num_earliest_frames_ignored, pos + 1)):
            self._set(env, p, 0.0)

    def _set(self, env: int, pos: int, value: float) -> None:
        for tree in (self._sum_tree, self._max_tree):
            tree.set(env * self._max_length + pos % self._max_length, value)

    def _change_mini_batch_length(self, length: int) -> None:
        """As ALF does when a batch of that length is drawn."""
        for env in range(self._num_envs):
            for age in range(1, len(self.live(env)) + 1):
                pos = int(self._current_pos[env]) - age
                if self._mini_batch_length <= age < length:
                    self._set(env, pos, 0.0)
                elif length <= age < self._mini_batch_length:
                    self._set(env, pos, 1.0)
        self._mini_batch_length = length

    def clear(self) -> None:
        self._current_pos.zero_()
        self._current_size.zero_()
        self.kinds = [[] for _ in self.kinds]

    def leaf(self, env: int, slot: int) -> float:
        return float(self._sum_tree._values[self._sum_tree.leaf(env * self._max_length + slot)])


def priority(number: int) -> float:
    return float(torch.tensor(1 + number % 17, dtype=torch.float32) / 7)


def run(
    rb: ReplayBuffer, counts: int | Sequence[int], seed: int = 0, lengths: tuple[int, int] = (2, 9)
) -> ReplayBuffer:
    """Steps of all rows; their numbers are seed * 100000 + row * 1000 and on. Some episodes end by a time limit."""
    for env in range(rb.num_environments):
        random = torch.Generator().manual_seed(seed * 100 + env)
        kinds: list[tuple[int, float]] = []
        count = counts if isinstance(counts, int) else counts[env]
        while len(kinds) < count:
            length = int(torch.randint(*lengths, (), generator=random))
            final = 0.0 if float(torch.rand((), generator=random)) < 0.7 else 1.0
            kinds += [(FIRST, 1.0)] + [(MID, 1.0)] * (length - 2) + [(LAST, final)]
        for i, (kind, discount) in enumerate(kinds[:count]):
            rb.add(env, seed * 100_000 + env * 1000 + i, kind, discount)
    return rb


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
