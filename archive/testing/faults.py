"""Has stores go wrong: fail, delay, cut, change, lose answers or throttle, at the operation that one says.

with faults.at(url, op="create", k=3, what="lose_answer") as fault:
    train(url)
assert fault.hits
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archive.store import around
from archive.store.drivers import Driver
from archive.testing.faulty import FaultyDriver
from archive.testing.injections import KINDS, Injection
from archive.testing.roots import is_within, url_of

__all__ = ["KINDS", "Injection", "at"]


@contextmanager
def at(
    where: Any, *, op: str = "any", k: int = 1, what: str | Exception = "fail", times: int | None = 1, key: str = "",
    seconds: float = 1.0, keep: int | None = None,
) -> Iterator[Injection]:  # fmt: skip
    """Within the block, break operations on the store of an archive or URL, whoever in this process sends them.

    op: get, put, create, list, delete, head or copy.  key: a text in the keys that are meant.  k: the first that is
    broken, counted from 1 among those that match; tries count each.  times: how many; None for all from then on.
    what: one of KINDS, or an exception, which is raised instead.  Blocks may be nested; processes that are forked
    meanwhile take it along, and count by themselves. UsageError for what is none.
    """
    injection = Injection(what, op, k, times, key, seconds, keep)
    place = url_of(where)

    def wrap(url: str, driver: Driver) -> Driver:
        return FaultyDriver(driver, injection) if is_within(url, place) else driver

    with around(wrap):
        yield injection
