"""Does no I/O of its own: what lies between all callers of this process and their stores, while somebody looks on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from archive.store.drivers import Driver

Around = Callable[[str, Driver], Driver]  # the URL of a root, and its driver

_around: list[Around] = []  # the innermost block, which is next to the store, first


@contextmanager
def around(wrap: Around) -> Iterator[None]:
    """Have every connection of this process, open already or not, go through the driver that `wrap` gives for its root
    and its own driver, until the block ends; whoever is forked meanwhile keeps it. Of nested blocks the inner one is
    nearer to the store."""
    _around.insert(0, wrap)
    try:
        yield
    finally:
        _around.remove(wrap)


def wrapped(url: str, driver: Driver) -> Driver:
    """The driver of a root, with all that lies around it."""
    for wrap in tuple(_around):
        driver = wrap(url, driver)
    return driver
