"""Annotations, as rows beside those of segments, and a commit that names them: labels of episodes, and derived columns
of their steps, in shards of their own. Data that was written before stays as it is."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, arrow
from archive.base import (
    CorruptCommitError,
    ExpiredError,
    FieldError,
    NotFoundError,
    UsageError,
    check_text,
    escape_path,
    jsontree,
    layout,
)
from archive.fields import to_path
from archive.index import Annotations, EpisodeIndex, Snapshot, labels, value_set
from archive.log import (
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    FileRef,
    Requirement,
    about,
    new_session,
    tablefiles,
)
from archive.observe import timed
from archive.read import lateshards
from archive.read.chosen import Chosen
from archive.read.lateshards import LateRows, checked
from archive.read.reader import Reader
from archive.store import Storage
from archive.tables import ADDRESS, KEYS, STRETCH, of_segments, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 5
HISTORY_COLUMNS = (
    "fields", "session", "buffer", "rank", "env_id", "position", "length", "dropped", "provenance", "by", "created_at",
    "commit",
)  # fmt: skip
Fields = Mapping[Any, Mapping[str, Any]]  # name -> episode id -> rows


# -- rows beside segments ----------------------------------------------------------------------------------------------


def _stamped(kind: str, rows: pa.Table, by: str | None, **more: Any) -> pa.Table:
    """Rows of a table, with their author and time."""
    if by is not None:
        check_text(by, "by")
    columns = {name: rows[name] for name in rows.column_names}
    return tables.from_columns(kind, {**columns, **more, "by": by, "created_at": datetime.now(UTC)})


def _still_there(kind: str, seen: Snapshot, rows: pa.Table) -> Requirement:
    """A requirement of a commit of these rows: nothing that they name was forgotten since it was read; ExpiredError."""

    def check(parent: Commit) -> None:
        if parent.let_go is None or parent.let_go <= seen.commit.number:
            return
        now = Snapshot(seen.storage, parent).columns(KEYS)
        if kind == "labels":
            gone = rows.filter(~of_segments(kind, rows, now))["episode_id"].unique().to_pylist()
            what = f"{len(gone)} of these episodes, such as {gone[0]!r}," if gone else ""
            undone = "no label was written"
        else:
            left, asked = int(overlaps(rows, now).length.sum()), int(rows["length"].to_numpy().sum())
            what = "some of the steps that were given fields" if left < asked else ""
            undone = "nothing was added to any"
        if what:
            raise ExpiredError(f"{what} were forgotten at {seen.storage.url} meanwhile; {undone}. Re-open the archive")

    return check


def log_of(annotations: Annotations) -> CommitLog:
    """The log of the episodes' archive; UsageError if it was opened at a commit."""
    if annotations.read_only:
        raise UsageError(
            f"this archive was opened at commit {annotations.head.number} and is read only; open it without commit="
        )
    return CommitLog(annotations.storage, annotations.head.archive, annotations.head)


def numbers_of(index: EpisodeIndex, ids: Sequence[str], undone: str) -> Ints:
    """The numbers of episodes in an index; NotFoundError, with what was not done, if some are not there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = value_set("episode_id", ids, pa.string())
    number = pc.index_in(wanted, value_set=index.column("episode_id").combine_chunks())
    if number.null_count:
        unknown = wanted.filter(pc.is_null(number)).unique().to_pylist()
        some = ", ".join(map(repr, unknown[:MAX_NAMED]))
        raise NotFoundError(
            f"{len(unknown)} of these episodes are not at {index.snapshot.storage.url}, such as {some}; {undone}. "
            "`archive episodes` lists them"
        )
    found: Ints = number.to_numpy().astype("int64")
    return found


# -- labels ------------------------------------------------------------------------------------------------------------


def label_all(episodes: Chosen, said: Mapping[str, Any], by: str | None = None) -> None:
    """Set the same labels on these episodes, as they are seen there; they show at once.

    UsageError if they are of an archive that was opened at a commit, ExpiredError if some were forgotten meanwhile.
    """
    if not said:
        raise UsageError("no labels were given: give some, as in eps.label(success=True)")
    texts = {check_key(key): labels.text_of(value, key) for key, value in said.items()}
    index, count = episodes.episode_index, len(episodes)
    log = log_of(index.snapshot.annotations)
    if count:
        of = np.repeat(np.arange(len(texts)), count)
        rows = _rows(index, np.tile(episodes.numbers, len(texts)), list(texts), list(texts.values()), of)
        there = _still_there("labels", index.snapshot, rows)
        index.snapshot.annotations.show(_label(log, lambda parent: rows, by, [there]))


def label(log: CommitLog, index: EpisodeIndex, said: Mapping[str, Mapping[str, Any]], by: str | None = None) -> Commit:
    """Set labels on episodes, by id; the commit. NotFoundError if an id has no episode.

    index: the episodes as they were last read, which saves reading them again.
    """
    ids: list[str] = []
    keys: list[str] = []
    texts: list[str | None] = []
    for name, mine in said.items():
        check_text(name, "an episode's id")
        for key, value in mine.items():
            ids.append(name)
            keys.append(key)
            texts.append(labels.text_of(value, key))
    for key in set(keys):
        check_key(key)
    return _label(log, partial(_by_id, index, ids, keys, texts), by) if ids else log.catch_up()


def check_key(key: str) -> str:
    """A label's key; UsageError for one that is invisible."""
    check_text(key, "a label's key")
    if not key.strip() or not key.isprintable():
        raise UsageError(f"the label {key!r} must have visible characters, and no invisible ones")
    return key


