"""Requirements of every commit, given what others committed since its writer began: numbers only grow, and nothing is
named that was forgotten or pruned.

Deleting is safe by the order of commits, not by clocks: a prune commits the list of what it deletes before it deletes.
The prune sees a writer that commits before that; a writer that commits after it looks into the list here, and fails
rather than name what is gone. So does a writer that holds forgotten steps, or columns in forgotten objects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from archive import tables
from archive.base import CheckpointError, CorruptManifestError, ExpiredError
from archive.log import tablefiles
from archive.log.commit import Commit
from archive.log.records import FileRef, RunEntry
from archive.store import Storage
from archive.tables import SHARDED, objects_of

LEFT, FORGOTTEN = "left behind", "forgotten"  # reasons of a prune: no commit ever named it; a commit forgot it
# of a run's entry: rank or node -> how many are in it
_GROWING = {
    "sequences": "rows of rank",
    "journal": "objects of the journal of rank",
    "nodes": "objects of the journal of node",
}


class Conflicts:
    """Deletions committed by others since one writer began: commits that forgot, and objects that were pruned."""

    def __init__(self, head: Commit) -> None:
        self._let_go = head.let_go  # checked before the first checkpoint, whose base may be older
        self._since = head.number  # the writer may name what this commit led to
        self._lists: list[FileRef] = []
        self._pruned: dict[str, int] = {}  # key -> the commit
        self._newest_loss = 0
        self.newest_prune = 0  # the number of the commit

    def note(self, commit: Commit) -> None:
        """Take note of a commit that another writer made."""
        if commit.let_go == commit.number:
            self._let_go = self._newest_loss = commit.number
        if commit.pruned is not None:
            self._lists.append(commit.pruned)
            self._newest_loss = self.newest_prune = commit.number

    def check(self, storage: Storage, parent: Commit, draft: Commit) -> None:
        """Raise if the draft must not follow its parent: CheckpointError if something newer of its session is committed
        already, ExpiredError if it refers to what was forgotten or pruned."""
        _check_grows(parent, draft)
        _check_origin(storage, parent, draft)
        self._check_objects(storage, parent, draft)
        if self._let_go is not None and draft.live is not None:
            self._check_live(storage, draft)

    def passed(self, commit: Commit) -> None:
        """Take note of a commit of this writer's own: all that it names was there."""
        if commit.live is not None:
            self._let_go, self._since = None, commit.number

    def gone(self, storage: Storage, head: Commit, keys: Collection[str], since: int) -> dict[str, int]:
        """The objects in `keys` that were forgotten or pruned after commit `since`, which led to them, and by which
        commit."""
        if not keys or self._newest_loss <= since:
            return {}
        self._load(storage)
        files = [ref for ref in head.files("forgotten") if ref.commit is None or ref.commit[1] > since]
        rows = tablefiles.load(storage, "forgotten", files, ["key", "commit"])
        forgotten = zip(rows["key"].to_pylist(), rows["commit"].to_pylist(), strict=True)
        found = {key: number for key, number in forgotten if number > since and key in keys}
        return found | {key: self._pruned[key] for key in keys if key in self._pruned}

    def _load(self, storage: Storage) -> None:
        while self._lists:
            table = tablefiles.load(storage, "pruned", self._lists[:1], ["key", "commit"])
            self._pruned.update(zip(table["key"].to_pylist(), table["commit"].to_pylist(), strict=True))
            del self._lists[:1]

    def _check_objects(self, storage: Storage, parent: Commit, draft: Commit) -> None:
        borrowed = () if draft.checkpoint is None else draft.checkpoint.borrowed
        if lost := self.gone(storage, parent, {*borrowed}, self._since):
            key = min(lost)
            raise ExpiredError(
                f"columns, attributes or states of this checkpoint are in {len(lost)} objects of earlier ones, such as "
                f"{storage.full_url(key)}, which commit {lost[key]} forgot meanwhile; nothing was committed. Save "
                "another checkpoint: it writes them again"
            )
        self._load(storage)
        gone = sorted(self._pruned.keys() & _named(storage, parent, draft)) if self._pruned else []
        if gone:
            raise ExpiredError(
                f"{len(gone)} objects that this commit names, such as {storage.full_url(gone[0])}, were pruned by "
                f"commit {self._pruned[gone[0]]}, as no commit had led to them for as long as that waits; nothing was "
                "committed, and what they held is lost. Open the archive again, a writer from its newest checkpoint, "
                "and write it again"
            )

    def _check_live(self, storage: Storage, draft: Commit) -> None:
        live = tablefiles.load(storage, "live", [] if draft.live is None else [draft.live])
        segments = tablefiles.load(storage, "segments", draft.files("segments"), tables.LOCATING)
        try:
            tables.locate(live, segments)
        except CorruptManifestError as e:
            raise ExpiredError(
                f"steps that are live in this checkpoint were forgotten by commit {self._let_go} at {storage.url}, "
                f"after this writer had taken them over ({e}); nothing was committed. Resume from a checkpoint that is "
                "kept"
            ) from e


