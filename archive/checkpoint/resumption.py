"""The start of a writer: live steps, offsets and open episodes from a checkpoint, or from episodes in the archive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Steps, places, row_codes
from archive.base import (
    ArchiveError,
    CorruptManifestError,
    PartialCheckpointError,
    UsageError,
    jsontree,
    level_of,
    logger,
    size,
)
from archive.index import EpisodeIndex, chains
from archive.log import Commit, ForkedFrom, read_of, tablefiles
from archive.read import Episodes
from archive.saved import Part, common
from archive.store import IOStats, Storage
from archive.tables import NO_ENV
from archive.write import BufferResume, EpisodeRecord, Kind, Resume, Stream, live_steps, ordered

if TYPE_CHECKING:
    import pyarrow as pa

    from archive.checkpoint.checkpoints import Checkpoint

_ROW = ("episode_id", "session", "rank", "sequence", "episode_start", "length", "return", "metadata", "last")


def same_rank(source: Checkpoint, rank: int) -> Resume:
    """The contents that a rank goes on with in a world of the same size: all as it was."""
    about = source.staged(rank).index.buffers
    buffers = dict.fromkeys(about, BufferResume(live_steps(), [], [], {}, {}))
    ranks = source.live["rank"].to_numpy()
    names = np.array(source.live["buffer"].cast("string").to_pylist(), object)
    for name, entry in about.items() if source.replay_saved else ():
        mine = (ranks == rank) & (names == name)
        pieces = source.located.pick(mine[source.located["run"]])
        env = source.live["env_id"].to_numpy()[pieces["run"]]
        at = (env, pieces["position"], entry.next_positions, entry.open_episodes)
        found = take_over(source.index, source.live, pieces, *at, lambda: source.whole_index)
        buffers[name] = replace(found, column_kinds=partial(column_kinds, source, name, [rank]))
    taken = (source.seen, source.number, source.origin, source.name, None, source.world_size, partial(holders, source))
    return Resume(rank, source.world_size, source.run, buffers, *taken)


def column_kinds(source: Checkpoint, buffer: str, ranks: Sequence[int]) -> dict[str, set[Kind]]:
    """The kind that each column has in a buffer with steps of these ranks; several if none holds all values."""
    kinds: dict[str, set[Kind]] = {}
    for rank in ranks:
        for name, ref in source.staged(rank).index.columns.get(buffer, {}).items():
            kinds.setdefault(name, set()).add((ref.dtype, ref.shape))
    return {name: of if (kind := common(of)) is None else {kind} for name, of in kinds.items()}


def holders(source: Checkpoint) -> dict[str, int]:
    """Episode id -> the rank that has it live; the first one, if several have steps of it."""
    ranks = source.live["rank"].to_numpy()[source.located["run"]]
    return first_ranks(source.index, source.index.episode_of_row[source.located.stream], ranks)


def first_ranks(index: EpisodeIndex, episodes: Ints, ranks: Ints) -> dict[str, int]:
    """The id of each of these episodes -> the first of its ranks."""
    numbers, first = np.unique(episodes, return_index=True)
    known = numbers >= 0
    names = index.column("episode_id").take(numbers[known]).to_pylist()
    return dict(zip(names, ranks[first[known]].tolist(), strict=True))


def take_over(
    index: EpisodeIndex, live: pa.Table, pieces: Steps, env: Ints, position: Ints, next_positions: Mapping[int, int],
    opened: Mapping[int, str], whole: Callable[[], EpisodeIndex], *, to_close: Sequence[str] = (),
) -> BufferResume:  # fmt: skip
    """A buffer with these live ranges at these places.

    index: their episodes, and `whole()` all that are there.  live: the streams of the ranges.
    opened: env id -> id of the episode that is open there.
    """
    numbers = index.episode_of_row[pieces.stream]
    if (numbers < 0).any():
        raise CorruptManifestError("live steps belong to an episode that was replaced; run `archive verify`")
    distinct = list(dict.fromkeys(numbers.tolist()))
    unfinished = sorted({*opened.values(), *to_close})
    begins, bare = _begins(index, pieces, env, position)
    known = _known(index, distinct, begins, unfinished)
    if elsewhere := [name for name in unfinished if name not in {one.id for one in known}]:
        every = whole()  # open episodes without a live step may be anywhere in the segments table
        known += _known(every, _numbers_of(every, elsewhere), {}, elsewhere)
    at = {one.id: i for i, one in enumerate(known)}
    bare = {place for place, number in enumerate(distinct) if number in bare}
    known = _without_live_steps(known, bare, {at[name]: e for e, name in opened.items()}, next_positions)
    streams, codes = _streams(live, pieces)
    starts = index.snapshot.columns(["position"])["position"].to_numpy()[pieces.stream] + pieces.lo
    place = {number: i for i, number in enumerate(distinct)}
    episode = np.array([place[int(n)] for n in numbers], np.int64)
    return BufferResume(
        ordered(live_steps(env, position, pieces.length, episode, codes, starts)),
        known,
        streams,
        next_positions,
        {e: at[name] for e, name in opened.items()},
        [at[name] for name in to_close],
    )


def _numbers_of(index: EpisodeIndex, ids: list[str]) -> list[int]:
    """The numbers of open episodes in an index that must have them."""
    found = np.flatnonzero(index.mask(episode_id=ids))
    numbers = dict(zip(index.column("episode_id").take(found).to_pylist(), found.tolist(), strict=True))
    if missing := [name for name in ids if name not in numbers]:
        raise PartialCheckpointError(f"open episode {missing[0]!r} is not in the segments table; run `archive verify`")
    return [numbers[name] for name in ids]


def _begins(
    index: EpisodeIndex, pieces: Steps, env: Ints, position: Ints
) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Number of an episode -> the env row of its earliest live steps, and the offset of its start there; and the
    numbers of episodes without live steps."""
    start = index.snapshot.columns(["episode_start"])["episode_start"].to_numpy()[pieces.stream] + pieces.lo
    number, bare = index.episode_of_row[pieces.stream], pieces.length == 0
    order = np.lexsort((start, bare))
    out: dict[int, tuple[int, int]] = {}
    for n, e, begin in zip(*(of[order].tolist() for of in (number, env, position - start)), strict=True):
        out.setdefault(n, (e, begin))
    return out, out.keys() - {*number[~bare].tolist()}


