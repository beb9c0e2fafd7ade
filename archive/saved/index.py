"""Pure, no I/O: the indexes of the objects that a rank saves, as records: of its part of a checkpoint, with all that
its buffers hold; of a tick of its journal, with what is new; and of the ticks of a node's ranks together.

archive/FORMAT.md says what each field means. They stand in front of a ZIP (`archive.shard.indexed`), which but for the
last kind is also a Zarr group, and have the offsets of its members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from archive.base import (
    COUNT,
    TEXT,
    WHOLE,
    CorruptStateError,
    Count,
    MisshapenError,
    Positive,
    Record,
    layout,
    pairs,
    stored,
)
from archive.log import Discarded, Lineage, Sighting
from archive.shard import Members, indexed
from archive.write import Stretch

UNCONSUMED = "unconsumed.json"  # the member with keys that were drawn and not trained on
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
    """A tree of state: its skeleton, and its arrays with their numbers of rows; those in `scalars` have no axis. The
    arrays are in this staged object or, where one is named, in an earlier one."""

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
class PartBuffer(Record):
    """A buffer of one rank. Env row -> the offset of its next step, and the id of its open episode."""

    steps: Count
    episodes: Count
    discarded: Mapping[str, Discarded]  # by reason
    next_positions: Annotated[Mapping[int, int], pairs(WHOLE, COUNT)] = stored(key="next")
    open_episodes: Annotated[Mapping[int, str], pairs(WHOLE, TEXT)] = stored(key="open")


@dataclass(frozen=True, slots=True)
class PartRows(Record):
    """The number of staged rows of each table; `left_out`: rows as of the live table that its writer holds beside."""

    segments: Count
    chunks: Count
    ledger: Count = 0
    left_out: Count = 0


class SavedIndex(Record):
    """The index of an object. `nonce`: of one writing of it; REMEDY: how to go on without it, in errors."""

    REMEDY: ClassVar[str]
    nonce: str
    members: Members

    @property
    def key(self) -> str:
        """The key of its object."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class PartIndex(SavedIndex):
    """The index of a rank's part of a checkpoint.

    Columns and attributes by buffer and name. `known_at`: the commit up to which ids that the user gave were checked;
    below 0 if there were none. `sequence`: the rank's segments below it are in the checkpoint.
    `journal`: so are its journal objects below this number; None if it keeps none. `journaled`: objects below this
    number were journaled before it, though a part without buffers has nothing of them. `node`: if its rank shares
    objects with others of its node, which node, and the number of its objects below which nothing is of this rank
    beyond the checkpoint. `seen`: the newest commit that its writer knew.
    """

    REMEDY: ClassVar[str] = "resume from another checkpoint"

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
    journaled: Count | None = None
    node: tuple[Count, Count] | None = None
    seen: Sighting | None = None
    metrics: Mapping[str, float] = stored({}, always=True)
    lineage: Lineage = stored(Lineage(), always=True)
    progress: str | None = stored(None, required=True)
    columns: Mapping[str, Mapping[str, ColumnRef]] = stored({}, required=True)
    attributes: Mapping[str, Mapping[str, AttributeRef]] = stored({}, required=True)
    states: Mapping[str, StateRef] = stored({}, required=True)
    rows: PartRows | None = None
    buffers: Mapping[str, PartBuffer] = stored({}, required=True)
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)  # checked before all else
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """The key of its object."""
        return layout.state_key(self.session, self.name, self.rank)

    @property
    def objects(self) -> set[str]:
        """The staged objects, its own and earlier ones, that have its columns, attributes and states."""
        columns = {one.object for of in self.columns.values() for one in of.values()}
        attributes = {one.object for of in self.attributes.values() for one in of.values()}
        return columns | attributes | {one.object for one in self.states.values() if one.object is not None}

    @property
    def lengths(self) -> dict[str, int]:
        """Array -> its number of rows, for the arrays of its own object that columns and states name."""
        own = (one for of in self.columns.values() for one in of.values() if one.object == self.key)
        columns = {one.array: one.rows for one in own}
        states = [one for one in self.states.values() if one.object is None]
        return {path: rows for state in states for path, rows in state.arrays.items()} | columns


