"""The archive: look at it, write to it. A thin face over the parts."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.base import MissingObjectError, NotFoundError, UsageError, one_line
from archive.fields import Schema
from archive.log import DEFAULT_RUN, Commit, Commits, check_exclusive, commits, place
from archive.observe import operation
from archive.store import IOStats, Storage
from archive.tables import distinct
from archive.upkeep import Upkeep

# imported where they are used: who lists shards waits for no reader, who reads for no writer
if TYPE_CHECKING:
    from archive.checkpoint import Checkpoints, Keep, Runs
    from archive.ledger import LedgerView
    from archive.maintain import ArchiveInfo
    from archive.read import Episodes
    from archive.view import Viewer
    from archive.views import reports
    from archive.writer import Writer

_checked: set[tuple[int, str]] = set()  # (pid, archive id) of stores known to be exclusive


class Archive(Upkeep):
    """Trajectories under one root. As of one commit: `refresh()` goes to the newest,
    and so do commits made through it."""

    @property
    def commits(self) -> Commits:
        """The commits, oldest first."""
        return Commits(self._storage, self._head)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints, oldest first; `.of(run)` has those of one run, and then `.latest`,
        `["step-1000"]` are its own."""
        from archive.checkpoint import Checkpoints

        return Checkpoints(self._storage, self._head, later=self.snapshot.later)

    @property
    def runs(self) -> Runs:
        """The runs by name: their checkpoints and episodes; `arc.runs.plot("a", "b")` compares. Reads no data."""
        from archive.checkpoint import Runs

        return Runs(self.checkpoints, self.episodes)

    @property
    def episodes(self) -> Episodes:
        """The episodes that were ever archived, as of this commit."""
        from archive.read import Episodes, Reader

        if self._reader is None:
            self._reader = Reader(self.snapshot)
        return Episodes(self._reader, self._index)

    @property
    def ledgers(self) -> list[str]:
        """The names of the ledgers of prompts, as of this commit."""
        from archive.ledger import names

        return names(self._storage, self._head)

    def ledger(self, name: str, run: str = DEFAULT_RUN) -> LedgerView:
        """A view of what has become of prompts, as the newest session of a run sees it: `to_reissue()`, `to_train()`,
        `counts`, `table`, `rows`."""
        from archive.ledger import of_run

        return of_run(self._storage, self._head, name, run)

    def refresh(self) -> Archive:
        """Show the newest commit."""
        if self._pinned:
            raise UsageError(
                f"this archive was opened at commit {self._head.number}; open it without commit= to follow it"
            )
        head = self._head
        self._committed(commits.newest_after(self._storage, head) if head.number else commits.newest(self._storage))
        return self

    def at(self, commit: int | str) -> Archive:
        """The same archive as of a commit (its number, or a tag), read only; NotFoundError if there is none."""
        head = at_commit(self._storage, commit)
        return Archive(self._storage, self._about, self._raw, head, pinned=True, single_writer=self._single_writer)

    def check_writable(self) -> None:
        """Make sure that one may write here, by creating what is there already: one request. UsageError in an archive
        that was opened at a commit, AccessDeniedError where the credentials may not."""
        self._log()
        check_exclusive(self._storage, self._raw, single_writer=self._single_writer)
        if not self._single_writer:  # which is no proof for those who come later
            _checked.add((os.getpid(), self.id))

    def view(
        self, *, port: int = 0, read_only: bool = False, labels: Any = (), by: str | None = None, tokenizer: Any = None
    ) -> Viewer:
        """Look at it in a browser, or in this cell of a notebook: a page on this machine alone, until `.close()`, or
        until this process ends. Needs the extra `view`. labels: what one may set, as in the JSON of `archive view
        --labels`. by: who sets them. tokenizer: as of `ep.to_html`."""
        from archive.view import Settings, labels_of, serve

        return serve(self, port=port, settings=Settings(read_only, labels_of(labels) if labels else (), by, tokenizer))

    def writer(
        self, rank: int | None = None, world_size: int | None = None, run: str | None = None,
        session: str | None = None, schema: Schema | None = None, compression: str | None = "zstd:1",
        resume: Any = None, keep: Keep | None = None, chunk_bytes: int | None = None, fork_from: Any = None,
        forget: str | None = None, journal_s: float | None = None,
    ) -> Writer:  # fmt: skip
        """Open a session (or join that of the other ranks) and write to it.

        rank, world_size: from torch.distributed, else RANK and WORLD_SIZE, else one writer alone.  run: a line of
        commits (default: that of `resume`, else "main"); a newer session of a run ends the earlier ones.  session: one
        start of the job, needed if world_size is over 1 and neither a process group nor torchrun or Slurm names it.
        compression: "zstd:LEVEL", "gzip:LEVEL" or None.  resume: a Share of a plan, or a Checkpoint for a world of the
        same size: go on as its run from its live steps, positions and open episodes, so that the next checkpoint
        uploads only what is new.  fork_from: the same, but a new run begins there, the one that `run` names; the run of
        the checkpoint is not touched. A fork that has no whole checkpoint yet may be made again.  keep: which
        checkpoints of the run to retain, from now on (see `checkpoints.kept()`); None leaves it as it was.  forget: let
        go of the run's others after each whole checkpoint, in the background: "checkpoints", or "unreferenced", also of
        its episodes that none of them holds any more. `undo()` brings the last ones back; nothing is ever pruned by it.
        chunk_bytes: of the chunks, as far as rows allow (default 1/128 of a field in a shard, 16 to 128 KB); a step
        that is drawn alone reads its chunk, and many chunks cost bulk reads and writes.  journal_s: make what is added
        durable so many seconds later at the latest, by one PUT at a time; see `w.sync()`, `w.durable_until` and
        `w.journal()`. The next commit takes it in without uploading it again. None: nothing is, before a commit.
        """
        if chunk_bytes is not None and chunk_bytes < 1:
            raise UsageError(f"chunk_bytes={chunk_bytes}: give a number of bytes above 0, or None for the usual size")
        log = self._log()
        from archive.checkpoint import resumption
        from archive.journal import seconds
        from archive.writer import Writer

        journal_s, before = seconds(journal_s), self.io_stats()
        with operation("session") as done:
            start = resumption.start(rank, world_size, run, resume, fork_from)
            if start is not None:
                rank, world_size, run = start.rank, start.world_size, start.run
            who = place(rank, world_size, DEFAULT_RUN if run is None else run, session)
            forgets = self._forgets(log, who, keep, forget)
            if (os.getpid(), self.id) not in _checked:
                self.check_writable()
            made = Writer(
                self._storage, log, who, schema or Schema(), self.layout, compression, self._committed, start, keep,
                chunk_bytes, forgets, journal_s, partial(self._take_over, log, who, start),
            )  # fmt: skip
        if start is not None:
            resumption.tell(start, self.io_stats() - before, done.seconds)
        return made

    def io_stats(self) -> IOStats:
        """Requests and bytes so far; subtract two to know what was between them."""
        return self._storage.stats.snapshot()

    @property
    def manifest_urls(self) -> list[str]:
        """URLs of the Parquet files that make up the segments table (for DuckDB, say)."""
        return [self._storage.full_url(f.path) for f in self._head.files("segments")]

    @property
    def shards(self) -> list[str]:
        """Keys of all shards, in the order of the segments table."""
        return distinct(self.snapshot.columns(["shard"])["shard"])

    def shard_url(self, shard: int | str) -> str:
        """A URL that `zarr.open_group(url, mode="r", storage_options=...)` opens; a shard by number or key."""
        key = self.shards[shard] if isinstance(shard, int) else shard
        url = self._storage.full_url(key)
        return f"zip::{url}" if key.endswith(".zip") else url

    @property
    def about(self) -> dict[str, Any]:
        """A few words of what it is, for people."""
        about = {"url": self.url, "commit": self._head.number, "layout": self.layout, "shards": len(self.shards)}
        return {**about, "uncompressed": self.episodes.size_told}

    @property
    def info(self) -> ArchiveInfo:
        """A summary of what it is and what it takes: prints as a few lines; `.usage` as above."""
        from archive.maintain import ArchiveInfo

        return ArchiveInfo(self.about, self.usage)

    def to_html(self) -> str:
        """A page of its own: runs, checkpoints, returns, and a row for each episode to sort and filter.
        Reads no data."""
        return self._report().page()

    def _repr_html_(self) -> str:
        return self._report().notebook()

    def _report(self) -> reports.Report:
        from archive.views import reports

        found, saved = self.episodes, self.checkpoints.table.to_pylist()
        return reports.archive(self.url, self.about, self.runs.about, saved, found.table, found.fields)

    def __repr__(self) -> str:
        return one_line(f"<Archive {self.url} at commit {self._head.number}>")


def at_commit(storage: Storage, commit: int | str) -> Commit:
    """A commit by its number, or a tag; NotFoundError if there is none."""
    if isinstance(commit, str):
        from archive.maintain import tags
    number = tags.opened_at(storage, commit) if isinstance(commit, str) else commit
    try:
        return commits.read(storage, number)
    except MissingObjectError as e:
        raise NotFoundError(f"the archive at {storage.url} has no commit {number}") from e
