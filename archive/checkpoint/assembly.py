"""Assembly of the ranks' staged parts into one commit: all of them or nothing. Any rank may do it; it is done once.

Rank 0 looks at once and often; the others first look whether it has been committed, and step in after a pause in
proportion to their rank. Staged parts are asked for by name, never by a listing. No rank is declared missing by
a clock: the wait ends with an error that names those that have not staged, and may be taken up again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.base import CheckpointError, MissingObjectError, RanksMissingError, Wait, at_once, jsontree, layout
from archive.log import (
    Addition,
    Attempt,
    BufferTotals,
    Change,
    CheckpointRecord,
    Commit,
    CommitLog,
    Discarded,
    MissingRank,
    Place,
    Recovered,
    Requirement,
    RunEntry,
    StagedObject,
)
from archive.saved import Part, PartIndex
from archive.store import Storage
from archive.tables import among, distinct
from archive.write import RankRows

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Joint:
    """One checkpoint to be committed: its ranks and its name."""

    place: Place
    name: str
    ordinal: int

    @property
    def transaction(self) -> str:
        return f"{self.place.session}/checkpoint/{self.name}"


def change_of(
    joint: Joint,
    parts: Sequence[Part],
    requires: Sequence[Requirement],
    *,
    partial: bool = False,
    recovered: Recovered | None = None,
) -> Change:
    """The change that commits a checkpoint of what these ranks staged, or what was staged on their behalf."""
    place = joint.place

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        fresh, sequences = fresh_rows(parent, place, {part.index.rank: part.rows_held[0] for part in parts})
        made = replace(_record(joint, parts, parent, sequences, partial=partial), recovered=recovered)
        runs = parent.runs_with({place.run: _run_entry(parent, made, parts, place, sequences)})
        rows = {**fresh._asdict(), "checkpoints": _row(made, place)}
        if made.replay_saved:
            rows["live"] = tables.concat("live", [part.rows_held[1] for part in parts])
        known = {} if recovered is None else {"format": layout.with_feature(parent.format, layout.JOURNAL)}
        return rows, {"runs": runs, "checkpoint": made, **known}

    ids_at = min((f.index.known_at for f in parts if f.index.known_at >= 0), default=0)
    return Change("checkpoint", adds, [place.newest, *requires], place.run, place.session, ids_at=ids_at)


def fresh_rows(parent: Commit, place: Place, rows: Mapping[int, RankRows]) -> tuple[RankRows, dict[int, int]]:
    """Rows above each rank's committed sequence, and the new sequences."""
    sequences = dict(parent.runs[place.run].sequences)
    fresh = []
    for rank, given in rows.items():
        fresh.append(_fresh(given, sequences.get(rank, 0)))
        if fresh[-1].next_sequence:
            sequences[rank] = fresh[-1].next_sequence
    return RankRows.joined(fresh), sequences


def _fresh(rows: RankRows, done: int) -> RankRows:
    """The rows numbered from `done` on, and the chunks of their shards."""
    import pyarrow.compute as pc

    segments, ledger = (
        table.filter(pc.greater_equal(table["sequence"], done)) if done else table
        for table in (rows.segments, rows.ledger)
    )
    chunks = rows.chunks.filter(among(rows.chunks["shard"], distinct(segments["shard"])))
    return RankRows(segments, chunks, ledger)


def _record(
    joint: Joint, parts: Sequence[Part], parent: Commit, sequences: Mapping[int, int], *, partial: bool
) -> CheckpointRecord:
    """The record of the checkpoint in its commit; the rest is in the staged objects."""
    indexes = [part.index for part in parts]
    world_size, latest = joint.place.world_size, parent.runs[joint.place.run].latest
    last_whole = None if latest is None else latest.commit
    missing = sorted(set(range(world_size)) - {index.rank for index in indexes})
    staged = {index.rank: index.sequence for index in indexes}
    own, borrowed = {part.key for part in parts}, {key for index in indexes for key in index.objects}
    return CheckpointRecord(
        name=joint.name,
        step=indexes[0].step,
        ordinal=joint.ordinal,
        world_size=world_size,
        whole=not missing and not partial,
        missing=tuple(MissingRank(rank, last_whole) for rank in missing),
        ranks=tuple(
            StagedObject(one.rank, part.key, one.nonce, one.rows is not None and one.rows.left_out > 0)
            for part, one in zip(parts, indexes, strict=True)
        ),
        buffers=_totals(indexes),
        discarded=_discarded(indexes),
        metrics=indexes[0].metrics,
        lineage=indexes[0].lineage,
        replay_saved=all(index.replay_saved for index in indexes),
        sequences={**dict.fromkeys(missing, 0), **sequences, **staged},  # each rank of its world
        borrowed=tuple(sorted(borrowed - own)),  # objects of earlier checkpoints
    )


