"""The runs that are not in the commit itself: in files of bounded size, ordered by name, and an index of these files,
which the commit names. So a commit is as small with 10,000 runs as with 50, and two requests find any of them."""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from archive import tables
from archive.base import (
    CorruptManifestError,
    IntegrityError,
    MissingObjectError,
    at_once,
    cached_property,
    layout,
    records,
)
from archive.log import tablefiles
from archive.log.records import FileRef, RunEntry
from archive.store import Storage

if TYPE_CHECKING:
    from archive.log.commit import Commit

MOST_OWN, KEPT_OWN = 48, 32  # runs in the commit itself, and how many are left where there are more
MOST_BYTES, KEPT_BYTES = 256 * 1024, 128 * 1024  # of their text
FILE_BYTES = 32 * 1024  # of the text of a file's runs, if it has several
_AT_ONCE = 16
_REMEDY = "run `archive verify`"
_Files = tuple[tuple[str, FileRef], ...]  # the least name in each, in order
_last: WeakKeyDictionary[Storage, tuple[str, _Files]] = WeakKeyDictionary()  # path of the index read last, what it has


class KnownRuns(Mapping[str, RunEntry]):
    """The runs of a commit by name. Its own are in the commit itself, and count whatever a file says; those of an index
    are read when they are asked for, and kept."""

    def __init__(self, storage: Storage, own: Mapping[str, RunEntry], index: FileRef | None) -> None:
        self._storage = storage
        self.own, self.index = own, index
        self._read: dict[str, dict[str, RunEntry]] = {}  # by the least name of a file

    def __getitem__(self, run: str) -> RunEntry:
        if run in self.own:
            return self.own[run]
        at = self._place(run)
        return self._load(self.files[at : at + 1])[run]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._load(self.files), **self.own})

    def __len__(self) -> int:
        return len({*self._load(self.files), *self.own})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownRuns) and (self.own, self.index) == (other.own, other.index)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return KnownRuns, (self._storage, self.own, self.index)

    def saying(self, own: Mapping[str, RunEntry]) -> KnownRuns:
        """The same files beside other runs of the commit's own."""
        out = KnownRuns(self._storage, own, self.index)
        out._read = self._read
        return out

    @cached_property
    def files(self) -> _Files:
        """The files of the index."""
        if self.index is None:
            return ()
        path, files = _last.get(self._storage, ("", ()))
        if path != self.index.path:
            rows = tablefiles.load(self._storage, "runfiles", [self.index]).to_pylist()
            files = tuple((row.pop("first"), FileRef(**row)) for row in rows)
            _last[self._storage] = self.index.path, files
        return files

    def having(self, changed: Mapping[str, RunEntry], session: str) -> KnownRuns:
        """The same, with these runs in files. `session` rewrites the files that have a changed run, or would have
        it."""
        new = {run: json.dumps(entry.to_json(), separators=(",", ":")) for run, entry in changed.items()}
        touched = {self._place(run) for run in new}
        old = self._texts([one for at, one in enumerate(self.files) if at in touched])
        by_file: dict[int, list[tuple[str, str]]] = {}
        for run, text in sorted((old | new).items()):
            by_file.setdefault(self._place(run), []).append((run, text))
        pieces = [piece for rows in by_file.values() for piece in _pieces(rows)]

        def written(rows: Sequence[tuple[str, str]]) -> tuple[str, FileRef]:
            names, texts = zip(*rows, strict=True)
            table = tables.from_columns("runs", {"run": names, "entry": texts})
            return names[0], tablefiles.write(self._storage, session, "runs", table)

        kept = [one for at, one in enumerate(self.files) if at not in touched]
        files = tuple(sorted([*kept, *at_once(written, pieces, _AT_ONCE)], key=lambda one: one[0]))
        columns = {name: [getattr(ref, name) for _, ref in files] for name in ("path", "rows", "bytes", "crc32c")}
        table = tables.from_columns("runfiles", {"first": [first for first, _ in files], **columns})
        index = tablefiles.write(self._storage, session, "runfiles", table)
        _last[self._storage] = index.path, files
        return KnownRuns(self._storage, self.own, index)

    def _place(self, run: str) -> int:
        """The number of the file that has the run, or would have it."""
        return max(bisect_right(self.files, run, key=lambda one: one[0]) - 1, 0)

    def _load(self, files: _Files) -> dict[str, RunEntry]:
        missing = [one for one in files if one[0] not in self._read]
        for run, text in self._texts(missing).items():
            first = self.files[self._place(run)][0]
            self._read.setdefault(first, {})[run] = _entry(run, text, self._storage)
        return {run: entry for first, _ in files for run, entry in self._read.get(first, {}).items()}

    def _texts(self, files: Sequence[tuple[str, FileRef]]) -> dict[str, str]:
        """Run -> its entry as text, of the runs of some files. Each must be in the file where it is looked for."""
        table = tablefiles.load(self._storage, "runs", [ref for _, ref in files])
        names = table["run"].to_pylist()
        held = [first for first, ref in files for _ in range(ref.rows)]
        if astray := [run for run, first in zip(names, held, strict=True) if self.files[self._place(run)][0] != first]:
            raise CorruptManifestError(
                f"run {astray[0]!r:.80} is not in the file of runs at {self._storage.url} in which it is looked for; "
                f"{_REMEDY}"
            )
        return dict(zip(names, table["entry"].to_pylist(), strict=True))


