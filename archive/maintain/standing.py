"""Which rows of the segments table stay when an archive lets go, and how the episodes fare, in groups.

An episode that stays has all that makes it up as of now, and all that a checkpoint that stays has of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints
from archive.base import CorruptManifestError, NotFoundError
from archive.checkpoint import StagedFile
from archive.maintain.asking import SUPERSEDED, Asked
from archive.maintain.keeping import has_own, read_tags
from archive.maintain.objects import read_pins
from archive.maintain.sealing import awaited
from archive.manifest import (
    CheckpointRecord,
    Commit,
    EpisodeIndex,
    Rows,
    RunEntry,
    Snapshot,
    chains,
    held_rows,
    liveview,
    read_of,
    value_set,
)
from archive.read import Episodes, Reader
from archive.tables import ADDRESS, among

if TYPE_CHECKING:
    import pyarrow as pa

Mask = np.ndarray[Any, np.dtype[np.bool_]]
HELD = "held by checkpoints that stay"
RUNNING = "of a session that may still commit"
PINNED = "referred to by other archives"
AWAITED = "sealed in a ledger, and not trained on"
NOT_ASKED = "not asked for"
GOES, TAILS = "no checkpoint that stays holds them", "superseded rows of episodes that stay"
CHOSEN = "chosen by where or ids"
_EXAMPLES = 3
_AT_ONCE = 16  # staged objects


@dataclass(frozen=True)
class EpisodeGroup:
    """Episodes that fare alike, for one reason. `steps`: those that they have as of now.

    superseded: that what goes is not these episodes, but steps of theirs that newer ones took the place of.
    """

    stays: bool
    reason: str
    episodes: int
    steps: int
    examples: tuple[str, ...]
    superseded: bool = False


@dataclass(frozen=True)
class Standing:
    """Which rows stay, and the groups of episodes. `goes`: how many episodes go. `protected`: why some stay that were
    asked for, but for what checkpoints hold."""

    rows: Mask
    groups: tuple[EpisodeGroup, ...]
    goes: int
    protected: tuple[str, ...] = ()


class _Rows:
    """The segments table by episode: `code` is a number for the id of each row."""

    def __init__(self, snapshot: Snapshot) -> None:
        import pyarrow as pa

        ids = snapshot.columns(["episode_id"])["episode_id"].cast(pa.string()).combine_chunks().dictionary_encode()
        self.snapshot = snapshot
        self.names: pa.Array = ids.dictionary
        self.code: Ints = ids.indices.to_numpy().astype(np.int64)
        self.index = EpisodeIndex(snapshot)
        self.current: Mask = self.index.episode_of_row >= 0

    def marked(self, rows: Mask | Ints) -> Mask:
        """Of which episodes any of these rows is."""
        out = np.zeros(len(self.names), bool)
        out[self.code[rows]] = True
        return out

    def plain(self, name: str) -> Any:
        return self.snapshot.columns([name])[name].to_numpy()

    def text(self, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        return self.snapshot.columns([name])[name].cast(pa.string())


def standing(snapshot: Snapshot, asked: Asked, kept: Sequence[Commit]) -> Standing:
    """How the rows fare, with these checkpoints kept. NotFoundError for an id that no episode has."""
    rows = _Rows(snapshot)
    if not asked.lets_episodes_go:
        every = np.ones(len(rows.code), bool)
        nobody = np.zeros(len(rows.names), bool)
        return Standing(every, tuple(_groups(rows, every, [(NOT_ASKED, ~nobody)], nobody)), 0)
    held = _held(snapshot, kept)
    chosen = _chosen(rows, asked)
    held_ids = rows.marked(held)
    protected = _protected(rows, asked)
    reasons = [(HELD, held_ids), *protected, (NOT_ASKED, ~chosen)]
    may_go = chosen[rows.code] & (~rows.current if asked.episodes == SUPERSEDED else True)
    stays = ~may_go | held | np.any([mask for _, mask in reasons[1:]], axis=0)[rows.code]
    stays |= held_ids[rows.code] & (rows.current | (asked.episodes is None))
    stays = _as_before(snapshot, rows, stays)
    gone = ~rows.marked(stays)
    kept_for = tuple(reason for reason, mask in protected if (mask & chosen).any())
    return Standing(stays, tuple(_groups(rows, stays, reasons, gone, asked)), int(gone.sum()), kept_for)


def _held(snapshot: Snapshot, kept: Sequence[Commit]) -> Mask:
    """The rows that hold what is live in these checkpoints, and the rest of their episodes."""
    out = np.zeros(snapshot.rows, bool)
    for commit in kept:
        if commit.live is None:
            continue
        try:
            out[held_rows(snapshot, commit)] = True
        except CorruptManifestError:  # what an earlier forgetting left to the tables of an earlier commit
            continue
    return out


def _chosen(rows: _Rows, asked: Asked) -> Mask:
    """The episodes that ids, the condition and the run (whose sessions alone wrote them) choose; all without."""
    import pyarrow as pa
    import pyarrow.compute as pc

    out = np.ones(len(rows.names), bool)
    if asked.run is not None:
        sessions = rows.snapshot.commit.runs[asked.run].sessions
        out &= ~rows.marked(~among(rows.text("session"), sessions))
    if asked.ids is not None:
        wanted = value_set("ids", asked.ids, pa.string())
        missing = wanted.filter(pc.invert(pc.is_in(wanted, value_set=rows.names))).to_pylist()
        if missing:
            raise NotFoundError(
                f"there is no episode {missing[0]!r} at {rows.snapshot.storage.url} ({len(missing)} of {len(wanted)} "
                "ids are not there); `archive episodes` lists them"
            )
        out &= among(rows.names, asked.ids)
    if asked.where is not None:
        meets = Episodes(Reader(rows.snapshot), rows.index).places_of(where=asked.where)
        out &= rows.marked(rows.index.chains.lasts()[meets])
    return out


# -- what is protected -------------------------------------------------------------------------------------------------


def _protected(rows: _Rows, asked: Asked) -> list[tuple[str, Mask]]:
    """Why -> episodes all of whose rows stay. Whoever names ids knows which finished rollouts are to be made again."""
    head = rows.snapshot.commit
    found = [(RUNNING, rows.marked(_running(rows, head))), (PINNED, rows.marked(_pinned(rows)))]
    if asked.ids is None:
        found.append((AWAITED, _awaited(rows)))
    for tag in read_tags(rows.snapshot.storage, head):
        if tag["checkpoint"] is None:
            found.append((f"tag {tag['name']!r}", rows.marked(rows.plain("commit") <= tag["target"])))
    return found


def _running(rows: _Rows, head: Commit) -> Mask:
    """Rows that a run's newest session wrote after its newest whole checkpoint, those with live steps which that left
    out, and ends of what it may go on with."""
    import pyarrow.compute as pc

    session, rank, sequence = rows.text("session"), rows.plain("rank"), rows.plain("sequence")
    out = np.zeros(len(rows.code), bool)
    for entry in head.runs.values():
        out[_left_open(rows, entry.session)] = True
        mine: Mask = pc.equal(session, entry.session).to_numpy()
        newest = _newest(rows.snapshot, head, entry)
        out |= _left_out(rows.snapshot, newest)
        since = {} if newest is None else newest.sequences
        limit = np.zeros(int(rank.max(initial=0)) + 1, np.int64)
        for number, up_to in since.items():
            if number < len(limit):
                limit[number] = up_to
        out |= mine & (sequence >= limit[rank])
    return out


def _left_open(rows: _Rows, session: str) -> Ints:
    """The newest rows of episodes that have not ended, as a session sees them: it may go on with these."""
    import pyarrow.compute as pc

    ends = pc.or_(pc.fill_null(rows.snapshot.columns(["last"])["last"], False), rows.text("reason").is_valid())
    tails = EpisodeIndex(rows.snapshot, branch=(session, None)).chains.lasts()
    written = Rows(rows.snapshot.columns(ADDRESS))
    seen = written.seen(rows.snapshot.branches.sight(session), tails)
    out: Ints = tails[~ends.to_numpy()[tails] & seen]
    return out


def _newest(snapshot: Snapshot, head: Commit, entry: RunEntry) -> CheckpointRecord | None:
    """The newest whole checkpoint, with its buffers, of the run's newest session."""
    if not has_own(entry) or entry.latest_replay is None:
        return None
    return read_of(snapshot.storage, entry.latest_replay.commit, head).checkpoint


