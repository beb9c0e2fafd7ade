"""An ALF replay buffer as tensors by name, what ALF derives from its steps (trees, episode indices), and what tells
whether the rows of a live one are still those that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from archive.adapters import digests
from archive.arrays import Ints
from archive.base import UsageError, cached_property
from archive.fields import Path

FIRST, LAST = 0, 2
POS, SIZE = "_current_pos", "_current_size"
INDEX, HEADLESS, DISC_0, RETURNS = (
    "_indexed_pos",
    "_headless_indexed_pos",
    "_prev_disc_0_pos",
    "_episodic_discounted_return",
)
SUMS, MAXIMA = "_sum_tree._values", "_max_tree._values"
KEPT = (POS, SIZE, INDEX, HEADLESS, DISC_0, RETURNS, SUMS, MAXIMA)
SEPARATOR = "|"  # between the keys of a nested field, in the name of its tensor
ELEMENTS_AT_ONCE = 1 << 22
NONE = torch.iinfo(torch.int64).min
SYSTEM = "alf"
PRIORITY, RETURN = "priority", "episodic_return"
DEFAULT_RETURN = -1000.0  # ALF's own default of what steps have whose episode has not ended
MARKED = 4  # newest steps of a row that tell whether the row is still the one that was saved
Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Tensors:
    """One buffer by its tensors: fields `[num_envs, max_length, ...]`, and what ALF keeps about them."""

    named: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        missing = [name for name in (POS, SIZE) if name not in self.named]
        if missing or not self.fields:
            raise UsageError(f"this is no replay buffer of ALF: it has no {missing[0] if missing else 'fields'}")
        if self.by_key("step_type") is None:
            raise UsageError(f"the buffer has no field 'step_type'; it has: {', '.join(map('/'.join, self.fields))}")

    @cached_property
    def fields(self) -> dict[Path, torch.Tensor]:
        return {path_of(name): tensor for name, tensor in self.named.items() if name not in KEPT}

    def by_key(self, key: str) -> torch.Tensor | None:
        """The field of that name that is nested least."""
        path = path_by_key(self.fields, key)
        return None if path is None else self.fields[path]

    @property
    def pos(self) -> torch.Tensor:
        return self.named[POS]

    @property
    def size(self) -> torch.Tensor:
        return self.named[SIZE]

    @property
    def num_envs(self) -> int:
        return len(self.pos)

    @property
    def max_length(self) -> int:
        return int(next(iter(self.fields.values())).shape[1])

    @property
    def leaves(self) -> torch.Tensor | None:
        """(E, L) priorities."""
        values = self.named.get(SUMS)
        if values is None:
            return None
        index = leaf_of(torch.arange(len(values) // 2, device=values.device), len(values) // 2)
        return values[index].reshape(self.num_envs, self.max_length)

    def oldest(self, name: str, after: int = 0) -> torch.Tensor | None:
        """(E,) values at each row's oldest step, or so many after it."""
        values = self.named.get(name)
        if values is None:
            return None
        step = torch.minimum(self.pos - self.size + after, (self.pos - 1).clamp(min=0))
        return values.gather(1, (step % self.max_length)[:, None])[:, 0].clone()


def tensors_of(rb: Any) -> Tensors:
    """The tensors of a live buffer."""
    if not isinstance(rb, torch.nn.Module):
        raise UsageError(
            f"{type(rb).__name__} is no replay buffer of ALF; give algorithm._replay_buffer once it is there"
        )
    return Tensors(dict(rb.named_buffers()))


def path_of(name: str) -> Path:
    return tuple(name.split(SEPARATOR))


def name_of(path: Path) -> str:
    return SEPARATOR.join(path)


def path_by_key(paths: Mapping[Path, Any], key: str) -> Path | None:
    """The path that ends in `key` and is the shortest."""
    return min((path for path in paths if path[-1] == key), key=lambda path: (len(path), path), default=None)


def leaf_of(index: torch.Tensor, capacity: int) -> torch.Tensor:
    """The places of a tree's values, of that capacity: from the first power of two that is no less, then around."""
    leftmost = 1 << max(0, capacity - 1).bit_length()
    leaf = index + leftmost
    return torch.where(leaf >= 2 * capacity, leaf - capacity, leaf)


