"""Pure, no I/O: the records in commits and other small objects. archive/FORMAT.md says what each field means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from archive.base import Count, MisshapenError, Positive, Record, layout, stored

MARKS = ("latest_replay", "latest")  # of a run


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredFile(Record):
    """An object that is read whole, with its size and checksum."""

    path: str
    bytes: Count
    crc32c: Count


@dataclass(frozen=True, slots=True)
class FileRef(StoredFile):
    """A manifest file, as a commit names it. Least and greatest of columns, where the table has them.
    `steps`: of all rows of a segments file; absent where an earlier writer made it."""

    rows: Count
    commit: tuple[Count, Count] | None = None
    update_count_min: int | None = None
    update_count_max: int | None = None
    steps: Count | None = None


@dataclass(frozen=True, slots=True)
class OtherArchive(Record):
    """Another archive, to whose shards this one refers."""

    url: str


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark(Record):
    """The newest whole checkpoint of a run. `manifest`: the commit whose tables it is read with, if not its own."""

    name: str
    step: int
    ordinal: int
    session: str
    commit: Count
    manifest: Count | None = None


@dataclass(frozen=True, slots=True)
class ResumedFrom(Record):
    """The checkpoint that a session went on from: its commit, and the session that made it."""

    session: str
    commit: Count


@dataclass(frozen=True, slots=True)
class ForkedFrom(Record):
    """The checkpoint of another run at which a run began."""

    run: str
    name: str | None
    commit: Count | None


@dataclass(frozen=True, slots=True)
class KeepRule(Record):
    """The retention rule of a run's checkpoints; see `archive.Keep`."""

    last: Positive | None = stored(None, always=True)
    every: Positive | None = stored(None, always=True)
    best: tuple[str, Literal["max", "min"]] | None = stored(None, always=True)
    best_count: Positive | None = None  # of the greatest or least, if more than one
    within_s: Positive | None = None


@dataclass(frozen=True, slots=True)
class RunEntry(Record):
    """A run, as a commit has it. `superseded`: sessions before the newest; `sequences`: rank -> its segments below this
    number are committed; `journal`: rank -> its journal objects below this number are in the newest checkpoint, of a
    session that has a journal (of each rank of its world), else None; `nodes`: node -> the objects that its ranks share
    below this number have nothing beyond that, of a session in which nodes keep journals, else None. `stands_for`: of a
    session that a restore made, so that no writer goes on: the newest session at that time. `opened`: number of the
    commit that opened `session`; None in early archives."""

    session: str
    opened: Count | None = None
    superseded: tuple[str, ...] = stored((), always=True)
    sequences: Mapping[int, Count] = stored({}, always=True)
    latest: Mark | None = None
    latest_replay: Mark | None = None
    resumed_from: ResumedFrom | None = None
    forked_from: ForkedFrom | None = None
    keep: KeepRule | None = None
    journal: Mapping[int, Count] | None = None
    nodes: Mapping[int, Count] | None = None
    stands_for: str | None = None

    @property
    def sessions(self) -> tuple[str, ...]:
        """Session ids of this run, oldest first."""
        return (*self.superseded, self.session)

    @property
    def journal_lines(self) -> dict[str, int]:
        """Line of objects of its journals ("rank-00003", "node-00000") -> the number below which nothing is awaited."""
        ranks = {layout.journal_line("rank", rank): number for rank, number in (self.journal or {}).items()}
        return ranks | {layout.journal_line("node", node): number for node, number in (self.nodes or {}).items()}

    @property
    def marks(self) -> dict[str, Mark]:
        """Its references to checkpoints, by their names in MARKS."""
        return {name: mark for name in MARKS if (mark := getattr(self, name)) is not None}


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MissingRank(Record):
    """A rank that is not in a partial checkpoint, and the commit of the last whole one."""

    rank: Count
    last_whole: Count | None


@dataclass(frozen=True, slots=True)
class StagedObject(Record):
    """A rank's part of a checkpoint: its key, the nonce that it must have, and whether it records what its writer held
    beside the checkpoint."""

    rank: Count
    key: str
    nonce: str
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class BufferTotals(Record):
    """A buffer, over all ranks."""

    steps: Count
    episodes: Count
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discarded(Record):
    """The episodes and steps that a checkpoint lacks for one reason."""

    episodes: Count
    steps: Count


@dataclass(frozen=True, slots=True)
class Lineage(Record):
    """The origin of a checkpoint: the git revision; the user's configuration, as the text of a JSON value."""

    git: str | None = stored(None, always=True)
    config: str | None = stored(None, always=True)


@dataclass(frozen=True, slots=True)
class Tail(Record):
    """The part of one rank's unflushed suffix that a recovery took: journal objects below `next`, and why no more
    ("missing": there was none)."""

    next: Count
    objects: Count
    steps: Count
    episodes: Count
    ended: str = stored("missing", always=True)


@dataclass(frozen=True, slots=True)
class Recovered(Record):
    """The origin of a recovered checkpoint: an earlier one, and journals. `base`, `name`: that one, None and "" if
    there was none. `trained`: rank -> of the session's ledger rows "trained" only those below this number are in it."""

    base: Count | None = stored(None, always=True)
    name: str = stored("", always=True)
    trained: Mapping[int, Count] = stored({}, always=True)
    tails: Mapping[int, Tail] = stored({}, always=True)


@dataclass(frozen=True, slots=True)
class CheckpointRecord(Record):
    """The checkpoint of a commit. `sequences`: rank -> its segments below this number are in it; `borrowed`:
    staged objects of earlier checkpoints that have its columns and attributes."""

    name: str
    step: int
    ordinal: int
    world_size: Positive
    whole: bool
    missing: tuple[MissingRank, ...]
    ranks: tuple[StagedObject, ...]
    buffers: Mapping[str, BufferTotals]
    discarded: Mapping[str, Discarded]
    metrics: Mapping[str, float]
    lineage: Lineage
    replay_saved: bool = stored(True, always=True)
    sequences: Mapping[int, Count] = stored({}, required=True)
    borrowed: tuple[str, ...] = stored((), required=True)
    recovered: Recovered | None = None

    def __post_init__(self) -> None:
        there = {one.rank for one in self.ranks} | {one.rank for one in self.missing}
        if len(there) != self.world_size or max(there) >= self.world_size:
            raise MisshapenError(f"ranks and missing are not those of a world of {self.world_size}")

    def mark(self, session: str, commit: int) -> Mark:
        """The reference by which a run's entry names it."""
        return Mark(self.name, self.step, self.ordinal, session, commit)


# -- objects beside the commits ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sighting(Record):
    """The newest commit that a writer had seen when it wrote an object: the archive, its number and checksum."""

    archive: str
    commit: Positive
    digest: str


@dataclass(frozen=True, slots=True)
class Claim(Record):
    """The claim of a rank of a session: it has, or had, a writer."""

    run: str = stored("", always=True)  # empty: of none
    session: str = stored("", required=True)
    rank: Count = stored(0, required=True)
    nonce: str = stored("", always=True)
    seen: Sighting | None = None


@dataclass(frozen=True, slots=True)
class Pin(Record):
    """Objects of this archive that another archive refers to."""

    archive: str
    url: str
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class About(Record):
    """The content of archive.json."""

    magic: str
    id: str
    format: Any  # checked by `layout.check_format`
    layout: Literal["packed", "directory"]
    created_at: str = ""
