"""Pure, no I/O: the records of a job: its rounds, the result of each batch, the commits of results, and its end.

archive/FORMAT.md, Jobs, says what each field means. All of them are created once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple

from archive.base import (
    Count,
    FieldError,
    MisshapenError,
    Record,
    UnsafePathError,
    UsageError,
    check_text,
    layout,
    stored,
)
from archive.log import FileRef
from archive.saved import SavedIndex
from archive.shard import Members

Outcome = Literal["finished", "cancelled", "replaced"]
FINISHED: Outcome = "finished"
CANCELLED: Outcome = "cancelled"
REPLACED: Outcome = "replaced"
_MAX_NAME = 200
_MOST_BATCHES, _MOST_FOLDED = 10**9, 10**6  # of a job, whose names have nine digits; of a fold
_KEPT = ("round", "fold", "made", "end")  # kinds of objects that stay: they say what was done
_NAMED = re.compile(
    r"(?P<kind>round|end|kind|fold|made)-(?P<number>[0-9]{6})\.json|(?P<batch>[0-9]{9})\.zip|plan-[0-9a-f]{8}\.parquet"
    r"|failed-[0-9]{6}\.parquet"
)


@dataclass(frozen=True, slots=True)
class JobRound(Record):
    """One round of a job: what was left to do at a frozen commit, in batches. Most jobs have one.

    Its batches are numbered from `first` on. `annotations`: the commit whose labels and derived columns are read.
    `session`: the name in the keys of what its workers write. `terms`: the arguments that its results depend on.
    `items`: how many its batches have in all; `plan` is the table of them. `function`: the digest of its function; None
    if its kind has none. `checkpoint`: of the checkpoint whose live steps are meant, its commit.
    """

    job: str
    number: Count
    kind: str
    archive: str
    commit: Count
    annotations: Count
    session: str
    terms: Any
    first: Count
    batches: Count
    items: Count
    plan: FileRef
    created_at: datetime
    library: str
    function: str | None = stored(None, always=True)
    checkpoint: Count | None = None
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)

    def __post_init__(self) -> None:
        if not isinstance(self.terms, dict):
            raise MisshapenError("its terms are no object")
        if self.first + self.batches > _MOST_BATCHES:
            raise MisshapenError(f"its batches [{self.first}, {self.first + self.batches}) are too many")

    @property
    def frozen(self) -> set[int]:
        """The commits that it reads."""
        return {self.commit, self.annotations, self.checkpoint or self.commit}

    @property
    def numbers(self) -> range:
        """The numbers of its batches."""
        return range(self.first, self.first + self.batches)


@dataclass(frozen=True, slots=True)
class JobEnd(Record):
    """The end of a round: how, and how many of its batches had a result then."""

    outcome: Outcome
    done: Count


@dataclass(frozen=True, slots=True)
class ResultKind(Record):
    """The kind of results that the first finished batch of a round agreed on; others must be of it."""

    kind: str


@dataclass(frozen=True, slots=True)
class Fold(Record):
    """Batches whose results one commit makes visible, as ranges; agreed on before it is made."""

    round: Count
    batches: tuple[tuple[Count, Count], ...]

    def __post_init__(self) -> None:
        stop = 0
        for first, end in self.batches:
            if not stop <= first < end:
                raise MisshapenError("its ranges of batches are empty, or not in order")
            stop = end
        if sum(end - first for first, end in self.batches) > _MOST_FOLDED:
            raise MisshapenError(f"it has more than {_MOST_FOLDED} batches")

    @property
    def numbers(self) -> list[int]:
        """The numbers of its batches."""
        return [number for first, stop in self.batches for number in range(first, stop)]


@dataclass(frozen=True, slots=True)
class FoldCommit(Record):
    """The commit of a fold, in its round. `rows`: committed steps. `forgotten`: steps left out, as they were forgotten
    meanwhile. `failed`: episodes at which the function failed; a table beside this object lists them."""

    round: Count
    commit: Count
    rows: Count
    forgotten: Count
    failed: Count


@dataclass(frozen=True, slots=True)
class ArrayForm(Record):
    """The form of an array of a receipt: dtype as numpy writes it, "O" for texts, and shape."""

    dtype: str
    shape: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class ReceiptIndex(SavedIndex):
    """The index of the result of a batch. `seconds`: how long it took, by part. `arrays`: those in it, which are
    members of the same names: their bytes, or a JSON list of texts. `said`: more, by the kind of job."""

    REMEDY: ClassVar[str] = "delete it, and run the job again, which makes this batch anew"

    job: str
    batch: Count
    session: str
    nonce: str
    function: str | None = stored(None, always=True)
    items: Count = stored(0, required=True)
    rows: Count = stored(0, required=True)
    failed: Count = stored(0, required=True)
    seconds: Mapping[str, float] = stored({}, always=True)
    arrays: Mapping[str, ArrayForm] = stored({}, always=True)
    said: Any = stored(None, always=True)
    format: Any = stored(layout.format_block(layout.PART_VERSION), required=True)
    members: Members = stored((), required=True)

    @property
    def key(self) -> str:
        """The key of its object."""
        return layout.batch_key(self.job, self.batch)


class Named(NamedTuple):
    """The objects of a job that a listing has, by kind: numbers of batches, rounds, ends, folds and their commits."""

    batch: set[int]
    round: set[int]
    end: set[int]
    fold: set[int]
    made: set[int]
    kind: set[int]


def named(names: list[str]) -> Named:
    """The objects of a job from the names in its folder; others are not its own."""
    out = Named(*(set() for _ in Named._fields))
    for name in names:
        found = _NAMED.fullmatch(name)
        if found is not None and found["batch"]:
            out.batch.add(int(found["batch"]))
        elif found is not None and found["kind"]:
            getattr(out, found["kind"]).add(int(found["number"]))
    return out


def is_result(key: str) -> bool:
    """True for an object of a job that nobody needs once that has ended: a result, a plan, the kind of its results, or
    a list of failures."""
    found = _NAMED.fullmatch(key.rpartition("/")[2])
    return job_of(key) is not None and found is not None and found["kind"] not in _KEPT


def is_record(key: str) -> bool:
    """True for an object that stays of a job that has ended: a round, a fold, its commit, an end."""
    found = _NAMED.fullmatch(key.rpartition("/")[2])
    return job_of(key) is not None and found is not None and found["kind"] in _KEPT


def job_of(key: str) -> str | None:
    """The job (escaped) to which an object belongs; None for all else."""
    parts = key.split("/")
    return parts[1] if len(parts) == 3 and parts[0] == layout.JOBS else None


def name_of(folder: str) -> str | None:
    """The name of the job with this folder; None for a folder that no job has."""
    with suppress(UnsafePathError, UsageError, FieldError):
        name = check_name(layout.unescape(folder))
        return name if layout.escape(name) == folder else None
    return None


def check_name(name: str) -> str:
    """A job's name; UsageError for one that is empty, invisible or too long for a key."""
    check_text(name, "a job's name")
    if not name.strip() or not name.isprintable() or len(layout.escape(name)) > _MAX_NAME:
        raise UsageError(f"the job {name!r:.80} must have a name of visible characters, at most {_MAX_NAME} bytes")
    return name
