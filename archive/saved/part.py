"""Writing a rank's part of a checkpoint: its snapshot, and the rows written since the last commit, as one object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive import tables
from archive.base import AlreadyExistsError, CheckpointError, cached_property, escape, git_revision
from archive.log import Discarded
from archive.saved.index import UNCONSUMED, AttributeRef, ColumnRef, PartBuffer, PartIndex, PartRows, StateRef
from archive.saved.object import Part, pack
from archive.shard import Member, encode, file_member
from archive.store import Storage
from archive.write import Column, Cut, Written, column_path, digest, live_steps

Array = np.ndarray[Any, Any]
Gone = Callable[[Collection[str]], Collection[str]]
COLUMN_CHUNK_BYTES = 1024 * 1024


class Request(NamedTuple):
    """The request of a checkpoint. part: the keys that do not follow from buffers and rows.  folder: the one whose git
    revision is recorded; None where the lineage is known."""

    part: PartIndex
    unconsumed: str | None = None
    folder: str | None = None


class _PartDraft:
    """A part in the making. Columns and attributes that are unchanged since an earlier part become references; the rest
    is collected in `arrays` and `files`."""

    def __init__(self, index: PartIndex, earlier: PartIndex | None, gone: Gone) -> None:
        self.key, self.nonce = index.key, index.nonce
        self.arrays: dict[str, Array] = {}
        self.files: list[Member] = []
        self._earlier = earlier
        self._find_gone = gone

    @cached_property
    def _gone(self) -> Collection[str]:
        """The earlier part's objects that were forgotten; asked for once something is unchanged."""
        return () if self._earlier is None else self._find_gone(self._earlier.objects)

    def _earlier_one(self, kind: str, buffer: str, name: str, mark: str) -> Any:
        """The earlier reference to the same values; None if there is none, or its object is gone."""
        earlier = {} if self._earlier is None else getattr(self._earlier, kind)
        ref = earlier.get(buffer, {}).get(name)
        return ref if ref is not None and ref.digest == mark and ref.object not in self._gone else None

    def column(self, buffer: str, name: str, column: Column) -> ColumnRef:
        """The place of a column, here or in an earlier object."""
        path = column_path(buffer, name)
        rows, *shape = column.array.shape
        here = ColumnRef(path, rows, column.dtype, tuple(shape), column.digest, self.key, self.nonce)
        ref: ColumnRef | None = self._earlier_one("columns", buffer, name, here.digest)
        if ref is None or ref.dtype != here.dtype:  # the same bytes may be other values
            ref = here
        self.arrays |= {path: column.array} if ref is here else {}
        return ref

    def attribute(self, buffer: str, name: str, text: str) -> AttributeRef:
        """The place of an attribute, here or in an earlier object."""
        member = f"attributes/{escape(buffer)}/{escape(name)}.json"
        here = AttributeRef(member, digest(np.frombuffer(text.encode(), np.uint8)), self.key, self.nonce)
        ref: AttributeRef = self._earlier_one("attributes", buffer, name, here.digest) or here
        self.files += [file_member(member, text.encode())] if ref is here else []
        return ref

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
    unchanged; gone: gives those of some objects that were forgotten or pruned since its commit.  states: trees with
    arrays in objects of an earlier checkpoint.
    """
    index = request.part
    draft = _PartDraft(index, earlier, gone)
    if not index.replay_saved:
        nothing: dict[str, Any] = {"columns": {}, "attributes": {}, "discarded": {}}
        cuts = [replace(one, runs=live_steps(), left=live_steps(), **nothing) for one in cuts]
    every = Written.joined(written if keeps_rows(index, written) else [])
    rows, journal = every.rows, every.journal if index.replay_saved else None
    live = tables.concat("live", [c.live for c in cuts])
    left_out = tables.concat("live", [c.left_out for c in cuts if len(c.left)])
    git = index.lineage.git if request.folder is None else git_revision(request.folder)
    index = replace(
        index,
        sequence=max(index.sequence, rows.next_sequence),
        journal=journal if index.journal is None else index.journal,
        journaled=None if index.replay_saved else max((one.journal for one in written if one.journal), default=None),
        lineage=replace(index.lineage, git=git),
        columns={c.name: {n: draft.column(c.name, n, column) for n, column in c.columns.items()} for c in cuts},
        attributes={c.name: {n: draft.attribute(c.name, n, text) for n, text in c.attributes.items()} for c in cuts},
        states={**(states or {}), **{c.name: draft.state(c.name, c.state) for c in cuts if c.state is not None}},
        rows=PartRows(*(table.num_rows for table in (*rows, left_out))),
        buffers={c.name: _buffer(c) for c in cuts},
    )
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
    """The error of a checkpoint whose name was staged before."""
    return CheckpointError(
        f"{storage.full_url(key)} exists or existed: this session has staged a checkpoint of this name before; "
        "give the checkpoint another name"
    )


def keeps_rows(index: PartIndex, written: Sequence[Written]) -> bool:
    """True if a checkpoint has the rows that were written: always where buffers are saved; else where some are of a
    ledger, which must not come apart from its episodes."""
    return index.replay_saved or any(one.rows.ledger.num_rows for one in written)


def _buffer(cut: Cut) -> PartBuffer:
    discarded = {reason: Discarded(counts["episodes"], counts["steps"]) for reason, counts in cut.discarded.items()}
    return PartBuffer(cut.steps, cut.episodes, discarded, cut.next_positions, cut.open_episodes)
