"""What must still hold for a commit when others have let go of something, or deleted objects, since its writer began.

Deleting is safe by the order of commits, not by clocks: a prune commits the list of what it deletes before it deletes.
A writer that commits before that is seen by it; one that commits after it looks into the list here, and fails rather
than naming what is gone. So does one that holds steps which were forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from archive.base import CorruptManifestError, LetGoError
from archive.manifest import liveview, tablefiles
from archive.manifest.commit import Commit
from archive.manifest.records import FileRef
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

LEFT, FORGOTTEN = "left behind", "forgotten"  # reasons of a prune: no commit ever named it; a commit let go of it


class Crossing:
    """What one writer has come across since it began: commits that let go, and objects that others left behind which
    were pruned."""

    def __init__(self, head: Commit) -> None:
        self._let_go = head.let_go  # looked at before the first checkpoint, as what it goes on from may be older
        self._lists: list[FileRef] = []
        self._pruned: dict[str, int] = {}  # key -> the commit

    def note(self, commit: Commit) -> None:
        """A commit that another made."""
        if commit.let_go == commit.number:
            self._let_go = commit.let_go
        if commit.pruned is not None:
            self._lists.append(commit.pruned)

    def check(self, storage: Storage, parent: Commit, draft: Commit) -> None:
        """LetGoError if something that the draft is first to name was pruned, or steps live in it were forgotten."""
        self._load(storage)
        if self._pruned:
            self._check_objects(storage, parent, draft)
        if self._let_go is not None and draft.live is not None:
            self._check_live(storage, draft)

    def passed(self, commit: Commit) -> None:
        """A commit of this writer's own was made: what it holds was there."""
        if commit.live is not None:
            self._let_go = None

    def _load(self, storage: Storage) -> None:
        while self._lists:
            table = tablefiles.load(storage, "pruned", self._lists[:1])
            rows = zip(*(table[name].to_pylist() for name in ("key", "reason", "commit")), strict=True)
            self._pruned |= {key: number for key, reason, number in rows if reason == LEFT}
            del self._lists[:1]

    def _check_objects(self, storage: Storage, parent: Commit, draft: Commit) -> None:
        gone = sorted(self._pruned.keys() & _named(storage, parent, draft))
        if gone:
            raise LetGoError(
                f"{len(gone)} objects that this commit names, such as {storage.full_url(gone[0])}, were pruned by "
                f"commit {self._pruned[gone[0]]}, as nobody had committed them for as long as that waits; nothing was "
                "committed, and what they held is lost. Open a new writer, from the newest checkpoint, and write it "
                "again"
            )

    def _check_live(self, storage: Storage, draft: Commit) -> None:
        live = tablefiles.load(storage, "live", [] if draft.live is None else [draft.live])
        segments = tablefiles.load(storage, "segments", draft.files("segments"), liveview.SEGMENT_COLUMNS)
        try:
            liveview.locate(live, segments)
        except CorruptManifestError as e:
            raise LetGoError(
                f"steps that are live in this checkpoint were forgotten by commit {self._let_go} at {storage.url}, "
                f"after this writer had taken them over ({e}); nothing was committed. Resume from a checkpoint that is "
                "kept"
            ) from e


def _named(storage: Storage, parent: Commit, draft: Commit) -> set[str]:
    """The objects that a draft names, but for the manifest files that its parent names too, and what rows of those say.

    Rows that were folded into a new file count as well: no earlier commit can have named what was left behind.
    """
    known = {ref.path for ref in parent.all_files}
    out = {ref.path for ref in draft.all_files} - known
    for kind in ("segments", "late"):
        new = [ref for ref in draft.files(kind) if ref.path not in known]
        out |= _of_rows(tablefiles.load(storage, kind, new, ["shard", "chunks"]))
    if draft.checkpoint is None:
        return out
    return out | {one.key for one in draft.checkpoint.ranks} | {*(draft.checkpoint.borrowed or ())}


def _of_rows(rows: pa.Table) -> set[str]:
    """The shards and chunk files that rows name."""
    import pyarrow as pa

    return {key for name in ("shard", "chunks") for key in rows[name].cast(pa.string()).unique().to_pylist()}
