"""An archive as it is open, and what one does to it beside writing: a thin face over `maintain`, as a part of
`Archive`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from archive.base import UsageError
from archive.index import EpisodeIndex, Snapshot
from archive.log import DEFAULT_RUN, About, Commit, CommitLog, Place
from archive.store import Storage
from archive.write import Resume

if TYPE_CHECKING:
    from datetime import timedelta

    import pyarrow as pa

    from archive.checkpoint import Checkpoint, Keep
    from archive.journal import Tails
    from archive.maintain import ForgetPlan, Progress, PrunePlan, Tag, Tags, Usage
    from archive.read import Reader


class Upkeep:
    """An archive as it is open, as of one commit, and its verbs that add a commit without a writer."""

    def __init__(
        self, storage: Storage, about: About, raw: bytes, head: Commit, *, pinned: bool, single_writer: bool
    ) -> None:
        self._storage = storage
        self._about = about
        self._raw = raw
        self._pinned = pinned
        self._single_writer = single_writer
        self._index = EpisodeIndex(Snapshot(storage, head, read_only=pinned))
        self._show(head)

    def _show(self, head: Commit) -> None:
        self._head = head
        self._index = self._index.as_of(head)
        self._reader: Reader | None = None

    @property
    def url(self) -> str:
        return self._storage.url

    @property
    def id(self) -> str:
        return self._about.id

    @property
    def layout(self) -> str:
        return self._about.layout

    @property
    def storage(self) -> Storage:
        """The store in which it lies."""
        return self._storage

    @property
    def snapshot(self) -> Snapshot:
        """The segments table as of this commit."""
        return self._index.snapshot

    @property
    def index(self) -> EpisodeIndex:
        """The episodes as of this commit, as columns."""
        return self._index

    @property
    def head(self) -> Commit:
        """The commit that this shows."""
        return self._head

    @property
    def pinned(self) -> bool:
        """True if it was opened at a commit, and stays there."""
        return self._pinned

    def _log(self) -> CommitLog:
        """The log to which commits are added; UsageError in an archive that was opened at a commit."""
        if self._pinned:
            raise UsageError(
                f"this archive was opened at commit {self._head.number} and is read only; open it without commit="
            )
        return CommitLog(self._storage, self.id, self._head)

    def _committed(self, head: Commit) -> None:
        """Show this commit, if it is newer than what is shown."""
        if head.number > self._head.number:
            self._show(head)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "storage": self._storage, "about": self._about, "raw": self._raw, "head": self._head,
            "pinned": self._pinned, "single_writer": self._single_writer,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def usage(self) -> Usage:
        """The room that the archive takes on its store, in bytes and objects: live, held by checkpoints alone,
        forgettable, prunable. Reads tables and lists all objects; no data."""
        from archive.maintain import usage

        return usage(self.storage, self.head)

    def tails(self, run: str = DEFAULT_RUN) -> Tails:
        """The tails of a run: what its newest session has journaled beyond its newest checkpoint, rank by rank, and why
        each ends: `print(arc.tails("main"))`. Reads the objects, a request each; adopts nothing."""
        from archive.journal import tails

        return tails.of_run(self.storage, self.head, run)

    def recover(self, run: str = DEFAULT_RUN) -> Checkpoint | None:
        """Commit a checkpoint with all that a run's newest session has journaled beyond its newest one: this one or,
        where nothing was journaled, the newest whole one. None if there is neither, as when a job starts for the first
        time. Where the newest was saved without its buffers, it gets those that the session saved, or went on from,
        before.

        Any number of processes may do it at once. It ends no session: call it once the job is dead, as what it writes
        afterwards is left behind when the next one begins.
        """
        from archive.checkpoint import Checkpoints
        from archive.journal import recover

        log = self._log()
        made = recover(log, run)
        self._committed(log.head)
        every = Checkpoints(self.storage, self.head, run, self.index.snapshot.later)
        return every.newest() if made is None else every.at_commit(made.number)

    @property
    def tags(self) -> Tags:
        """Name -> tag, as of this commit: `arc.tags["paper"].commit`."""
        from archive.maintain import Tags

        return Tags(self.storage, self.head)

    def tag(self, name: str, what: Checkpoint | int | None = None, *, by: str | None = None) -> Tag:
        """Name a checkpoint, or a commit by its number (None: the newest), for `archive.open(url, commit=name)`.

        A tag stays what it is (AlreadyExistsError), and what it names is kept: nothing of it is forgotten or pruned.
        Where forgetting went over a checkpoint since, the tag names the newest commit, which still has it. LetGoError
        for what was let go of already.
        """
        from archive.maintain import tags

        self._committed(tags.add(self._log(), name, what, by))
        return tags.Tags(self.storage, self.head)[name]

    def forget(
        self, keep: Keep | None = None, episodes: str | None = None, where: Any = None, ids: Any = None,
        run: str | None = None, redact: bool = False, dry_run: bool = True,
    ) -> ForgetPlan:  # fmt: skip
        """Plan to let go of checkpoints and episodes; `.commit()` on the plan, or dry_run=False, does it.

        keep: which checkpoints stay (each run by itself); None: all.  episodes: "unreferenced": those go that no
        checkpoint that stays holds; "superseded": what newer revisions, or a resume, have taken the place of; None:
        none go but by where and ids.  where: a condition as of `episodes.filter(where=)`.  ids: of episodes. With
        `episodes`, both narrow what may go.  run: nothing of other runs goes.

        redact: nothing of these ids may be left, as somebody's data must go: shards that hold other episodes, too, are
        written anew without them, and a prune deletes the rest. UsageError from `.commit()`, with nothing done, as long
        as a checkpoint, a tag, a running session or another archive needs something of them: the plan's `obstacles`.

        It is one commit, which deletes nothing: `undo()` brings all back, until it is pruned. Whatever is asked, these
        stay: the newest whole checkpoint of each run (and the newest with its buffers), what the newest session of a
        run went on from and has written since, what tags name, what other archives refer to, and episodes that a
        checkpoint that stays holds. The plan says why each stays.

        UsageError if the policy says nothing, or wants none of the checkpoints. The plan's `.commit()` raises
        ConflictError if by then something else would go than it says.
        """
        from archive.maintain import Redaction, asked
        from archive.maintain import forget as forgetting

        found = asked(keep, episodes, where, ids, run, redact=redact)
        redaction = Redaction(self.storage, self.layout, found.ids or ()) if redact else None
        planned = forgetting.plan(self._log(), found, self._committed, redaction)
        return planned if dry_run else planned.commit()

    def undo(self) -> Self:
        """Bring back what the newest `forget` let go of that is not undone yet, by one more commit; what came since
        stays.

        UsageError if there is none; ConflictError if something of it was pruned, or a compaction, a merge or a restore
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
        """Make the archive as it was as of this commit, by one more; what came since is forgotten. Tags stay.

        Writers that are open now can no longer commit. ConflictError if something of it was pruned.
        """
        from archive.maintain import restore

        self._committed(restore(self._log(), commit))
        return self

    @property
    def labels(self) -> pa.Table:
        """The history of labels, oldest first: episode_id, key, value (JSON; null: taken back), by,
        created_at, commit. What counts of it is in `arc.episodes.table` and `ep.labels`."""
        from archive.index import labels

        return self.index.snapshot.later.labels.select(labels.TOLD)

    def label(self, said: Mapping[str, Mapping[str, Any]], *, by: str | None = None) -> Self:
        """Say something of episodes, by id: `arc.label({"id": {"success": True, "quality": 0.9}}, by="anna")`.

        Values are JSON: a bool, number or string, a list or dict; None takes a label back. Of each key the newest
        counts, the others stay in `arc.labels`. NotFoundError if there is no episode of some id; then nothing is said
        of any. One small object and a commit, beside running writers.
        """
        from archive.read import notes

        self._committed(notes.label(self._log(), self.index, said, by))
        return self

    @property
    def late_fields(self) -> pa.Table:
        """The history of added fields, oldest first: a row for each run of steps. fields,
        session, buffer, rank, env_id, position, length, dropped, provenance (JSON), by, created_at, commit."""
        from archive.read import notes

        return self.index.snapshot.later.late.select(notes.TOLD)

    def add_fields(
        self, fields: Mapping[Any, Mapping[str, Any]], *, provenance: Any = None, by: str | None = None
    ) -> Self:  # fmt: skip
        """Give steps fields that come after the fact: `arc.add_fields({"advantage": {"episode id": rows}})`.

        Each is an array of one row a step of the episode; "judge/score" lies within "judge". Of a field that is given
        twice the newest rows count, also over those that were written with the steps: a relabelled reward. They are
        read, sampled and passed on like any field; steps without it are read as `missing=` says. provenance: what made
        them, as JSON (function, version, weights); by: who.

        They are written as shards of their own, with a commit, beside running writers; none that is there is written
        again. NotFoundError for an unknown id, FieldError for rows that are not the episode's: then nothing is added.
        """
        from archive.read import notes

        self._committed(notes.add(self._log(), self.index, fields, provenance, by))
        return self

    def drop_fields(self, names: Sequence[Any]) -> Self:
        """Take fields that were added away from all steps again: `arc.drop_fields(["advantage"])`. What the steps were
        written with under that name shows again. FieldError if nobody added a field of some name."""
        from archive.read import notes

        self._committed(notes.drop(self._log(), names))
        return self

    def prune(
        self, older_than: str | timedelta = "24h", dry_run: bool = True, *, force: bool = False,
        per_second: float | None = None, progress: Progress | None = None,
    ) -> PrunePlan:  # fmt: skip
        """Plan to delete objects that nothing needs any more; `.commit()` on the plan, or dry_run=False, does it.

        Those go that were forgotten, and what crashes have left behind, if that is older than `older_than`, by the
        store's clock (never this machine's): a number with w, d, h, m or s. Once something was forgotten and that is
        older, what only commits before it need goes, too: they can no longer be opened in full, nor can it be undone.
        An archive in which nothing was forgotten keeps all that a commit ever named.

        Never commits; what the newest commit, tags or other archives need; what commits since the last forgetting need;
        what a session has put that may still commit. Writers and readers may go on meanwhile: who comes to commit what
        was deleted gets LetGoError, with nothing committed. The plan says why each stays, and whether the bucket keeps
        what is deleted. Killed in between, the next prune goes on; run again it does nothing.

        force: permits less than an hour, if nobody else uses the archive.  per_second: delete at most so many.
        progress: told (objects deleted, of how many).
        """
        from archive.base import seconds_of
        from archive.maintain import prune

        planned = prune.plan(self._log(), seconds_of(older_than, "older_than"), self._committed, force=force)
        return planned if dry_run else planned.commit(per_second=per_second, progress=progress)

    def _take_over(self, log: CommitLog, who: Place, start: Resume | None) -> None:
        """Before a session is opened: end the journal of the one whose place it takes. What that one has journaled is
        recovered or, where the new one goes on from a checkpoint, is told of if it goes beyond that."""
        entry = log.head.runs.get(who.run)
        if entry is None or not entry.journal:
            return
        from archive.journal import leave_behind, recover, tails

        if start is None:
            recover(log, who.run)
        left = tails.end(log, who)
        if left and start is None:
            recover(log, who.run)
        elif left and start is not None:
            leave_behind(log.storage, log.head, who.run, left, start.checkpoint)

    def _forgets(
        self, log: CommitLog, who: Place, keep: Keep | None, forget: str | None
    ) -> Callable[[Commit], None] | None:  # fmt: skip
        """A call that a writer makes after each checkpoint, to let go as it was told; UsageError if that makes no
        sense."""
        if forget is None:
            return None
        from archive.maintain import forget as forgetting

        forgetting.check_writer(log.head, who.run, keep, forget)
        return forgetting.after_checkpoint(self.storage, log.archive_id, who, forget)
