"""Merging, splitting and filtering archives, and a plan's shares in another: rows of some archives become visible in
another, by reference or as copies.

Ids are never renumbered. Everything is written before one commit makes it visible, so a run that fails leaves the
target as it was; the next run finds the existing copies and goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from archive import Archive, tables
from archive import open as open_archive
from archive.arrays import Ints
from archive.base import (
    AlreadyExistsError,
    ConflictError,
    ExpiredError,
    NotFoundError,
    UsageError,
    at_once,
    cached_property,
    layout,
)
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.index import Branches, Snapshot, run_of_session
from archive.jobs import Crew, Job, JobCall, JobRequest, JobRound
from archive.log import (
    Addition,
    Attempt,
    Change,
    Claim,
    Commit,
    CommitLog,
    Origin,
    OtherArchive,
    branch_rows,
    commits,
    new_session,
)
from archive.store import Storage
from archive.tables import CHUNK_FILE, addresses, distinct
from resharding.archives import NAMED, Copying, Outgoing, Part, copied, referred, to_copy
from resharding.plans import Plan
from resharding.share import Share

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Writer
    from archive.checkpoint import Pending


MERGE = "merge"  # the kind of jobs that copy shards
_MOST_SOURCES = 1000  # a round's terms have a line of each


class How(TypedDict, total=False):
    """The options of `merge`: the way in which episodes get to another archive."""

    copy: bool
    verify: bool
    storage_options: Mapping[str, Any] | None
    allow_bases: bool | Sequence[str]
    single_writer: bool
    progress: Callable[[int, int], None] | None
    engine: str
    workers: int | None
    num_cpus: float | None
    num_gpus: float | None
    job: str | None


def merge(urls: Sequence[Any], to: Any, **how: Unpack[How]) -> Archive:
    """Make the episodes of several archives visible in one, which is made if it is not there.

    copy=False (default) refers to the sources' shards (they are pinned there; the target must be opened with
    `allow_bases`); copy=True copies them: a store that has both archives does so by itself, and compares sizes and
    ETags; with verify=True, and elsewhere, every byte is read and compared with its checksum.  Merging again adds
    new rows: labels and derived columns that are newer, in the source, than the known ones here, and so apply
    from then on.
    progress: called with (shards there, shards) of each source.  storage_options, allow_bases: of all these archives,
    single_writer: of the target, as `archive.open` has them.

    engine, workers, num_cpus, num_gpus: of what copies, as for `Episodes.map`.  job: a name in the target under which
    finished copies are kept: after whatever stopped it, the same call goes on, with the sources as they were. Progress
    is then of batches of shards.
    """
    target = _Recipient(to, **how)
    given = [urls] if isinstance(urls, (str, Archive)) else urls
    sources = [target.source(url) for url in given]
    return _transfer([Outgoing(source, source.index.chains.rows) for source in sources], target)


def split(url: Any, to: Any, count: int, **how: Unpack[How]) -> Archive:
    """Make the first `count` episodes of an archive visible in another; otherwise as merge, with its options."""
    target = _Recipient(to, **how)
    source = target.source(url)
    if not 0 < count <= len(source.episodes):
        raise UsageError(
            f"count={count}: the archive at {source.url} has {len(source.episodes)} episodes; give 1 to that many"
        )
    return _transfer([_of_episodes(source, np.arange(count))], target)


def filter(url: Any, to: Any, **options: Any) -> Archive:
    """Make the episodes that meet the conditions (as for `Episodes.filter`) visible in another archive;
    otherwise as merge, with its options."""
    how: Any = {name: options.pop(name) for name in How.__annotations__ if name in options}
    target = _Recipient(to, **how)
    source = target.source(url)
    return _transfer([_of_episodes(source, source.episodes.filter(**options).numbers)], target)


def reshard(source: Archive, plan: Plan, to: Any, **how: Unpack[How]) -> Checkpoint:
    """Save the plan's shares as a checkpoint of its world size in another archive, which is made if it is not there.

    Episodes, columns, attributes and progress are carried over. State can't be divided: where the plan moves anything,
    each rank gets the states of all source ranks, as {"source_states": {rank: state}}.  how: the options of `merge`.
    """
    checkpoint = plan.checkpoint
    if not checkpoint.replay_saved:
        raise UsageError(f"checkpoint {checkpoint.name!r} was saved without its buffers: there is nothing to reshard")
    present = _Recipient(to, **how).present()
    if present is not None and checkpoint.run in present.head.runs:
        raise AlreadyExistsError(
            f"{present.url} has a run {checkpoint.run!r} already, which this would end; give an archive of its own"
        )
    ids = checkpoint.episodes.table["episode_id"].to_pylist()
    target = filter(source, to, episode_id=ids, **how)
    session = new_session()
    with ExitStack() as stack:
        shares = [plan.share(rank) for rank in range(plan.world_size)]
        writers = [stack.enter_context(target.writer(resume=share, session=session)) for share in shares]
        pending = [_checkpoint(w, share) for w, share in zip(writers, shares, strict=True)]
        made = [p.result() for p in pending]
    return made[0]


def _checkpoint(writer: Writer, share: Share) -> Pending:
    """The checkpoint of one rank, with all that its share has."""
    given = {}
    for name in share.buffers:
        part = share.buffer(name)
        state = part.state
        if not share.plan.is_identity:
            known = {rank: state for rank, state in part.source_states.items() if state is not None}
            state = {"source_states": known} if known else None
        given[name] = {"columns": dict(part.columns), "attributes": part.attributes, "state": state}
    main, ck = given.pop(MAIN_BUFFER, {}), share.checkpoint
    return writer.checkpoint(ck.step, ck.name, progress=ck.progress, metrics=ck.metrics, buffers=given, **main)


def _of_episodes(source: Archive, chosen: Ints) -> Outgoing:
    parts = [source.index.chains.of(int(i)) for i in chosen]
    return Outgoing(source, np.concatenate(parts) if parts else np.zeros(0, np.int64))


@dataclass(frozen=True)
class _Recipient:
    """Another archive, which need not exist yet, and the options of the transfer; see `merge`."""

    to: Any
    copy: bool = False
    verify: bool = False
    storage_options: Mapping[str, Any] | None = None
    allow_bases: bool | Sequence[str] = ()
    single_writer: bool = False
    progress: Callable[[int, int], None] | None = None
    engine: str = "local"
    workers: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    job: str | None = None

    @property
    def crew(self) -> Crew:
        return Crew(self.engine, self.workers, self.num_cpus, self.num_gpus)

    @property
    def alone(self) -> bool:
        """True if this process copies all at once."""
        return self.job is None and self.crew.alone

    @cached_property
    def round(self) -> JobRound | None:
        """The round of the job with which this call goes on."""
        present = None if self.job is None else self.present()
        known = None if present is None or self.job is None else Job(present.storage, self.job).newest_round()
        return None if known is None or known.end is not None or known.record.kind != MERGE else known.record

    def source(self, url: Any) -> Archive:
        """An archive that episodes come from, as of the commit that the job froze; the same object if it is open."""
        if isinstance(url, Archive):
            found = url
        else:
            found = open_archive(url, storage_options=self.storage_options, allow_bases=self.allow_bases)
        frozen = {} if self.round is None else dict(self.round.terms["sources"])
        number = frozen.get(found.id, found.head.number)
        if number == found.head.number:
            return found
        storage = found.storage
        return open_archive(
            found.url, commit=number, storage_options=storage.root.options, allow_bases=storage.allowed_bases
        )

    def tables(self, present: Archive) -> Snapshot:
        """The tables of the archive as of the commit that the job froze."""
        if self.round is None or self.round.commit == present.head.number:
            return present.snapshot
        return Snapshot(present.storage, commits.read(present.storage, self.round.commit))

    def present(self) -> Archive | None:
        """The archive as it is now; None if it does not exist."""
        try:
            return self.opened(create=False)
        except NotFoundError:
            return None

    def opened(self, *, create: bool) -> Archive:
        if isinstance(self.to, Archive):
            return self.to.refresh()
        return open_archive(
            self.to,
            create=create,
            storage_options=self.storage_options,
            allow_bases=self.allow_bases,
            single_writer=self.single_writer,
        )

    def moved(self, done: int, total: int) -> None:
        """Say how many of the shards of a source are there."""
        if self.progress is not None:
            self.progress(done, total)


def _transfer(selections: Sequence[Outgoing], target: _Recipient) -> Archive:
    """Make rows of some archives visible in another, which is made if it does not exist; that archive afterwards."""
    present = target.present()
    _check_places(selections, target, present)
    there = target.tables(present) if present else None
    fresh = _fresh(selections, there, present.url if present else str(target.to))
    labels, late = (_beside(kind, selections, there) for kind in ("labels", "late"))
    archive = present or target.opened(create=True)
    there = there or archive.snapshot
    said, branches = tables.concat("labels", labels), _branches(selections, there)
    parts: list[Part] = [(n, one.archive.snapshot, one.table()) for n, one in enumerate(fresh)]
    added: list[Part] = [
        (n, selections[n].archive.snapshot, tables.only_used(rows)) for n, rows in enumerate(late) if rows.num_rows
    ]
    if not any(len(one.rows) for one in fresh) and not branches and not said.num_rows and not added:
        return archive
    every, call = [*parts, *added], None
    log = CommitLog(archive.storage, archive.id, archive.head)
    if target.copy:
        call = _copying(target, selections, every, there, log)
        if call.round is not None and call.round.commit != there.commit.number:  # another process began it meanwhile
            return _transfer(selections, replace(target))
        log, moved = call.log_of(log), copied(call, every)
    else:
        moved = [referred(selections[n].archive, rows, archive, target.moved) for n, _, rows in every]
    segments = tables.concat("segments", moved[: len(parts)])
    fields = tables.concat("late", moved[len(parts) :])
    _claim_sessions(archive, fresh)
    bases: dict[str, OtherArchive] = {}
    for one in (selections if added else fresh) if not target.copy else ():
        bases |= {**one.archive.head.bases, one.archive.id: OtherArchive(one.archive.url)}

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        new, snapshot = segments, Snapshot(archive.storage, parent)
        if parent.number != there.commit.number:  # others committed meanwhile: perhaps some of the same
            wanted = {address for one in _fresh(fresh, snapshot, archive.url) for address in addresses(one.names)}
            new = new.filter([address in wanted for address in addresses(new)])
        known = _branches(selections, snapshot)
        said = tables.concat("labels", _beside("labels", selections, snapshot))
        rows = {"segments": new, "branches": branch_rows(known.origins, known.runs), "labels": said, "late": fields}
        return rows, {"bases": {**parent.bases, **bases}}

    key = _transaction(fresh, branches, [said, fields.drop_columns(list(CHUNK_FILE))], copy=target.copy)
    if call is None:
        log.commit(key, Change("merge", adds))
    else:
        _committed(call, log, key, Change("merge", adds, [call.not_ended], session=call.session))
    return archive.refresh()


def _transaction(fresh: Sequence[Outgoing], branches: Branches, beside: Sequence[pa.Table], *, copy: bool) -> str:
    """The key of the commit: the same for the same rows, so that two processes that do the same commit once; each has
    chunk files of its own."""
    what: list[Any] = [[one.archive.id, addresses(one.names)] for one in fresh]
    what += [list(branches.origins)] if branches else []
    what += [hashlib.sha256(tables.dumps(table)).hexdigest() for table in beside if table.num_rows]
    return f"merge/{hashlib.sha256(json.dumps([what, copy]).encode()).hexdigest()}"


def _copying(
    target: _Recipient, selections: Sequence[Outgoing], parts: Sequence[Part], there: Snapshot, log: CommitLog
) -> JobCall:
    """A call of the job that copies the shards of these rows, with all its results."""
    sources = [[one.archive.id, one.archive.head.number] for one in selections]
    chosen = hashlib.sha256(b"".join(hashlib.sha256(one.rows.tobytes()).digest() for one in selections)).hexdigest()
    ask = JobRequest(MERGE, {"sources": sources, "rows": chosen[:16], "verify": target.verify})
    call = JobCall.of(log, target.job, ask, there.commit, lambda: to_copy(parts, whole=target.alone))
    if call.round is None or call.round.commit == there.commit.number:
        tables = [one.archive.snapshot for one in selections]
        copying = Copying(tables, there, verify=target.verify, moved=target.moved if target.alone else None)
        call.carry_out(copying, target.crew, None if target.alone else target.progress)
    return call


def _committed(call: JobCall, log: CommitLog, key: str, change: Change) -> None:
    """Make the commit of a job, or find it, and end the job; where the archive changed so that it cannot be made, the
    same call begins anew."""
    try:
        log.commit(key, change)
    except (ConflictError, ExpiredError):
        call.give_up()
        raise
    call.finish()


def _check_places(selections: Sequence[Outgoing], target: _Recipient, present: Archive | None) -> None:
    """Refuse impossible transfers before anything is written."""
    storage = present.storage if present else Storage.connect(target.to, target.storage_options)
    where = storage.url
    if not target.copy and (target.job is not None or target.crew != Crew()):
        raise UsageError("job=, engine= and workers= are of copies: give copy=True")
    if len(selections) > _MOST_SOURCES and target.job is not None:
        raise UsageError(f"one job copies from {_MOST_SOURCES} archives at most: merge the others afterwards")
    for one in (storage, *(s.archive.storage for s in selections)):
        target.crew.check(one, [s.archive.snapshot for s in selections])
    for source in (s.archive for s in selections):
        if present and source.id == present.id:
            raise UsageError(f"{present.url} is one of the sources; give another archive as target")
        if not target.copy and source.url.partition("://")[0] != where.partition("://")[0]:
            raise UsageError(
                f"{where} cannot refer to shards at {source.url}, which is another kind of store; give copy=True"
            )


def _fresh(selections: Sequence[Outgoing], present: Snapshot | None, where: str) -> list[Outgoing]:
    """The selections without the rows that the target, or an earlier source, has already."""
    import pyarrow as pa

    known = present.columns(NAMED) if present else tables.schema("segments").empty_table().select(NAMED)
    out = []
    for selection in selections:
        out.append(selection.without(known, where))
        known = pa.concat_tables([known, out[-1].names])
    return out


def _branches(selections: Sequence[Outgoing], present: Snapshot | None) -> Branches:
    """The origins of sessions that decide the state of the transferred episodes, and are not there yet."""
    known = present.branches if present else Branches({}, {})
    origins: dict[str, Origin] = {}
    runs: dict[str, str] = {}
    for selection in selections:
        sessions = set(distinct(selection.names["session"]))
        new = selection.archive.snapshot.branches.around(sessions).beyond(known)
        origins |= {name: origin for name, origin in new.origins.items() if name not in origins}
        runs |= new.runs
    return Branches(origins, runs)


def _beside(kind: str, selections: Sequence[Outgoing], present: Snapshot | None) -> list[pa.Table]:
    """The rows of a table that follow each selection, if they are newer than the known ones there."""
    out = [getattr(present.annotations, kind) if present else tables.schema(kind).empty_table()]
    for selection in selections:
        out.append(selection.beside(kind, tables.concat(kind, out)))
    return out[1:]


def _claim_sessions(archive: Archive, selections: Sequence[Outgoing]) -> None:
    """Claim the names of the sessions that come along, so that no later writer numbers its rows like theirs."""

    runs = {session: run for s in selections for session, run in run_of_session(s.archive.snapshot).items()}

    def claim(place: tuple[str, int]) -> None:
        session, rank = place
        made = Claim(runs.get(session) or "", session, rank, "merge")
        with suppress(AlreadyExistsError):
            archive.storage.create_once(layout.rank_key(session, rank), json.dumps(made.to_json()).encode())

    places = dict.fromkeys(place[:2] for s in selections for place in addresses(s.names))
    at_once(claim, places, 16)