def _by_id(
    known: EpisodeIndex, ids: Sequence[str], keys: Sequence[str], texts: Sequence[str | None], parent: Commit
) -> pa.Table:
    """A row for each of these, for the episode as it is at a commit."""
    storage, same = known.snapshot.storage, known.snapshot.commit.same_episodes(parent)
    index = known if same else EpisodeIndex(Snapshot(storage, parent))
    return _rows(index, numbers_of(index, ids, "no label was written"), keys, texts, np.arange(len(keys)))


def _rows(index: EpisodeIndex, numbers: Ints, keys: Sequence[str], texts: Sequence[str | None], of: Ints) -> pa.Table:
    """Rows that say keys[of[i]] and texts[of[i]] of the newest segment of episode numbers[i]."""
    import pyarrow as pa

    one = index.snapshot.take(index.chains.lasts()[numbers], ["episode_id", *ADDRESS])
    coded = pa.array(keys, pa.string()).dictionary_encode().take(arrow(of))
    return one.append_column("key", coded).append_column("value", pa.array(texts, pa.string()).take(arrow(of)))


@timed("label")
def _label(
    log: CommitLog, rows: Callable[[Commit], pa.Table], by: str | None, requires: Sequence[Requirement] = ()
) -> Commit:
    """Commit labels. rows: gives the rows to commit after a commit, without author and time."""

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        return {"labels": _stamped("labels", rows(parent), by)}, {}

    return log.commit(f"label/{uuid.uuid4().hex}", Change("label", adds, requires))


# -- fields ------------------------------------------------------------------------------------------------------------


def add(log: CommitLog, known: EpisodeIndex, given: Fields, provenance: Any, by: str | None) -> Commit:
    """Add derived columns, by name and episode id; the commit. Nothing is written unless all of them can be added.

    known: the episodes as they were last read, which saves reading them again.
    """
    ids = list(dict.fromkeys(episode for values in given.values() for episode in values))
    if not ids:
        raise UsageError('no columns were given: give some, as in arc.add_fields({"advantage": {episode id: rows}})')
    index = known.as_of(log.catch_up())
    reader = Reader(index.snapshot)
    spans = Chosen(reader, index, numbers_of(index, ids, "nothing was added to any")).step_spans()
    steps, known_fields = spans.lengths().tolist(), reader.shown(spans).schemas
    values = ({name: of[episode] for name, of in given.items() if episode in of} for episode in ids)
    fields = [checked(of, n, episode, known_fields) for of, n, episode in zip(values, steps, ids, strict=True)]
    made = (one.of(index.snapshot, spans) for one in lateshards.gathered(enumerate(fields)))
    why = None if provenance is None else jsontree.dumps(provenance, where="provenance")
    return _add(log, reader.snapshot, made, why, by)


@timed("add_fields")
def _add(log: CommitLog, seen: Snapshot, made: Iterable[LateRows], provenance: str | None, by: str | None) -> Commit:
    """Write derived columns and commit them."""
    if by is not None:
        check_text(by, "by")
    session = new_session()
    rows, chunks = lateshards.write(log.storage, session, layout_of(log.storage), made)
    if not rows.num_rows:
        return log.catch_up()
    late, file = placed(log.storage, session, rows, chunks, provenance, by)
    there = _still_there("late", seen, late)
    change = Change("late", lambda parent, attempt: ({"late": late}, {"chunks": file}), [there], session=session)
    return log.commit(f"late/{uuid.uuid4().hex}", change)


def layout_of(storage: Storage) -> str:
    """The layout of an archive's shards."""
    found = about.find(storage)
    if found is None:
        raise CorruptCommitError(f"{storage.full_url(layout.ARCHIVE_KEY)} is gone; put it back from a copy")
    return found[0].layout


def placed(
    storage: Storage, session: str, rows: pa.Table, chunks: pa.Table, provenance: str | None, by: str | None
) -> tuple[pa.Table, FileRef]:
    """Rows of the late table as they are committed, and the file that they name with the chunk rows of their shards."""
    file = tablefiles.write(storage, session, "chunks", chunks)
    return _stamped("late", tablefiles.with_chunks(rows, file), by, provenance=provenance), file


@timed("drop_fields")
def drop(log: CommitLog, names: Sequence[Any]) -> Commit:
    """Remove derived columns from all steps; the commit. FieldError for a name that is no derived column."""
    if isinstance(names, str) or not names:
        raise UsageError('give a list of names of derived columns, as in arc.drop_fields(["advantage"])')
    wanted = list(dict.fromkeys(escape_path(to_path(name)) for name in names))
    return log.commit(f"late/{uuid.uuid4().hex}", Change("late", partial(_dropped, wanted)))


def _dropped(names: Sequence[str], parent: Commit, attempt: Attempt) -> Addition:
    late = attempt.load("late", parent.files("late"))
    parts = [_to_drop(late, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if not part.num_rows:
            raise FieldError(f"no field {name!r} was added to steps at {attempt.storage.url}; nothing was dropped")
    return {"late": _stamped("late", tables.concat("late", parts), None)}, {}


def _to_drop(late: pa.Table, name: str) -> pa.Table:
    """Rows that remove a field from all steps that have it."""
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