def _left_out(snapshot: Snapshot, newest: CheckpointRecord | None) -> Mask:
    """Rows of which a step is live in the writers of a checkpoint, but not in it: not complete, by `incomplete="drop"`.
    The next one may have it again."""
    parts = [] if newest is None else [one for one in newest.ranks if one.left_out]
    if not parts:
        return np.zeros(snapshot.rows, bool)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda one: StagedFile(snapshot.storage, one.key, one.nonce).left_out(), parts)
    live = tables.concat("live", list(found))
    out: Mask = liveview.touched(live, snapshot.columns(liveview.SEGMENT_COLUMNS))
    return out


def _pinned(rows: _Rows) -> Mask:
    """Rows whose steps, or whose chunk rows, another archive refers to."""
    pins = read_pins(rows.snapshot.storage)
    return among(rows.text("shard"), pins) | among(rows.text("chunks"), pins)


def _awaited(rows: _Rows) -> Mask:
    """Episodes that a ledger waits for."""
    out = np.zeros(len(rows.names), bool)
    for ids in awaited(rows.snapshot.storage, rows.snapshot.commit):
        out |= among(rows.names, ids)
    return out


# -- what stays is as before -------------------------------------------------------------------------------------------


def _as_before(snapshot: Snapshot, rows: _Rows, stays: Mask) -> Mask:
    """The rows that stay, and all rows of episodes that would be made up of other rows without those that go."""
    import pyarrow as pa

    if stays.all():
        return stays
    places = np.flatnonzero(stays)
    marks = snapshot.columns(list(dict.fromkeys((*chains.COLUMNS, *chains.DETAIL)))).take(pa.array(places))
    left = EpisodeIndex(Snapshot.of(snapshot.storage, snapshot.commit, marks))
    differ = rows.marked(np.setxor1d(places[left.chains.rows], np.flatnonzero(rows.current & stays)))
    return stays | differ[rows.code]


