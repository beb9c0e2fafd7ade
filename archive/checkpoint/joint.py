"""Pure, but for the parts that it is given: the change of the archive that commits what ranks have staged, or what was
staged on their behalf, as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from archive import tables
from archive.base import jsontree, layout
from archive.log import (
    Addition,
    Attempt,
    BufferTotals,
    Change,
    CheckpointRecord,
    Commit,
    Discarded,
    MissingRank,
    Place,
    Recovered,
    Requirement,
    RunEntry,
    StagedObject,
)
from archive.saved import Part, PartIndex
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
    indexes = [part.index for part in parts]
    if journal is not None:
        journal = {**journal, **{one.rank: one.journal for one in indexes if one.journal is not None}}
    return replace(entry, latest=mark, latest_replay=mark, journal=journal, nodes=_nodes(entry, indexes))


def _nodes(entry: RunEntry, indexes: Sequence[PartIndex]) -> Mapping[int, int] | None:
    """Node -> the number of its objects below which nothing is of any of its ranks beyond a checkpoint of these parts,
    which are of all ranks."""
    least: dict[int, int] = {}
    for node, number in (one.node for one in indexes if one.node is not None):
        least[node] = min(number, least.get(node, number))
    nodes = entry.nodes
    return None if nodes is None else {node: max(number, least.get(node, 0)) for node, number in nodes.items()}