@dataclass(frozen=True, slots=True)
class TickColumn(Record):
    """Values of a column in a tick: an array of its object, and the steps that they are of, in its order.

    These are `steps` or, where there are many stretches, `streams` and the array `ranges`: of each stream the session,
    rank, env row, first step and number of stretches; in the array, for all stretches, how many steps there are between
    it and the one before, and then how many it has.
    """

    array: str
    dtype: str
    steps: tuple[Stretch, ...] = stored((), always=True)
    streams: tuple[Stretch, ...] = ()
    ranges: str | None = None


@dataclass(frozen=True, slots=True)
class TickIndex(SavedIndex):
    """The index of an object of a rank's journal.

    It holds one shard at most: a tick of more shards makes more objects; all but the last have `goes_on`.
    `sequence`: the rank's rows below this number are in it or came before. `goes_on`: its tick does, in the next one.
    `rows`: table -> its number of rows. `gone`: buffer -> steps evicted since the object before. `live`: it has rows
    of the live table: the contents of a resumed rank when its journal began. Columns and attributes by buffer and name;
    an attribute is {episode id: JSON value} as text. `progress`: as in a part; None where it did not change.
    `resumed_from`: the commit of the checkpoint that the rank's writer went on from; None if there is none. `seen`: the
    newest commit that it knew. `ended_by`: the session that takes the place of the rank's, and made this object so that
    the rank cannot: the journal ends before it.
    """

    REMEDY: ClassVar[str] = "what this rank journaled from here on is lost"

    run: str
    session: str
    rank: Count
    number: Count
    nonce: str
    sequence: Count
    goes_on: bool = stored(False, always=True)
    rows: Mapping[str, Count] = stored({}, always=True)
    gone: Mapping[str, tuple[Stretch, ...]] = stored({}, always=True)
    columns: Mapping[str, Mapping[str, TickColumn]] = stored({}, always=True)
    attributes: Mapping[str, Mapping[str, str]] = stored({}, always=True)
    progress: str | None = None
    resumed_from: Count | None = None
    seen: Sighting | None = None
    ended_by: str | None = None
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """The key of its object."""
        return layout.journal_key(self.session, self.rank, self.number)


@dataclass(frozen=True, slots=True)
class NodeIndex(SavedIndex):
    """The index of an object of a node's journal. Its members are ticks of the node's ranks, each byte for byte the
    object that the rank would have made by itself.

    `seen`: the newest commit that its writer knew. `ended_by`: as in a tick; then it has no members.
    """

    REMEDY: ClassVar[str] = "what the node's ranks journaled in it is lost"

    run: str
    session: str
    node: Count
    number: Count
    nonce: str
    seen: Sighting | None = None
    ended_by: str | None = None
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """The key of its object."""
        return layout.node_key(self.session, self.node, self.number)


I = TypeVar("I", bound=SavedIndex)  # noqa: E741


def load(kind: type[I], data: bytes, key: str, where: str, nonce: str | None = None) -> I:
    """The index of the object at `key`, parsed; CorruptStateError if it is damaged, or another object's: it must
    identify itself as what leads to it does. nonce: the one in the reference; None where there is no reference yet."""
    body = indexed.parse_index(data, where)
    index = kind.from_json(body, what=f"the index of {where}", error=CorruptStateError, remedy=kind.REMEDY)
    if index.key != key or nonce not in (None, index.nonce):
        again = ", written another time" if index.key == key else ""
        raise CorruptStateError(
            f"{where} is not the object that belongs there: its index says {index.key}{again}; put the right "
            f"object back, or {kind.REMEDY}"
        )
    return index
