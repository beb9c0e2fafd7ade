"""Pure, no I/O: the index of the object that a rank stages, as a record.
archive/FORMAT.md says what each field means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from archive.base import (
    COUNT,
    TEXT,
    WHOLE,
    Count,
    MisshapenError,
    Positive,
    Record,
    layout,
    pairs,
    stored,
)
from archive.manifest import Discarded, Lineage, Sighting
from archive.shard import Members

UNCONSUMED = "unconsumed.json"  # the member with what was drawn and not trained on
LEDGER = "ledger.parquet"  # the member with rows of the ledger table, if there are any
LEFT_OUT = "left_out.parquet"  # the member with these, if there are any


@dataclass(frozen=True, slots=True)
class ColumnRef(Record):
    """A column of one rank: an array of this staged object or, if it is unchanged, of an earlier one."""

    array: str
    rows: Count
    dtype: str
    shape: tuple[Count, ...]
    digest: str
    object: str
    nonce: str | None = None


@dataclass(frozen=True, slots=True)
class AttributeRef(Record):
    """An attribute of one rank: a member of this staged object or, if it is unchanged, of an earlier one."""

    member: str
    digest: str
    object: str
    nonce: str | None = None


@dataclass(frozen=True, slots=True)
class StateRef(Record):
    """A tree of state: its skeleton, and its arrays with their numbers of rows; those in `scalars` have no axis. They
    lie in this staged object or, where one is named, in an earlier one."""

    skeleton: Mapping[str, Any]
    prefix: str
    arrays: Mapping[str, Count]
    scalars: tuple[str, ...]
    object: str | None = None
    nonce: str | None = None

    def __post_init__(self) -> None:
        for key in self.scalars:
            if self.arrays.get(self.prefix + key) != 1:
                raise MisshapenError(f"its scalar {key!r:.80} is no array of one row")


@dataclass(frozen=True, slots=True)
class StagedBuffer(Record):
    """A buffer of one rank. Env row -> where its next step goes, and the id of the episode that is open there."""

    steps: Count
    episodes: Count
    discarded: Mapping[str, Discarded]  # by reason
    next_positions: Annotated[Mapping[int, int], pairs(WHOLE, COUNT)] = stored(key="next")
    open_episodes: Annotated[Mapping[int, str], pairs(WHOLE, TEXT)] = stored(key="open")


@dataclass(frozen=True, slots=True)
class StagedRows(Record):
    """How many rows of the tables were staged; `left_out`: as of the live table, of what its writer holds beside it."""

    segments: Count
    chunks: Count
    ledger: Count = 0
    left_out: Count = 0


@dataclass(frozen=True, slots=True)
class StagedIndex(Record):
    """What a rank says of its part of a checkpoint, and where in the object the rest lies.

    Columns and attributes by buffer and name. `known_at`: the commit up to which ids that the user gave were checked;
    below 0 if there were none. `sequence`: the rank's segments below it are in the checkpoint.
    `journal`: so are its journal objects below this number; None if it keeps none. `seen`: the newest commit that its
    writer knew.
    """

    rank: Count
    world_size: Positive
    run: str
    session: str
    name: str
    step: int
    ordinal: int
    nonce: str
    replay_saved: bool
    partial: bool = stored(False, always=True)
    known_at: int = stored(-1, always=True)
    resumed_from: Count | None = stored(None, always=True)
    sequence: Count = stored(0, required=True)
    journal: Count | None = None
    seen: Sighting | None = None
    metrics: Mapping[str, float] = stored({}, always=True)
    lineage: Lineage = stored(Lineage(), always=True)
    progress: str | None = stored(None, required=True)
    columns: Mapping[str, Mapping[str, ColumnRef]] = stored({}, required=True)
    attributes: Mapping[str, Mapping[str, AttributeRef]] = stored({}, required=True)
    states: Mapping[str, StateRef] = stored({}, required=True)
    rows: StagedRows | None = None
    buffers: Mapping[str, StagedBuffer] = stored({}, required=True)
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)  # checked before all else
    members: Members = stored((), required=True)

    @property
    def objects(self) -> set[str]:
        """The staged objects, its own and earlier ones, in which its columns, attributes and states lie."""
        columns = {one.object for of in self.columns.values() for one in of.values()}
        attributes = {one.object for of in self.attributes.values() for one in of.values()}
        return columns | attributes | {one.object for one in self.states.values() if one.object is not None}

    @property
    def lengths(self) -> dict[str, int]:
        """Array -> its number of rows, of the arrays that columns, and states of its own, name."""
        columns = {one.array: one.rows for of in self.columns.values() for one in of.values()}
        states = [one for one in self.states.values() if one.object is None]
        return {path: rows for state in states for path, rows in state.arrays.items()} | columns
