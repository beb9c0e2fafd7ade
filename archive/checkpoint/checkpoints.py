"""Checkpoints: commits with live sets, columns, states and progress; read in parts, each when asked for.

Live steps are mostly the last ones written, so the newest files of the segments table mostly have all of them. They
are read alone if no row of an older file can change anything about a live episode; else the whole table is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, arrow, ascending, numbers, row_codes, run_starts
from archive.base import (
    CorruptCommitError,
    CorruptManifestError,
    NotFoundError,
    PartialCheckpointError,
    UsageError,
    at_once,
    cached_property,
    frozen,
    jsontree,
)
from archive.checkpoint import resumption
from archive.index import Annotations, ByWriter, EpisodeIndex, Snapshot
from archive.ledger import LedgerView
from archive.log import Commit, FileRef, Origin, Sequences, tablefiles
from archive.read import Episodes, Reader, Spans
from archive.saved import UNCONSUMED, AttributeRef, ColumnRef, Part
from archive.store import Storage
from archive.write import Resume

if TYPE_CHECKING:
    import pyarrow as pa

MAIN_BUFFER = "replay"
_AT_ONCE = 32  # staged parts
_TAIL = ("session", "rank", "sequence", "commit")
Branch = tuple[str, Sequences | None]  # a session, and the sequences of its ranks
_READ_ONLY = "it is what the commit says: change copy.deepcopy() of it"


class Checkpoint:
    """One checkpoint, as its commit has it."""

    def __init__(
        self, storage: Storage, commit: Commit, served_by: Commit | None = None, annotations: Annotations | None = None
    ) -> None:
        """served_by: the commit whose tables serve its steps; annotations: as of another commit; None: its own."""
        self._storage = storage
        self.commit = commit
        self.served_by = commit if served_by is None else served_by
        self.annotations = Annotations(storage, self.served_by) if annotations is None else annotations
        self.seen = max(commit.number, self.annotations.head.number)  # the newest commit known at its lookup
        if commit.checkpoint is None:
            raise CorruptCommitError(
                f"commit {commit.number} at {storage.url} is no checkpoint, though the table of checkpoints names it; "
                "run `archive verify`"
            )
        self.record = commit.checkpoint  # its record in the commit

    # -- the commit's record -------------------------------------------------------------------------------------------

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
    def storage(self) -> Storage:
        """The root of its archive."""
        return self._storage

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
        return list(frozen(self.record.to_json()["missing"], _READ_ONLY))

    @property
    def replay_saved(self) -> bool:
        """True if the buffers are in it; so it is without a record of it."""
        return self.record.replay_saved

    @property
    def buffers(self) -> dict[str, dict[str, Any]]:
        """Buffer -> steps, episodes and names of columns, over all ranks."""
        return self._as_json("buffers")

    @property
    def discarded(self) -> dict[str, dict[str, int]]:
        """Reason -> episodes and steps that policy left out, a ring overwrote before they were appended,
        or a plan dropped."""
        return self._as_json("discarded")

    @property
    def metrics(self) -> dict[str, float]:
        return self._as_json("metrics")

    @property
    def lineage(self) -> dict[str, Any]:
        """Parent commit's checksum, library version, run, session, git revision and configuration."""
        commit, more = self.commit, self.record.lineage.to_json()
        if self.record.lineage.config:
            more["config"] = jsontree.loads(self.record.lineage.config, where=f"configuration in {self!r}")
        known = {"parent": commit.parent, "library": commit.library, "run": self.run, "session": self.session}
        out: dict[str, Any] = frozen(known | more, _READ_ONLY)
        return out

    def _as_json(self, name: str) -> dict[str, Any]:
        out: dict[str, Any] = frozen(self.record.to_json()[name], _READ_ONLY)
        return out

    @property
    def origin(self) -> Origin | None:
        """The origin of a session that resumes from it; None without buffers and ledger: it takes nothing over."""
        if not self.replay_saved and not self.commit.ledger:
            return None
        recovered = self.record.recovered
        trained = None if recovered is None else recovered.trained
        return Origin(self.session, self.run, self.number, self.record.sequences, trained)

    # -- staged parts --------------------------------------------------------------------------------------------------

    @cached_property
    def _staged(self) -> dict[int, Part]:
        return {one.rank: self._part(one.key, one.nonce) for one in self.record.ranks}

    def _part(self, key: str, nonce: str | None) -> Part:
        return Part(self._storage, key, nonce, remedy=partial(resumption.remedy, self._storage, self.commit))

    def staged(self, rank: int) -> Part:
        """The staged part of one rank; an error if it is missing from a partial checkpoint, or not of this world."""
        if rank not in self._staged:
            why = "is missing from it" if rank in self.missing_ranks else f"is not of its world of {self.world_size}"
            raise NotFoundError(f"checkpoint {self.name!r} at {self._storage.url}: rank {rank} {why}")
        return self._staged[rank]

    def all_staged(self) -> dict[int, Part]:
        """The staged part of each rank, with its index, fetched at once."""
        at_once(lambda part: part.index, self._staged.values(), _AT_ONCE)
        return dict(self._staged)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are in it."""
        return sorted(self._staged)

    @property
    def progress(self) -> Any:
        """The run's counters, as rank 0 gave them; each call reads a copy of your own. None if it gave none."""
        text = self.staged(0).index.progress if 0 in self._staged else None
        return None if text is None else jsontree.loads(text)

    def state(self, rank: int, buffer: str = MAIN_BUFFER) -> Any:
        """The state tree that a rank gave for a buffer. Each call reads a copy of your own. None if it gave none."""
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
        """The staged object that has a column or attribute: of this checkpoint or, for unchanged ones,
        of an earlier one."""
        own = [part for part in self._staged.values() if part.key == ref.object]
        return own[0] if own else self._part(ref.object, ref.nonce)

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

    # -- live steps ----------------------------------------------------------------------------------------------------

    @cached_property
    def live(self) -> pa.Table:
        """Live ranges of all ranks: rank, buffer, env_id, position, and their stream and positions there.

        CorruptManifestError if a rank that is not in it has live steps.
        """
        ref = self.commit.live
        found = tablefiles.load(self._storage, "live", [] if ref is None else [ref])
        strange = set(found["rank"].unique().to_pylist()) - set(self._staged)
        if ref is not None and strange:
            raise CorruptManifestError(
                f"{self._storage.full_url(ref.path)} has live steps of rank {min(strange)}, which is not in the "
                f"checkpoint of commit {self.number}; run `archive verify`"
            )
        return found

    @property
    def _branch(self) -> Branch:
        return self.session, self.record.sequences

    @cached_property
    def _whole(self) -> Snapshot:
        """The segments table that serves its steps."""
        return Snapshot(self._storage, self.served_by, self.annotations)

    @cached_property
    def index(self) -> EpisodeIndex:
        """The episodes of the newest files, if these have all live steps; else of the whole table."""
        if not self.live.num_rows:
            return EpisodeIndex(self._whole.newest(0), None, self._branch)
        steps = int((numbers(self.live["hi"]) - numbers(self.live["lo"])).sum())
        for count in _counts(self._whole.files, steps):
            found = EpisodeIndex(self._whole.newest(count), None, self._branch)
            if _is_enough(found, self.live, self._branch):
                return found
        return self.whole_index

    @cached_property
    def whole_index(self) -> EpisodeIndex:
        """The episodes of the whole table."""
        return EpisodeIndex(self._whole, self._live_rows, self._branch)  # a method, as local functions do not pickle

    def _live_rows(self) -> Ints:
        return self._located_in_whole.stream

    @cached_property
    def _located_in_whole(self) -> Steps:
        return tables.locate(self.live, self._whole.columns(tables.LOCATING))

    @property
    def snapshot(self) -> Snapshot:
        """The part of the segments table that its live steps need: its newest files, or all."""
        return self.index.snapshot

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.snapshot)

    @cached_property
    def located(self) -> Steps:
        """The places of the live steps, in live order, in the rows of `index`."""
        if self.index is self.whole_index:
            return self._located_in_whole
        return tables.locate(self.live, self.snapshot.columns(tables.LOCATING))

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """Live episodes in live order: the start of each in `located`, and its number in the index."""
        episode = self.index.episode_of_row[self.located.stream]
        place = row_codes(self.live.select(["rank", "buffer"]))[0][self.located["run"]]
        heads = run_starts(episode, place)
        return heads, episode[heads]

    @property
    def episodes(self) -> Episodes:
        """The episodes that are live in it, with their live steps, in order (rank, buffer, env row, time)."""
        heads, numbers = self.groups
        offsets = np.append(heads, len(self.located.stream))
        parts = Spans(offsets, self.located.stream, self.located.lo, self.located.hi)
        return Episodes(self.reader, self.index, numbers, parts, self)

    def ledger(self, name: str) -> LedgerView:
        """The states of prompts at this checkpoint: `to_reissue()`, `to_train()`, `counts`, `table`."""
        trained = None if self.record.recovered is None else self.record.recovered.trained
        return LedgerView(self._storage, self.served_by, name, self.session, self.record.sequences, trained)

    def to_resume(self, rank: int | None = None) -> Resume:
        """The start of the same rank in a world of the same size; see resharding.plan for another size."""
        if not self.whole:
            raise PartialCheckpointError(
                f"checkpoint {self.name!r} lacks ranks {self.missing_ranks}; resume through a plan"
            )
        if rank is None:
            if self.world_size > 1:
                raise UsageError(
                    f"checkpoint {self.name!r} has {self.world_size} ranks; give one with arc.writer(rank=, resume=)"
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
        """A page of its own: ranks, buffers, and the distribution of its episodes. Reads no data."""
        from archive.view import pages

        return pages.checkpoint(self)

    def _repr_html_(self) -> str:
        from archive.view import notebook

        return notebook.checkpoint(self.about, self.steps_per_rank, self.buffers, self.discarded, self.progress)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_storage", "commit", "served_by", "annotations", "seen", "record")
        return {name: getattr(self, name) for name in kept}

    def __repr__(self) -> str:
        what = "" if self.whole else f" without ranks {self.missing_ranks}"
        skipped = "" if self.replay_saved else " without replay"
        return (
            f"<Checkpoint {self.name!r} step={self.step} commit={self.number} ranks={self.world_size}{what}{skipped}>"
        )


# -- the newest files of the segments table ----------------------------------------------------------------------------


def _counts(files: Sequence[FileRef], steps: int) -> Iterator[int]:
    """The numbers of newest files to try, up to all but one: as many as have these steps, then twice the rows each.

    files: oldest first. A file without a number of steps may have enough.
    """
    rows = wanted = held = 0
    for count, ref in enumerate(reversed(files), 1):
        rows += ref.rows
        held += steps if ref.steps is None else ref.steps
        if held >= steps and rows >= wanted and count < len(files):
            yield count
            wanted = 2 * rows


def _is_enough(index: EpisodeIndex, live: pa.Table, branch: Branch) -> bool:
    """True if the newest files have all live steps, and no row of an older one changes anything about them.

    That holds if each live step is there, in an episode of its id alone, which begins there, and ends in a row that is
    newer than all in older files and that the checkpoint's session sees: then this row is the episode's newest one in
    the whole table, too, and its chain is the same.
    """
    part = index.snapshot
    located = tables.locate_some(live, part.columns(tables.LOCATING))
    if len(tables.lacking(live, located)):
        return False
    live_ones = ascending(index.episode_of_row[located.stream])
    if (live_ones < 0).any() or not _named_once(index, live_ones):
        return False
    begins = part.take(index.chains.firsts()[live_ones], ["predecessor"])
    tails = part.take(index.chains.lasts()[live_ones], _TAIL)
    older = (float("inf") if ref.commit is None else ref.commit[1] for ref in part.older)  # a file may lack it
    if begins["predecessor"].null_count < len(live_ones) or (numbers(tails["commit"]) <= max(older, default=0)).any():
        return False
    known = ByWriter(tails)  # its origin is read only if it did not write all of them itself
    return bool(known.seen(dict([branch])).all() or known.seen(part.branches.sight(*branch)).all())


def _named_once(index: EpisodeIndex, numbers: Ints) -> bool:
    """True if no other episode of an index has the id of one of these."""
    import pyarrow.compute as pc

    ids = index.column("episode_id")
    same = pc.is_in(ids, value_set=ids.take(arrow(numbers)).combine_chunks())
    return bool(pc.sum(same, min_count=0).as_py() == len(numbers))