def _known(
    index: EpisodeIndex, numbers: Sequence[int], begins: Mapping[int, tuple[int, int]], unfinished: Sequence[str]
) -> list[EpisodeRecord]:
    """The records that a writer needs of each episode, from its outer segments, and the start of its live steps."""
    chosen = np.array(numbers, np.int64)
    rows = index.snapshot.take(index.chains.lasts()[chosen], _ROW).to_pylist()
    begun = index.snapshot.take(index.chains.firsts()[chosen], ["first"])["first"].to_pylist()
    out = []
    for number, row, first in zip(numbers, rows, begun, strict=True):
        e, begin = begins.get(number, (-1, 0))
        out.append(EpisodeRecord(row["episode_id"], e, begin, not first, stored=row["episode_start"] + row["length"]))
        if row["episode_id"] in unfinished:
            out[-1].predecessor = chains.address(row["session"], row["rank"], row["sequence"])
            out[-1].returned = row["return"]
            out[-1].metadata = jsontree.loads(row["metadata"]) if row["metadata"] else {}
        else:
            out[-1].sealed, out[-1].broken = True, not row["last"]
    return out


def _without_live_steps(
    known: Sequence[EpisodeRecord], bare: Collection[int], open_at: Mapping[int, int], next_positions: Mapping[int, int]
) -> list[EpisodeRecord]:
    """Open episodes without live steps, placed in the env row that they go on in."""
    out = list(known)
    for place, env in open_at.items():
        one = out[place]
        if one.env_id != env or place in bare:
            out[place] = replace(one, env_id=env, begin=next_positions.get(env, one.stored) - one.stored)
    return out


def _streams(live: pa.Table, pieces: Steps) -> tuple[list[Stream], Ints]:
    """The streams of the ranges, and each range's place among them."""
    live = live.select(["session", "stream_rank", "stream_env"])
    stream = row_codes(live)[0][pieces["run"]]
    numbers, first = np.unique(stream, return_index=True)
    names = live.take(pieces["run"][first]).to_pylist()
    return [(one["session"], one["stream_rank"], one["stream_env"]) for one in names], places(stream, numbers)


# -- damaged checkpoints -----------------------------------------------------------------------------------------------

_TRIED = 5  # earlier checkpoints, at most


def remedy(storage: Storage, commit: Commit) -> str:
    """The advice for a user who cannot go on from the checkpoint of a commit."""
    name = "" if commit.checkpoint is None else commit.checkpoint.name
    told = f"Checkpoint {name!r} (commit {commit.number}) of run {commit.run!r} cannot be resumed."
    try:
        before = _sound_before(storage, commit)
    except ArchiveError:  # other damage, which `verify` reports
        before = None
    if before is None or before.checkpoint is None:
        return f"{told} `archive verify {storage.url}` says what is sound"
    return (
        f"{told} The newest before it whose states are there is {before.checkpoint.name!r} (commit {before.number}): "
        f"{go_on(storage.url, before.number)}; `archive verify {storage.url}` says what else is damaged"
    )


def go_on(url: str, number: int) -> str:
    """The command that makes a checkpoint the newest again."""
    return f"`archive restore {url} --commit {number} --yes` goes on from it"


