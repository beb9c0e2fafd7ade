"""Pure, no I/O: which steps are live after a crash: those of before, less what left, and those of the tails; and their
values: for each live step the newest that was saved or journaled.

Runs are those of a live set, but that every stream has a number: `LiveRuns.stream` is a place in `Streams.names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, offsets_of, spans
from archive.fields import dtypes
from archive.manifest import LiveRuns, Stream
from archive.saved import Stretch
from archive.steps import Steps
from archive.write import Column

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Part = tuple[int, str]  # rank, buffer


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

    def steps(self, some: Sequence[Stretch]) -> Steps:
        """Steps of these streams."""
        columns = [(self.number((session, rank, env)), lo, hi) for session, rank, env, lo, hi in some]
        return Steps(*np.array(columns, np.int64).reshape(-1, 3).T)


def by_part(live: pa.Table, streams: Streams) -> dict[Part, LiveRuns]:
    """Rows of the live table, by rank and buffer."""
    stream = streams.of(live["session"], live["stream_rank"], live["stream_env"])
    env, position, lo, hi = (live[name].to_numpy() for name in ("env_id", "position", "lo", "hi"))
    every = LiveRuns(env, position, hi - lo, np.zeros(len(lo), np.int64), stream, lo)
    parts = list(zip(live["rank"].to_pylist(), live["buffer"].to_pylist(), strict=True))
    places: dict[Part, list[int]] = {}
    for place, part in enumerate(parts):
        places.setdefault(part, []).append(place)
    return {part: every.pick(np.array(some, np.int64)) for part, some in places.items()}


def appended(segments: pa.Table, streams: Streams) -> dict[Part, LiveRuns]:
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


def together(*some: LiveRuns) -> LiveRuns:
    """All of them, in live order."""
    return LiveRuns.joined(some).ordered()


def ends_of(runs: LiveRuns) -> dict[int, int]:
    """Env row -> the position after its last step."""
    ordered = np.argsort(ends := runs.position + np.maximum(runs.length, 1), kind="stable")
    return dict(zip(runs.env[ordered].tolist(), ends[ordered].tolist(), strict=True))


def without(runs: LiveRuns, gone: Steps) -> LiveRuns:
    """The runs less these steps, wherever they stand; an episode without steps goes with its position."""
    left = runs.written.minus(gone)
    return LiveRuns(left["env"], left["position"], left.length, left["episode"], left.stream, left.lo).ordered()


def left_over(origin: Mapping[Part, LiveRuns], taken: Mapping[Part, LiveRuns], rank: int) -> dict[Part, LiveRuns]:
    """What a rank gets that died before it said what it held: of what its session went on from all that no other took.

    Of several ranks each gets env rows of its own.
    """
    out: dict[Part, LiveRuns] = {}
    for buffer in sorted({buffer for _, buffer in origin}):
        others = [runs for (_, name), runs in taken.items() if name == buffer]
        gone = together(LiveRuns.empty(), *others).written.placed
        rest = [without(runs, gone) for (_, name), runs in sorted(origin.items()) if name == buffer]
        rest = [runs for runs in rest if len(runs.lo)]
        if rest:
            out[rank, buffer] = together(*(rest if len(rest) == 1 else _apart(rest)))
    return out


def _apart(some: Sequence[LiveRuns]) -> list[LiveRuns]:
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


# -- values of columns -------------------------------------------------------------------------------------------------


def fill(wanted: Steps, given: Sequence[tuple[Column, Steps]]) -> tuple[Column, int]:
    """The newest value of each step, of those given for steps from the oldest to the newest, and how many steps have
    none: these get NaN where the dtype has it, else its zero. Values of another dtype or shape than the newest ones do
    not count."""
    newest, _ = given[-1]
    own = offsets_of(wanted.length)
    out = blank(newest.dtype, int(own[-1]), newest.array.shape[1:])
    known = np.zeros(len(out), bool)
    for column, steps in given:
        if column.dtype == newest.dtype and column.array.shape[1:] == newest.array.shape[1:]:
            met = wanted.meet(steps)
            count = met.hi - met.lo
            at = spans(own[met.left] + met.lo - wanted.lo[met.left], count)
            theirs = offsets_of(steps.length)[met.right] + met.lo - steps.lo[met.right]
            out[at] = column.array[spans(theirs, count)]
            known[at] = True
    return Column(out, newest.dtype), int((~known).sum())


def blank(dtype: str, count: int, shape: tuple[int, ...]) -> Array:
    """Rows in stored form, of this shape each, of steps whose value nobody knows."""
    kind = dtypes.to_numpy(dtype)
    if kind.kind in "OUT":
        return np.full((count, *shape), "null" if dtype == "json" else "", object)
    has_nan = kind.kind in "fc" or dtype in dtypes.ML_NAMES
    unknown, _ = dtypes.to_stored(np.full(1, np.nan).astype(kind) if has_nan else np.zeros(1, kind))
    out: Array = np.empty((count, *shape), unknown.dtype)
    out[...] = unknown[0]
    return out
