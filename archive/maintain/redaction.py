"""Redaction: a forgetting after which nothing that is retained holds anything of some episodes; and its obstacles:
tables, staged objects and journals that would still lead to them.

Shards that hold their steps beside those of others are rewritten without them. All is put before the one commit that
names it: after a kill before that nothing has changed, and what was put is like what a crash leaves behind.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, numbers
from archive.base import ConflictError, CorruptStateError, at_once, escape, jsontree, layout, one_line
from archive.index import Branches, Snapshot, checkpoint_places
from archive.jobs import Crew, Job, JobCall, JobRequest, Jobs
from archive.log import Commit, CommitLog, FileRef, commits, read_of, tablefiles
from archive.maintain import relocation
from archive.maintain.draft import Draft
from archive.maintain.objects import REDACT, Watermarks, read_pins
from archive.maintain.plans import Redacted
from archive.maintain.relocation import Location, Relocation
from archive.maintain.survivors import RUNNING, Decision, rows_held
from archive.maintain.tags import Tags
from archive.read.chunks import Segments, Shards
from archive.saved import UNCONSUMED, Part, TickObject, ticks_of
from archive.store import Storage, split_key
from archive.tables import LISTED, STRETCH, TABLES, among, distinct, mention, objects_of, overlaps, stored_in

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAMED = 10  # checkpoints that a sentence names
_AT_ONCE = 32  # objects of journals in memory
_SHARDS_AT_ONCE = 16  # shards that are read
_RESAVE = "save another checkpoint, with other columns if it borrows these, and expire the named ones by keep="
_REMOVE = f"remove the episodes from the buffer, {_RESAVE}"
_COPY = "copy the other episodes to another archive by resharding.filter(..., copy=True), and delete this one"
_END = "save a checkpoint without them, or open another writer of their run, which ends that session"
_END_JOBS = "finish them by the same calls, or cancel them (`archive jobs`)"
_COMPANION = "%places"  # suffix of the array with an array's row counts, if not one row a step


class Redaction:
    """The removal of episodes' steps from their shards. layout: of the shards that are written."""

    def __init__(self, storage: Storage, layout: str, ids: Collection[str]) -> None:
        self._storage = storage
        self._layout = layout
        self._ids = frozenset(ids)
        self._call: JobCall | None = None
        self._written: tuple[list[Any], list[Location], FileRef] | None = None  # old and new places of steps
        self._found: tuple[Snapshot, tuple[_Stored, _Stored]] | None = None

    def rewrite(self, log: CommitLog, decision: Decision, crew: Crew, job: str | None, progress: Any) -> JobCall:
        """Write the steps of others to new shards, or what of them a job of this name has not written yet."""
        storage, some = self._storage, [one for one in self._stored(decision) if len(one.rows)]
        sources = {one.kind: one.source for one in some}
        crew.check(storage, Relocation(self._layout, "", decision.snapshot))

        def batches() -> list[Ints]:
            groups = [(one, one.pieces.beside(group=np.full(len(one.pieces), n))) for n, one in enumerate(some)]
            whole = crew.alone and job is None
            return [batch for one, of in groups for batch in relocation.batches(one.source, one.kind, of, whole=whole)]

        if job is not None:
            _end_if_committed(log, Job(storage, job))
        names = hashlib.sha256("\n".join(sorted(self._ids)).encode("utf-8", "surrogatepass")).hexdigest()
        self._call = call = JobCall.of(log, job, JobRequest(REDACT, {"ids": names[:16]}), decision.parent, batches)
        frozen = call.frozen(decision.snapshot)
        relocating = Relocation(self._layout, call.session, frozen, **(sources if frozen is decision.snapshot else {}))
        if some or call.batches:
            moved, places, chunks = relocation.write(call, relocating, crew, progress)
            self._written = relocating.where(moved), places, chunks
        return call

    def applied(self, decision: Decision, *, is_dry: bool) -> Decision:
        """The decision with the steps of others at new places, as `rewrite` wrote them; ConflictError if they are no
        longer the ones that were written. is_dry: nothing is written."""
        some = [one for one in self._stored(decision) if len(one.rows)]
        if not some:
            return decision
        where = [place for one in some for place in one.where]
        if is_dry:
            chunks = FileRef(layout.manifest_key("planned", "redact", "chunks"), 0, 0, 0)
            place = {"shard": layout.shard_key("planned", "redact", 0, self._layout)}
            written = where, [place | tablefiles.chunk_columns(chunks)] * len(where), chunks
        elif self._written is None or self._written[0] != where:
            if self._call is not None:
                self._call.give_up()
            raise ConflictError(
                f"steps at {self._storage.url} were moved or added while a redaction rewrote others; nothing was "
                "committed: plan again"
            )
        else:
            written = self._written
        _, places, chunks = written
        left = iter(places)
        return replace(decision, moved={one.kind: one.moved(left) for one in some}, chunks=chunks)

    def told(self, decision: Decision, made: Draft | None) -> Redacted:
        """The extent of the redaction, and its obstacles. made: the commit; None where nothing goes."""
        segments, late = self._stored(decision)
        shards = segments.shards | late.shards
        size = sum(made.gone.get(key, 0) for key in shards) if made is not None else 0
        found = _obstacles(self._storage, decision, made, self._ids, shards)
        return Redacted(len(self._ids), len(shards), int(segments.pieces.length.sum()), size, tuple(found))

    def _stored(self, decision: Decision) -> tuple[_Stored, _Stored]:
        if self._found is None or self._found[0] is not decision.snapshot:
            self._found = decision.snapshot, (_segments(decision), _late(decision))
        return self._found[1]