def _entry(run: str, text: str, storage: Storage) -> RunEntry:
    what = f"run {run!r:.80} of a file of runs at {storage.url}"
    body = records.parse_object(text.encode(), what=what, error=CorruptManifestError, max_depth=records.MAX_DEPTH)
    return RunEntry.from_json(body, what=what, error=CorruptManifestError, remedy=_REMEDY)


def _pieces(rows: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The rows of one file each: all, or half of what a file may hold, so that there is room."""
    if sum(len(text) for _, text in rows) <= FILE_BYTES:
        return [rows]
    out: list[list[tuple[str, str]]] = []
    nbytes = FILE_BYTES
    for row in rows:
        nbytes += len(row[1])
        if nbytes > FILE_BYTES // 2:
            out.append([])
            nbytes = len(row[1])
        out[-1].append(row)
    return out


# -- commits -----------------------------------------------------------------------------------------------------------


def served(storage: Storage, commit: Commit) -> Commit:
    """The commit that was read, with all of its runs."""
    if commit.run_files is None:
        return commit
    return replace(commit, runs=KnownRuns(storage, commit.own_runs, commit.run_files))


def files_there(commit: Commit) -> list[FileRef]:
    """The manifest files that an old commit leads to; only those that it names, if its index of runs was pruned since
    or is damaged."""
    try:
        return commit.files_led_to
    except (MissingObjectError, IntegrityError):
        return commit.all_files


def settled(storage: Storage, parent: Commit, draft: Commit, attempt: int) -> Commit:
    """The draft. If it has too many runs itself, those that were touched longest ago move to files.

    After a lost race the move is put off if possible: then speed matters more.
    """
    sizes = {run: len(json.dumps(entry.to_json())) for run, entry in draft.own_runs.items()}
    patience = 2 if attempt else 1
    few = len(sizes) <= patience * MOST_OWN and sum(sizes.values()) <= patience * MOST_BYTES
    if few:
        return draft
    kept = _kept(parent, draft, sizes)
    rest = {run: entry for run, entry in draft.own_runs.items() if run not in kept}
    own = {run: draft.own_runs[run] for run in kept}
    runs = KnownRuns(storage, own, draft.run_files).having(rest, draft.session or secrets.token_hex(6))
    known = layout.with_feature(draft.format, layout.RUN_FILES)
    return replace(draft, runs=runs, run_files=runs.index, format=known)


def _kept(parent: Commit, draft: Commit, sizes: Mapping[str, int]) -> set[str]:
    """The runs that stay in the draft itself: those that it changes, one in any case, and those with the newest session
    or checkpoint."""

    def touched(run: str) -> tuple[bool, int]:
        entry = draft.own_runs[run]
        newest = max([entry.opened or 0, *(mark.commit for mark in entry.marks.values())])
        return entry != parent.own_runs.get(run), newest

    out: set[str] = set()
    nbytes = 0
    for run in sorted(sizes, key=touched, reverse=True)[:KEPT_OWN]:
        nbytes += sizes[run]
        if out and nbytes > KEPT_BYTES:
            break
        out.add(run)
    return out
