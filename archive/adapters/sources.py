"""Imports of datasets as jobs: batches of episodes become shards on any worker, and one commit makes all of them
visible, as one checkpoint."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from archive import Archive
from archive.arrays import numbers, run_starts
from archive.base import (
    ArchiveError,
    CheckpointError,
    CorruptStateError,
    IntegrityError,
    JobError,
    check_text,
    jsontree,
    logger,
)
from archive.checkpoint import MAIN_BUFFER, Checkpoint, Joint, assembly
from archive.fields import Schema
from archive.jobs import Agree, Crew, Items, Job, JobCall, JobRequest, Procedure, Progress, Receipt, Result
from archive.journal import take_over
from archive.log import Commit, CommitLog, Place, commits, open_session
from archive.maintain import check_newest
from archive.read import sizes
from archive.saved import Part, PartIndex, Request, stage
from archive.store import Storage
from archive.tables import NO_ENV, coded
from archive.write import OWN, Cut, RankRows, Staging, Written, end_to_end, live_steps

BATCH_BYTES = 64 * 1024 * 1024  # of the steps of a batch, about
COMPRESSION = "zstd:1"
_LEAST_BATCHES = 16
_QUOTED = 200


@dataclass(frozen=True)
class Imported:
    """One episode of a dataset; one that has neither end is unfinished."""

    steps: Mapping[str, Any]
    terminated: bool = False
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class Source(ABC):
    """A dataset that is imported. It pickles; what it has read of the dataset need not. where: its place, in errors.
    terms: the options that its episodes depend on."""

    where: str
    terms: Mapping[str, Any] = {}

    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Bytes of the steps of each episode, about."""

    def groups(self) -> Sequence[int]:
        """The number of the file of each episode, where it costs much to open one; no batch is of two."""
        return [0] * len(self.sizes())

    @abstractmethod
    def read(self, episodes: Sequence[int]) -> Iterator[Imported]:
        """These episodes, by their place in the dataset."""

    def batches(self, *, whole: bool) -> list[list[int]]:
        """The episodes of each batch. whole: one worker in this process reads all."""
        nbytes, groups = np.array(self.sizes(), np.int64), np.array(self.groups(), np.int64)
        if whole:
            return [list(range(len(nbytes)))] if len(nbytes) else []
        most, out = max(1, -(-len(nbytes) // _LEAST_BATCHES)), []
        for start, stop in pairwise([*run_starts(groups).tolist(), len(nbytes)]):
            for at, end in sizes.runs(nbytes[start:stop], BATCH_BYTES):
                out += [list(range(i, min(i + most, start + end))) for i in range(start + at, start + end, most)]
        return out


@contextmanager
def reading(where: str, what: str = "dataset") -> Iterator[None]:
    """Say of what lies at `where` that it is no `what`, whatever goes wrong: other people's readers of other people's
    files may end in any error. IntegrityError with its cause; the library's own errors stay."""
    try:
        yield
    except ArchiveError:
        raise
    except Exception as e:
        why = str(e).strip().partition("\n")[0][:_QUOTED]
        raise IntegrityError(f"{where} is no readable {what}: {type(e).__name__}: {why}") from e


# -- in a worker -------------------------------------------------------------------------------------------------------


class _StagedEpisodes(Procedure):
    """Episodes of a dataset as shards, and the rows of these. Items are their places in the dataset,
    one after the other."""

    def __init__(self, source: Source, storage: Storage, archive_layout: str, place: Place, schema: Schema) -> None:
        self._source = source
        self._staging = partial(Staging, storage, archive_layout, place, MAIN_BUFFER, schema, COMPRESSION)

    def run(self, items: Items, agree: Agree) -> Result:
        began, count = perf_counter(), len(self._source.sizes())
        if any(one not in range(count) for one in items) or len(items) != items[-1] - items[0] + 1:
            raise JobError(
                f"{self._source.where} does not have the episodes that the job's plan names: if it was changed, cancel "
                "the job, and begin anew"
            )
        staging = self._staging(first_id=items[0])
        try:
            episodes = self._source.read(items)
            for _ in items:
                with reading(self._source.where):
                    one = next(episodes)
                ended = one.terminated or one.truncated
                staging.buffer.add_episode(
                    one.steps,
                    terminated=one.terminated if ended else None,
                    truncated=one.truncated if ended else None,
                    metadata=one.metadata,
                    last=ended,
                )
            rows, positions = staging.rows(), staging.buffer.next_position(NO_ENV)
        finally:
            staging.close()
        steps = int(numbers(rows.segments["length"]).sum())
        made = {"segments": rows.segments, "chunks": rows.chunks}
        return Result(made, said=positions, steps=steps, seconds={"computed": perf_counter() - began})


# -- the commit --------------------------------------------------------------------------------------------------------


def archive_dataset(
    arc: Archive, name: str, source: Source, about: Mapping[str, Any], schema: Schema, run: str, *,
    crew: Crew | None = None, job: str | None = None, progress: Progress | bool = False,
) -> Checkpoint:  # fmt: skip
    """Add the episodes of a dataset and commit them as one checkpoint: all of them or, if anything is wrong, none.
    `about` becomes its progress.

    crew, job: as of `episodes.map`; the same call goes on with batches that are not staged, and gives the checkpoint of
    a job that is finished.
    """
    arc.check_writable()
    log, crew = CommitLog(arc.storage, arc.id, arc.head), crew or Crew()
    check_text(name, "checkpoint name")
    told = jsontree.dumps(dict(about), where="progress")
    crew.check(arc.storage, source)
    ask = JobRequest("import", {"from": source.where, "name": name, "run": run, **source.terms})
    if job is not None and (made := _finished(log, Job(arc.storage, job), ask)) is not None:
        arc.refresh()
        return Checkpoint(arc.storage, made)
    whole = crew.alone and job is None
    call = JobCall.of(log, job, ask, arc.head, partial(source.batches, whole=whole))
    place = Place(0, 1, run, call.session)
    joint, made = Joint(place, name, 1), None
    if call.others:
        log = call.log_of(log)
        log.catch_up()
        made = log.find(joint.transaction)  # a driver died after it had committed
    if made is None:
        call.carry_out(_StagedEpisodes(source, arc.storage, arc.layout, place, schema), crew, progress)
        if call.job is not None and call.round is not None:
            call.job.check_going(call.round)
        made = _committed(log, arc.head.number, joint, call, told)
    call.finish()
    arc.refresh()
    return Checkpoint(arc.storage, made)


def _finished(log: CommitLog, job: Job, ask: JobRequest) -> Commit | None:
    """The commit of a job that is finished: whoever repeats the call may not know. None if it is not."""
    known = job.newest_round()
    if known is None or known.end is None or known.end.outcome != "finished":
        return None
    ask.check(job.name, known.record, log.storage.url)
    since = CommitLog(log.storage, log.archive_id, commits.read_of(log.storage, min(known.record.frozen), log.head))
    since.catch_up()
    made = since.find(Joint(Place(0, 1, ask.terms["run"], known.record.session), ask.terms["name"], 1).transaction)
    if made is not None:
        logger.info(
            "job %r is finished: commit %d has what it imported; another name imports it again", job.name, made.number
        )
    return made


def _committed(log: CommitLog, seen: int, joint: Joint, call: JobCall, progress: str) -> Commit:
    """Commit all that was staged as one checkpoint, which another driver of the job may do, too. seen: the newest
    commit that was known at the call: a session of the run that was opened later is not ended."""
    storage, place = log.storage, joint.place
    parts = [_rows(receipt) for receipt in call.read(call.results)]
    rows, positions = end_to_end(parts), sum(taken for _, taken in parts)
    open_session(
        log,
        place,
        seen,
        check=partial(check_newest, storage, place.run),
        take_over=partial(take_over, log, place, None),
        again=True,
    )
    index = PartIndex(
        rank=0, world_size=1, run=place.run, session=place.session, name=joint.name, step=0, ordinal=joint.ordinal,
        nonce=secrets.token_hex(8), replay_saved=True, seen=log.head.sighting, progress=progress,
    )  # fmt: skip
    try:
        part = stage(storage, Request(index, folder=str(Path.cwd())), [_cut(place, rows, positions)], [Written(rows)])
    except CheckpointError:  # an earlier try has staged the same
        part = Part(storage, index.key)
    return assembly.commit(log, joint, {0: part})


def _rows(receipt: Receipt) -> tuple[RankRows, int]:
    """The rows of a batch, and how many positions they take."""
    positions = receipt.index.said
    if type(positions) is not int or positions < 0:
        raise CorruptStateError(f"{receipt.where} does not say how many positions it takes; {receipt.damage}")
    return RankRows.of(segments=[receipt.table("segments")], chunks=[receipt.table("chunks")]), positions


def _cut(place: Place, rows: RankRows, positions: int) -> Cut:
    """A snapshot of a buffer that has all of these episodes."""
    segments = rows.segments
    position, length = (numbers(segments[name]).astype(np.int64) for name in ("position", "length"))
    episode = coded(segments["episode_id"])[1]
    env, own = (np.full(len(position), value) for value in (NO_ENV, OWN))
    runs = live_steps(env, position, length, episode, own, position)
    following = {NO_ENV: positions} if positions else {}
    return Cut(MAIN_BUFFER, (place.session, place.rank), runs, (), following, {}, {}, {}, None, {}, live_steps())
