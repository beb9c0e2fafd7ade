"""Does no I/O of its own: the requests that a block of code sends to a store, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from archive.base import UsageError
from archive.store import VERBS, around
from archive.store.drivers import Buffer, DelegatingDriver, Driver, Write
from archive.testing.roots import is_within, url_of

if TYPE_CHECKING:
    import pandas as pd


def check_verb(verb: str) -> str:
    """The verb itself, or "any"; UsageError for all else."""
    if verb != "any" and verb not in VERBS:
        raise UsageError(f"{verb!r} is no operation of a store: give one of {', '.join(VERBS)}, or any")
    return verb


@dataclass
class Traced:
    """One request to a store; each try is one, and so is each range of several.

    at_s: when it began, since the trace did.  start, stop: of the range that a get asks for.  error: the name of the
    client's exception, or empty; it may have been tried again.
    """

    verb: str
    url: str
    key: str
    start: int | None = None
    stop: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    at_s: float = 0.0
    seconds: float = 0.0
    error: str = ""


@dataclass
class Trace:
    """The requests of a block: `rows` in the order in which they began."""

    rows: list[Traced] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of requests."""
        return len(self.rows)

    @property
    def bytes_in(self) -> int:
        """The number of bytes received."""
        return sum(row.bytes_in for row in self.rows)

    @property
    def bytes_out(self) -> int:
        """The number of bytes sent, also by failed tries."""
        return sum(row.bytes_out for row in self.rows)

    @property
    def bytes(self) -> int:
        """The number of bytes received and sent."""
        return self.bytes_in + self.bytes_out

    def of(self, verb: str = "any", key: str = "") -> Trace:
        """The requests of a verb (get, put, create, list, delete, head or copy) whose key has this text in it."""
        check_verb(verb)
        return Trace([row for row in self.rows if verb in ("any", row.verb) and key in row.key])

    def count(self, verb: str = "any", key: str = "") -> int:
        """The number of requests of a verb whose key has this text in it."""
        return self.of(verb, key).requests

    def to_pandas(self) -> pd.DataFrame:
        """A row a request."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows], columns=list(Traced.__dataclass_fields__))

    def __str__(self) -> str:
        verbs = dict.fromkeys(row.verb for row in self.rows)
        counts = ", ".join(f"{self.count(verb)} {verb}" for verb in verbs) or "no requests"
        return f"{counts}; {self.bytes_in:,} bytes in, {self.bytes_out:,} out"


T = TypeVar("T")
Spans = Sequence[tuple[int, int | None]]
Begin = Callable[[str, str, Spans], list[Traced]]  # a verb, a key, the ranges that are asked for: rows of the trace


class TracedDriver(DelegatingDriver):
    """Another driver; `begin` makes the rows of a request, which are filled once it is answered."""

    def __init__(self, inner: Driver, begin: Begin) -> None:
        super().__init__(inner)
        self._begin = begin

    @contextmanager
    def _noted(self, verb: str, key: str, spans: Spans = ()) -> Iterator[list[Traced]]:
        rows, started = self._begin(verb, key, spans), time.perf_counter()
        try:
            yield rows
        except BaseException as error:
            for row in rows:
                row.error = type(error).__name__
            raise
        finally:
            for row in rows:
                row.seconds = time.perf_counter() - started

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        with self._noted("get", key, [(start, stop)]) as (row,):
            data = self._inner.get(key, start, stop, timeout_s)
            row.bytes_in = len(data)
            return data

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> Sequence[bytes]:
        asked = [span for span in spans if span[1] > span[0]]  # for others nothing is sent
        with self._noted("get", key, asked) as rows:
            found = self._inner.get_ranges(key, spans, timeout_s)
            _came(rows, map(len, found))
            return found

    def read_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Sequence[int]:
        sizes = [sum(map(len, of)) for of in rooms]
        asked = [(start, start + size) for start, size in zip(starts, sizes, strict=True) if size]
        with self._noted("get", key, asked) as rows:
            came = self._inner.read_into(key, starts, rooms, timeout_s)
            _came(rows, came)
            return came

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        with self._noted("get", key, [(start, stop)]) as (row,):

            def counted(piece: Buffer) -> None:
                row.bytes_in += len(piece)
                take(piece)

            self._inner.stream(key, start, stop, counted, timeout_s)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("put", self._inner.put, key, parts, timeout_s)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("put", self._inner.put_fresh, key, parts, timeout_s)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("create", self._inner.create, key, parts, timeout_s)

    def _write(self, verb: str, send: Write, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with self._noted(verb, key) as (row,):
            row.bytes_out = sum(map(len, parts))
            send(key, parts, timeout_s)

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        with self._noted("list", prefix):
            names, requests = self._inner.list(prefix, timeout_s)
        for _ in range(requests - 1):  # the pages behind the first
            self._begin("list", prefix, ())
        return names, requests

    def _ask(self, verb: str, key: str, call: Callable[[Driver], T], timeout_s: float) -> T:
        with self._noted(verb, key):
            return call(self._inner)


def _came(rows: Sequence[Traced], sizes: Iterable[int]) -> None:
    for row, size in zip(rows, filter(None, sizes), strict=False):
        row.bytes_in = size


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
