"""Pure, no I/O: which steps are live after a crash: those of before, less what left, and those of the tails.

Runs are those of a live set, but that every stream has a number: `Runs.stream` is a place in `Streams.names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, merge_runs, spans
from archive.base import CorruptStateError
from archive.journal.entries import Steps
from archive.manifest import Runs, Stream

if TYPE_CHECKING:
    import pyarrow as pa

Part = tuple[int, str]  # rank, buffer
_MOST = 1 << 62


class Streams:
    """Numbers of streams, in the order in which they are met."""

    def __init__(self) -> None:
        self.names: list[Stream] = []
        self._numbers: dict[Stream, int] = {}

    def number(self, stream: Stream) -> int:
        """The number of a stream; a new one gets the next."""
        if stream not in self._numbers:
            self._numbers[stream] = len(self.names)
            self.names.append(stream)
        return self._numbers[stream]

    def of(self, session: Any, rank: Any, env: Any) -> Ints:
        """The numbers of many, from three columns."""
        names = zip(session.to_pylist(), rank.to_pylist(), env.to_pylist(), strict=True)
        return np.array([self.number(name) for name in names], np.int64)

    def steps(self, some: Sequence[Steps]) -> Runs:
        """Steps of streams as runs that stand nowhere."""
        columns = [(self.number((session, rank, env)), lo, hi) for session, rank, env, lo, hi in some]
        stream, lo, hi = np.array(columns, np.int64).reshape(-1, 3).T
        none = np.zeros(len(lo), np.int64)
        return Runs(none, none, hi - lo, none, stream, lo)


def by_part(live: pa.Table, streams: Streams) -> dict[Part, Runs]:
    """Rows of the live table, by rank and buffer."""
    stream = streams.of(live["session"], live["stream_rank"], live["stream_env"])
    env, position, lo, hi = (live[name].to_numpy() for name in ("env_id", "position", "lo", "hi"))
    every = Runs(env, position, hi - lo, np.zeros(len(lo), np.int64), stream, lo)
    parts = list(zip(live["rank"].to_pylist(), live["buffer"].to_pylist(), strict=True))
    places: dict[Part, list[int]] = {}
    for place, part in enumerate(parts):
        places.setdefault(part, []).append(place)
    return {part: every.pick(np.array(some, np.int64)) for part, some in places.items()}


def appended(segments: pa.Table, streams: Streams) -> dict[Part, Runs]:
    """The steps that rows of the segments table have, and episodes without steps, where their ranks put them."""
    import pyarrow.compute as pc

    rows = segments.filter(pc.is_valid(segments["shard"]))
    names = ("rank", "buffer", "env_id", "position", "session")
    live = rows.select(names)
    end = pc.add(rows["position"], rows["length"])
    more = (("stream_rank", rows["rank"]), ("stream_env", rows["env_id"]), ("lo", rows["position"]), ("hi", end))
    for name, column in more:
        live = live.append_column(name, column)
    return by_part(live, streams)


def together(*some: Runs) -> Runs:
    """All of them, in live order."""
    every = Runs(*map(np.concatenate, zip(*some, strict=True)))
    return every.pick(np.lexsort((every.length, every.position, every.env)))


def ends_of(runs: Runs) -> dict[int, int]:
    """Env row -> the position after its last step."""
    ordered = np.argsort(ends := runs.position + np.maximum(runs.length, 1), kind="stable")
    return dict(zip(runs.env[ordered].tolist(), ends[ordered].tolist(), strict=True))


def span_of(*some: Runs) -> int:
    """A number beyond all positions of their streams, by which streams are kept apart; CorruptStateError if there is
    none."""
    span = 2 + max([0, *(int((runs.lo + np.maximum(runs.length, 1)).max(initial=0)) for runs in some)])
    streams = 1 + max([0, *(int(runs.stream.max(initial=0)) for runs in some)])
    if min([0, *(int(runs.lo.min(initial=0)) for runs in some)]) < 0 or span * streams >= _MOST:
        raise CorruptStateError("a journal has steps at positions that there cannot be; it is damaged")
    return span


def addresses(runs: Runs, span: int) -> Ints:
    """A number for each step, in order."""
    return spans(runs.stream * span + runs.lo, runs.length)


def without(runs: Runs, gone: Runs) -> Runs:
    """The runs less these steps, wherever they stand; an episode without steps goes with its position."""
    if not len(runs.lo) or not len(gone.lo):
        return runs
    span = span_of(runs, gone)
    holes = merge_runs(first := gone.stream * span + gone.lo, first + np.maximum(gone.length, 1))
    empty = runs.pick(runs.length == 0)
    empty = empty.pick(~_inside(empty.stream * span + empty.lo, holes))
    return together(_cut(runs.pick(runs.length > 0), holes, span), empty)


def _cut(runs: Runs, holes: tuple[Ints, Ints], span: int) -> Runs:
    """Runs with steps, less those in the holes."""
    runs = runs.pick(np.argsort(runs.stream * span + runs.lo, kind="stable"))
    start = runs.stream * span + runs.lo
    stop = start + runs.length
    edges = np.unique(np.concatenate([start, stop, *holes]))
    lo, hi = edges[:-1], edges[1:]
    owner = np.searchsorted(start, lo, side="right") - 1
    kept = (owner >= 0) & (hi <= stop[np.maximum(owner, 0)] if len(stop) else False) & ~_inside(lo, holes)
    base = runs.pick(owner[kept])
    ahead = lo[kept] - start[owner[kept]]
    return base._replace(position=base.position + ahead, length=(hi - lo)[kept], lo=base.lo + ahead)


def _inside(places: Ints, holes: tuple[Ints, Ints]) -> Any:
    """Which places lie in a hole."""
    at = np.searchsorted(holes[0], places, side="right") - 1
    return (at >= 0) & (places < holes[1][np.maximum(at, 0)])


def left_over(origin: Mapping[Part, Runs], taken: Mapping[Part, Runs], rank: int) -> dict[Part, Runs]:
    """What a rank gets that died before it said what it held: of what its session went on from all that no other took.

    Of several ranks each gets env rows of its own.
    """
    out: dict[Part, Runs] = {}
    for buffer in sorted({buffer for _, buffer in origin}):
        others = [runs for (_, name), runs in taken.items() if name == buffer]
        gone = together(Runs.empty(), *others)
        rest = [without(runs, gone) for (_, name), runs in sorted(origin.items()) if name == buffer]
        rest = [runs for runs in rest if len(runs.lo)]
        if rest:
            out[rank, buffer] = together(*(rest if len(rest) == 1 else _apart(rest)))
    return out


def _apart(some: Sequence[Runs]) -> list[Runs]:
    """Runs of several ranks, so that none stands where another does; without an env row they follow each other."""
    out, rows, position = [], 0, 0
    for runs in some:
        alone = runs.env < 0
        out.append(
            runs._replace(
                env=np.where(alone, runs.env, runs.env + rows),
                position=np.where(alone, runs.position + position, runs.position),
            )
        )
        ends = runs.position + np.maximum(runs.length, 1)
        rows += int(runs.env.max(initial=-1)) + 1
        position += int(ends[alone].max(initial=0))
    return out
