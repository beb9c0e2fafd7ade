"""The survivors of a forgetting, as of a commit: checkpoints, rows of the segments table, and the fate of the episodes,
in groups.

An episode that stays keeps all of its present steps, and all that a checkpoint which stays has of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Mask
from archive.base import CorruptManifestError, NotFoundError, at_once
from archive.index import ByWriter, EpisodeIndex, Snapshot, chains, held_rows, value_set
from archive.ledger import LedgerView, names, of_run
from archive.log import CheckpointRecord, Commit, FileRef, Mark, RunEntry, commits, read_of
from archive.maintain.objects import read_pins
from archive.maintain.plans import CheckpointFate, EpisodesFate
from archive.maintain.retention import SUPERSEDED, ForgetRequest, fates, has_own
from archive.maintain.tags import Tags
from archive.read import Episodes, Reader
from archive.saved import Part
from archive.store import Storage
from archive.tables import ADDRESS, Address, among, stored_in

if TYPE_CHECKING:
    import pyarrow as pa

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
class Decision:
    """A decision on what stays of an archive as of a commit: its checkpoints, and the rows of its segments table.

    known: the commits of the checkpoints that stay, by number.  episodes: all of them, in groups.  episodes_gone: the
    number that goes.  protected: why some requested ones stay, checkpoints aside.  moved: the segments and late
    tables, where steps have new places, as the chunk rows in `chunks` say.
    """

    snapshot: Snapshot
    fates: Sequence[CheckpointFate]
    known: Mapping[int, Commit] = field(repr=False)
    rows: Mask
    episodes: tuple[EpisodesFate, ...]
    episodes_gone: int = 0
    protected: tuple[str, ...] = ()
    moved: Mapping[str, pa.Table] = field(default_factory=dict)
    chunks: FileRef | None = None

    @property
    def parent(self) -> Commit:
        """The commit as of which it was decided."""
        return self.snapshot.commit

    @property
    def gone(self) -> Ints:
        """The numbers of the rows that go."""
        return np.flatnonzero(~self.rows)

    @property
    def kept(self) -> list[CheckpointFate]:
        """The checkpoints that stay."""
        return [one for one in self.fates if one.stays]

    @property
    def goes(self) -> tuple[set[int], set[Address]]:
        """The checkpoints and segments that go."""
        addresses = tables.addresses(self.snapshot.take(self.gone, ADDRESS))
        return {one.commit for one in self.fates if not one.stays}, set(addresses)

    @property
    def empty(self) -> bool:
        """True if nothing goes."""
        return bool(self.rows.all()) and len(self.kept) == len(self.fates)


def decide(storage: Storage, parent: Commit, asked: ForgetRequest) -> Decision:
    """The decision, as of a commit. NotFoundError for a run or an id that is not there."""
    every = fates(storage, parent, asked)
    marks = {mark.commit for entry in parent.runs.values() for mark in entry.marks.values()}
    kept = commits.read_all(storage, marks | {one.commit for one in every if one.stays}, parent)
    known = {one.number: one for one in kept}
    return _decided(Snapshot(storage, parent), asked, every, known)


class _ByEpisode:
    """The segments table by episode: `code` is a number for the id of each row."""

    def __init__(self, snapshot: Snapshot) -> None:
        ids = _text(snapshot, "episode_id").combine_chunks().dictionary_encode()
        self.snapshot = snapshot
        self.names: pa.Array = ids.dictionary
        self.code: Ints = ids.indices.to_numpy().astype(np.int64)
        self.index = EpisodeIndex(snapshot)
        self.current: Mask = self.index.episode_of_row >= 0

    def marked(self, rows: Mask | Ints) -> Mask:
        """Mask of the episodes that have any of these rows."""
        out = np.zeros(len(self.names), bool)
        out[self.code[rows]] = True
        return out


def _values_of(snapshot: Snapshot, name: str) -> Any:
    return snapshot.columns([name])[name].to_numpy()


def _text(snapshot: Snapshot, name: str) -> pa.ChunkedArray:
    import pyarrow as pa

    return snapshot.columns([name])[name].cast(pa.string())


def _decided(
    snapshot: Snapshot, asked: ForgetRequest, every: Sequence[CheckpointFate], known: Mapping[int, Commit]
) -> Decision:
    """The decision that keeps these checkpoints."""
    rows = _ByEpisode(snapshot)
    if not asked.lets_episodes_go:
        stays, nobody = np.ones(len(rows.code), bool), np.zeros(len(rows.names), bool)
        groups = _groups(rows, stays, [(NOT_ASKED, ~nobody)], nobody, GOES)
        return Decision(snapshot, every, known, stays, tuple(groups))
    held, chosen, protected = np.zeros(snapshot.rows, bool), _chosen(rows, asked), _protected(rows, asked)
    for commit in known.values():
        held[rows_held(snapshot, commit)] = True
        if commit.checkpoint is not None and commit.live is not None:  # a resume goes on with these, live or not
            held[_left_open(snapshot, commit.session, commit.checkpoint.sequences)] = True
    held_ids = rows.marked(held)
    reasons = [(HELD, held_ids), *protected, (NOT_ASKED, ~chosen)]
    may_go = chosen[rows.code] & (~rows.current if asked.episodes == SUPERSEDED else True)
    stays = ~may_go | held | np.any([mask for _, mask in reasons[1:]], axis=0)[rows.code]
    stays |= held_ids[rows.code] & (rows.current | (asked.episodes is None))
    stays = _as_before(rows, stays)
    gone = ~rows.marked(stays)
    kept_for = tuple(reason for reason, mask in protected if (mask & chosen).any())
    groups = _groups(rows, stays, reasons, gone, CHOSEN if asked.episodes is None else GOES)
    return Decision(snapshot, every, known, stays, tuple(groups), int(gone.sum()), kept_for)


def rows_held(snapshot: Snapshot, commit: Commit) -> Ints:
    """The rows that hold live steps of a checkpoint, and the other rows of their episodes; none where only tables of an
    earlier commit have them, because an earlier forgetting left it to these."""
    if commit.live is None:
        return np.zeros(0, np.int64)
    try:
        return held_rows(snapshot, commit)
    except CorruptManifestError:
        return np.zeros(0, np.int64)


def _chosen(rows: _ByEpisode, asked: ForgetRequest) -> Mask:
    """Mask of the episodes selected by ids, condition and run (whose sessions alone wrote them); all without any."""
    import pyarrow as pa
    import pyarrow.compute as pc

    out = np.ones(len(rows.names), bool)
    if asked.run is not None:
        sessions = rows.snapshot.commit.runs[asked.run].sessions
        out &= ~rows.marked(~among(_text(rows.snapshot, "session"), sessions))
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


def _protected(rows: _ByEpisode, asked: ForgetRequest) -> list[tuple[str, Mask]]:
    """Reason -> episodes all of whose rows stay. Ids name finished rollouts that their user means to make again."""
    snapshot = rows.snapshot
    storage, head = snapshot.storage, snapshot.commit
    pins = read_pins(storage)  # of shards with steps, and of files with their chunk rows
    pinned = stored_in(snapshot.columns(["shard"]), pins) | among(_text(snapshot, "chunks"), pins)
    found = [(RUNNING, rows.marked(_running(snapshot))), (PINNED, rows.marked(pinned))]
    if asked.ids is None:
        awaited = [among(rows.names, ids) for ids in _awaited(storage, head)]
        found.append((AWAITED, np.any([np.zeros(len(rows.names), bool), *awaited], axis=0)))
    for tag in Tags(storage, head).values():
        if tag.checkpoint is None:
            found.append((f"tag {tag.name!r}", rows.marked(_values_of(snapshot, "commit") <= tag.commit)))
    return found


def _running(snapshot: Snapshot) -> Mask:
    """Rows that a run's newest session wrote after its newest whole checkpoint, those with live steps that the
    checkpoint left out, and ends of episodes that it may go on with."""
    import pyarrow.compute as pc

    session = _text(snapshot, "session")
    rank, sequence = (_values_of(snapshot, name) for name in ("rank", "sequence"))
    out = np.zeros(snapshot.rows, bool)
    for entry in snapshot.commit.runs.values():
        out[_left_open(snapshot, entry.session)] = True
        mine: Mask = pc.equal(session, entry.session).to_numpy()
        newest = _newest(snapshot, entry)
        out |= _left_out(snapshot, newest)
        limit = np.zeros(int(rank.max(initial=0)) + 1, np.int64)
        for number, up_to in ({} if newest is None else newest.sequences).items():
            if number < len(limit):
                limit[number] = up_to
        out |= mine & (sequence >= limit[rank])
    return out


def _left_open(snapshot: Snapshot, session: str, own: Mapping[int, int] | None = None) -> Ints:
    """The newest rows of open episodes, as a session (up to the offsets `own`) sees them: it may go on with these."""
    import pyarrow.compute as pc

    ends = pc.or_(pc.fill_null(snapshot.columns(["last"])["last"], False), _text(snapshot, "reason").is_valid())
    tails = EpisodeIndex(snapshot, branch=(session, own)).chains.lasts()
    seen = ByWriter(snapshot.columns(ADDRESS)).seen(snapshot.branches.sight(session, own), tails)
    out: Ints = tails[~ends.to_numpy()[tails] & seen]
    return out


def _newest(snapshot: Snapshot, entry: RunEntry) -> CheckpointRecord | None:
    """The newest whole checkpoint, with its buffers, of the run's newest session."""
    if not has_own(entry) or entry.latest_replay is None:
        return None
    return read_of(snapshot.storage, entry.latest_replay.commit, snapshot.commit).checkpoint


