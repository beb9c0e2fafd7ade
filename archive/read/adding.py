"""Giving steps fields that come after the fact: shards of their own, rows of the late table, and a commit that names
them. What was written before stays as it is."""

from __future__ import annotations

import hashlib
import inspect
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import (
    CorruptCommitError,
    FieldError,
    LetGoError,
    UsageError,
    check_text,
    escape_path,
    jsontree,
    layout,
    show,
)
from archive.fields import to_path
from archive.manifest import Addition, Attempt, Change, Commit, CommitLog, EpisodeIndex, Snapshot, about, new_session
from archive.observe import timed
from archive.read import labelling
from archive.read.chosen import Chosen
from archive.read.lateshards import Given, LateShards, checked
from archive.read.reader import Reader
from archive.read.spans import Spans
from archive.store import Storage
from archive.tables import STRETCH, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

TOLD = (
    "fields", "session", "buffer", "rank", "env_id", "position", "length", "dropped", "provenance", "by", "created_at",
    "commit",
)  # fmt: skip
Fields = Mapping[Any, Mapping[str, Any]]  # name -> episode id -> rows


def add(log: CommitLog, known: EpisodeIndex, given: Fields, provenance: Any, by: str | None) -> Commit:
    """Give episodes fields, by name and id; the commit. Nothing is written unless all of them can be added.

    known: the episodes as they were seen last, which saves reading them again.
    """
    ids = list(dict.fromkeys(episode for values in given.values() for episode in values))
    if not ids:
        raise UsageError('no field is given for any episode: give arc.add_fields({"advantage": {episode id: rows}})')
    index = known.as_of(log.catch_up())
    reader = Reader(index.snapshot)
    spans = Chosen(reader, index, labelling.numbers_of(index, ids, "nothing was added to any")).step_spans()
    steps, known_fields = spans.lengths().tolist(), reader.shown(spans).schemas
    values = ({name: of[episode] for name, of in given.items() if episode in of} for episode in ids)
    fields = [checked(of, n, episode, known_fields) for of, n, episode in zip(values, steps, ids, strict=True)]
    return write(log, reader, ((spans.one(i), of) for i, of in enumerate(fields)), provenance, by)


@timed("add_fields")
def write(
    log: CommitLog, reader: Reader, made: Iterable[tuple[Spans, Given]], provenance: Any, by: str | None
) -> Commit:  # fmt: skip
    """Write late fields of episodes, each with its steps, as they are made; then commit them all."""
    said = {"provenance": _text(provenance), "by": None if by is None else check_text(by, "by")}
    session = new_session()
    shards = LateShards(reader.snapshot, session, _layout(log.storage))
    for spans, given in made:
        shards.add(spans, given)
    rows, chunks = shards.close()
    if not rows.num_rows:
        return log.catch_up()
    for name, value in {**said, "created_at": datetime.now(UTC)}.items():
        rows = tables.set_column(rows, name, value)
    there = partial(_check_there, reader.snapshot, rows)
    change = Change("late", lambda parent, attempt: ({"late": rows}, {"chunks": chunks}), [there], session=session)
    return log.commit(f"late/{uuid.uuid4().hex}", change)


def _layout(storage: Storage) -> str:
    found = about.find(storage)
    if found is None:
        raise CorruptCommitError(f"{storage.full_url(layout.ARCHIVE_KEY)} is gone; put it back from a copy")
    return found[0].layout


def _check_there(seen: Snapshot, rows: pa.Table, parent: Commit) -> None:
    """LetGoError if some of the steps that the rows are of were let go of since they were seen."""
    if parent.let_go is None or parent.let_go <= seen.commit.number:
        return
    now = Snapshot(seen.storage, parent)
    found = overlaps(rows, now.columns(STRETCH))
    if int(found.length.sum()) < int(rows["length"].to_numpy().sum()):
        raise LetGoError(
            f"some of the steps that were given fields were forgotten at {now.storage.url} meanwhile; nothing was "
            "added to any. Open the archive again"
        )


def _text(provenance: Any) -> str | None:
    return None if provenance is None else jsontree.dumps(provenance, where="provenance")


