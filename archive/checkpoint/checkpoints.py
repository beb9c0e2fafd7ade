"""Checkpoints: commits with live sets, columns, states and progress; read in parts, each when asked for."""

from __future__ import annotations

from collections.abc import Mapping
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
from archive.checkpoint import resuming
from archive.checkpoint.staged import StagedFile
from archive.manifest import (
    Commit,
    EpisodeIndex,
    Located,
    Origin,
    Resume,
    Sequences,
    Snapshot,
    liveview,
    read_of,
    tablefiles,
    tables,
)
from archive.read import Episodes, LiveParts, Reader
from archive.store import Storage
from archive.views import reports

if TYPE_CHECKING:
    import pyarrow as pa

MAIN_BUFFER = "replay"
_SAID = "it is what the commit says: change copy.deepcopy() of it"


class Checkpoint:
    """One checkpoint, as its commit has it."""

    def __init__(self, storage: Storage, commit: Commit) -> None:
        self._storage, self.commit = storage, commit
        if "checkpoint" not in commit.body:
            raise CorruptCommitError(
                f"commit {commit.number} at {storage.url} is no checkpoint, though the table of checkpoints names it; run "
                "`archive verify`"
            )
        self._about: dict[str, Any] = commit.body["checkpoint"]

    # -- what the commit says ------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        return self.commit.number

    @property
    def name(self) -> str:
        return str(self._about["name"])

    @property
    def step(self) -> int:
        return int(self._about["step"])

    @property
    def run(self) -> str:
        return self.commit.run

    @property
    def session(self) -> str:
        return self.commit.session

    @property
    def archive_id(self) -> str:
        """Which archive it is of."""
        return str(self.commit.body["archive"])

    @property
    def world_size(self) -> int:
        return int(self._about["world_size"])

    @property
    def whole(self) -> bool:
        """Whether all ranks are in it."""
        return bool(self._about["whole"])

    @property
    def missing_ranks(self) -> list[int]:
        return [int(m["rank"]) for m in self._about["missing"]]

    @property
    def missing(self) -> list[dict[str, Any]]:
        """The missing ranks, and the commit of the last whole checkpoint, which has their steps."""
        return list(self._told("missing"))

    @property
    def replay_saved(self) -> bool:
        """Whether the buffers are in it; a checkpoint that doesn't say has them."""
        return bool(self._about.get("replay_saved", True))

    @property
    def buffers(self) -> dict[str, dict[str, Any]]:
        """Buffer -> steps, episodes and names of columns, over all ranks."""
        out: dict[str, dict[str, Any]] = self._told("buffers")
        return out

    @property
    def discarded(self) -> dict[str, dict[str, int]]:
        """Why -> episodes and steps that policy left out, a ring overwrote before they were appended, or a plan dropped."""
        out: dict[str, dict[str, int]] = self._told("discarded")
        return out

    @property
    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = self._told("metrics")
        return out

    @property
    def lineage(self) -> dict[str, Any]:
        """Parent commit's checksum, library version, run, session, git revision and configuration."""
        body = self.commit.body
        more = dict(self._about["lineage"])
        if more.get("config"):
            more["config"] = jsontree.loads(more["config"])
        known = {"parent": body["parent"], "library": body["library"], "run": self.run, "session": self.session} | more
        out: dict[str, Any] = frozen(known, _SAID)
        return out

    def _told(self, name: str) -> Any:
        return frozen(self._about[name], _SAID)

    @property
    def _sequences(self) -> Sequences | None:
        """Rank -> which of its session's segments are in it: those below this number. None: not recorded."""
        known = self._about.get("sequences")
        return None if known is None else {int(rank): int(number) for rank, number in known.items()}

    @property
    def origin(self) -> Origin | None:
        """What a session that resumes from it goes on from; None without buffers: then it takes no episode over."""
        entry = self.commit.runs.get(self.run, {})
        if not self.replay_saved or (self._sequences is None and entry.get("session") != self.session):
            return None
        committed = {int(rank): int(number) for rank, number in entry.get("sequences", {}).items()}
        return Origin(self.session, self.run, self.number, committed if self._sequences is None else self._sequences)

    # -- what the ranks staged -----------------------------------------------------------------------------------

    @cached_property
    def _staged(self) -> dict[int, StagedFile]:
        return {r["rank"]: StagedFile(self._storage, r["key"], r["nonce"]) for r in self._about["ranks"]}

    def staged(self, rank: int) -> StagedFile:
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
        text = self.staged(0).index["progress"] if 0 in self._staged else None
        return None if text is None else jsontree.loads(text)

    def state(self, rank: int, buffer: str = MAIN_BUFFER) -> Any:
        """The state tree that a rank gave for a buffer, read anew: a copy of your own. None if it gave none."""
        return self.staged(rank).state(buffer)

    @property
    def unconsumed(self) -> list[Any]:
        """What was drawn but not trained on, over all ranks in order."""
        out: list[Any] = []
        for rank in self.ranks:
            if any(m[0] == "unconsumed.json" for m in self.staged(rank).index["members"]):
                value = jsontree.loads(self.staged(rank).files(["unconsumed.json"])[0])
                out += value if isinstance(value, list) else [value]
        return out

    def column(self, name: str, rank: int, buffer: str = MAIN_BUFFER) -> np.ndarray[Any, Any]:
        """A column of one rank, in live order."""
        entry = self.column_entry(name, rank, buffer)
        return self.file(entry).column_rows(entry, [(0, entry["rows"])])[0]

    def column_entry(self, name: str, rank: int, buffer: str = MAIN_BUFFER) -> dict[str, Any]:
        entries = self.staged(rank).index["columns"].get(buffer, {})
        if name not in entries:
            raise NotFoundError(
                f"rank {rank} has no column {name!r} in buffer {buffer!r}; it has: {', '.join(entries) or 'none'}"
            )
        return dict(entries[name])

    def file(self, entry: Mapping[str, Any]) -> StagedFile:
        """The staged object that has a column or attribute: of this or, for what is unchanged, of an earlier checkpoint."""
        own = [f for f in self._staged.values() if f.key == entry["object"]]
        return own[0] if own else StagedFile(self._storage, entry["object"], entry.get("nonce"))

    def attributes(self, rank: int, buffer: str = MAIN_BUFFER) -> dict[str, dict[str, Any]]:
        """Name -> {episode id: value} of one rank."""
        entries = self.staged(rank).index["attributes"].get(buffer, {})
        return {n: jsontree.loads(self.file(e).files([e["member"]])[0]) for n, e in entries.items()}

    @cached_property
    def values(self) -> dict[str, dict[str, Any]]:
        """Attributes of all ranks and buffers: name -> {episode id: value}."""
        out: dict[str, dict[str, Any]] = {}
        for rank in self.ranks:
            for buffer in self.staged(rank).index["attributes"]:
                for name, given in self.attributes(rank, buffer).items():
                    out.setdefault(name, {}).update(given)
        return out

    # -- live steps ----------------------------------------------------------------------------------------------

    @cached_property
    def snapshot(self) -> Snapshot:
        return Snapshot(self._storage, self.commit)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.snapshot)

    @cached_property
    def index(self) -> EpisodeIndex:
        branch = (self.session, self._sequences)
        return EpisodeIndex(self.snapshot, self._live_rows, branch)  # a method, as functions of here do not pickle

    def _live_rows(self) -> Ints:
        return self.located.row

    @cached_property
    def live(self) -> pa.Table:
        """Live runs of all ranks: rank, buffer, env_id, position, and the stream and positions they were written to."""
        ref = self.commit.body.get("live")
        return tables.schema("live").empty_table() if ref is None else tablefiles.load(self._storage, "live", ref)

    @cached_property
    def located(self) -> Located:
        """Where the live steps lie, in live order."""
        return liveview.locate(self.live, self.snapshot.columns(liveview.SEGMENT_COLUMNS))

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """Live episodes in live order: where the pieces of each begin in `located`, and its number in the index."""
        episode = self.index.episode_of_row[self.located.row]
        place = _codes(self.live)[self.located.run]
        heads = liveview.episode_groups(episode, place)
        return heads, episode[heads]

    @property
    def episodes(self) -> Episodes:
        """The episodes that are live in it, with their live steps, in order (rank, buffer, env row, time)."""
        heads, numbers = self.groups
        offsets = np.append(heads, len(self.located.row))
        parts = LiveParts(offsets, self.located.row, self.located.lo, self.located.hi)
        return Episodes(self.reader, self.index, numbers, parts, self)

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
        return resuming.same_rank(self, rank)

    @property
    def steps_per_rank(self) -> dict[int, int]:
        """Rank -> its live steps, in all buffers."""
        rank, steps = self.live["rank"].to_numpy(), self.live["hi"].to_numpy() - self.live["lo"].to_numpy()
        return {r: int(steps[rank == r].sum()) for r in self.ranks}

    @property
    def about(self) -> dict[str, Any]:
        """What it is, for people."""
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
        return {"_storage": self._storage, "commit": self.commit, "_about": self._about}

    def __repr__(self) -> str:
        what = "" if self.whole else f" without ranks {self.missing_ranks}"
        skipped = "" if self.replay_saved else " without replay"
        return (
            f"<Checkpoint {self.name!r} step={self.step} commit={self.number} ranks={self.world_size}{what}{skipped}>"
        )


def _codes(live: pa.Table) -> Ints:
    """A number for (rank, buffer) of each live run."""
    buffers = live["buffer"].combine_chunks()
    code = buffers.indices.to_numpy() if len(buffers) else np.zeros(0, np.int64)
    out: Ints = live["rank"].to_numpy().astype(np.int64) * (int(code.max(initial=0)) + 1) + code
    return out


def checkpoint_at(storage: Storage, head: Commit, number: int) -> Checkpoint:
    """The checkpoint of a commit's number, among those that `head` follows."""
    if number == head.number:
        return Checkpoint(storage, head)
    try:
        return Checkpoint(storage, read_of(storage, number, head))
    except MissingObjectError as e:
        raise NotFoundError(f"commit {number}, a checkpoint, is gone from {storage.url}") from e
