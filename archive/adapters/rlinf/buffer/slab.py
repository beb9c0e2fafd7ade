"""Pure, no I/O: rows of many trajectories end to end, one tensor a field, so that a batch is one gather a field."""

from __future__ import annotations

import torch

from archive.adapters.rlinf.buffer.flatten import Rows, gathered

_SLACK = 1.5  # room taken when more is needed, in proportion to what is


class Slab:
    """Rows of trajectories of one signature. Not safe for several threads.

    expected: how many trajectories it will hold at once, if known: then room for as many of the first one's size is
    reserved (and touched only as it is filled).
    """

    def __init__(self, expected: int = 0) -> None:
        self._expected = expected
        self._tensors: Rows = {}
        self._capacity = 0
        self._spans: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: int) -> bool:
        return key in self._spans

    def start(self, key: int) -> int:
        """Row at which a trajectory begins."""
        return self._spans[key][0]

    def put(self, key: int, rows: Rows, count: int) -> None:
        """Copy a trajectory's rows in."""
        start = self._place(count)
        if start is None:
            self._make_room(rows, count)
            start = self._place(count)
            assert start is not None
        for path, value in rows.items():
            self._tensors[path][start : start + count] = value
        self._spans[key] = (start, start + count)

    def drop(self, key: int) -> None:
        """Forget a trajectory."""
        del self._spans[key]

    def view(self, key: int) -> Rows:
        """A trajectory's rows, not copied."""
        start, stop = self._spans[key]
        return {path: tensor[start:stop] for path, tensor in self._tensors.items()}

    def take(self, index: torch.Tensor) -> Rows:
        """Copies of these rows."""
        return {path: gathered(tensor, index) for path, tensor in self._tensors.items()}

    def _place(self, count: int) -> int | None:
        """Where that many rows are free."""
        at = 0
        for start, stop in sorted(self._spans.values()):
            if start - at >= count:
                return at
            at = stop
        return at if self._capacity - at >= count and self._tensors else None

    def _make_room(self, rows: Rows, count: int) -> None:
        """Close the gaps, in larger tensors where those would be left nearly full."""
        needed = count + sum(stop - start for start, stop in self._spans.values())
        if not self._tensors:
            self._capacity = count * max(1, self._expected)
        elif needed * _SLACK > self._capacity:
            self._capacity = int(needed * _SLACK) + 1
        old, spans = self._tensors, sorted(self._spans.items(), key=lambda item: item[1])
        self._tensors = {p: torch.empty((self._capacity, *t.shape[1:]), dtype=t.dtype) for p, t in rows.items()}
        at = 0
        for key, (start, stop) in spans:
            for path, tensor in self._tensors.items():
                tensor[at : at + stop - start] = old[path][start:stop]
            self._spans[key] = (at, at + stop - start)
            at += stop - start