def grown(leaves: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The nodes of a tree over these values, root at 1, each combined of its two children."""
    capacity = len(leaves)
    values = leaves.new_zeros(2 * capacity)
    values[leaf_of(torch.arange(capacity, device=leaves.device), capacity)] = leaves
    for level in range(capacity.bit_length(), -1, -1):
        lo, hi = max(1, 1 << level), min(1 << (level + 1), capacity)
        if lo < hi:
            values[lo:hi] = combine(values[2 * lo : 2 * hi : 2], values[2 * lo + 1 : 2 * hi : 2])
    return values


@dataclass(frozen=True)
class Heads:
    """The numbers that ALF keeps of the episode at the start of each row, whose first steps may be gone: (E,) each."""

    begin: torch.Tensor  # position of its first step
    value: torch.Tensor  # of the index at the row's oldest step
    disc_0: torch.Tensor  # position of the last step before with discount 0, or of the first step


@dataclass(frozen=True)
class Indices:
    index: torch.Tensor  # (E, L)
    headless: torch.Tensor  # (E,)
    disc_0: torch.Tensor  # (E, L)


def indices(starts: torch.Tensor, zeros: torch.Tensor, pos: torch.Tensor, size: torch.Tensor, heads: Heads) -> Indices:
    """ALF's episode indices of a ring.  starts, zeros: (E, L) steps that begin an episode, that have discount 0."""
    index, disc_0 = (torch.zeros(starts.shape, dtype=torch.int64, device=starts.device) for _ in range(2))
    headless = torch.zeros_like(pos)
    for rows in _row_slices(starts):
        order = _Order(pos[rows], size[rows], starts.shape[1])
        begins = order.take(starts[rows])
        head = order.valid & (begins.cumsum(1) == 0)
        following = torch.where(begins, order.position, pos[rows, None]).flip(1).cummin(1).values.flip(1)
        end = torch.cat([following[:, 1:], pos[rows, None]], 1) - 1
        begin = order.latest(begins, heads.begin[rows])
        value = torch.where(begins, end, begin)
        value[:, 0] = torch.where(head[:, 0], heads.value[rows], value[:, 0])
        order.put(index[rows], value)
        order.put(disc_0[rows], order.latest(begins | order.take(zeros[rows]), heads.disc_0[rows]))
        headless[rows] = torch.where(head[:, 0], following[:, 0] - 1, headless[rows])
    return Indices(index, headless, disc_0)


class _Order:
    """Rows of a ring in order of time: `position` (E, L), the first `size` of each row `valid`."""

    def __init__(self, pos: torch.Tensor, size: torch.Tensor, length: int) -> None:
        steps = torch.arange(length, device=pos.device)
        self.position = (pos - size)[:, None] + steps
        self.valid = steps < size[:, None]
        self.slot = self.position % length

    def take(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.gather(1, self.slot) & self.valid

    def latest(self, mask: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Position of the latest step of `mask` so far; `before` there is one."""
        found = torch.where(mask, self.position, NONE).cummax(1).values
        return torch.where(found == NONE, before[:, None], found)

    def put(self, out: torch.Tensor, value: torch.Tensor) -> None:
        out.scatter_(1, self.slot, torch.where(self.valid, value, 0))


def _row_slices(ring: torch.Tensor) -> Iterator[slice]:
    rows = max(1, ELEMENTS_AT_ONCE // max(1, ring.shape[1]))
    for start in range(0, len(ring), rows):
        yield slice(start, start + rows)


# -- what is known of a live buffer ------------------------------------------------------------------------------------


@dataclass
class Track:
    """The knowledge of a live buffer since its last save or restore, for the next save."""

    offset: Ints  # of each row: position in the archive less ALF's own, which starts anew when the buffer is cleared
    at: Ints  # position in the archive of each row's next step
    marks: Table  # (E, MARKED) checksums of the newest steps, the newest first; -1 where there is none
    rewritten: Table  # (n, 3) env row, position in the archive, step type: in the buffer other than in the archive
    closed: list[int] = field(
        default_factory=list
    )  # rows whose open episode was closed in the buffer, not yet in the archive


def no_rewrites() -> Table:
    return np.zeros((0, 3), np.int64)


def marks(tensors: Tensors) -> Table:
    """Checksums of the newest steps of each row."""
    position = tensors.pos.cpu()[:, None] - 1 - torch.arange(MARKED)
    there = (position >= (tensors.pos - tensors.size).cpu()[:, None]).numpy()
    return checksums(tensors, position.clamp(min=0), there)


def checksums(tensors: Tensors, position: torch.Tensor, there: np.ndarray[Any, Any]) -> Table:
    rows, which = np.nonzero(there)
    slots = position[rows, which] % max(1, tensors.max_length)
    at = torch.from_numpy(rows)
    sums = np.zeros(len(rows), np.uint64)
    for number, (path, leaf) in enumerate(sorted(tensors.fields.items())):
        if path[-1] != "step_type":  # ALF's own loading rewrites it
            steps = leaf[at.to(leaf.device), slots.to(leaf.device)]
            sums += digests.of_tensor(steps, None) * digests.salt(number, path)
    out = np.full(there.shape, -1, np.int64)
    out[rows, which] = sums >> np.uint64(1)
    return out