def _left_out(snapshot: Snapshot, newest: CheckpointRecord | None) -> Mask:
    """Rows with a step that is live in the writers of a checkpoint, but not in it: incomplete, by `incomplete="drop"`.
    The next one may have it again."""
    parts = [] if newest is None else [one for one in newest.ranks if one.left_out]
    if not parts:
        return np.zeros(snapshot.rows, bool)
    found = at_once(lambda one: Part(snapshot.storage, one.key, one.nonce).left_out(), parts, _AT_ONCE)
    live = tables.concat("live", found)
    out: Mask = tables.touched(live, snapshot.columns(tables.LOCATING))
    return out


def _awaited(storage: Storage, head: Commit) -> Iterator[pa.ChunkedArray]:
    """Ids of episodes that are sealed in a ledger and not trained on: as the newest session of each run sees it, and as
    a session would that goes on from its newest checkpoint (which does not know what was trained on since)."""
    for name in names(storage, head) if head.ledger else ():
        for run, entry in head.runs.items():
            yield of_run(storage, head, name, run).awaited
            for mark in {mark.commit: mark for mark in entry.marks.values()}.values():
                yield _ledger_at(storage, head, name, mark).awaited


def _ledger_at(storage: Storage, head: Commit, name: str, mark: Mark) -> LedgerView:
    """A ledger as of a checkpoint."""
    record = read_of(storage, mark.commit, head).checkpoint
    if record is None:
        return LedgerView(storage, head, name, mark.session, {})
    trained = None if record.recovered is None else record.recovered.trained
    return LedgerView(storage, head, name, mark.session, record.sequences, trained)


