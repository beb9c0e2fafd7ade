"""Writing a rank's part of a checkpoint: what was cut, and the rows written since the last commit, as one object."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archive import tables
from archive.base import AlreadyExistsError, CheckpointError, cached_property, escape, git_revision, layout
from archive.log import Discarded, Lineage, Place, Sighting
from archive.saved.index import UNCONSUMED, AttributeRef, ColumnRef, PartBuffer, PartIndex, PartRows, StateRef
from archive.saved.object import Part, RankRows, pack
from archive.shard import Member, encode, file_member
from archive.store import Storage
from archive.write import Column, Cut, LiveRuns, Written, column_path, digest

Array = np.ndarray[Any, Any]
Gone = Callable[[Collection[str]], Collection[str]]
COLUMN_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Request:
    """The arguments of `checkpoint()`, beyond the buffers."""

    name: str
    step: int
    ordinal: int
    save_replay: bool
    progress: str | None
    unconsumed: str | None
    metrics: Mapping[str, float]
    config: str | None
    folder: str  # whose git revision is recorded
    partial: bool = False
    known_at: int = -1  # the commit up to which ids that the user gave were checked; -1 if he gave none
    resumed_from: int | None = None  # the commit of the checkpoint that the writer went on from
    committed: int = 0  # this rank's segments below this number are committed already
    journal: int | None = None  # this rank's journal objects below this number are in it; None: it keeps none
    lineage: Lineage | None = None  # that of another checkpoint; None: its own
    seen: Sighting | None = None  # the newest commit that the writer knows


class _PartDraft:
    """A part that is being made. Columns and attributes that are as they were in an earlier part are referred to; the
    rest is collected in `arrays` and `files`."""

    def __init__(self, key: str, earlier: PartIndex | None, gone: Gone) -> None:
        self.key, self.nonce = key, secrets.token_hex(8)
        self.arrays: dict[str, Array] = {}
        self.files: list[Member] = []
        self._earlier = earlier
        self._find_gone = gone

    @cached_property
    def _gone(self) -> Collection[str]:
        """The earlier part's objects that were let go of; asked once something is unchanged."""
        return () if self._earlier is None else self._find_gone(self._earlier.objects)

    def _is_same(self, ref: ColumnRef | AttributeRef | None, mark: str) -> bool:
        """True if an earlier one has the same values, and can be referred to."""
        return ref is not None and ref.digest == mark and ref.object not in self._gone

    def column(self, buffer: str, name: str, column: Column) -> ColumnRef:
        """The place of a column, here or in an earlier object."""
        ref = None if self._earlier is None else self._earlier.columns.get(buffer, {}).get(name)
        if ref is not None and self._is_same(ref, column.digest):
            return ref
        path = column_path(buffer, name)
        self.arrays[path] = column.array
        rows, *shape = column.array.shape
        return ColumnRef(path, rows, column.dtype, tuple(shape), column.digest, self.key, self.nonce)

    def attribute(self, buffer: str, name: str, text: str) -> AttributeRef:
        """The place of an attribute, here or in an earlier object."""
        mark = digest(np.frombuffer(text.encode(), np.uint8))
        ref = None if self._earlier is None else self._earlier.attributes.get(buffer, {}).get(name)
        if ref is not None and self._is_same(ref, mark):
            return ref
        member = f"attributes/{escape(buffer)}/{escape(name)}.json"
        self.files.append(file_member(member, text.encode()))
        return AttributeRef(member, mark, self.key, self.nonce)

    def state(self, buffer: str, state: tuple[dict[str, Any], dict[str, Array]]) -> StateRef:
        """The place of a tree of state, here."""
        skeleton, values = state
        prefix = f"state/{escape(buffer)}/"
        placed = {prefix + key: array.reshape(1) if array.ndim == 0 else array for key, array in values.items()}
        self.arrays.update(placed)
        scalars = tuple(key for key, array in values.items() if array.ndim == 0)
        return StateRef(skeleton, prefix, {path: len(array) for path, array in placed.items()}, scalars)