# -- for people --------------------------------------------------------------------------------------------------------


def _groups(
    rows: _Rows, stays: Mask, reasons: Sequence[tuple[str, Mask]], gone: Mask, asked: Asked | None = None
) -> Iterator[EpisodeGroup]:
    """Each episode once, by the first reason that it has; and the rows that go of those that stay."""
    length = rows.plain("length")
    steps = np.bincount(rows.code, length * rows.current, len(rows.names)).astype(np.int64)
    left = ~gone
    for reason, mask in reasons:
        if (left & mask).any():
            yield _group(rows, True, reason, left & mask, steps)
        left &= ~mask
    if left.any():
        yield _group(rows, True, "complete as of now", left, steps)
    if gone.any():
        why = CHOSEN if asked is not None and asked.episodes is None else GOES
        yield _group(rows, False, why, gone, steps)
    tails = ~stays & ~gone[rows.code]
    if tails.any():
        lost = np.bincount(rows.code[tails], length[tails], len(rows.names)).astype(np.int64)
        yield replace(_group(rows, False, TAILS, rows.marked(tails), lost), superseded=True)


def _group(rows: _Rows, stays: bool, reason: str, mask: Mask, steps: Ints) -> EpisodeGroup:
    places = np.flatnonzero(mask)
    examples = tuple(rows.names[int(i)].as_py() for i in places[:_EXAMPLES])
    return EpisodeGroup(stays, reason, len(places), int(steps[places].sum()), examples)
