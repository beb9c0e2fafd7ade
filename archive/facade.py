"""The archive, to read and to write. A thin layer over the rooms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from archive.base import MissingObjectError, NotFoundError, UsageError, layout, one_line
from archive.fields import Schema
from archive.index import Annotations, EpisodeIndex, Snapshot
from archive.log import (
    DEFAULT_RUN,
    About,
    Commit,
    CommitLog,
    Commits,
    commits,
    place,
)
from archive.observe import operation
from archive.store import IOStats, Storage, prove
from archive.tables import distinct

# imported where they are used: who lists shards waits for no reader, who reads for no writer
if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa

    from archive.checkpoint import Checkpoint, Checkpoints, Keep, Runs
    from archive.jobs import Jobs
    from archive.journal import Tails
    from archive.ledger import LedgerView
    from archive.maintain import ArchiveInfo, ForgetPlan, Progress, PrunePlan, Report, Tag, Tags, Usage
    from archive.read import Episodes, Reader
    from archive.view import Viewer
    from archive.writer import Writer


class Archive:
    """Trajectories under one root, as of one commit: `refresh()` goes to the newest,
    and so do commits made through it.

    storage: its store.  index: the episodes as of the commit, as columns.  pinned: true if it was
    opened at a commit, and stays there.
    """

    def __init__(
        self, storage: Storage, about: About, raw: bytes, head: Commit, *, pinned: bool, single_writer: bool
    ) -> None:
        self.storage = storage
        storage.known = layout.ARCHIVE_KEY, raw
        self.pinned = pinned
        self.index = EpisodeIndex(Snapshot(storage, head, Annotations(storage, head, read_only=pinned)))
        self._about = about
        self._raw = raw
        self._single_writer = single_writer
        self._reader: Reader | None = None

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def id(self) -> str:
        return self._about.id

    @property
    def layout(self) -> str:
        return self._about.layout

    @property
    def snapshot(self) -> Snapshot:
        """The segments table as of this commit."""
        return self.index.snapshot

    @property
    def head(self) -> Commit:
        """The commit that this archive shows."""
        return self.index.snapshot.commit

    def _log(self) -> CommitLog:
        """The log to which commits are added; UsageError in an archive that was opened at a commit."""
        if self.pinned:
            raise UsageError(
                f"this archive was opened at commit {self.head.number} and is read only; open it without commit="
            )
        return CommitLog(self.storage, self.id, self.head)

    def _committed(self, head: Commit) -> None:
        """Show this commit, if it is newer than the shown one."""
        if head.number > self.head.number:
            self.index = self.index.as_of(head)
            self._reader = None

    def __reduce__(self) -> Any:
        made = partial(type(self), pinned=self.pinned, single_writer=self._single_writer)
        return made, (self.storage, self._about, self._raw, self.head)

    @property
    def commits(self) -> Commits:
        """The commits, oldest first."""
        return Commits(self.storage, self.head)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints, oldest first; `.of(run)` has those of one run, and then `.latest`,
        `["step-1000"]` are its own."""
        from archive.checkpoint import Checkpoints

        return Checkpoints(self.storage, self.head, annotations=self.snapshot.annotations)

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
        return Episodes(self._reader, self.index)

    @property
    def jobs(self) -> Jobs:
        """Name -> job: work over all that is stored, how far it is, and what failed: `arc.jobs["verifier-v2"].done`.
        Each look is at the store as it is now."""
        from archive.jobs import Jobs

        return Jobs(self.storage)

    @property
    def ledgers(self) -> list[str]:
        """The names of the ledgers of prompts, as of this commit."""
        from archive.ledger import names

        return names(self.storage, self.head)

    def ledger(self, name: str, run: str = DEFAULT_RUN) -> LedgerView:
        """The states of prompts, as the newest session of a run sees them: `to_reissue()`, `to_train()`,
        `counts`, `table`, `rows`."""
        from archive.ledger import of_run

        return of_run(self.storage, self.head, name, run)

    def refresh(self) -> Archive:
        """Show the newest commit."""
        head = self.head
        if self.pinned:
            raise UsageError(f"this archive was opened at commit {head.number}; open it without commit= to follow it")
        self._committed(commits.newest_after(self.storage, head) if head.number else commits.newest(self.storage))
        return self

    def at(self, commit: int | str) -> Archive:
        """The same archive as of a commit (its number, or a tag), read only; NotFoundError if there is none."""
        head = at_commit(self.storage, commit)
        return Archive(self.storage, self._about, self._raw, head, pinned=True, single_writer=self._single_writer)

    def check_writable(self) -> None:
        """Check for the right to write here, by creating an object that is there already: one request. UsageError in an
        archive that was opened at a commit, AccessDeniedError without the right."""
        self._log()
        prove(self.storage, again=True)

    def view(
        self, *, port: int = 0, read_only: bool = False, labels: Any = (), by: str | None = None, tokenizer: Any = None
    ) -> Viewer:
        """Look at it in a browser, or in this cell of a notebook: a page on this machine alone, until `.close()`, or
        until this process ends. Needs the extra `view`. labels: the labels one may set, as in the JSON of `archive view
        --labels`. by: the name of their author. tokenizer: as of `ep.to_html`."""
        from archive.view import Settings, labels_of, serve

        return serve(self, port=port, settings=Settings(read_only, labels_of(labels) if labels else (), by, tokenizer))

    def writer(
        self, rank: int | None = None, world_size: int | None = None, run: str | None = None,
        session: str | None = None, schema: Schema | None = None, compression: str | None = "zstd:1",
        resume: Any = None, keep: Keep | None = None, chunk_bytes: int | None = None, fork_from: Any = None,
        forget: str | None = None, journal_s: float | None = None, journal: str = "rank",
    ) -> Writer:  # fmt: skip
        """Open a session (or join that of the other ranks) and write to it.

        rank, world_size: from torch.distributed, else RANK and WORLD_SIZE, else one writer alone.  run: a line of
        commits (default: that of `resume`, else "main"); a newer session of a run ends the earlier ones.  session: one
        start of the job, needed if world_size is over 1 and neither a process group nor torchrun or Slurm names it.
        compression: "zstd:LEVEL", "gzip:LEVEL" or None.  resume: a Share of a plan, or a Checkpoint for a world of the
        same size: go on as its run from its live steps, positions and open episodes, so that the next checkpoint
        uploads only what is new.  fork_from: the same, but a new run begins there, the one that `run` names; the run of
        the checkpoint is not touched. A fork that has no whole checkpoint yet may be made again.  keep: the
        retention of the run's checkpoints, from now on (see `checkpoints.kept()`); None leaves it as it was.  forget:
        expire the run's others after each whole checkpoint, in the background: "checkpoints", or "unreferenced", also
        its episodes that none of them holds any more. `undo()` brings the last ones back; it never prunes anything.
        chunk_bytes: of the chunks, as far as rows allow (default 1/128 of a field in a shard, 16 to 128 KB); a step
        that is drawn alone reads its chunk, and many chunks cost bulk reads and writes.  journal_s: make additions
        durable this many seconds later at the latest, by one PUT at a time; see `w.sync()`, `w.durable_until` and
        `w.journal()`. The next commit adopts them without another upload. None: nothing is durable before a commit.
        journal: "rank", or "node": the ranks of a machine share one PUT at a time (torchrun and Slurm name it).
        """
        if chunk_bytes is not None and chunk_bytes < 1:
            raise UsageError(f"chunk_bytes={chunk_bytes}: give a number of bytes above 0, or None for the usual size")
        log = self._log()
        from archive.checkpoint import resumption
        from archive.journal import node_of, seconds, take_over
        from archive.writer import Writer

        journal_s, before = seconds(journal_s), self.io_stats()
        with operation("session") as done:
            start = resumption.start(rank, world_size, run, resume, fork_from)
            if start is not None:
                rank, world_size, run = start.rank, start.world_size, start.run
            who = place(rank, world_size, DEFAULT_RUN if run is None else run, session)
            node, forgets = node_of(journal, journal_s, who), None
            if forget is not None:
                from archive.maintain import forget as forgetting

                forgetting.check_writer(log.head, who.run, keep, forget)
                forgets = forgetting.after_checkpoint(self.storage, self.id, who, forget)
            prove(self.storage)
            made = Writer(
                self.storage, log, who, schema or Schema(), self.layout, compression, self._committed, start, keep,
                chunk_bytes, forgets, journal_s, partial(take_over, log, who, start), node,
            )  # fmt: skip
        if start is not None:
            resumption.tell(start, self.io_stats() - before, done.seconds)
        return made

    def io_stats(self) -> IOStats:
        """Requests and bytes so far; subtract two values for those in between."""
        return self.storage.stats.snapshot()

    @property
    def manifest_urls(self) -> list[str]:
        """URLs of the Parquet files that make up the segments table (for DuckDB, say)."""
        return [self.storage.full_url(f.path) for f in self.head.files("segments")]

    @property
    def shards(self) -> list[str]:
        """Keys of all shards, in the order of the segments table."""
        return distinct(self.snapshot.columns(["shard"])["shard"])

    def shard_url(self, shard: int | str) -> str:
        """A URL that `zarr.open_group(url, mode="r", storage_options=...)` opens; a shard by number or key."""
        name = self.shards[shard] if isinstance(shard, int) else shard
        key = layout.object_of(name)
        url = self.storage.full_url(key)
        if name != key:
            return f"zip::zip:/{name.removeprefix(key)}::{url}"
        return f"zip::{url}" if key.endswith(".zip") else url

    @property
    def about(self) -> dict[str, Any]:
        """A short summary, for people."""
        about = {"url": self.url, "commit": self.head.number, "layout": self.layout, "shards": len(self.shards)}
        return {**about, "uncompressed": self.episodes.size_told}

    @property
    def info(self) -> ArchiveInfo:
        """A summary of the archive and its size: prints as a few lines; `.usage` as above."""
        from archive.maintain import ArchiveInfo

        return ArchiveInfo(self.about, self.usage)

    def to_html(self) -> str:
        """A page of its own: runs, checkpoints, returns, and a row for each episode to sort and filter.
        Reads no data."""
        from archive.view import pages

        return pages.archive(self.episodes, list(self.runs), self.url)

    def _repr_html_(self) -> str:
        from archive.view import notebook

        found, saved = self.episodes, self.checkpoints.table.to_pylist()
        return notebook.archive(self.about, self.runs.about, saved, found.table, found.fields)

    def __repr__(self) -> str:
        return one_line(f"<Archive {self.url} at commit {self.head.number}>")

    # -- maintenance and labels ----------------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """The space that the archive takes on its store, in bytes and objects: live, held by checkpoints alone,
        forgettable, prunable. Reads tables and lists all objects; no data."""
        from archive.maintain import usage

        return usage(self.storage, self.head)

    def tails(self, run: str = DEFAULT_RUN) -> Tails:
        """The tails of a run, which are the unflushed suffixes of its journals: the objects beyond its newest
        checkpoint, rank by rank, and why each ends: `print(arc.tails("main"))`. Reads each object; adopts nothing."""
        from archive.journal import tails

        return tails.of_run(self.storage, self.head, run)

    def recover(self, run: str = DEFAULT_RUN) -> Checkpoint | None:
        """Commit a checkpoint with all that a run's newest session has journaled beyond its newest one: the new one or,
        if nothing was journaled, the newest whole one. None without either, as when a job starts for the first time.
        If the newest was saved without its buffers, the checkpoint gets those that the session saved, or went on
        from, before.

        Any number of processes may call it at once. It ends no session: call it once the job is dead, as what it writes
        afterwards is left behind when the next one begins.
        """
        from archive.checkpoint import Checkpoints
        from archive.journal import recover

        log = self._log()
        made = recover(log, run)
        self._committed(log.head)
        every = Checkpoints(self.storage, self.head, run, self.index.snapshot.annotations)
        return every.newest() if made is None else every.at_commit(made.number)

    @property
    def tags(self) -> Tags:
        """Name -> tag, as of this commit: `arc.tags["paper"].commit`."""
        from archive.maintain import Tags

        return Tags(self.storage, self.head)

    def tag(self, name: str, what: Checkpoint | int | None = None, *, by: str | None = None) -> Tag:
        """Name a checkpoint, or a commit by its number (None: the newest), for `archive.open(url, commit=name)`.

        A tag cannot be changed (AlreadyExistsError), and retains what it names: nothing of that is forgotten or pruned.
        If a later forgetting kept the checkpoint, the tag names the newest commit, which still has it. ExpiredError
        if it was forgotten already.
        """
        from archive.maintain import tags

        self._committed(tags.add(self._log(), name, what, by))
        return tags.Tags(self.storage, self.head)[name]

    def forget(
        self,
        keep: Keep | None = None,
        episodes: str | None = None,
        where: Any = None,
        ids: Any = None,
        run: str | None = None,
        redact: bool = False,
        dry_run: bool = True,
    ) -> ForgetPlan:
        """Plan to expire checkpoints and episodes; `.commit()` on the plan, or dry_run=False, does it.

        keep: retention of checkpoints (each run by itself); None: all stay.  episodes: "unreferenced": those go that no
        retained checkpoint holds; "superseded": those that newer revisions, or a resume, have replaced; None:
        only those selected by where and ids.  where: a condition as of `episodes.filter(where=)`.  ids: of episodes.
        With `episodes`, both narrow what may go.  run: nothing of other runs goes.

        redact: no data of these ids may be left, as for a legal request: shards that hold other episodes, too, are
        rewritten without them, and a prune deletes the rest. UsageError from `.commit()`, with nothing done, as long
        as a checkpoint, a tag, a running session or another archive needs something of them: the plan's `obstacles`.

        It is one commit, which deletes nothing: `undo()` brings all back, until it is pruned. In any case these
        stay: the newest whole checkpoint of each run (and the newest with its buffers), what the newest session of a
        run went on from and has written since, what tags name, what other archives refer to, and episodes that a
        checkpoint that stays holds. The plan says why each stays.

        UsageError if the policy is empty, or retains no checkpoint. The plan's `.commit()` raises
        ConflictError if other things would go by then.
        """
        from archive.maintain import Redaction, asked
        from archive.maintain import forget as forgetting

        found = asked(keep, episodes, where, ids, run, redact=redact)
        redaction = Redaction(self.storage, self.layout, found.ids or ()) if redact else None
        planned = forgetting.plan(self._log(), found, self._committed, redaction)
        return planned if dry_run else planned.commit()

    def undo(self) -> Self:
        """Bring back what the newest `forget` that is not undone forgot, by one more commit; what came since stays.

        UsageError if there is none; ConflictError if some of it was pruned, or a compaction, a merge or a restore
        came between.
        """
        from archive.maintain import undo

        self._committed(undo(self._log()))
        return self

    @property
    def forgotten_last(self) -> Commit:
        """The commit that `undo()` would bring back; UsageError if there is none."""
        from archive.maintain import to_undo

        return to_undo(self._log())

    def restore(self, commit: int) -> Self:
        """Restore an earlier commit as a new one; what came since is forgotten. Tags stay.

        Writers that are open now can no longer commit. ConflictError if some of it was pruned.
        """
        from archive.maintain import restore

        self._committed(restore(self._log(), commit))
        return self

    @property
    def labels(self) -> pa.Table:
        """The history of labels, oldest first: episode_id, key, value (JSON; null: removed), by,
        created_at, commit. Current labels are in `arc.episodes.table` and `ep.labels`."""
        from archive.index import labels

        return self.index.snapshot.annotations.labels.select(labels.HISTORY_COLUMNS)

    def label(self, said: Mapping[str, Mapping[str, Any]], *, by: str | None = None) -> Self:
        """Set labels on episodes, by id: `arc.label({"id": {"success": True, "quality": 0.9}}, by="anna")`.

        Values are JSON: a bool, number or string, a list or dict; None removes a label. The newest value of a key
        counts, the others stay in `arc.labels`. NotFoundError if an id has no episode; then no label is set.
        One small object and a commit, beside running writers.
        """
        from archive.read import notes

        self._committed(notes.label(self._log(), self.index, said, by))
        return self

    @property
    def late_fields(self) -> pa.Table:
        """The history of derived columns, oldest first: one row for each range of steps. fields,
        session, buffer, rank, env_id, position, length, dropped, provenance (JSON), by, created_at, commit."""
        from archive.read import notes

        return self.index.snapshot.annotations.late.select(notes.HISTORY_COLUMNS)

    def add_fields(
        self, fields: Mapping[Any, Mapping[str, Any]], *, provenance: Any = None, by: str | None = None
    ) -> Self:
        """Add derived columns to archived steps: `arc.add_fields({"advantage": {"episode id": rows}})`.

        Each is an array of one row a step of the episode; "judge/score" is a field within "judge". Of a field that is
        given twice the newest rows count, also over those that were written with the steps: a relabelled reward. They
        are read, sampled and passed on like any field; steps without it are read as `missing=` says. provenance: the
        origin of them, as JSON (function, version, weights); by: their author.

        They are written as shards of their own, with a commit, beside running writers; existing shards are not
        rewritten. NotFoundError for an unknown id, FieldError for rows that are not the episode's: then nothing is
        added.
        """
        from archive.read import notes

        self._committed(notes.add(self._log(), self.index, fields, provenance, by))
        return self

    def drop_fields(self, names: Sequence[Any]) -> Self:
        """Remove derived columns from all steps: `arc.drop_fields(["advantage"])`. Fields of that name that were
        written with the steps show again. FieldError for a name that is no derived column."""
        from archive.read import notes

        self._committed(notes.drop(self._log(), names))
        return self

    def verify(
        self,
        deep: bool = False,
        *,
        engine: str = "local",
        job: str | None = None,
        workers: int | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        progress: Progress | bool = False,
    ) -> Report:
        """Check that commits, tables, staged objects, journals and shards are there as they were written, and agree
        with each other: a report of `findings`, `.sound` without any. Changes nothing.

        deep: read every byte, and every step as a reader does; else the first bytes of each shard.  engine, workers,
        num_cpus, num_gpus: as of `episodes.map`.  job: a name under which what is checked is noted, batch by batch of
        shards: after whatever stopped it, the same call goes on with the rest, as of the commit at which it began, and
        reports all.  progress: True draws a bar; a function is called with (commits and shards done, all of them).
        """
        from archive.jobs import Crew
        from archive.maintain import verify

        crew = Crew(engine, workers, num_cpus, num_gpus)
        return verify(self, deep=deep, crew=crew, job=job, progress=progress)

    def prune(
        self,
        older_than: str | timedelta = "24h",
        dry_run: bool = True,
        *,
        force: bool = False,
        per_second: float | None = None,
        progress: Progress | None = None,
    ) -> PrunePlan:
        """Plan a garbage collection: deleting unneeded objects. `.commit()` on the plan, or dry_run=False, does it.

        Objects go that were forgotten, or that crashes have left behind, if that is older than `older_than`, by the
        store's clock (never this machine's): a number with w, d, h, m or s. Once a forgetting is
        older, objects that only commits before it need go, too: they can no longer be opened in full, nor can it be
        undone. An archive in which nothing was forgotten keeps all that a commit ever named.

        Commits never go, nor objects that the newest commit, commits since the last forgetting, tags or other archives
        need, nor those of a session that may still commit. Writers and readers may go on meanwhile: a writer that
        commits a deleted object gets ExpiredError, with nothing committed. The plan says why each object stays, and
        if the bucket keeps deleted versions. After a kill in between, the next prune goes on.

        force: permits less than an hour, if nobody else uses the archive.  per_second: the most objects to delete a
        second. progress: called with (objects deleted, total).
        """
        from archive.base import seconds_of
        from archive.maintain import prune

        planned = prune.plan(self._log(), seconds_of(older_than, "older_than"), self._committed, force=force)
        return planned if dry_run else planned.commit(per_second=per_second, progress=progress)


def at_commit(storage: Storage, commit: int | str) -> Commit:
    """A commit by its number, or a tag; NotFoundError if there is none."""
    if isinstance(commit, str):
        from archive.maintain import Tags

        commit = Tags(storage, commits.newest(storage))[commit].commit
    try:
        return commits.read(storage, commit)
    except MissingObjectError as e:
        raise NotFoundError(f"the archive at {storage.url} has no commit {commit}") from e
