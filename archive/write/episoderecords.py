"""Pure, no I/O: what a writer knows of its episodes, by number and by id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask
from archive.base import Undo

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
