"""Pure, no I/O: a writer's records of its episodes, by number and by id; the ids that it gives and takes;
and the rows of the segments table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.arrays import Ints, Mask
from archive.base import DuplicateEpisodeError, FieldError, check_text, jsontree
from archive.fields import ShardSchema
from archive.index import chains
from archive.log import Place
from archive.write.blocks import UNKNOWN, Slab
from archive.write.changes import kept

if TYPE_CHECKING:
    import pyarrow as pa

NONE = -1


class End(NamedTuple):
    """The end of an episode: `position` is the offset after its last step, `epoch` the one in which it ended. A broken
    one ended without a last step; `reason` says why."""

    position: int
    epoch: int
    terminated: bool | None = None
    truncated: bool | None = None
    reason: str | None = None
    broken: bool = False


@dataclass(slots=True)
class EpisodeRecord:
    """An episode as its writer knows it; `stored` and the fields below it sum up its written segments."""

    id: str
    env_id: int
    # offset of its first step in its env row, or its place there (before the row's live part, if it was evicted);
    # its end is as many offsets later as it has steps
    begin: int = 0
    headless: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    replaces: bool = False
    fields: str = ""  # digest of its fields when it began; they must not change in the middle
    earlier: int | None = None  # the number of the revision that had its id before
    stored: int = 0
    returned: float | None = None
    predecessor: str | None = None
    weights: tuple[str | None, int | None] = (None, None)  # uuid and update count of its newest written segment
    sealed: bool = False  # a segment row has its end
    broken: bool = False  # it was taken over without a last step


def end_of(of_one: Ints, epoch: int) -> End | None:
    """The end in an array: its offset (NONE: none), and terminated and truncated as 0, 1 or NONE."""
    position, *flags = of_one.tolist()
    terminated, truncated = (None if flag == NONE else bool(flag) for flag in flags)
    return None if position == NONE else End(position, epoch, terminated, truncated)


class Lot(NamedTuple):
    """Episodes that one call begins, as arrays: thousands of records would take too long. `first`: the number of the
    first one; `first_id`: of its id, where they get new ones. `ends`: a column for each, in the form of `end_of`;
    None if all are open."""

    first: int
    ids: Ids
    metadata: dict[str, Any]
    fields: str
    env: Ints
    begin: Ints
    headless: Mask
    ends: Ints | None
    epoch: int
    first_id: int = 0

    def name(self, i: int) -> str:
        return self.ids.name(self.first_id + i)

    def end(self, i: int) -> End | None:
        return None if self.ends is None else end_of(self.ends[:, i], self.epoch)

    def record(self, i: int, name: str) -> EpisodeRecord:
        about = (int(self.env[i]), int(self.begin[i]), bool(self.headless[i]))
        return EpisodeRecord(name, *about, metadata=self.metadata, fields=self.fields)


class EpisodeRecords:
    """The records, numbered from 0. One thread adds episodes; background threads read those that were added before.

    A record is made at its first use, and the index of ids at the first lookup.
    An episode ends once. So all that a call changes is appended.
    """

    def __init__(self) -> None:
        self._made: dict[int, EpisodeRecord] = {}
        self._lots: list[Lot] = []
        self._ends: dict[int, End] = {}  # ends of episodes that did not end in the call that began them
        self._refined: Mapping[int, str] = {}  # the fields of episodes that were refined since they began
        self._numbers: dict[str, int] = {}
        self._named = 0  # the number of lots in it
        self._count = 0
        self.kept = kept(self, "_count", "_refined", grown=("_lots", "_ends"), after=self._forget_beyond)

    def __len__(self) -> int:
        return self._count

    def _forget_beyond(self) -> None:
        """Drop the caches of episodes beyond its length."""
        for number in sorted((n for n in list(self._made) if n >= self._count), reverse=True):
            record = self._made[number]
            if self._numbers.get(record.id) == number:
                if record.earlier is None:
                    del self._numbers[record.id]
                else:
                    self._numbers[record.id] = record.earlier
            del self._made[number]
        self._named = min(self._named, len(self._lots))

    def __getitem__(self, number: int) -> EpisodeRecord:
        found = self._made.get(number)
        if found is None:
            lot = self._lot(number)
            at = number - lot.first
            found = self._made.setdefault(number, lot.record(at, lot.name(at)))  # another thread's, if it came
        return found

    def id_of(self, number: int) -> str:
        """The id of an episode; no record is made for it."""
        found = self._made.get(number)
        if found is not None:
            return found.id
        lot = self._lot(number)
        return lot.name(number - lot.first)

    def end(self, number: int) -> End | None:
        """The end of an episode; None if it is open."""
        found = self._ends.get(number)
        if found is None and self._lots and self._lots[0].first <= number:
            lot = self._lot(number)
            at = number - lot.first
            found = lot.end(at) if at < len(lot.env) else None
        return found

    def _lot(self, number: int) -> Lot:
        at = bisect_right(self._lots, number, key=lambda lot: lot.first) - 1
        if number >= self._count or at < 0:
            raise IndexError(number)
        return self._lots[at]

    def number_of(self, name: str) -> int | None:
        """The number of the newest episode with that id; None if there is none."""
        for lot in self._lots[self._named :]:
            for i in range(len(lot.env)):
                self._numbers.setdefault(lot.name(i), lot.first + i)
        self._named = len(self._lots)
        number = self._numbers.get(name)
        taken_back = number is None or number >= self._count or self.id_of(number) != name
        return None if taken_back else number

    def fields_of(self, number: int) -> str:
        """The digest of an episode's fields, as far as they are known."""
        return self._refined.get(number, self[number].fields)

    def refine(self, number: int, fields: str) -> None:
        """Set a more precise digest of an episode's fields."""
        self._refined = {**self._refined, number: fields}

    def add(self, record: EpisodeRecord) -> int:
        """Add a record; its number."""
        number = self._count
        record.earlier = self.number_of(record.id)  # so the older ones are in
        self._made[number] = record
        self._numbers[record.id] = number
        self._count += 1
        return number

    def begin(self, lot: Lot, names: Sequence[str | None] | None) -> None:
        """Add episodes under the next numbers, with these ids or new ones (None)."""
        if names is None:
            self._lots.append(lot._replace(first_id=lot.ids.take(len(lot.env))))
            self._count += len(lot.env)
            return
        for i, name in enumerate(names):
            number = self.add(lot.record(i, lot.ids.named(name)[0]))
            if (end := lot.end(i)) is not None:
                self.close(number, end)

    def close(self, number: int, end: End) -> None:
        """End an episode."""
        self._ends[number] = end


