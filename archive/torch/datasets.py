"""Torch datasets over episodes: whole ones, windows that never cross an episode's end, single steps.

They pickle, survive fork, and open their own connections in each DataLoader worker. A DataLoader's batch is one read:
chunks that several of its items share are fetched once, and only the fields asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from archive import dtypes
from archive.episodes import Episodes
from archive.errors import UsageError
from archive.fields import Selection
from archive.segments import cut
from archive.tree import Ragged

Transform = Callable[[dict[str, Any]], Any]


class EpisodeDataset(Dataset[Any]):
    """Item i is episode i: a nested dict of tensors, axis 0 the step."""

    def __init__(
        self, episodes: Episodes, fields: Any = None, *, missing: Any = "error", transform: Transform | None = None
    ) -> None:
        self.episodes, self.transform = episodes, transform
        self._selection = Selection(fields, missing)

    def __len__(self) -> int:
        return len(self.episodes)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        places = [_checked(i, len(self)) for i in indices]
        parts = self.episodes[np.array(places, np.int64)].parts()
        return [self._finished(data) for data in self.episodes.reader.read(parts, self._selection)]

    def _finished(self, data: dict[str, Any]) -> Any:
        out = to_tensors(data)
        return out if self.transform is None else self.transform(out)


class WindowDataset(EpisodeDataset):
    """Item i is a window of `length` steps of one episode, every `stride` steps; it never crosses an episode's end.

    pad=False: only full windows. pad=True: windows begin up to the last step, and shorter ones are filled with zeros
    (strings with ""); the tensor "mask" says which steps are real.
    """

    def __init__(
        self,
        episodes: Episodes,
        length: int,
        stride: int = 1,
        pad: bool = False,
        fields: Any = None,
        *,
        missing: Any = "error",
        transform: Transform | None = None,
    ) -> None:
        if length < 1 or stride < 1:
            raise UsageError(f"length={length} and stride={stride} must both be at least 1")
        super().__init__(episodes, fields, missing=missing, transform=transform)
        self.length, self.stride, self.pad = length, stride, pad
        steps = episodes.lengths()
        full = steps if pad else steps - length + 1
        self._ends = np.cumsum(np.maximum(-(-full // stride), 0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def place(self, index: int) -> tuple[int, int]:
        """(number of the episode, first step) of a window."""
        index = _checked(index, len(self))
        episode = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[episode - 1]) if episode else 0
        return episode, (index - before) * self.stride

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        places = [self.place(i) for i in indices]
        episodes = self.episodes[np.array([e for e, _ in places], np.int64)]
        parts = [
            cut(whole, start, start + self.length) for whole, (_, start) in zip(episodes.parts(), places, strict=True)
        ]
        items = self.episodes.reader.read(parts, self._selection)
        counts = [sum(p.hi - p.lo for p in group) for group in parts]
        return [self._finished(self._padded(d, n)) for d, n in zip(items, counts, strict=True)]

    def _padded(self, data: dict[str, Any], steps: int) -> dict[str, Any]:
        if not self.pad:
            return data
        return {**_fill(data, steps, self.length), "mask": np.arange(self.length) < steps}


class StepDataset(WindowDataset):
    """Item i is one step: a nested dict of tensors without a step axis."""

    def __init__(
        self, episodes: Episodes, fields: Any = None, *, missing: Any = "error", transform: Transform | None = None
    ) -> None:
        super().__init__(episodes, 1, fields=fields, missing=missing, transform=transform)

    def _finished(self, data: dict[str, Any]) -> Any:
        out = _first(to_tensors(data))
        return out if self.transform is None else self.transform(out)


def to_tensors(value: Any) -> Any:
    """A nest with its arrays as tensors; strings and JSON stay as they are."""
    if isinstance(value, dict):
        return {k: to_tensors(v) for k, v in value.items()}
    if isinstance(value, Ragged):
        return Ragged(dtypes.to_torch(value.values), dtypes.to_torch(value.lengths))
    if isinstance(value, list):
        return [to_tensors(v) if isinstance(v, np.ndarray) else v for v in value]
    return dtypes.to_torch(value) if isinstance(value, np.ndarray) else value


def _checked(index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"item {index} of a dataset of {count}")
    return int(index) % count


def _first(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _first(v) for k, v in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray, list)):
        return value[0] if len(value) else value
    return value


def _fill(value: Any, steps: int, length: int) -> Any:
    """Arrays of `steps` rows made `length` long; what has another number of rows belongs to the whole episode."""
    if isinstance(value, dict):
        return {k: _fill(v, steps, length) for k, v in value.items()}
    if isinstance(value, np.ndarray) and value.ndim and len(value) == steps and steps < length:
        tail = np.full((length - steps, *value.shape[1:]), "" if value.dtype == object else 0, value.dtype)
        return np.concatenate([value, tail])
    return value