def stage(
    storage: Storage,
    place: Place,
    request: Request,
    cuts: Sequence[Cut],
    written: Sequence[Written],
    *,
    earlier: PartIndex | None = None,
    gone: Gone = lambda keys: (),
    states: Mapping[str, StateRef] | None = None,
) -> Part:
    """Write a rank's part of a checkpoint, create-only. CheckpointError if its name is taken.

    earlier: its part of the last committed checkpoint, whose columns and attributes are referred to where they are
    unchanged; gone: gives which of some objects were forgotten or pruned since that was committed.  states: those that
    lie in the objects of an earlier checkpoint.
    """
    draft = _PartDraft(layout.state_key(place.session, request.name, place.rank), earlier, gone)
    cuts = cuts if request.save_replay else [_without_replay(c) for c in cuts]
    rows = rows_of(written if keeps_rows(request, written) else [])
    live = tables.concat("live", [c.live for c in cuts])
    left_out = tables.concat("live", [c.left_out for c in cuts if len(c.left.env)])
    index = PartIndex(
        rank=place.rank, world_size=place.world_size, run=place.run, session=place.session, name=request.name,
        step=request.step, ordinal=request.ordinal, nonce=draft.nonce, replay_saved=request.save_replay,
        partial=request.partial, known_at=request.known_at, resumed_from=request.resumed_from,
        sequence=max(request.committed, rows.next_sequence), journal=_journal(request, written),
        seen=request.seen, metrics=request.metrics,
        lineage=request.lineage or Lineage(git_revision(request.folder), request.config), progress=request.progress,
        columns={c.name: {n: draft.column(c.name, n, column) for n, column in c.columns.items()} for c in cuts},
        attributes={c.name: {n: draft.attribute(c.name, n, text) for n, text in c.attributes.items()} for c in cuts},
        states={**(states or {}), **{c.name: draft.state(c.name, c.state) for c in cuts if c.state is not None}},
        rows=PartRows(*(table.num_rows for table in (*rows, left_out))), buffers={c.name: _buffer(c) for c in cuts},
    )  # fmt: skip
    held = {"segments": rows.segments, "chunks": rows.chunks, "live": live}
    some = {"ledger": rows.ledger, "left_out": left_out}
    if request.unconsumed is not None:
        draft.files.append(file_member(UNCONSUMED, request.unconsumed.encode()))
    members = [*draft.files, *encode(draft.arrays, attributes={}, chunk_bytes=COLUMN_CHUNK_BYTES)]
    try:
        buffers, _ = pack(index, held | {name: table for name, table in some.items() if table.num_rows}, members)
        storage.create_once(draft.key, buffers)
    except AlreadyExistsError as e:
        raise name_taken(storage, draft.key) from e
    return Part.written(storage, index, rows, live)


def name_taken(storage: Storage, key: str) -> CheckpointError:
    """The error of a checkpoint whose staged object would have the name of another one."""
    return CheckpointError(
        f"{storage.full_url(key)} is, or was, there already: this session has staged a checkpoint of this name before; "
        "give the checkpoint another name"
    )


def keeps_rows(request: Request, written: Sequence[Written]) -> bool:
    """True if a checkpoint has the rows of what was written: always where buffers are saved; else where some are of a
    ledger, which would come apart from the episodes that it speaks of."""
    return request.save_replay or any(w.ledger is not None for w in written)


def rows_of(written: Sequence[Written]) -> RankRows:
    """The rows of what was written."""
    return RankRows(
        tables.concat("segments", [w.segments for w in written if w.segments is not None]),
        tables.concat("chunks", [w.chunks for w in written if w.chunks is not None]),
        tables.concat("ledger", [w.ledger for w in written if w.ledger is not None]),
    )


def _journal(request: Request, written: Sequence[Written]) -> int | None:
    """The journal's objects below this number are in the checkpoint; None without a journal, or without its steps."""
    if request.journal is not None:
        return request.journal
    numbers = [one.journal for one in written if one.journal is not None]
    return max(numbers) if numbers and request.save_replay else None


def _without_replay(cut: Cut) -> Cut:
    return replace(cut, runs=LiveRuns.empty(), columns={}, attributes={}, discarded={}, left=LiveRuns.empty())


def _buffer(cut: Cut) -> PartBuffer:
    discarded = {reason: Discarded(counts["episodes"], counts["steps"]) for reason, counts in cut.discarded.items()}
    return PartBuffer(cut.steps, cut.episodes, discarded, cut.next_positions, cut.open_episodes)