def _totals(indexes: Sequence[PartIndex]) -> dict[str, BufferTotals]:
    """The totals of each buffer, over all ranks."""
    out: dict[str, BufferTotals] = {}
    for index in indexes:
        for name, buffer in index.buffers.items():
            known = out.get(name, BufferTotals(0, 0, ()))
            columns = tuple(sorted({*known.columns, *index.columns.get(name, {})}))
            out[name] = BufferTotals(known.steps + buffer.steps, known.episodes + buffer.episodes, columns)
    return out


def _discarded(indexes: Sequence[PartIndex]) -> dict[str, Discarded]:
    """The counts of episodes and steps that the ranks left out, by reason."""
    out: dict[str, Discarded] = {}
    for index in indexes:
        for buffer in index.buffers.values():
            for reason, more in buffer.discarded.items():
                known = out.get(reason, Discarded(0, 0))
                out[reason] = Discarded(known.episodes + more.episodes, known.steps + more.steps)
    return out


def _row(made: CheckpointRecord, place: Place) -> pa.Table:
    """Its row of the table of checkpoints."""
    return tables.from_columns(
        "checkpoints",
        {
            "commit": np.zeros(1, np.int64),
            "run": place.run,
            "session": place.session,
            "name": [made.name],
            "step": [made.step],
            "world_size": place.world_size,
            "whole": [made.whole],
            "replay_saved": [made.replay_saved],
            "metrics": [jsontree.dumps(dict(made.metrics), where="metrics")],
            "created_at": [datetime.now(UTC)],
        },
    )


def _run_entry(
    parent: Commit, made: CheckpointRecord, parts: Sequence[Part], place: Place, sequences: Mapping[int, int]
) -> RunEntry:
    """The run's entry once this checkpoint is committed."""
    entry = replace(parent.runs[place.run], sequences=sequences)
    if not made.whole:
        return entry
    mark = made.mark(place.session, parent.number + 1)
    if not made.replay_saved:
        return replace(entry, latest=mark)
    journal = entry.journal  # each rank's objects below this number are in the newest checkpoint
    if journal is not None:
        indexes = [part.index for part in parts]
        journal = {**journal, **{one.rank: one.journal for one in indexes if one.journal is not None}}
    return replace(entry, latest=mark, latest_replay=mark, journal=journal)


FIRST_POLL_S = 0.02
MAX_POLL_S = 1.0
MAX_CONCURRENT = 16
PARTIAL_STEP_IN_S, MAX_PARTIAL_STEPS = 0.5, 6  # the same when the process ends, and time is short
STEP_IN_S = 1.0  # the extra wait of each higher rank before it completes a checkpoint itself


def join(
    log: CommitLog,
    joint: Joint,
    staged: dict[int, Part],
    *,
    timeout_s: float,
    given_up: Callable[[], bool],
    ending: Callable[[float], bool],
    absent: Callable[[Sequence[int], float], None],
) -> Commit:
    """The commit of this checkpoint, once all ranks have staged it. `given_up` ends the wait early.

    staged: the parts that are known, this rank's own for one; others that are found are added.

    `ending(grace_s)` is true if the process ends, and its time for waiting was over this long ago: the staged parts
    are then committed as partial.  `absent` is called, after seconds and then now and then,
    with the ranks that have not staged.
    """
    wait = Wait(timeout_s, FIRST_POLL_S, MAX_POLL_S)
    last_grace_s = PARTIAL_STEP_IN_S * min(joint.place.rank, MAX_PARTIAL_STEPS)
    while True:
        if found := _committed(log, joint):
            return found
        if wait.waited_s >= STEP_IN_S * joint.place.rank and all_staged(log.storage, joint, staged):
            return commit(log, joint, staged)
        if ending(last_grace_s):
            return commit_present(log, joint, staged)
        if wait.over or given_up():
            if not all_staged(log.storage, joint, staged, look_at_all=True):
                raise _missing(joint, staged, wait.waited_s)
            return commit(log, joint, staged)
        if wait.due():
            absent(_absent(log.storage, joint), wait.waited_s)
        wait.pause()


