"""Pure, no I/O: one buffer at the moment of a checkpoint: its live steps, columns, attributes and state, copied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import ColumnError, UsageError, cached_property, check_text, escape, jsontree
from archive.fields import dtypes, nests
from archive.fields.state import trees
from archive.write.episodes import EpisodeRecords
from archive.write.live import OWN, LiveRuns, Stream

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
Empty = Callable[[tuple[int, ...], Any], Array]  # (shape, dtype) -> memory
POLICIES = ("keep", "drop")


@dataclass(frozen=True)
class Column:
    """One value a live step, in live order, in stored form."""

    array: Array
    dtype: str

    @cached_property
    def digest(self) -> str:
        """Tells whether it has changed; found out when somebody asks, as a checkpoint's caller waits for the rest."""
        return digest(self.array)


@dataclass(frozen=True)
class Cut:
    """One buffer as a checkpoint says it."""

    name: str
    place: tuple[str, int]  # session and rank
    runs: LiveRuns
    streams: Sequence[Stream]
    next_positions: dict[int, int]
    open_episodes: dict[int, str]
    columns: dict[str, Column]
    attributes: dict[str, str]  # name -> JSON of {episode id: value}
    state: tuple[dict[str, Any], dict[str, Array]] | None
    discarded: dict[str, dict[str, int]]
    left: LiveRuns  # what is live, and not in it

    @cached_property
    def live(self) -> pa.Table:
        """Rows of the live table; made in the background, as a checkpoint's caller waits for the rest."""
        return live_table(self.name, self.place, self.runs, self.streams)

    @property
    def left_out(self) -> pa.Table:
        """Rows as of the live table, of what is not in it."""
        return live_table(self.name, self.place, self.left, self.streams)

    @property
    def steps(self) -> int:
        return self.runs.steps

    @property
    def episodes(self) -> int:
        return len(np.unique(self.runs.episode))


def make(
    name: str, place: tuple[str, int], runs: LiveRuns, records: EpisodeRecords, streams: Sequence[Stream],
    positions: tuple[dict[int, int], dict[int, str]], *, columns: Mapping[str, Any] | None,
    attributes: Mapping[str, Mapping[str, Any]] | None, state: Any, incomplete: str, empty: Empty = np.empty,
) -> Cut:  # fmt: skip
    """Copy what belongs to the checkpoint; errors name what does not fit, and nothing is written.
    empty: memory for the columns."""
    if incomplete not in POLICIES:
        raise UsageError(f"incomplete={incomplete!r}: give 'keep' or 'drop'")
    made = {n: column(n, v, runs, records, empty) for n, v in (columns or {}).items()}
    texts = {n: attribute(n, v, runs, records) for n, v in (attributes or {}).items()}
    flat = None if state is None else trees.flatten(state, where="state")
    dropped: dict[str, dict[str, int]] = {}
    left = LiveRuns.empty()
    if incomplete == "drop":
        following, opened = positions
        dropped, keep = _incomplete(runs, records, {env: following[env] for env in opened})
        made = made if keep.all() else {n: _picked(c, np.repeat(keep, runs.length), empty) for n, c in made.items()}
        runs, left = runs.pick(keep), runs.pick(~keep)
    return Cut(name, place, runs, tuple(streams), *positions, made, texts, flat, dropped, left)


def live_table(buffer: str, place: tuple[str, int], runs: LiveRuns, streams: Sequence[Stream]) -> pa.Table:
    """Rows of the live table: runs joined over episodes, streams named."""
    session, rank = place
    runs = runs.merged()
    own = runs.stream == OWN
    named = [
        (session, rank, int(e)) if o else streams[int(s)] for o, s, e in zip(own, runs.stream, runs.env, strict=True)
    ]
    return tables.from_columns(
        "live",
        {
            "rank": np.full(len(own), rank), "buffer": [buffer] * len(own), "env_id": runs.env,
            "position": runs.position, "session": [n[0] for n in named], "stream_rank": [n[1] for n in named],
            "stream_env": [n[2] for n in named], "lo": runs.lo, "hi": runs.lo + runs.length,
        },
    )  # fmt: skip


