"""Tags: names for commits, given once. A tag retains what it names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from archive import tables
from archive.base import (
    AlreadyExistsError,
    ExpiredError,
    MissingObjectError,
    NotFoundError,
    UsageError,
    cached_property,
    check_text,
    one_line,
    tabulate,
)
from archive.checkpoint import Checkpoint
from archive.index import Walk
from archive.log import Addition, Attempt, Change, Commit, CommitLog, commits, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 20  # tags that a message names


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for a commit. checkpoint, run: set if a checkpoint was tagged."""

    name: str
    commit: int
    checkpoint: str | None
    run: str | None
    by: str | None
    created_at: datetime


COLUMNS = tuple(one.name for one in fields(Tag))


class Tags(Mapping[str, Tag]):
    """The tags of an archive by name, in the order in which they were given, as of one commit."""

    def __init__(self, storage: Storage, head: Commit) -> None:
        self._storage = storage
        self._head = head

    @cached_property
    def table(self) -> pa.Table:
        """A table with one row for each tag: name, commit, checkpoint, run, by, created_at."""
        rows = tablefiles.load(self._storage, "tags", self._head.files("tags"))
        return rows.drop_columns(["commit"]).rename_columns(COLUMNS)

    @cached_property
    def _by_name(self) -> dict[str, Tag]:
        return {row["name"]: Tag(**row) for row in self.table.to_pylist()}

    def __getitem__(self, name: str) -> Tag:
        if name not in self._by_name:
            known = ", ".join(map(repr, list(self._by_name)[-MAX_NAMED:])) or "none"
            raise NotFoundError(f"there is no tag {name!r} at {self._storage.url}; its tags: {known}")
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str, default: Any = None) -> Any:
        return self._by_name.get(name, default)

    @property
    def _rows(self) -> list[list[Any]]:
        return [[getattr(tag, name) for name in COLUMNS] for tag in self.values()]

    def _repr_html_(self) -> str:
        from archive.view import notebook

        return notebook.rows("Tags", COLUMNS, self._rows)

    def __repr__(self) -> str:
        return "\n".join([one_line(f"<{len(self)} tags at {self._storage.url}>"), *tabulate(COLUMNS, self._rows)])


def add(log: CommitLog, name: str, what: Checkpoint | int | None = None, by: str | None = None) -> Commit:
    """Commit a tag for a checkpoint, a commit by its number, or the newest commit; the commit with the tag.

    AlreadyExistsError if there is a tag of that name, NotFoundError if there is no such commit, ExpiredError if
    something that it needs was forgotten.
    """
    check_name(name)
    if by is not None:
        check_text(by, "by")
    if isinstance(what, Checkpoint) and what.archive_id != log.archive_id:
        raise UsageError(f"checkpoint {what.name!r} is of another archive than the one at {log.storage.url}")
    number = what.number if isinstance(what, Checkpoint) else what
    return log.commit(f"tag/{uuid.uuid4().hex}", Change("tag", partial(_added, name, number, by)))


def check_name(name: str) -> None:
    """Refuse a name that looks like a commit's number, or is invisible."""
    check_text(name, "a tag's name")
    if not name.strip() or not name.isprintable():
        raise UsageError(f"the tag {name!r} must have visible characters, and no invisible ones")
    if name.isdigit():
        raise UsageError(f"the tag {name!r} would be taken for a commit's number: give it a letter")


def _added(name: str, number: int | None, by: str | None, parent: Commit, attempt: Attempt) -> Addition:
    tags = Tags(attempt.storage, parent)
    if name in tags:
        there = tags[name]
        what = f"commit {there.commit}" + (f", checkpoint {there.checkpoint!r}" if there.checkpoint else "")
        raise AlreadyExistsError(
            f"there is a tag {name!r} at {attempt.storage.url} already, for {what}: a tag cannot be changed, give "
            "another name"
        )
    row = {"name": name, "by": by, "created_at": datetime.now(UTC)}
    row |= _named(attempt.storage, parent, parent.number if number is None else number)
    return {"tags": tables.from_columns("tags", {column: [value] for column, value in row.items()})}, {}


def _named(storage: Storage, parent: Commit, number: int) -> dict[str, Any]:
    """The row of the tagged commit or, where something that it led to was forgotten since, of the newest commit, if
    that still has its checkpoint."""
    if not 0 < number <= parent.number:
        raise NotFoundError(f"there is no commit {number} to tag at {storage.url}; the newest is {parent.number}")
    saved = tablefiles.load(storage, "checkpoints", parent.files("checkpoints"), ["commit", "name", "run"])
    found = [row for row in saved.to_pylist() if row["commit"] == number]
    told = {"checkpoint": found[0]["name"], "run": found[0]["run"]} if found else {}
    if parent.let_go is None or number >= parent.let_go:
        _check_whole(storage, parent, number)
        return {"target": number, **told}
    if not found:
        raise ExpiredError(
            f"commit {number} at {storage.url} cannot be tagged: commit {parent.let_go} forgot some of what it "
            "leads to. Tag one of arc.checkpoints, or a commit from that on; arc.undo() brings back what was forgotten"
        )
    return {"target": parent.number, **told}


def _check_whole(storage: Storage, parent: Commit, number: int) -> None:
    """ExpiredError if something that a commit leads to was pruned, also before an undo brought back what came later."""
    commit = commits.read_of(storage, number, parent)
    pruned = commits.pruned_since(storage, commit, parent)
    try:
        gone = pruned.keys() & Walk(storage).reach(commit).keys if pruned else ()
        lost = [storage.full_url(key) for key in sorted(gone)]
    except MissingObjectError as e:
        lost = [str(e)]
    if lost:
        raise ExpiredError(
            f"commit {number} at {storage.url} cannot be tagged: some of what it leads to was pruned ({lost[0]}). "
            "Tag one of arc.checkpoints, or a newer commit"
        )