@timed("drop_fields")
def drop(log: CommitLog, names: Sequence[Any]) -> Commit:
    """Take late fields away from all steps; the commit. FieldError if nobody added a field of some name."""
    if isinstance(names, str) or not names:
        raise UsageError('give a list of names of late fields, as in arc.drop_fields(["advantage"])')
    wanted = list(dict.fromkeys(escape_path(to_path(name)) for name in names))
    return log.commit(f"late/{uuid.uuid4().hex}", Change("late", partial(_dropped, wanted)))


def _dropped(names: Sequence[str], parent: Commit, attempt: Attempt) -> Addition:
    late = attempt.load("late", parent.files("late"))
    parts = [_to_drop(late, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if not part.num_rows:
            raise FieldError(f"no field {name!r} was added to steps at {attempt.storage.url}; nothing was dropped")
    return {"late": tables.set_column(tables.concat("late", parts), "created_at", datetime.now(UTC))}, {}


def _to_drop(late: pa.Table, name: str) -> pa.Table:
    """Rows that take a field away from all steps that have it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = late["fields"].combine_chunks()
    owner = pc.list_parent_indices(names).to_numpy()
    has = np.zeros(late.num_rows, bool)
    has[owner[pc.equal(pc.list_flatten(names), name).to_numpy(zero_copy_only=False)]] = True
    dropped, commit = pc.fill_null(late["dropped"], False).to_numpy(), late["commit"].to_numpy()
    since = commit[has & dropped].max(initial=-1)
    taken = late.filter(pa.array(has & ~dropped & (commit > since))).select(list(STRETCH))
    columns = {column: taken[column] for column in taken.column_names}
    return tables.from_columns("late", {**columns, "fields": [[name]] * taken.num_rows, "dropped": True})


# -- fields that a function makes of others ----------------------------------------------------------------------------


def map_all(
    episodes: Chosen, streamed: Iterable[tuple[Any, dict[str, Any]]], fn: Callable[..., Mapping[Any, Any]],
    adds: Sequence[Any] | None, provenance: Any, by: str | None,
) -> None:  # fmt: skip
    """Give each episode the fields that a function makes of its steps, as they are streamed; one commit at the end."""
    later = episodes.episode_index.snapshot.later
    if later.read_only:
        raise UsageError(
            f"this archive was opened at commit {later.head.number} and is read only; open it without commit="
        )
    log = CommitLog(later.storage, later.head.archive, later.head)
    made = _made(episodes, streamed, fn, adds)
    later.show(write(log, episodes.reader, made, told(fn, provenance), by))


def _made(
    episodes: Chosen, streamed: Iterable[tuple[Any, dict[str, Any]]], fn: Callable[..., Mapping[Any, Any]],
    adds: Sequence[Any] | None,
) -> Iterator[tuple[Spans, Given]]:  # fmt: skip
    spans = episodes.step_spans()
    known, steps = episodes.reader.shown(spans).schemas, spans.lengths().tolist()
    wanted = None if adds is None else {to_path(name) for name in ([adds] if isinstance(adds, str) else adds)}
    for i, (episode, data) in enumerate(streamed):
        found = fn(data)
        have = {to_path(name) for name in found} if isinstance(found, Mapping) else None
        if not have or have != (wanted or have):
            gave = "no dict" if have is None else sorted(map(show, have))
            raise FieldError(
                f"the function gave {gave} for episode {episode.id!r}; let it return a dict of one array each, with a "
                f"row a step, of {sorted(map(show, wanted)) if wanted else 'the fields to add'}"
            )
        yield spans.one(i), checked(found, steps[i], episode.id, known)


def told(fn: Callable[..., Any], provenance: Any) -> dict[str, Any]:
    """What is recorded of a function that made fields: its name, the version of its package, a digest of its text."""
    module = getattr(fn, "__module__", None) or ""
    out = {"function": f"{module}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"}
    package = sys.modules.get(module.partition(".")[0])
    version = getattr(fn, "__version__", None) or getattr(package, "__version__", None)
    if version is not None:
        out["version"] = str(version)
    with suppress(OSError, TypeError):  # typed at a prompt, or no function
        out["source"] = hashlib.sha256(inspect.getsource(fn).encode()).hexdigest()[:16]
    return out if provenance is None else {**out, "provenance": provenance}