def _end_if_committed(log: CommitLog, job: Job) -> None:
    """End a job whose driver died after its commit: its episodes are gone, so the same call is not made again."""
    known = job.newest_round()
    if known is None or known.end is not None or known.record.kind != REDACT:
        return
    since = CommitLog(log.storage, log.archive_id, read_of(log.storage, known.record.commit, log.head))
    since.catch_up()
    if since.find(transaction(known.record.session)) is not None:
        job.ends(known.record, "finished")


def transaction(session: str) -> str:
    """The key of the commit of a redaction that was written under this session."""
    return f"forget/{session}"


# -- shards that must go -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """Objects of shards that must go, and the steps of others in them: rows of a table, and their steps that stay, as
    ranges, in order.

    source: the rows of the table as segments, to be read from.
    """

    kind: str
    table: pa.Table
    source: Snapshot
    shards: frozenset[str]
    rows: Ints
    pieces: Steps

    @property
    def where(self) -> list[Any]:
        """The place of each range now."""
        return relocation.where(self.source, self.pieces)

    def moved(self, places: Iterator[Location]) -> pa.Table:
        """The table with the ranges at the next of these places, in place of their rows."""
        spans = zip(*(getattr(self.pieces, name).tolist() for name in ("stream", "lo", "hi")), strict=True)
        rows = self.table.take(self.pieces.stream).to_pylist()
        new = [(at, relocation.cut(row, lo, hi) | next(places)) for row, (at, lo, hi) in zip(rows, spans, strict=True)]
        return tables.replaced(self.kind, self.table, self.rows, new)


def _segments(decision: Decision) -> _Stored:
    """The objects of the shards of rows that go, and those that name or still hold parts of such; rows of others are in
    them whole."""
    import pyarrow as pa

    table = decision.snapshot.columns(tables.schema("segments").names)
    gone = {layout.object_of(shard) for shard in distinct(table["shard"].take(pa.array(decision.gone)))}
    gone |= _leavings(decision) | _journals_naming(decision)
    rows = np.flatnonzero(stored_in(table, {key for key in gone if split_key(key)[0] is None}) & decision.rows)
    pieces = Steps(rows, np.zeros_like(rows), numbers(table["length"])[rows])
    return _Stored("segments", table, decision.snapshot, frozenset(gone), rows, pieces)


# -- derived columns ---------------------------------------------------------------------------------------------------


def _late(decision: Decision) -> _Stored:
    """The rows of the late table for steps that go, or in shards with such steps."""
    table = relocation.late_rows(decision.snapshot)
    source = relocation.as_segments(decision.snapshot, table)
    over = overlaps(table, decision.snapshot.take(decision.gone, STRETCH))
    away = Steps(over["late"], over["step"], over["step"] + over.length)
    names = table["shard"].to_pylist()
    shards = frozenset(names[row] for row in over["late"].tolist()) - {None}
    if decision.parent.let_go:
        there = np.flatnonzero([name is not None for name in names])
        shards |= _with_more(source, there)
    rows = np.flatnonzero([name in shards for name in names])
    left = Steps(rows, np.zeros_like(rows), table["length"].to_numpy()[rows]).minus(away)
    return _Stored("late", table, source, shards, rows, left)


# -- shards with rows that no segment names, after a forgetting or a compaction ----------------------------------------


def _leavings(decision: Decision) -> set[str]:
    """Objects of kept rows, written by the sessions of rows that go or by compactions, that hold more than their rows:
    maybe steps of an episode that no row names any more."""
    import pyarrow as pa

    table = decision.snapshot.columns(["shard", "session"])
    shards, sessions = (table[name].cast("string").combine_chunks() for name in ("shard", "session"))
    wrote = {escape(name) for name in sessions.unique().to_pylist()}
    gone = {escape(name) for name in sessions.take(pa.array(decision.gone)).unique().to_pylist()}
    made = {key: layout.session_of(layout.object_of(key)) for key in shards.unique().drop_null().to_pylist()}
    moved = {key for key, session in made.items() if session is not None and session not in wrote}
    if not decision.parent.let_go and not moved:
        return set()
    wanted = moved | {key for key, session in made.items() if session in gone}
    more = _with_more(decision.snapshot, np.flatnonzero(among(shards, wanted)))
    return {layout.object_of(shard) for shard in more} | _with_more_ticks(decision, wanted)


def _with_more_ticks(decision: Decision, shards: Set[str]) -> set[str]:
    """The objects of nodes' journals, of those that these shards lie in, with steps of a tick that no kept row
    names."""
    import pyarrow as pa

    kept = {*distinct(decision.snapshot.columns(["shard"]).filter(pa.array(decision.rows))["shard"])}
    storage, journaled, out = decision.snapshot.storage, Watermarks.of(decision.parent), set[str]()
    for key in sorted({layout.object_of(shard) for shard in shards} - shards):
        if journaled.awaited(key):  # no row names its newest ticks yet; an id of theirs is an obstacle
            continue
        try:
            ticks = ticks_of(storage.get(key), key, storage.full_url(key))
            if any(tick.shard not in kept and tick.index.rows.get("segments") for tick in ticks):
                out.add(key)
        except CorruptStateError:  # its content is unknown
            out.add(key)
    return out


def _with_more(snapshot: Snapshot, rows: Ints) -> set[str]:
    """The shards of these rows that have an array with more rows than all of these together."""
    segments, shards = Segments(snapshot, rows), Shards(snapshot)
    shards.load_indexes(segments, list(range(len(segments.shards))))
    steps: Counter[str] = Counter()
    extents: Counter[tuple[str, str]] = Counter()
    for row in snapshot.take(rows, ["shard", "length", "extents"]).to_pylist():
        steps[row["shard"]] += row["length"]
        for one in row["extents"] or ():
            extents[row["shard"], one["field"]] += one["rows"]

    def has_more(shard: str) -> bool:
        view = shards.view(shard, segments.owner)
        named = {path: extents.get((shard, path.removesuffix(_COMPANION)), steps[shard]) for path in view.paths}
        return any(view.describe(path).shape[0] > rows for path, rows in named.items())

    more = at_once(has_more, segments.shards, _SHARDS_AT_ONCE)
    return {shard for shard, found in zip(segments.shards, more, strict=True) if found}


# -- obstacles ---------------------------------------------------------------------------------------------------------


def _obstacles(
    storage: Storage, decision: Decision, made: Draft | None, ids: Set[str], shards: Set[str]
) -> Iterator[str]:
    """A sentence for each kind of thing that would still lead to these episodes or shards. made: the commit; None where
    nothing goes."""
    mentions, head, snapshot = _Mentions(storage, ids, shards), decision.parent, decision.snapshot
    mine = np.flatnonzero(among(snapshot.columns(["episode_id"])["episode_id"], ids))
    live = [number for number, one in decision.known.items() if np.isin(mine, rows_held(snapshot, one)).any()]
    if live:
        yield f"some of the episodes are live in checkpoints: {_checkpoints(decision, live)}; {_REMOVE}"
    if RUNNING in decision.protected:
        yield f"some of the episodes are {RUNNING}: {_END}"
    journaled = Watermarks.of(head)
    since = storage.scan("journal/") if any(entry.journal for entry in head.runs.values()) else ()
    if _naming(storage, [one.key for one in since if journaled.awaited(one.key)], ids):
        yield f"what a running session has journaled since its newest checkpoint names some of them: {_END}"
    objects = shards | objects_of(snapshot.take(mine, ["shard", "chunks"]))
    pins = read_pins(storage)
    if urls := {pins[key] for key in objects & pins.keys()}:
        yield f"other archives refer to shards that must go: {_listed(sorted(urls))}; copy them, and delete these"
    bases = {split_key(key)[0] for key in objects} - {None}
    if urls := {head.base_urls.get(str(base), str(base)) for base in bases}:
        yield f"their steps lie in other archives: {_listed(sorted(urls))}; {_COPY}"
    if tags := [tag.name for tag in Tags(storage, head).values() if _is_kept(storage, head, tag.commit, mentions)]:
        yield f"tags lead to them, and a tag stays: {_listed(tags)}; {_COPY}"
    rounds = [one for one in Jobs(storage).unfinished() if one.kind != REDACT]
    if jobs := [o.job for o in rounds if any(_is_kept(storage, head, n, mentions) for n in sorted(o.frozen))]:
        yield f"jobs that have not ended read them: {_listed(jobs)}; {_END_JOBS}"
    if made is not None:
        yield from _in_checkpoints(storage, decision, made, mentions)


def _is_kept(storage: Storage, head: Commit, number: int, mentions: _Mentions) -> bool:
    """True if the objects that are retained for a commit, such as a tagged one, lead to them."""
    target = read_of(storage, number, head)
    if mentions.in_tables(target):
        return True
    places = checkpoint_places(storage, target)
    numbers = {number for place in places for number in place if number is not None}
    known = {one.number: one for one in commits.read_all(storage, numbers, head)}
    return any(
        mentions.in_staged(known[number]) or mentions.in_tables(known[manifest or number])
        for number, manifest in places
    )


def _in_checkpoints(storage: Storage, decision: Decision, made: Draft, mentions: _Mentions) -> Iterator[str]:
    """Checkpoints that stay whose staged objects or earlier tables (where only those serve them) name the episodes."""
    number = decision.parent.number + 1
    earlier = {commit: manifest or commit for commit, manifest in made.places if manifest != number}
    serving = {one.number: one for one in commits.read_all(storage, earlier.values(), decision.parent)}
    named = sorted(commit for commit, _ in made.places if mentions.in_staged(decision.known[commit]))
    if named:
        yield f"objects of checkpoints name some of them: {_checkpoints(decision, named)}; {_RESAVE}"
    old = sorted(commit for commit, manifest in earlier.items() if mentions.in_tables(serving[manifest]))
    if old:
        yield f"checkpoints can be read with tables of before alone: {_checkpoints(decision, old)}; {_RESAVE}"


def _checkpoints(decision: Decision, numbers: Iterable[int]) -> str:
    """The names and commits of checkpoints; a compaction publishes one again, under another number."""
    records = {number: decision.known[number].checkpoint for number in numbers}
    return _listed([f"{'' if one is None else one.name} (commit {number})" for number, one in records.items()])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(map(one_line, names[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


# -- in tables and staged objects --------------------------------------------------------------------------------------


class _Mentions:
    """A search for ids of episodes, and for the objects of the shards of their steps."""

    def __init__(self, storage: Storage, ids: Set[str], objects: Set[str]) -> None:
        self._storage = storage
        self._ids = ids
        self._objects = objects
        self._known: dict[str, bool] = {}  # file of a table, or staged object -> whether it mentions them

    def in_tables(self, commit: Commit) -> bool:
        """True if a row of the tables that a commit names is of the episodes, or is stored in these shards."""
        return any(self._in_file(kind, ref) for kind in LISTED for ref in commit.files(kind))

    def in_staged(self, commit: Commit) -> bool:
        """True if the staged objects of a checkpoint, or those that it borrows columns from, name the episodes."""
        record = commit.checkpoint
        if record is None:
            return False
        nonces: dict[str, str | None] = dict.fromkeys(record.borrowed)
        nonces |= {one.key: one.nonce for one in record.ranks}
        return any(self._in_object(key, nonce) for key, nonce in nonces.items())

    def _in_file(self, kind: str, ref: FileRef) -> bool:
        if ref.path not in self._known:
            names = [name for name in ("episode_id", "shard") if name in TABLES[kind].columns]
            table = tablefiles.load(self._storage, kind, [ref], names) if names else None
            self._known[ref.path] = table is not None and self._mentions(table)
        return self._known[ref.path]

    def _mentions(self, table: pa.Table) -> bool:
        stored = "shard" in table.column_names and bool(stored_in(table, self._objects).any())
        return stored or mention(table, {"episode_id": self._ids})

    def _in_object(self, key: str, nonce: str | None) -> bool:
        if key not in self._known:
            file = Part(self._storage, key, nonce)
            kinds = [kind for kind in ("segments", "ledger") if file.has(f"{kind}.parquet")]
            named = any(mention(table, {"episode_id": self._ids}) for table in file.tables(*kinds))
            self._known[key] = named or any(_says(value, self._ids) for value in _values(file))
        return self._known[key]


def _values(file: Part) -> Iterator[Any]:
    """The JSON values in a staged object: of open episodes, attributes, progress, unconsumed items, states."""
    index = file.index
    yield from ([*one.open_episodes.values()] for one in index.buffers.values())
    yield from (dict(one.skeleton) for one in index.states.values())
    own = [one.member for of in index.attributes.values() for one in of.values() if one.object == file.key]
    members = file.files([*own, *([UNCONSUMED] if file.has(UNCONSUMED) else [])])
    texts = [data.decode() for data in members] + ([] if index.progress is None else [index.progress])
    yield from map(jsontree.loads, texts)


def _says(value: Any, ids: Set[str]) -> bool:
    """True if a string anywhere in the value, keys included, is one of the ids."""
    if isinstance(value, str):
        return value in ids
    if isinstance(value, Mapping):
        return any(_says(one, ids) for one in chain(value.keys(), value.values()))
    return isinstance(value, (list, tuple)) and any(_says(one, ids) for one in value)


# -- in journals -------------------------------------------------------------------------------------------------------


def _journals_naming(decision: Decision) -> set[str]:
    """The journal objects with kept rows that name a removed episode: in rows that end it, rows of ledgers, or
    attributes. Only objects of sessions that may have known the episode are read."""
    import pyarrow as pa

    table = decision.snapshot.columns(["shard", "session", "episode_id"])
    kept, gone = table.filter(pa.array(decision.rows)), table.filter(pa.array(~decision.rows))
    sessions = _hearing(decision.snapshot.branches, gone["session"].unique().to_pylist())
    found = zip(kept["shard"].to_pylist(), kept["session"].to_pylist(), strict=True)
    named = {layout.object_of(shard) for shard, session in found if session in sessions and shard}
    keys = {key for key in named if layout.journal_place(key)}
    return _naming(decision.snapshot.storage, keys, {*gone["episode_id"].to_pylist()})


def _hearing(branches: Branches, sessions: Iterable[str]) -> set[str]:
    """These sessions, and those that went on from them: later sessions may name what is in a buffer."""
    out = set(sessions)
    for session, origin in branches.origins.items():  # in the order in which they were opened
        if origin.session in out:
            out.add(session)
    return out


def _naming(storage: Storage, keys: Iterable[str], ids: Set[str]) -> set[str]:
    """The objects among these that name one of the episodes, or are damaged: their content is unknown."""
    out, wanted = set(), sorted(keys)
    for at in range(0, len(wanted), _AT_ONCE):
        some = wanted[at : at + _AT_ONCE]
        for key, data in zip(some, storage.get_all(some), strict=True):
            try:
                if any(_names_one(tick, ids) for tick in ticks_of(data, key, storage.full_url(key))):
                    out.add(key)
            except CorruptStateError:
                out.add(key)
    return out


def _names_one(tick: TickObject, ids: Set[str]) -> bool:
    """True if a tick names one of these episodes."""
    rows = [tick.table(kind) for kind in ("segments", "ledger")]
    texts = [text for of in tick.index.attributes.values() for text in of.values()]
    names = {name for text in texts for name in jsontree.loads(text, where=tick.where)}
    return bool(names & ids) or any(mention(table, {"episode_id": ids}) for table in rows)
