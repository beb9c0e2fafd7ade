"""Pure, no I/O: what a writer knows of its episodes, by number and by id; the ids that it gives and takes;
and the rows of the segments table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, Mask
from archive.base import DuplicateEpisodeError, FieldError, Undo, check_text, jsontree
from archive.fields import ShardSchema
from archive.manifest import Place, chains

if TYPE_CHECKING:
    import pyarrow as pa

    from archive.write.blocks import Slab

NONE = -1


@dataclass(slots=True)
class EpisodeRecord:
    """What the writer knows of an episode; `stored` and below are what its written segments add up to."""

    id: str
    env_id: int
    headless: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    replaces: bool = False
    end: int | None = None  # position after its last step, once it has ended
    ended: int = 0  # in which epoch that was
    broken: bool = False  # it ended without a last step (reason says why)
    sealed: bool = False  # a segment row says that it has ended
    terminated: bool | None = None
    truncated: bool | None = None
    reason: str | None = None
    begin: int = (
        0  # position of its first step in its env row, or where that will stand (before the row's live part, if
    )
    # it has left); `end` is as many positions on as it has steps
    fields: str = ""  # digest of its fields, which must not change in the middle
    stored: int = 0
    returned: float | None = None
    predecessor: str | None = None
    weights: tuple[str | None, int | None] = (None, None)  # uuid and update count of its newest written segment


class NewEpisodes(NamedTuple):
    """What the episodes that a call begins have in common, and where their ids come from."""

    claim: Callable[[str], bool]  # refuses an id that was given, or says whether it takes the place of another
    take: Callable[[int], int]  # so many new ids: the number of the first
    name: Callable[[int], str]  # the id of that number
    metadata: dict[str, Any]
    fields: str = ""

    def named(self, given: str | None) -> tuple[str, bool]:
        """The id of one episode, which may have been given; and whether it replaces another of that id."""
        return (self.name(self.take(1)), False) if given is None else (given, self.claim(given))


class Ends(NamedTuple):
    """Where each of some episodes ends (the position after its last step; NONE: it is open), and how: terminated and
    truncated are 0, 1 or NONE."""

    position: Ints
    terminated: Ints
    truncated: Ints
    epoch: int

    @classmethod
    def none(cls, count: int, epoch: int) -> Ends:
        """Of episodes that are all open."""
        position, terminated, truncated = np.full((3, count), NONE)
        return cls(position, terminated, truncated, epoch)

    def pick(self, index: Ints) -> Ends:
        return Ends(self.position[index], self.terminated[index], self.truncated[index], self.epoch)

    def mark(self, i: int, record: EpisodeRecord) -> None:
        """Put the end of the i-th episode into its record."""
        record.end, record.ended = int(self.position[i]), self.epoch
        record.terminated, record.truncated = (
            None if values[i] == NONE else bool(values[i]) for values in (self.terminated, self.truncated)
        )


class Begun(NamedTuple):
    """Episodes that one call begins, as arrays: thousands of records would keep the caller waiting."""

    new: NewEpisodes
    env: Ints
    begin: Ints
    headless: Mask
    ends: Ends

    def record(self, i: int, name: str, replaces: bool = False) -> EpisodeRecord:
        new = self.new
        made = EpisodeRecord(name, int(self.env[i]), bool(self.headless[i]), new.metadata, replaces, fields=new.fields)
        made.begin = int(self.begin[i])
        if self.ends.position[i] != NONE:
            self.ends.mark(i, made)
        return made


class _Lot(NamedTuple):
    """Begun episodes under new ids: the number of the first among the episodes, and of its id."""

    first: int
    number: int
    begun: Begun

    def name(self, i: int) -> str:
        return self.begun.new.name(self.number + i)


class EpisodeRecords:
    """The records, numbered from 0. One thread adds episodes; those in the background look at what was added before.

    A record is made when somebody asks for it, and ids are looked up in what was made up when somebody first did.
    """

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._made: dict[int, EpisodeRecord] = {}
        self._lots: list[_Lot] = []
        self._numbers: dict[str, int] = {}
        self._named = 0  # so many lots are in there
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> EpisodeRecord:
        found = self._made.get(number)
        if found is None:
            lot = self._lot(number)
            at = number - lot.first
            found = self._made.setdefault(number, lot.begun.record(at, lot.name(at)))  # another thread's, if it came
        return found

    def id_of(self, number: int) -> str:
        """Its id; no record is made for it."""
        found = self._made.get(number)
        if found is not None:
            return found.id
        lot = self._lot(number)
        return lot.name(number - lot.first)

    def _lot(self, number: int) -> _Lot:
        at = bisect_right(self._lots, number, key=lambda lot: lot.first) - 1
        if number >= self._count or at < 0:
            raise IndexError(number)
        return self._lots[at]

    def number_of(self, name: str) -> int | None:
        """The episode of that id, the newest of several revisions; None if there is none."""
        for lot in self._lots[self._named :]:
            for i in range(len(lot.begun.env)):
                self._numbers.setdefault(lot.name(i), lot.first + i)
        self._named = len(self._lots)
        number = self._numbers.get(name)
        taken_back = number is None or number >= self._count or self.id_of(number) != name
        return None if taken_back else number

    def add(self, *records: EpisodeRecord) -> int:
        """Keep records under the next numbers; the first of these."""
        first = self._grow(len(records))
        for number, record in enumerate(records, first):
            self.number_of(record.id)  # the older ones are in, so this one is what its id means
            self._undo.key(self._numbers, record.id)
            self._made[number] = record
            self._numbers[record.id] = number
        return first

    def begin(self, begun: Begun) -> None:
        """Keep episodes under the next numbers, and under new ids."""
        if len(begun.env):
            number = begun.new.take(len(begun.env))
            self._undo.attributes(self, "_named")
            self._undo.length(self._lots)
            self._lots.append(_Lot(self._count, number, begun))
            self._grow(len(begun.env))

    def _grow(self, by: int) -> int:
        self._undo.attributes(self, "_count")
        self._undo.keys_from(self._made, self._count)
        self._count += by
        return self._count - by


class Ids:
    """Episode ids of one writer: new ones, and the claim to those that the user gives."""

    def __init__(self, place: Place, known: Callable[[], Set[str]], undo: Undo | None = None) -> None:
        self._undo = undo or Undo()
        self._prefix = f"{place.session}-{place.rank:05d}-"
        self._count = 0
        self.sequence = 0  # of the next segment of this rank and session, over all buffers
        self._load = known
        self._known: Set[str] | None = None  # of what is committed; others' come to it as it goes
        self._own: set[str] = set()  # given by the user
        self._new: list[str] = []  # claimed by the call under way

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """What is claimed within is given back if the call is refused."""
        self._new.clear()
        try:
            yield
        except BaseException:
            self._own.difference_update(self._new)
            raise

    def take(self, count: int) -> int:
        """So many new ids: the number of the first; the others follow."""
        self._count += count
        return self._count - count

    def name(self, number: int) -> str:
        """The new id of that number."""
        return f"{self._prefix}{number:09d}"

    def episodes(self, metadata: dict[str, Any], fields: str, *, replace: bool) -> NewEpisodes:
        """What begins episodes of these fields; an id that is known is refused, unless they are to `replace` others."""

        def claim(name: str) -> bool:
            return self.claim(check_text(name, "episode_id"), replace=replace)

        return NewEpisodes(claim, self.take, self.name, metadata, fields)

    def check_new(self, name: str | None) -> None:
        """Refuse to replace a known episode by one of which no step is given."""
        if name is not None and self._is_known(name):
            raise FieldError(
                f"no steps were given for episode {name!r}, which would be replaced by one of length 0; nothing was "
                "changed: to change its metadata, read it and add it again whole (with its weights, update count and "
                f"flags), w.add_episode(arc.episodes[{name!r}].read(), episode_id={name!r}, replace=True, "
                f"metadata={{...}})"
            )

    def _is_known(self, name: str) -> bool:
        if self._known is None:
            self._known = self._load()
        return name in self._known or name in self._own or name.startswith(self._prefix)

    def claim(self, name: str, *, replace: bool) -> bool:
        """Whether the id takes the place of another, if there is one: it may be committed meanwhile. One that is known
        and replaces none is refused."""
        known = self._is_known(name)
        if known and not replace:
            raise DuplicateEpisodeError(
                f"the archive already has an episode {name!r}; give another id, or replace=True (with all of its "
                "steps) for a new revision"
            )
        self._undo.member(self._own, name)
        if name not in self._own:
            self._own.add(name)
            self._new.append(name)
        return replace


class SegmentRows:
    """Numbers segments, links each to the one before it in its episode, and adds up what an episode's segments hold."""

    def __init__(self, buffer: str, place: Place, records: EpisodeRecords, ids: Ids) -> None:
        self._buffer = buffer
        self._place = place
        self._records = records
        self._ids = ids

    def describe(self, epoch: int, slab: Slab, key: str) -> pa.Table:
        """The segments of a slab as rows; called in order, on the pipeline's thread.

        What ended after the slab was sent is open in it: a checkpoint may lie between.
        """
        episodes, positions, lengths = slab.episode.tolist(), slab.position.tolist(), slab.length.tolist()
        rows: list[dict[str, Any]] = [{}] * len(episodes)
        # episodes as they were begun: of two revisions the newer is the later; steps as they follow, beginning with
        # none
        for i in np.lexsort((slab.position, slab.episode)).tolist():
            rows[i] = row = self._segment(episodes[i], positions[i], lengths[i], epoch)
            record, reward = self._records[row.pop("index")], slab.reward[i]
            record.weights = _newest(slab, i)
            record.returned = reward if record.returned is None or reward is None else record.returned + reward
            row["return"] = record.returned
        columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {"episode_id": []}
        return self._table(
            columns, shard=key, start=slab.start, length=slab.length, env_id=slab.env_id, position=slab.position,
            extents=tables.extents(slab.extents, len(episodes)), schema=slab.schema.dumps(),
            model_weights_uuids=slab.uuids, update_count_min=slab.update_min, update_count_max=slab.update_max,
            weights=slab.weights,
        )  # fmt: skip

    def _segment(self, index: int, position: int, length: int, epoch: int) -> dict[str, Any]:
        record = self._records[index]
        ends = record.end is not None and position + length == record.end and record.ended <= epoch
        row = {
            "index": index,
            "episode_id": record.id,
            "sequence": self._ids.sequence,
            "predecessor": record.predecessor,
            "replaces": record.replaces and record.predecessor is None,
            "first": record.predecessor is None and not record.headless,
            "last": ends and not record.broken,
            "terminated": record.terminated if ends else None,
            "truncated": record.truncated if ends else None,
            "reason": record.reason if ends else None,
            "episode_start": record.stored,
            "metadata": jsontree.dumps(record.metadata, where="metadata") if record.metadata else None,
        }
        record.predecessor = chains.address(self._place.session, self._place.rank, self._ids.sequence)
        record.stored += length
        record.sealed = record.sealed or ends
        self._ids.sequence += 1
        return row

    def closing(self, closed: Sequence[int]) -> pa.Table | None:
        """A row of length 0 for each episode that ended after its last steps were written."""
        records = self._records
        late = [i for i in closed if not records[i].sealed]
        rows = [self._segment(i, records[i].end or 0, 0, records[i].ended) for i in late]
        if not rows:
            return None
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "index"}
        schema = ShardSchema(()).dumps()
        return self._table(
            columns, length=0, env_id=[records[i].env_id for i in late], position=[records[i].end for i in late],
            schema=schema, model_weights_uuids=[[] for _ in late], **{"return": [records[i].returned for i in late]},
        )  # fmt: skip

    def _table(self, columns: dict[str, Any], **more: Any) -> pa.Table:
        fixed = {"session": self._place.session, "buffer": self._buffer, "rank": self._place.rank}
        return tables.from_columns("segments", columns | more | fixed)


def _newest(slab: Slab, segment: int) -> tuple[str | None, int | None]:
    """The weights and the update count of the last step of a segment."""
    runs, uuids = slab.weights[segment], slab.uuids[segment]
    if runs is None:
        return uuids[-1] if uuids else None, slab.update_max[segment]
    return runs[-1]["model_weights_uuid"], runs[-1]["update_count"]