# -- survivors are unchanged -------------------------------------------------------------------------------------------


def _as_before(rows: _ByEpisode, stays: Mask) -> Mask:
    """The rows that stay, and all rows of episodes that would consist of other rows without those that go."""
    if stays.all():
        return stays
    places, snapshot = np.flatnonzero(stays), rows.snapshot
    marks = snapshot.take(places, list(dict.fromkeys((*chains.COLUMNS, *chains.DETAIL))))
    left = EpisodeIndex(Snapshot.of(snapshot.storage, snapshot.commit, marks))
    differ = rows.marked(np.setxor1d(places[left.chains.rows], np.flatnonzero(rows.current & stays)))
    return stays | differ[rows.code]


# -- for people --------------------------------------------------------------------------------------------------------


def _groups(
    rows: _ByEpisode, stays: Mask, reasons: Sequence[tuple[str, Mask]], gone: Mask, why: str
) -> Iterator[EpisodesFate]:
    """Groups of episodes, each episode in one, by the first reason that it has; and the rows that go of episodes that
    stay. why: the reason that others go."""
    length = _values_of(rows.snapshot, "length")
    steps = np.bincount(rows.code, length * rows.current, len(rows.names)).astype(np.int64)
    left = ~gone
    for reason, mask in (*reasons, ("complete as of now", left)):
        if (left & mask).any():
            yield _group(rows, True, reason, left & mask, steps)
        left = left & ~mask
    if gone.any():
        yield _group(rows, False, why, gone, steps)
    tails = ~stays & ~gone[rows.code]
    if tails.any():
        lost = np.bincount(rows.code[tails], length[tails], len(rows.names)).astype(np.int64)
        yield replace(_group(rows, False, TAILS, rows.marked(tails), lost), superseded=True)


def _group(rows: _ByEpisode, stays: bool, reason: str, mask: Mask, steps: Ints) -> EpisodesFate:
    places = np.flatnonzero(mask)
    examples = tuple(rows.names[int(i)].as_py() for i in places[:_EXAMPLES])
    return EpisodesFate(stays, reason, len(places), int(steps[places].sum()), examples)