def _check_grows(parent: Commit, draft: Commit) -> None:
    """CheckpointError if a session would have less, or an older checkpoint, than it has."""
    for run, entry in draft.own_runs.items():
        before = parent.runs.get(run)
        if before is None or before is entry or before.session != entry.session:
            continue
        for field, what in _GROWING.items():
            old: Mapping[int, int] = getattr(before, field) or {}
            new: Mapping[int, int] = getattr(entry, field) or {}
            if back := [rank for rank, number in old.items() if new.get(rank, 0) < number]:
                rank = back[0]
                told = f"{old[rank]} {what} {rank}, this one {new.get(rank, 0)}"
                raise _newer(before, draft, f"has {told} (somebody recovered them meanwhile)")
    _check_order(parent, draft)


def _check_order(parent: Commit, draft: Commit) -> None:
    """Require that every rank's part is newer than its part of the latest checkpoint, whichever rank was late.

    Then the least ordinal of the ranks grows too, also where a rank counted calls that others did not make.
    """
    made, before = draft.checkpoint, parent.runs.get(draft.run)
    latest = None if before is None else before.latest
    if made is None or before is None or latest is None or latest.session != draft.session:
        return
    if draft.kind != "checkpoint" or made.recovered is not None:
        return
    if not made.whole and latest.name == made.name:
        raise _newer(before, draft, "is whole")
    if latest.ordinal >= made.ordinal:
        raise _newer(before, draft, "is newer")


def _check_origin(storage: Storage, parent: Commit, draft: Commit) -> None:
    """ExpiredError if a session is to go on from a checkpoint that was forgotten."""
    entry, before = draft.runs.get(draft.run), parent.runs.get(draft.run)
    if entry is None or entry.resumed_from is None:
        return
    known = before is not None and before.session == entry.session and before.resumed_from is not None
    number = entry.resumed_from.commit
    if known or parent.let_go is None or number > parent.let_go:
        return
    marked = {mark.commit for entry in parent.runs.values() for mark in entry.marks.values()}
    kept = tablefiles.load(storage, "checkpoints", parent.files("checkpoints"), ["commit"])["commit"].to_pylist()
    if number not in marked and number not in kept:
        raise ExpiredError(
            f"the checkpoint of commit {number} at {storage.url} was forgotten by commit {parent.let_go} at the "
            "latest: go on from one of arc.checkpoints, or bring it back by arc.undo() or arc.restore(commit=...)"
        )


def _newer(before: RunEntry, draft: Commit, why: str) -> CheckpointError:
    """The error of a checkpoint that comes too late. why: a clause about the newest checkpoint of its session."""
    made, latest = draft.checkpoint, before.latest
    what = f"what session {draft.session!r} wrote" if made is None else f"checkpoint {made.name!r}"
    newest = ("what", "committed") if latest is None else (f"{latest.name!r},", f"commit {latest.commit}")
    return CheckpointError(
        f"{what} was not committed: {newest[0]} which {why}, is {newest[1]} already; go on with the next checkpoint"
    )


def _named(storage: Storage, parent: Commit, draft: Commit) -> set[str]:
    """The objects that a draft names, and that rows of its new manifest files name.

    Rows that were folded into a new file count as well: what the parent leads to was not pruned.
    """
    known = {ref.path for ref in parent.files_led_to}
    out = {ref.path for ref in draft.files_led_to} - known
    for kind in SHARDED:
        new = [ref for ref in draft.files(kind) if ref.path not in known]
        out |= objects_of(tablefiles.load(storage, kind, new, ["shard", "chunks"]))
    if draft.checkpoint is None:
        return out
    return out | {one.key for one in draft.checkpoint.ranks} | {*draft.checkpoint.borrowed}