class Ids:
    """Episode ids of one writer: it makes new ones, and claims those that the user gives."""

    def __init__(self, place: Place, known: Callable[[], Set[str]]) -> None:
        self._prefix = f"{place.session}-{place.rank:05d}-"
        self._count = 0
        self.sequence = 0  # of the next segment of this rank and session, over all buffers
        self._load = known
        self._known: Set[str] | None = None  # ids of commits, with those of other writers as they come
        self._own: dict[str, None] = {}  # given by the user
        self.kept = kept(self, grown=("_own",))

    def take(self, count: int) -> int:
        """Reserve new ids; the number of the first one."""
        self._count += count
        return self._count - count

    def name(self, number: int) -> str:
        """The new id of that number."""
        return f"{self._prefix}{number:09d}"

    def named(self, given: str | None, *, replace: bool = False) -> tuple[str, bool]:
        """The id of one episode, given or new; and True if it replaces another of that id, if there is one: that may be
        committed meanwhile. A known id that replaces none is refused."""
        if given is None:
            return self.name(self.take(1)), False
        name = check_text(given, "episode_id")
        if not replace and self._is_known(name):
            raise DuplicateEpisodeError(
                f"the archive already has an episode {name!r}; give another id, or replace=True (with all of its "
                "steps) for a new revision"
            )
        self._own[name] = None
        return name, replace

    def check_new(self, name: str | None) -> None:
        """Refuse to replace a known episode by one without steps."""
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


class SegmentRows:
    """Rows of segments: each is numbered, and linked to its predecessor in the episode; the records sum them up."""

    def __init__(self, buffer: str, place: Place, records: EpisodeRecords, ids: Ids) -> None:
        self._buffer = buffer
        self._place = place
        self._records = records
        self._ids = ids

    def describe(self, epoch: int, slab: Slab, key: str) -> pa.Table:
        """The segments of a slab as rows; called in order, on the pipeline's thread.

        An episode that ended after the slab was sent is open in it: a checkpoint may come in between.
        """
        some = slab.segments
        episodes, positions, lengths = some["episode"].tolist(), some.lo.tolist(), some.length.tolist()
        uuids, updates = some["uuid"].tolist(), some["update"].tolist()
        rows: list[dict[str, Any]] = [{}] * len(episodes)
        # episodes as they were begun: of two revisions the newer is the later; steps as they follow, beginning with
        # none
        for i in np.lexsort((some.lo, some["episode"])).tolist():
            rows[i] = row = self._segment(episodes[i], positions[i], lengths[i], epoch)
            record, reward = self._records[row.pop("index")], slab.reward[i]
            record.weights = uuids[i], None if updates[i] == UNKNOWN else updates[i]
            record.returned = reward if record.returned is None or reward is None else record.returned + reward
            row["return"] = record.returned
        columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {"episode_id": []}
        return self._table(columns, shard=key, **slab.columns)

    def _segment(self, index: int, position: int, length: int, epoch: int) -> dict[str, Any]:
        record, end = self._records[index], self._records.end(index)
        if end is not None and (position + length != end.position or end.epoch > epoch):
            end = None
        row = {
            "index": index,
            "episode_id": record.id,
            "sequence": self._ids.sequence,
            "predecessor": record.predecessor,
            "replaces": record.replaces and record.predecessor is None,
            "first": record.predecessor is None and not record.headless,
            "last": end is not None and not end.broken,
            "terminated": end and end.terminated,
            "truncated": end and end.truncated,
            "reason": end and end.reason,
            "episode_start": record.stored,
            "metadata": jsontree.dumps(record.metadata, where="metadata") if record.metadata else None,
        }
        record.predecessor = chains.address(self._place.session, self._place.rank, self._ids.sequence)
        record.stored += length
        record.sealed = record.sealed or end is not None
        self._ids.sequence += 1
        return row

    def closing(self, closed: Sequence[int]) -> pa.Table | None:
        """A row of length 0 for each episode that ended after its last steps were written."""
        records = self._records
        late = {i: end for i in closed if (end := records.end(i)) is not None and not records[i].sealed}
        rows = [self._segment(i, end.position, 0, end.epoch) for i, end in late.items()]
        if not rows:
            return None
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "index"}
        schema = ShardSchema(()).dumps()
        return self._table(
            columns,
            length=0,
            env_id=[records[i].env_id for i in late],
            position=[end.position for end in late.values()],
            schema=schema,
            model_weights_uuids=[[] for _ in late],
            **{"return": [records[i].returned for i in late]},
        )

    def _table(self, columns: dict[str, Any], **more: Any) -> pa.Table:
        fixed = {"session": self._place.session, "buffer": self._buffer, "rank": self._place.rank}
        return tables.from_columns("segments", columns | more | fixed)