def commit_present(log: CommitLog, joint: Joint, staged: dict[int, Part]) -> Commit:
    """Commit with the ranks that have staged by now, as partial if some are missing; a partial commit of another rank
    serves as well, if this rank is in it."""
    whole = all_staged(log.storage, joint, staged, look_at_all=True)
    if not whole:
        log.catch_up()
        for rank in range(joint.place.rank):
            made = log.find(f"{joint.transaction}/partial-{rank}")
            if made and made.checkpoint and joint.place.rank in [part.rank for part in made.checkpoint.ranks]:
                return made
    return commit(log, joint, staged, partial=not whole)


def _absent(storage: Storage, joint: Joint) -> list[int]:
    """The ranks that have not staged, by one listing: good enough to tell people, not to decide by."""
    place = joint.place
    keys = [layout.state_key(place.session, joint.name, rank) for rank in range(place.world_size)]
    folder = keys[0].rpartition("/")[0]
    names = set(storage.list(folder))
    return [rank for rank, key in enumerate(keys) if key.rpartition("/")[2] not in names]


def _committed(log: CommitLog, joint: Joint) -> Commit | None:
    if joint.place.world_size == 1:
        return None
    joint.place.newest(log.catch_up())
    return log.find(joint.transaction)


def all_staged(storage: Storage, joint: Joint, staged: dict[int, Part], *, look_at_all: bool = False) -> bool:
    """Look for parts that are not in `staged` yet; True if all ranks are there now.

    The first missing part ends the look, unless all are to be looked at: so waiting costs one request for each look.
    """

    def look(rank: int) -> None:
        file = Part(storage, layout.state_key(joint.place.session, joint.name, rank))
        with suppress(MissingObjectError):
            file.index  # noqa: B018  # read it: whether it is there
            staged[rank] = file

    absent = [rank for rank in range(joint.place.world_size) if rank not in staged]
    if absent and not look_at_all:
        look(absent[0])
        if absent.pop(0) not in staged:
            return False
    at_once(look, absent, MAX_CONCURRENT)
    return len(staged) == joint.place.world_size


def _missing(joint: Joint, staged: Mapping[int, Part], waited_s: float) -> RanksMissingError:
    absent = [r for r in range(joint.place.world_size) if r not in staged]
    return RanksMissingError(
        f"checkpoint {joint.name!r} of session {joint.place.session!r} is not whole after {waited_s:.0f} s: rank "
        f"{', '.join(map(str, absent))} of {joint.place.world_size} has not staged; nothing was committed and nothing "
        "is lost. See to these ranks, or call result() again to wait longer"
    )


def commit(log: CommitLog, joint: Joint, staged: Mapping[int, Part], *, partial: bool = False) -> Commit:
    """Commit what these ranks staged."""
    parts = [staged[r] for r in sorted(staged)]
    _check_agree(joint, parts)
    if len(parts) > 1:
        at_once(lambda part: part.rows_held, parts, MAX_CONCURRENT)
    key = joint.transaction + (f"/partial-{joint.place.rank}" if partial else "")
    joint = replace(joint, ordinal=min(f.index.ordinal for f in parts))  # ranks may have counted apart
    return log.commit(key, change_of(joint, parts, [], partial=partial))


def commit_recovered(
    log: CommitLog, joint: Joint, parts: Sequence[Part], recovered: Recovered, check: Callable[[Commit], None]
) -> Commit:
    """Commit, once, a checkpoint that was made of journals' tails on behalf of these ranks. `check(parent)` raises if
    it no longer holds."""
    taken = sorted((rank, tail.next) for rank, tail in recovered.tails.items())
    about = hashlib.sha256(json.dumps([recovered.base, taken]).encode()).hexdigest()[:16]
    change = change_of(joint, parts, [check], recovered=recovered)
    return log.commit(f"{joint.place.session}/recover/{about}", change)


def _check_agree(joint: Joint, parts: Sequence[Part]) -> None:
    """Refuse parts of ranks that describe different checkpoints."""
    for key in ("step", "world_size", "run", "replay_saved"):
        values = {f.index.rank: getattr(f.index, key) for f in parts}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"the ranks do not agree on the {key} of checkpoint {joint.name!r}: {values}; nothing was committed"
            )
    went_on = {f.index.rank: f.index.resumed_from for f in parts if f.index.resumed_from is not None}
    if len(set(went_on.values())) > 1:
        raise CheckpointError(
            f"the ranks went on from different checkpoints (rank: commit): {went_on}, so checkpoint {joint.name!r} "
            "would lose what others had, or have it twice; nothing was committed: load the same checkpoint on all ranks"
        )