def _incomplete(
    runs: LiveRuns, records: EpisodeRecords, following: Mapping[int, int]
) -> tuple[dict[str, dict[str, int]], Any]:  # fmt: skip
    """Live episodes that lack steps or their end, and their live steps, counted by what they lack; mask of the others'
    runs. following: env row -> its next position, where an episode is open."""
    numbers, episode = np.unique(runs.episode, return_inverse=True)
    live = np.bincount(episode, runs.length, len(numbers)).astype(np.int64)
    full = runs.pick(runs.length > 0)
    begun = set(zip(full.episode.tolist(), full.env.tolist(), full.position.tolist(), strict=True))
    each = zip(numbers.tolist(), live.tolist(), strict=True)
    why = np.array([_lack(number, records, steps, begun, following) for number, steps in each], object)
    counts = {
        reason: {"episodes": int((why == reason).sum()), "steps": int(live[why == reason].sum())}
        for reason in ("headless", "open")
        if (why == reason).any()
    }
    return counts, (why == "")[episode]


def _lack(
    number: int, records: EpisodeRecords, live: int, begun: set[tuple[int, int, int]], following: Mapping[int, int]
) -> str:  # fmt: skip
    """Why an episode is not complete: its first step is not live, or the last, or one between; "" if it is.
    live: how many steps are; begun: episode, env row and position where runs of live steps begin."""
    record, end = records[number], records.end(number)
    stop = following.get(record.env_id, record.begin) if end is None else end.position
    has_first = stop == record.begin or (number, record.env_id, record.begin) in begun
    if record.headless or not has_first:
        return "headless"
    return "" if end is not None and not end.broken and live == stop - record.begin else "open"


def column(name: str, value: Any, runs: LiveRuns, records: EpisodeRecords, empty: Empty = np.empty) -> Column:
    """A column of these runs, copied: one value a step, or a dict of episode id to array; ColumnError if that does not
    fit."""
    check_text(name, "column name")
    array = _by_episode(name, value, runs, records) if isinstance(value, Mapping) else nests.as_array(value, name)
    if array.ndim == 0 or len(array) != runs.steps:
        count = "no axis" if array.ndim == 0 else f"{len(array)} values"
        raise ColumnError(
            f"column {name!r} has {count}, the buffer has {runs.steps} live steps; give one value a live step, in the "
            "order of w.live, or a dict of episode id to array"
        )
    stored, logical = dtypes.to_stored(array)
    return _copied(stored, logical, empty)


def _copied(stored: Array, logical: str, empty: Empty) -> Column:
    own = empty(stored.shape, stored.dtype)
    own[...] = stored
    return Column(own, logical)


def _picked(column: Column, steps: Any, empty: Empty) -> Column:
    return _copied(column.array[steps], column.dtype, empty)


def _by_episode(name: str, values: Mapping[str, Any], runs: LiveRuns, records: EpisodeRecords) -> Array:
    """Values in live order, from one array an episode."""
    arrays = {key: nests.as_array(v if not np.isscalar(v) else [v], name) for key, v in values.items()}
    taken = dict.fromkeys(arrays, 0)
    parts = []
    for index, length in zip(runs.episode.tolist(), runs.length.tolist(), strict=True):
        key = records.id_of(index)
        if key not in arrays:
            raise ColumnError(f"column {name!r} has no values for live episode {key!r}; give one array a live episode")
        parts.append(arrays[key][taken[key] : taken[key] + length])
        taken[key] += length
    wrong = [k for k, a in arrays.items() if len(a) != taken[k]]
    if wrong:
        raise ColumnError(
            f"column {name!r} has {len(arrays[wrong[0]])} values for episode {wrong[0]!r}, of which {taken[wrong[0]]} "
            "steps are live; give one value a live step"
        )
    return np.concatenate(parts) if parts else np.zeros(0)


def attribute(name: str, values: Mapping[str, Any], runs: LiveRuns, records: EpisodeRecords) -> str:
    """An attribute of episodes of these runs, as JSON; ColumnError if it has a value for another."""
    live = {records.id_of(i) for i in np.unique(runs.episode).tolist()}
    unknown = [k for k in values if k not in live]
    if unknown:
        raise ColumnError(
            f"attribute {name!r} has a value for {unknown[0]!r}, which is not among the {len(live)} live episodes"
        )
    return jsontree.dumps(dict(values), where=f"attributes.{check_text(name, 'attribute name')}")


def column_path(buffer: str, name: str) -> str:
    return f"columns/{escape(buffer)}/{escape(name)}"


def digest(array: np.ndarray[Any, Any]) -> str:
    """Tells whether a column has changed."""
    head = f"{array.dtype.str}{array.shape}".encode()
    if array.dtype == object:
        return hashlib.sha256(head + json.dumps(array.tolist()).encode()).hexdigest()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
