"""What a writer goes on from: live steps, positions and open episodes, out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from archive.arrays import Ints
from archive.base import CorruptManifestError, PartialCheckpointError, jsontree
from archive.checkpoint.staged import StagedFile
from archive.manifest import (
    BufferResume,
    EpisodeIndex,
    KnownEpisode,
    Located,
    Origin,
    Resume,
    Runs,
    Snapshot,
    Stream,
    Unfinished,
    chains,
)

if TYPE_CHECKING:
    import pyarrow as pa

_ROW = ("episode_id", "session", "rank", "sequence", "episode_start", "length", "return", "metadata", "last")


class Held(Protocol):
    """Where pieces lie that a buffer is to hold: `live` has the stream of each run."""

    @property
    def live(self) -> pa.Table: ...
    @property
    def index(self) -> EpisodeIndex: ...
    @property
    def snapshot(self) -> Snapshot: ...


class Source(Held, Protocol):
    """A checkpoint, as far as a resume needs it."""

    @property
    def located(self) -> Located: ...
    @property
    def run(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def replay_saved(self) -> bool: ...
    @property
    def origin(self) -> Origin | None: ...
    def staged(self, rank: int) -> StagedFile: ...


def same_rank(source: Source, rank: int) -> Resume:
    """What a rank goes on from in a world of the same size: all as it was."""
    about = source.staged(rank).index.buffers
    if not source.replay_saved:
        empty = BufferResume(Runs.empty(), [], [], {}, {})
        return Resume(
            rank, source.world_size, source.run, dict.fromkeys(about, empty), source.number, source.origin, source.name
        )
    ranks = source.live["rank"].to_numpy()
    names = np.array(source.live["buffer"].cast("string").to_pylist(), object)
    buffers = {}
    for name, entry in about.items():
        mine = (ranks == rank) & (names == name)
        pieces = source.located.pick(mine[source.located.run])
        env = source.live["env_id"].to_numpy()[pieces.run]
        buffers[name] = take_over(source, pieces, env, pieces.position, entry.next_positions, entry.open_episodes)
    return Resume(rank, source.world_size, source.run, buffers, source.number, source.origin, source.name)


def take_over(
    source: Held, pieces: Located, env: Ints, position: Ints, next_positions: Mapping[int, int],
    opened: Mapping[int, str], *, to_close: Sequence[str] = (),
) -> BufferResume:  # fmt: skip
    """A buffer that holds these pieces at these places; `opened`: env id -> id of the episode that is open there."""
    numbers = source.index.episode_of_row[pieces.row]
    if (numbers < 0).any():
        raise CorruptManifestError("live steps belong to an episode that was replaced; run `archive verify`")
    others = _numbers_of(source.index, sorted({*opened.values(), *to_close}))
    distinct = list(dict.fromkeys([*numbers.tolist(), *others.values()]))
    place = {number: i for i, number in enumerate(distinct)}
    known = _known(source, distinct, pieces, env, position, set(others))
    known = _without_live_steps(known, {place[others[name]]: e for e, name in opened.items()}, next_positions)
    streams, codes = _streams(source, pieces)
    starts = source.snapshot.columns(["position"])["position"].to_numpy()[pieces.row] + pieces.lo
    episode = np.array([place[int(n)] for n in numbers], np.int64)
    runs = Runs(env, position, pieces.hi - pieces.lo, episode, codes, starts)
    return BufferResume(
        runs.pick(np.lexsort((runs.position, runs.env))), known, streams, next_positions,
        {e: place[others[name]] for e, name in opened.items()}, [place[others[name]] for name in to_close],
    )  # fmt: skip


def _numbers_of(index: EpisodeIndex, ids: Sequence[str]) -> dict[str, int]:
    if not ids:
        return {}
    found = np.flatnonzero(index.mask(episode_id=list(ids)))
    names = index.column("episode_id").take(found).to_pylist()
    out = dict(zip(names, found.tolist(), strict=True))
    missing = [i for i in ids if i not in out]
    if missing:
        raise PartialCheckpointError(f"open episode {missing[0]!r} is not in the segments table; run `archive verify`")
    return out


def _known(
    source: Held, numbers: Sequence[int], pieces: Located, env: Ints, position: Ints, unfinished: set[str]
) -> list[KnownEpisode]:
    """What a writer must know of each episode, from its last segment and its first live step."""
    lasts = source.index.chains.lasts()[np.array(numbers, np.int64)]
    rows = source.snapshot.take(lasts, _ROW).to_pylist()
    firsts = source.index.chains.firsts()[np.array(numbers, np.int64)]
    begun = source.snapshot.take(firsts, ["first"])["first"].to_pylist()
    start = source.snapshot.columns(["episode_start"])["episode_start"].to_numpy()[pieces.row] + pieces.lo
    begins: dict[int, tuple[int, int]] = {}
    for number, e, p, s in zip(
        source.index.episode_of_row[pieces.row].tolist(), env.tolist(), position.tolist(), start.tolist(), strict=True
    ):
        begins.setdefault(number, (e, p - s))
    out = []
    for number, row, first in zip(numbers, rows, begun, strict=True):
        e, begin = begins.get(number, (-1, 0))
        rest = _unfinished(row) if row["episode_id"] in unfinished else None
        out.append(KnownEpisode(row["episode_id"], e, begin, not first, not row["last"] and rest is None, rest))
    return out


def _without_live_steps(
    known: Sequence[KnownEpisode], open_at: Mapping[int, int], next_positions: Mapping[int, int]
) -> list[KnownEpisode]:
    """Open episodes whose steps have all left the buffer stand in the env row that they go on in."""
    out = list(known)
    for place, env in open_at.items():
        rest = out[place].unfinished
        if out[place].env_id != env and rest is not None:
            out[place] = replace(out[place], env_id=env, begin=next_positions.get(env, rest.stored) - rest.stored)
    return out


def _unfinished(row: dict[str, Any]) -> Unfinished:
    metadata = jsontree.loads(row["metadata"]) if row["metadata"] else {}
    address = chains.address(row["session"], row["rank"], row["sequence"])
    stored = row["episode_start"] + row["length"]
    return Unfinished(address, stored, row["return"], metadata)


def _streams(source: Held, pieces: Located) -> tuple[list[Stream], Ints]:
    """The streams that the pieces lie in, and each piece's place among them."""
    live = source.live.select(["session", "stream_rank", "stream_env"]).to_pylist()
    names = [(live[r]["session"], live[r]["stream_rank"], live[r]["stream_env"]) for r in pieces.run.tolist()]
    distinct = list(dict.fromkeys(names))
    place = {name: i for i, name in enumerate(distinct)}
    return distinct, np.array([place[n] for n in names], np.int64)
