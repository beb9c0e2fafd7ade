"""What a writer goes on from: live steps, positions and open episodes, out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    """Where pieces lie that a buffer is to hold: `live` has the stream of each run; `index` their episodes, and
    `whole_index` all that are there."""

    @property
    def live(self) -> pa.Table: ...
    @property
    def index(self) -> EpisodeIndex: ...
    @property
    def whole_index(self) -> EpisodeIndex: ...
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
            rank, source.world_size, source.run, dict.fromkeys(about, empty), source.number, source.origin, source.name,
            saved_by=source.world_size,
        )  # fmt: skip
    ranks = source.live["rank"].to_numpy()
    names = np.array(source.live["buffer"].cast("string").to_pylist(), object)
    buffers = {}
    for name, entry in about.items():
        mine = (ranks == rank) & (names == name)
        pieces = source.located.pick(mine[source.located.run])
        env = source.live["env_id"].to_numpy()[pieces.run]
        buffers[name] = take_over(source, pieces, env, pieces.position, entry.next_positions, entry.open_episodes)
    taken = (source.number, source.origin, source.name, None, source.world_size, partial(holders, source))
    return Resume(rank, source.world_size, source.run, buffers, *taken)


def holders(source: Source) -> dict[str, int]:
    """Episode id -> the rank that has it live, the first if several have steps of it."""
    ranks = source.live["rank"].to_numpy()[source.located.run]
    return first_ranks(source.index, source.index.episode_of_row[source.located.row], ranks)


def first_ranks(index: EpisodeIndex, episodes: Ints, ranks: Ints) -> dict[str, int]:
    """The id of each of these episodes -> the first of its ranks."""
    numbers, first = np.unique(episodes, return_index=True)
    known = numbers >= 0
    names = index.column("episode_id").take(numbers[known]).to_pylist()
    return dict(zip(names, ranks[first[known]].tolist(), strict=True))


def take_over(
    source: Held, pieces: Located, env: Ints, position: Ints, next_positions: Mapping[int, int],
    opened: Mapping[int, str], *, to_close: Sequence[str] = (),
) -> BufferResume:  # fmt: skip
    """A buffer that holds these pieces at these places; `opened`: env id -> id of the episode that is open there."""
    numbers = source.index.episode_of_row[pieces.row]
    if (numbers < 0).any():
        raise CorruptManifestError("live steps belong to an episode that was replaced; run `archive verify`")
    distinct = list(dict.fromkeys(numbers.tolist()))
    unfinished = sorted({*opened.values(), *to_close})
    known = _known(source.index, distinct, _begins(source, pieces, env, position), unfinished)
    known += _without_pieces(source, [name for name in unfinished if name not in {one.id for one in known}])
    at = {one.id: i for i, one in enumerate(known)}
    known = _without_live_steps(known, {at[name]: e for e, name in opened.items()}, next_positions)
    streams, codes = _streams(source, pieces)
    starts = source.snapshot.columns(["position"])["position"].to_numpy()[pieces.row] + pieces.lo
    place = {number: i for i, number in enumerate(distinct)}
    episode = np.array([place[int(n)] for n in numbers], np.int64)
    runs = Runs(env, position, pieces.hi - pieces.lo, episode, codes, starts)
    return BufferResume(
        runs.pick(np.lexsort((runs.position, runs.env))), known, streams, next_positions,
        {e: at[name] for e, name in opened.items()}, [at[name] for name in to_close],
    )  # fmt: skip


def _without_pieces(source: Held, ids: Sequence[str]) -> list[KnownEpisode]:
    """Open episodes of which no step is held: they may be anywhere in the segments table."""
    if not ids:
        return []
    numbers = _numbers_of(source.whole_index, ids)
    return _known(source.whole_index, [numbers[name] for name in ids], {}, ids)


def _numbers_of(index: EpisodeIndex, ids: Sequence[str]) -> dict[str, int]:
    found = np.flatnonzero(index.mask(episode_id=list(ids)))
    names = index.column("episode_id").take(found).to_pylist()
    out = dict(zip(names, found.tolist(), strict=True))
    missing = [i for i in ids if i not in out]
    if missing:
        raise PartialCheckpointError(f"open episode {missing[0]!r} is not in the segments table; run `archive verify`")
    return out


def _begins(source: Held, pieces: Located, env: Ints, position: Ints) -> dict[int, tuple[int, int]]:
    """Number of an episode -> the env row of its first piece, and where in it the episode begins."""
    start = source.snapshot.columns(["episode_start"])["episode_start"].to_numpy()[pieces.row] + pieces.lo
    number = source.index.episode_of_row[pieces.row]
    out: dict[int, tuple[int, int]] = {}
    for n, e, begin in zip(number.tolist(), env.tolist(), (position - start).tolist(), strict=True):
        out.setdefault(n, (e, begin))
    return out


def _known(
    index: EpisodeIndex, numbers: Sequence[int], begins: Mapping[int, tuple[int, int]], unfinished: Sequence[str]
) -> list[KnownEpisode]:
    """What a writer must know of each episode, from its first and last segments, and where its live steps begin."""
    chosen = np.array(numbers, np.int64)
    rows = index.snapshot.take(index.chains.lasts()[chosen], _ROW).to_pylist()
    begun = index.snapshot.take(index.chains.firsts()[chosen], ["first"])["first"].to_pylist()
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