def _sound_before(storage: Storage, commit: Commit) -> Commit | None:
    """The commit of the newest earlier whole checkpoint of the same run that has all ranks' states."""
    names = ("commit", "run", "whole")
    rows = tablefiles.load(storage, "checkpoints", commit.files("checkpoints"), names).to_pylist()
    mine = (row["commit"] for row in rows if row["whole"] and row["run"] == commit.run)
    for number in sorted((n for n in mine if n < commit.number), reverse=True)[:_TRIED]:
        with suppress(ArchiveError):
            found = read_of(storage, number, commit)
            for one in () if found.checkpoint is None else found.checkpoint.ranks:
                Part(storage, one.key, one.nonce).index  # noqa: B018
            return found
    return None


def start(rank: int | None, world_size: int | None, run: str | None, resume: Any, fork_from: Any) -> Resume | None:
    """The start of a writer from a checkpoint or share; None if it begins anew. Refuses contradictions."""
    if resume is not None and fork_from is not None:
        raise UsageError(
            "resume= goes on with the checkpoint's run, fork_from= begins another run there: give one of them, not both"
        )
    source = resume if fork_from is None else fork_from
    if source is None:
        return None
    if not hasattr(source, "to_resume"):
        raise UsageError(
            f"a writer goes on from a Checkpoint or the Share of a plan, not from {type(source).__name__}: after "
            "checkpoint() give its .result(), of a plan give .share(rank)"
        )
    found: Resume = source.to_resume(rank)
    _check_rank(found, rank, world_size)
    return _resumed(found, run) if fork_from is None else _forked(found, run)


def tell(start: Resume, taken: IOStats, seconds: float) -> None:
    """Log the origin of a writer, and the time and requests that it took."""
    steps = sum(int(buffer.runs.length.sum()) for buffer in start.buffers.values())
    name = "its episodes" if start.name is None else repr(start.name)
    worlds = f"{start.saved_by or start.world_size} -> {start.world_size} ranks"
    logger.log(
        level_of(start.rank, INFO),
        "rank %d of run %r goes on from %s, %s, with %d live steps: %s in %d requests, %.1f s",
        start.rank,
        start.run,
        name,
        worlds,
        steps,
        size(taken.bytes_in),
        taken.requests,
        seconds,
    )


def _check_rank(found: Resume, rank: int | None, world_size: int | None) -> None:
    if rank not in (None, found.rank) or world_size not in (None, found.world_size):
        asked = ", ".join(f"{n}={v}" for n, v in (("rank", rank), ("world_size", world_size)) if v is not None)
        raise UsageError(
            f"{asked}: resume= is that of rank {found.rank} of {found.world_size}; leave rank= and "
            "world_size= out, or take this rank's share of resharding.plan(checkpoint, world_size=...)"
        )


def _resumed(found: Resume, run: str | None) -> Resume:
    if run not in (None, found.run):
        raise UsageError(
            f"run={run!r}, and the checkpoint to resume from is of run {found.run!r}: leave run= out to go on with "
            f"{found.run!r} (which ends the session that has it), or begin {run!r} there with "
            f"arc.writer(run={run!r}, fork_from=...); a run's own newest is arc.checkpoints.of({run!r}).latest"
        )
    return found


def _forked(found: Resume, run: str | None) -> Resume:
    if run is None:
        raise UsageError(f"fork_from= begins a new run: name it with run=..., other than {found.run!r}")
    if run == found.run:
        raise UsageError(f"run={run!r} is that of the checkpoint: go on with it by resume=, or name another to fork")
    return replace(found, run=run, forked_from=ForkedFrom(found.run, found.name, found.checkpoint))


@dataclass(frozen=True)
class Holding:
    """One rank's buffer with these episodes, one after the other: `arc.writer(resume=Holding(...))`."""

    episodes: Episodes
    buffer: str  # the one they were written to
    run: str
    rank: int = 0
    world_size: int = 1

    def to_resume(self, rank: int | None = None) -> Resume:
        """The contents that the writer goes on with. rank: as for a checkpoint; this one knows its own."""
        found = self.episodes.step_spans()
        place = np.arange(len(found.rows))
        taken = np.maximum(found.hi - found.lo, 1)  # an episode without steps has an offset of its own
        at = np.cumsum(taken) - taken
        pieces = Steps(found.rows, found.lo, found.hi, follows=("position",), run=place, position=at)
        env: Ints = np.full(len(place), NO_ENV, np.int64)
        index, snapshot = self.episodes.episode_index, self.episodes.reader.snapshot
        live = snapshot.take(found.rows, ["session", "rank", "env_id"])
        live = live.rename_columns(["session", "stream_rank", "stream_env"])
        held = take_over(index, live, pieces, env, at, {NO_ENV: int(taken.sum())}, {}, lambda: index)
        return Resume(self.rank, self.world_size, self.run, {self.buffer: held}, snapshot.commit.number)
