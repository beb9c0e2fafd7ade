"""Does no I/O of its own: what a block of code asks of a store, request by request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from archive.store import around
from archive.store.drivers import Driver
from archive.testing.roots import is_within, url_of
from archive.testing.traced import Begin, Spans, TracedDriver
from archive.testing.traces import Trace, Traced


@contextmanager
def trace(where: Any = None) -> Iterator[Trace]:
    """See every request that this process sends to the store of an archive (or URL, or all of them) within the block,
    whoever sends it: `with trace(arc) as t: ...` and then `t.count("list")`, `t.bytes`, `t.to_pandas()`.
    Around `faults.at(...)` it sees the tries that fail, within it only what reaches the store."""
    place, found, started = "" if where is None else url_of(where), Trace(), time.perf_counter()

    def begin(url: str) -> Begin:
        def rows(verb: str, key: str, spans: Spans) -> list[Traced]:
            now = time.perf_counter() - started
            new = [Traced(verb, url, key, lo, hi, at_s=now) for lo, hi in spans] or [Traced(verb, url, key, at_s=now)]
            found.rows.extend(new)
            return new

        return rows

    def wrap(url: str, driver: Driver) -> Driver:
        return TracedDriver(driver, begin(url)) if is_within(url, place) else driver

    with around(wrap):
        yield found
