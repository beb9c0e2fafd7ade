"""Jobs whose driver is interrupted between the work of a batch and its result, at one batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from archive.jobs.receipts import Receipts


class Stop:
    """After so many results, the next one is not put. `put`: the numbers of all that were."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.put: list[int] = []


@contextmanager
def broken_off(left: int | None = None) -> Iterator[Stop]:
    """Interrupt calls of jobs after so many results (None: never), as a driver that is killed."""
    stop, put = Stop(), Receipts.put
    stop.left = left

    def counted(self: Receipts, number: int, *args: Any) -> bytes | None:
        if stop.left == 0:
            raise KeyboardInterrupt
        if stop.left is not None:
            stop.left -= 1
        stop.put.append(number)
        return put(self, number, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receipts, "put", counted)
        yield stop


def interrupted(call: Callable[[], Any], left: int = 0) -> None:
    """Make a call that is interrupted after so many results."""
    with broken_off(left), pytest.raises(KeyboardInterrupt):
        call()


def interrupted_at_each(call: Callable[[], Any], done: Callable[[], int], total: int) -> Any:
    """The result of a call that was interrupted at each of its batches; each result was put once. done: gives the
    number of batches that have a result."""
    with broken_off() as stop:
        for number in range(total):
            stop.left = min(number, 1)
            with pytest.raises(KeyboardInterrupt):
                call()
            assert done() == number
        stop.left = None
        result = call()
    assert sorted(stop.put) == list(range(total))
    return result
