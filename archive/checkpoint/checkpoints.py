"""Checkpoints: commits with live sets, columns, states and progress; read in parts, each when asked for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints
from archive.base import (
    CorruptCommitError,
    MissingObjectError,
    NotFoundError,
    PartialCheckpointError,
    UsageError,
    cached_property,
    frozen,
    jsontree,
)
from archive.checkpoint import resumption
from archive.checkpoint.livesteps import LiveSteps
from archive.index import EpisodeIndex, Later, Resume, Snapshot
from archive.ledger import LedgerView
from archive.log import Commit, Origin, read_of
from archive.read import Episodes, Reader, Spans
from archive.saved import UNCONSUMED, AttributeRef, ColumnRef, Part
from archive.steps import Steps
from archive.store import Storage
from archive.views import reports

if TYPE_CHECKING:
    import pyarrow as pa

MAIN_BUFFER = "replay"
_READ_ONLY = "it is what the commit says: change copy.deepcopy() of it"


class Checkpoint:
    """One checkpoint, as its commit has it."""

    def __init__(
        self, storage: Storage, commit: Commit, served_by: Commit | None = None, later: Later | None = None
    ) -> None:  # fmt: skip
        """served_by: the commit with whose tables its steps are found; later: what was said since; None: its own."""
        self._storage = storage
        self.commit = commit
        self.served_by = commit if served_by is None else served_by
        self.later = Later(storage, self.served_by) if later is None else later
        self.seen = max(commit.number, self.later.head.number)  # the newest commit that was known when it was looked up
        if commit.checkpoint is None:
            raise CorruptCommitError(
                f"commit {commit.number} at {storage.url} is no checkpoint, though the table of checkpoints names it; "
                "run `archive verify`"
            )
        self.record = commit.checkpoint  # what the commit says of it

    # -- what the commit says ------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        return self.commit.number

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def run(self) -> str:
        return self.commit.run

    @property
    def session(self) -> str:
        return self.commit.session

    @property
    def archive_id(self) -> str:
        """The id of its archive."""
        return self.commit.archive

    @property
    def world_size(self) -> int:
        return self.record.world_size

    @property
    def whole(self) -> bool:
        """True if all ranks are in it."""
        return self.record.whole

    @property
    def missing_ranks(self) -> list[int]:
        return [one.rank for one in self.record.missing]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """The missing ranks, and the commit of the last whole checkpoint, which has their steps."""
        return list(self._as_json("missing"))

    @property
    def replay_saved(self) -> bool:
        """True if the buffers are in it; a checkpoint that doesn't say has them."""
        return self.record.replay_saved

    @property
    def buffers(self) -> dict[str, dict[str, Any]]:
        """Buffer -> steps, episodes and names of columns, over all ranks."""
        out: dict[str, dict[str, Any]] = self._as_json("buffers")
        return out

    @property
    def discarded(self) -> dict[str, dict[str, int]]:
        """Why -> episodes and steps that policy left out, a ring overwrote before they were appended,
        or a plan dropped."""
        out: dict[str, dict[str, int]] = self._as_json("discarded")
        return out

    @property
    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = self._as_json("metrics")
        return out

    @property
    def lineage(self) -> dict[str, Any]:
        """Parent commit's checksum, library version, run, session, git revision and configuration."""
        commit, more = self.commit, self.record.lineage.to_json()
        if self.record.lineage.config:
            more["config"] = jsontree.loads(self.record.lineage.config, where=f"configuration in {self!r}")
        known = {"parent": commit.parent, "library": commit.library, "run": self.run, "session": self.session}
        out: dict[str, Any] = frozen(known | more, _READ_ONLY)
        return out

    def _as_json(self, name: str) -> Any:
        return frozen(self.record.to_json()[name], _READ_ONLY)

    @property
    def origin(self) -> Origin | None:
        """What a session that resumes from it goes on from; None without buffers and ledger: it takes nothing over."""
        if not self.replay_saved and not self.commit.ledger:
            return None
        recovered = self.record.recovered
        trained = None if recovered is None else recovered.trained
        return Origin(self.session, self.run, self.number, self.record.sequences, trained)

    # -- what the ranks staged -----------------------------------------------------------------------------------

    @cached_property
    def _staged(self) -> dict[int, Part]:
        told = partial(resumption.remedy, self._storage, self.commit)
        return {one.rank: Part(self._storage, one.key, one.nonce, remedy=told) for one in self.record.ranks}

    def staged(self, rank: int) -> Part:
        """What one rank staged; an error if it is missing from a partial checkpoint, or not of this world."""
        if rank not in self._staged:
            why = "is missing from it" if rank in self.missing_ranks else f"is not of its world of {self.world_size}"
            raise NotFoundError(f"checkpoint {self.name!r} at {self._storage.url}: rank {rank} {why}")
        return self._staged[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks that are in it."""
        return sorted(self._staged)

    @property
    def progress(self) -> Any:
        """The run's counters, as rank 0 gave them, read anew: your own, to count on with. None if it gave none."""
        text = self.staged(0).index.progress if 0 in self._staged else None
        return None if text is None else jsontree.loads(text)

    def state(self, rank: int, buffer: str = MAIN_BUFFER) -> Any:
        """The state tree that a rank gave for a buffer, read anew: a copy of your own. None if it gave none."""
        return self.staged(rank).state(buffer)

    @property
    def unconsumed(self) -> list[Any]:
        """The prompts that were drawn but not trained on, over all ranks in order."""
        out: list[Any] = []
        for rank in self.ranks:
            if self.staged(rank).has(UNCONSUMED):
                value = jsontree.loads(self.staged(rank).files([UNCONSUMED])[0])
                out += value if isinstance(value, list) else [value]
        return out

    def column(self, name: str, rank: int, buffer: str = MAIN_BUFFER) -> np.ndarray[Any, Any]:
        """A column of one rank, in live order."""
        column = self.column_ref(name, rank, buffer)
        return self.file(column).column_rows(column, [(0, column.rows)])[0]

    def column_ref(self, name: str, rank: int, buffer: str = MAIN_BUFFER) -> ColumnRef:
        """The place of a column of one rank; NotFoundError if it has none of this name."""
        known = self.staged(rank).index.columns.get(buffer, {})
        if name not in known:
            raise NotFoundError(
                f"rank {rank} has no column {name!r} in buffer {buffer!r}; it has: {', '.join(known) or 'none'}"
            )
        return known[name]

    def file(self, ref: ColumnRef | AttributeRef) -> Part:
        """The staged object that has a column or attribute: of this or, for what is unchanged,
        of an earlier checkpoint."""
        own = [f for f in self._staged.values() if f.key == ref.object]
        told = partial(resumption.remedy, self._storage, self.commit)
        return own[0] if own else Part(self._storage, ref.object, ref.nonce, remedy=told)

    def attributes(self, rank: int, buffer: str = MAIN_BUFFER) -> dict[str, dict[str, Any]]:
        """Name -> {episode id: value} of one rank."""
        refs = self.staged(rank).index.attributes.get(buffer, {})
        return {name: jsontree.loads(self.file(ref).files([ref.member])[0]) for name, ref in refs.items()}

    @cached_property
    def values(self) -> dict[str, dict[str, Any]]:
        """Attributes of all ranks and buffers: name -> {episode id: value}."""
        out: dict[str, dict[str, Any]] = {}
        for rank in self.ranks:
            for buffer in self.staged(rank).index.attributes:
                for name, given in self.attributes(rank, buffer).items():
                    out.setdefault(name, {}).update(given)
        return out

    # -- live steps ----------------------------------------------------------------------------------------------

    @cached_property
    def steps_held(self) -> LiveSteps:
        """Its live steps, and the rows of the segments table that say what they are of."""
        return LiveSteps(Snapshot(self._storage, self.served_by, self.later), self.commit)

    @property
    def snapshot(self) -> Snapshot:
        """The segments table as far as what is live in it needs it: its newest files, or all."""
        return self.index.snapshot

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.snapshot)

    @property
    def index(self) -> EpisodeIndex:
        """The episodes of `snapshot`."""
        return self.steps_held.index

    @property
    def whole_index(self) -> EpisodeIndex:
        """The episodes that its tables hold."""
        return self.steps_held.whole_index

    @property
    def live(self) -> pa.Table:
        """Live runs of all ranks: rank, buffer, env_id, position, and the stream and positions they were written to."""
        return self.steps_held.live

    @property
    def located(self) -> Steps:
        """The places of the live steps, in live order."""
        return self.steps_held.located

    @property
    def groups(self) -> tuple[Ints, Ints]:
        """Live episodes in live order: where the pieces of each begin in `located`, and its number in the index."""
        return self.steps_held.groups

    @property
    def episodes(self) -> Episodes:
        """The episodes that are live in it, with their live steps, in order (rank, buffer, env row, time)."""
        heads, numbers = self.groups
        offsets = np.append(heads, len(self.located.stream))
        parts = Spans(offsets, self.located.stream, self.located.lo, self.located.hi)
        return Episodes(self.reader, self.index, numbers, parts, self)

    def ledger(self, name: str) -> LedgerView:
        """What had become of prompts at this checkpoint: `to_reissue()`, `to_train()`, `counts`, `table`."""
        trained = None if self.record.recovered is None else self.record.recovered.trained
        return LedgerView(self._storage, self.served_by, name, self.session, self.record.sequences, trained)

    def to_resume(self, rank: int | None = None) -> Resume:
        """What the same rank of a world of the same size goes on from; see resharding.plan for another size."""
        if not self.whole:
            raise PartialCheckpointError(
                f"checkpoint {self.name!r} lacks ranks {self.missing_ranks}; resume through a plan"
            )
        if rank is None:
            if self.world_size > 1:
                raise UsageError(
                    f"checkpoint {self.name!r} has {self.world_size} ranks; say which with arc.writer(rank=, resume=)"
                )
            rank = 0
        return resumption.same_rank(self, rank)

    @property
    def steps_per_rank(self) -> dict[int, int]:
        """Rank -> its live steps, in all buffers."""
        rank, steps = self.live["rank"].to_numpy(), self.live["hi"].to_numpy() - self.live["lo"].to_numpy()
        return {r: int(steps[rank == r].sum()) for r in self.ranks}

    @property
    def about(self) -> dict[str, Any]:
        """The facts about it, for people."""
        missing = self.missing_ranks
        return {
            "name": self.name, "step": self.step, "run": self.run, "session": self.session, "commit": self.number,
            "at": self._storage.url, "ranks": self.world_size, "missing ranks": missing or None,
            "replay saved": self.replay_saved, "created at": self.commit.created_at, "metrics": self.metrics or None,
        }  # fmt: skip

    def to_html(self) -> str:
        """A page of its own: ranks, buffers, and how its episodes are spread. Reads no data."""
        return self._report(self.episodes.table, self.episodes.fields).page()

    def _repr_html_(self) -> str:
        return self._report().notebook()

    def _report(self, *episodes: Any) -> reports.Report:
        held = (self.steps_per_rank, self.buffers, self.discarded, self.progress)
        return reports.checkpoint(self.about, *held, *episodes)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_storage", "commit", "served_by", "later", "seen", "record")
        return {name: getattr(self, name) for name in kept}

    def __repr__(self) -> str:
        what = "" if self.whole else f" without ranks {self.missing_ranks}"
        skipped = "" if self.replay_saved else " without replay"
        return (
            f"<Checkpoint {self.name!r} step={self.step} commit={self.number} ranks={self.world_size}{what}{skipped}>"
        )


def checkpoint_at(storage: Storage, head: Commit, number: int, manifest: int | None, later: Later) -> Checkpoint:
    """The checkpoint of a commit's number, among those that `head` follows; manifest: number of the commit with whose
    tables its steps are found; None: its own."""
    served_by = None if manifest is None else _read(storage, manifest, head)
    return Checkpoint(storage, _read(storage, number, head), served_by, later)


def _read(storage: Storage, number: int, head: Commit) -> Commit:
    if number == head.number:
        return head
    try:
        return read_of(storage, number, head)
    except MissingObjectError as e:
        raise NotFoundError(f"commit {number}, which a checkpoint needs, is gone from {storage.url}") from e
