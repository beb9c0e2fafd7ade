"""Saying something of episodes: one small object of rows, and a commit that names it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from archive import tables
from archive.arrays import Ints
from archive.base import LetGoError, NotFoundError, UsageError, check_text
from archive.manifest import (
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    EpisodeIndex,
    Requirement,
    Snapshot,
    labels,
    value_set,
)
from archive.observe import timed
from archive.read.chosen import Chosen
from archive.tables import ADDRESS, of_segments

if TYPE_CHECKING:
    import pyarrow as pa

Rows = Callable[[Commit], "pa.Table"]  # those to commit after this one, but for who and when
MAX_NAMED = 5


def label_all(episodes: Chosen, said: Mapping[str, Any], by: str | None = None) -> None:
    """Say the same of each of these episodes, as they are seen there; they show it then.

    UsageError if they are of an archive that was opened at a commit, LetGoError if some were forgotten meanwhile.
    """
    if not said:
        raise UsageError("nothing is said of these episodes: give labels, as in eps.label(success=True)")
    texts = {check_key(key): labels.text_of(value, key) for key, value in said.items()}
    later = episodes.episode_index.snapshot.later
    if later.read_only:
        raise UsageError(
            f"this archive was opened at commit {later.head.number} and is read only; open it without commit="
        )
    if len(episodes):
        rows = _of_each(episodes, texts)
        log = CommitLog(later.storage, later.head.archive, later.head)
        there = partial(_check_there, episodes.episode_index.snapshot, rows)
        later.show(_commit(log, lambda parent: rows, by, [there]))


def label(
    log: CommitLog, index: EpisodeIndex, said: Mapping[str, Mapping[str, Any]], by: str | None = None
) -> Commit:  # fmt: skip
    """Say of episodes, by id, what is said of each; the commit. NotFoundError if there is none of some id.

    index: the episodes as they were seen last, which saves reading them again.
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
    return _commit(log, partial(_by_id, index, ids, keys, texts), by) if ids else log.catch_up()


def check_key(key: str) -> str:
    """A label's key; UsageError for one that would not be seen."""
    check_text(key, "a label's key")
    if not key.strip() or not key.isprintable():
        raise UsageError(f"the label {key!r} must have characters that show, and none that do not")
    return key


def _of_each(episodes: Chosen, texts: Mapping[str, str | None]) -> pa.Table:
    """A row for each episode and key, with the newest segment of the episode as it is seen."""
    import pyarrow as pa

    index, count = episodes.episode_index, len(episodes)
    one = _addressed(index, episodes.numbers)
    parts = []
    for key, text in texts.items():
        coded = pa.array([key], pa.string()).dictionary_encode().take(pa.repeat(pa.scalar(0, pa.int32()), count))
        value = pa.nulls(count, pa.string()) if text is None else pa.repeat(pa.scalar(text), count)
        parts.append(one.append_column("key", coded).append_column("value", value))
    return pa.concat_tables(parts)


def _addressed(index: EpisodeIndex, numbers: Ints) -> pa.Table:
    """The id and newest segment of these episodes."""
    return index.snapshot.take(index.chains.lasts()[numbers], ["episode_id", *ADDRESS])


def _check_there(snapshot: Snapshot, rows: pa.Table, parent: Commit) -> None:
    """LetGoError if some of what the rows are of was let go of since it was seen."""
    if parent.let_go is not None and parent.let_go > snapshot.commit.number:
        now = Snapshot(snapshot.storage, parent).columns(ADDRESS)
        gone = rows.filter(~of_segments("labels", rows, now))["episode_id"].unique().to_pylist()
        if gone:
            raise LetGoError(
                f"{len(gone)} of these episodes, such as {gone[0]!r}, were forgotten at {snapshot.storage.url} "
                "meanwhile; nothing was said of any. Open the archive again"
            )


def _by_id(
    known: EpisodeIndex, ids: Sequence[str], keys: Sequence[str], texts: Sequence[str | None], parent: Commit
) -> pa.Table:  # fmt: skip
    """A row for each of these, with the newest segment of the episode as it stands at a commit."""
    import pyarrow as pa

    storage, same = known.snapshot.storage, known.snapshot.commit.same_episodes(parent)
    index = known if same else EpisodeIndex(Snapshot(storage, parent))
    one = _addressed(index, numbers_of(index, ids, "nothing was said of any"))
    coded = pa.array(keys, pa.string()).dictionary_encode()
    return one.append_column("key", coded).append_column("value", pa.array(texts, pa.string()))


def numbers_of(index: EpisodeIndex, ids: Sequence[str], undone: str) -> Ints:
    """The numbers of episodes in an index; NotFoundError, saying what was not done, if some are not there."""
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


@timed("label")
def _commit(log: CommitLog, rows: Rows, by: str | None, requires: Sequence[Requirement] = ()) -> Commit:
    if by is not None:
        check_text(by, "by")
    at = datetime.now(UTC)

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        said = rows(parent)
        columns = {name: said[name] for name in said.column_names}
        return {"labels": tables.from_columns("labels", {**columns, "by": by, "created_at": at})}, {}

    return log.commit(f"label/{uuid.uuid4().hex}", Change("label", adds, requires))
