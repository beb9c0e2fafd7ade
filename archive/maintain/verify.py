"""Verification that the promises of commits hold: objects are there as they were written, and tables agree with each
other and with what they name. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from archive.arrays import ascending
from archive.base import ArchiveError, CorruptManifestError, cached_property, layout
from archive.checkpoint import Checkpoint, Checkpoints
from archive.index import ByWriter, EpisodeIndex, Snapshot, chains, checkpoint_places, chunkindex
from archive.jobs import Crew, JobCall, JobRequest, Jobs, Progress
from archive.journal import Tails, tails
from archive.log import Commit, CommitLog, FileRef, commits, sessions, tablefiles
from archive.maintain.evidence import Evidence, leftovers
from archive.maintain.objects import History, retained, retained_reach
from archive.maintain.shardcheck import CheckedShards, NamedShard, ShardCheck, batches_of, named_shards
from archive.observe import telling
from archive.saved import Part
from archive.store import Roots, split_key
from archive.tables import CHUNK_FILE, distinct, of_segments, stored_in

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_OF_SHARDS = ("episode_id", "shard", *CHUNK_FILE)


@dataclass(frozen=True)
class Finding:
    """One inconsistency between the store and the manifest. episodes: some of the episodes stored in the object."""

    object: str
    problem: str
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A whole checkpoint of a run, and why it cannot be resumed; None: no finding is against it."""

    run: str
    name: str
    commit: int
    problem: str | None


@dataclass
class Report:
    """A report of what was checked, and what is wrong.

    journaled: objects of journals beyond the newest checkpoints.  warnings: losses that break no promise of a commit.
    notes: objects that no commit names, and what they would have been.  checkpoints: if something is wrong, the
    newest of each run, down to the first sound one.  not_allowed: URL of another archive -> its shards, not checked.
    """

    deep: bool
    commits: int = 0
    manifests: int = 0
    shards: int = 0
    states: int = 0
    bytes: int = 0
    journaled: int = 0
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    checkpoints: list[Judged] = field(default_factory=list)
    not_allowed: dict[str, int] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """True if nothing is wrong, and nothing was left out."""
        return not self.findings and not self.not_allowed


def verify(
    archive: Any,
    *,
    deep: bool = False,
    crew: Crew | None = None,
    job: str | None = None,
    progress: Progress | bool = False,
) -> Report:
    """Check all commits of an archive, their tables, the staged objects of their checkpoints, that the live steps of
    each checkpoint are in its tables, that no episode goes on from a branch that a resume left behind, and every
    shard of the newest commit: its first bytes must be there or, if `deep`, every byte must be as it was written and
    every step readable. Where something was forgotten, only tables, checkpoints and shards of the newest commit and
    the tagged ones are checked; others need not be there.

    Journals of the runs' newest sessions beyond their checkpoints are checked, too. Where one is damaged, the rest of
    it cannot be recovered. That breaks no promise of a commit, so it is a warning and no finding; and so is a damaged
    object of a job.

    Objects that no commit names are noted: a dead writer leaves some, and so does a removed commit. Where an object
    names a commit that its writer had seen, and that is missing or another one, that is a finding.

    Shards of other archives are checked where `allow_bases` permits it; the others are no findings, but
    counted, and the report is not sound then.

    crew, job: shards are checked by these workers, in batches of which each is done once, as of the commit at which
    the job began.  progress: True draws a bar; a function is called with (commits and shards done, all of them).
    """
    with telling(progress, "verify", [archive]) as tell:
        return _verify(archive, deep, crew or Crew(), job, tell)


def _verify(archive: Any, deep: bool, crew: Crew, job: str | None, tell: Progress) -> Report:
    looking, call = _begun(archive, deep, crew, job)
    report, total = looking.report, looking.head.number + len(looking.named)
    for commit in looking.commits():
        looking.at_files(commit)
        looking.at_staged(commit)
        tell(report.commits, total)
    looking.at_checkpoints()
    looking.at_episodes()
    looking.at_claims()
    looking.at_journals()
    looking.at_jobs()
    done = total - len(looking.named)
    of_batch = len(looking.named) / max(1, call.batches)
    call.carry_out(looking.check, crew, lambda n, _: tell(done + round(n * of_batch), total))
    looking.at_results(call)
    looking.at_leftovers()
    if report.findings:
        report.checkpoints += looking.attempt("the checkpoints table", lambda: list(looking.judged())) or ()
    call.finish()
    return report


def _begun(archive: Any, deep: bool, crew: Crew, job: str | None) -> tuple[_Verification, JobCall]:
    """A verification, and its job: one that was begun before is as of its own commit."""
    snapshot, storage = archive.snapshot, archive.storage
    log = CommitLog(storage, archive.id, snapshot.commit)
    if job is not None:
        archive.check_writable()
        log.catch_up()
    looking_at = partial(_Verification, deep=deep, newest=log.head, lasts=job is not None)
    looking = looking_at(snapshot)
    crew.check(storage, looking.check)
    allowed = storage.allowed_bases
    terms = {"deep": deep, "allow_bases": allowed if isinstance(allowed, bool) else sorted(allowed)}
    cut = lambda: batches_of(looking.named, alone=crew.alone and job is None)  # noqa: E731
    call = JobCall.of(log, job, JobRequest("verify", terms), snapshot.commit, cut)
    frozen = call.frozen(snapshot)
    return looking if frozen is snapshot else looking_at(frozen), call


class _Verification:
    """The checks of an archive, part by part; all findings go into `report`."""

    def __init__(self, snapshot: Snapshot, deep: bool, newest: Commit, *, lasts: bool) -> None:
        """newest: the newest commit that is known; what was forgotten up to it need not be there. lasts: results of
        batches are kept."""
        self.report = Report(deep)
        self.check = ShardCheck(snapshot, deep=deep, lasts=lasts)
        self._snapshot = snapshot
        self._storage = snapshot.storage
        self.head = snapshot.commit
        self._roots = Roots(snapshot.storage, snapshot.commit.base_urls)
        self._history, self._evidence = History(self._storage), Evidence()
        self._known: dict[int, Commit] = {}
        self._files: set[str] = set()  # checked already, like:
        self._shards: set[str] = set()
        # the objects that must be there; None: all that were ever committed
        reach = partial(retained_reach, self._storage, self.head, rounds=())
        self._reach = None if newest.let_go is None else self.attempt("the tables", reach)

    def attempt(self, name: str, check: Callable[[], T]) -> T | None:
        """The result of a check; None, and a finding, if it fails."""
        try:
            return check()
        except ArchiveError as e:
            self._find(name, str(e))
            return None

    def _find(self, name: str, problem: str, episodes: tuple[str, ...] = ()) -> None:
        self.report.findings.append(Finding(name, problem, episodes))

    # -- commits, and what they name -----------------------------------------------------------------------------------

    def commits(self) -> Iterator[Commit]:
        """The commits that can be read, oldest first; each must follow the one before."""
        before: Commit | None = None
        for number in range(1, self.head.number + 1):
            key = layout.commit_key(number)
            commit = self.attempt(key, partial(commits.read, self._storage, number))
            if commit is not None:
                if before is not None and commit.parent != before.digest:
                    self._find(key, f"its parent's checksum is not that of commit {before.number}")
                self.report.commits += 1
                self._history.note(commit)
                self._known[number] = commit
                yield commit
            before = commit

    def at_files(self, commit: Commit) -> None:
        """Check the manifest files that a commit names, each once."""
        led_to = commit.tables
        if commit.run_files is not None and self._is_needed(commit.run_files.path):
            led_to = self.attempt(f"the runs of commit {commit.number}", lambda: commit.tables_led_to) or led_to
        for kind, ref in led_to:
            if ref.path not in self._files and self._is_needed(ref.path):
                self._files.add(ref.path)
                self.report.manifests += 1
                self.attempt(ref.path, partial(self._check_file, kind, ref))

    def _is_needed(self, path: str) -> bool:
        return self._reach is None or path in self._reach.manifests

    def _check_file(self, kind: str, ref: FileRef) -> None:
        """Check that a file is of its table, and has the commits and steps that the commit says: readers rely on it."""
        import pyarrow.compute as pc

        rows = tablefiles.load(self._roots, kind, [ref])
        if kind == "chunks":
            chunkindex.from_table(rows)
            self._history.learn(ref.path, distinct(rows["shard"]))
        if kind != "segments":
            return
        numbers, steps = tuple(pc.min_max(rows["commit"]).as_py().values()), pc.sum(rows["length"]).as_py()
        if ref.commit not in (None, numbers) or ref.steps not in (None, steps):
            raise CorruptManifestError(
                f"{self._roots.full_url(ref.path)} has rows of commits {numbers} with {steps} steps; the commit that "
                f"names it says {ref.commit} and {ref.steps}"
            )

    def at_staged(self, commit: Commit) -> None:
        """Check what the ranks staged for the checkpoint of a commit."""
        for staged in () if commit.checkpoint is None else commit.checkpoint.ranks:
            if self._reach is not None and staged.key not in self._reach.states:
                continue
            file = Part(self._storage, staged.key, staged.nonce)
            self.report.states += 1
            index = self.attempt(staged.key, partial(getattr, file, "index"))
            if index is not None:
                self._evidence.add(staged.key, index.seen)
                if self.report.deep:
                    self.attempt(staged.key, file.check)

    def at_claims(self) -> None:
        """Check the claims of sessions: each names the commit that its writer had seen."""
        for key in self.attempt("sessions", lambda: sessions.claim_keys(self._storage)) or ():
            claim = self.attempt(key, partial(sessions.read_claim, self._storage, key))
            self._evidence.add(key, None if claim is None else claim.seen)

    # -- rows of tables ------------------------------------------------------------------------------------------------

    def at_checkpoints(self) -> None:
        """Check that the live steps of each checkpoint are in the tables that serve it."""
        places = self.attempt("the checkpoints table", lambda: checkpoint_places(self._storage, self.head)) or ()
        for number, manifest in sorted(places, key=lambda place: place[0]):
            self.attempt(layout.commit_key(number), lambda: self._checkpoint(number, manifest).groups)  # noqa: B023

    def _checkpoint(self, number: int, manifest: int | None) -> Checkpoint:
        every = Checkpoints(self._storage, self.head, annotations=self._snapshot.annotations)
        return every.at_commit(number, manifest)

    def at_episodes(self) -> None:
        """Check that no episode joins branches that exclude each other, or goes on from another episode or itself, and
        that no rollout of a prompt is sealed with a missing episode."""
        table = "the segments table"
        if self.attempt(table, lambda: EpisodeIndex(self._snapshot).chains) is not None:
            for name, problem in self.attempt(table, lambda: list(spliced(self._snapshot))) or ():
                self._find(table, problem, (name,))
        table = "the ledger table"
        for name, problem in self.attempt(table, lambda: list(self._sealed_unknown())) or ():
            self._find(table, problem, (name,))

    def _sealed_unknown(self) -> Iterator[tuple[str, str]]:
        """Episodes that a ledger names and the segments table lacks, with a sentence."""
        import pyarrow as pa

        columns = ["ledger", "key", "episode_id"]
        ledger = tablefiles.load(self._storage, "ledger", self.head.files("ledger"), columns)
        if not ledger.num_rows:
            return
        there = of_segments("ledger", ledger, self._snapshot.columns(["episode_id"]))
        unknown = ledger.filter(pa.array(ledger["episode_id"].is_valid().to_numpy() & ~there))
        for name, key, episode in zip(*(unknown[column].to_pylist() for column in columns), strict=True):
            problem = f"key {key} of ledger {name!r} is sealed with episode {episode!r}, of which there is no row"
            yield episode, problem

    # -- journals ------------------------------------------------------------------------------------------------------

    def at_journals(self) -> None:
        """Check what the newest session of each run has journaled since its newest checkpoint."""
        for run, entry in (self.attempt("the runs", lambda: {**self.head.runs}) or {}).items():
            if not entry.journal:
                continue
            of_run = partial(tails.of_run, self._storage, self.head, run)
            found: Tails | None = self.attempt(f"the journal of run {run!r}", of_run)
            for one in () if found is None else found.ranks:
                self.report.journaled += one.objects
                if one.ended == tails.DAMAGED:
                    key = one.spoiled or layout.journal_key(entry.session, one.rank, one.next)
                    folder, _, name = key.rpartition("/")
                    lost = sum(other >= name for other in self._storage.list(folder))
                    problem = f"{one.why}; if the job dies now, this and what comes after it, {lost} objects, are lost"
                    self.report.warnings.append(Finding(key, problem))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def at_jobs(self) -> None:
        """Check the objects of jobs."""
        problems = Jobs(self._storage).problems(deep=self.report.deep)
        for key, problem in self.attempt(layout.JOBS, lambda: list(problems)) or ():
            self.report.warnings.append(Finding(key, problem))

    # -- shards --------------------------------------------------------------------------------------------------------

    @cached_property
    def named(self) -> list[NamedShard]:
        """Every shard to check that rows name, once."""
        return [one for table in self._tables_of_shards() for one in self._shards_of(table)]

    def _tables_of_shards(self) -> Iterator[pa.Table]:
        """Rows that name the shards to check: of the newest commit and, where something was forgotten, of tagged
        commits and of checkpoints that earlier tables serve, as far as they are needed."""
        table = self.attempt("the segments table", lambda: self._snapshot.columns(_OF_SHARDS))
        late = self.attempt("the late table", self._late)
        yield from (found for found in (table, late) if found is not None)
        for commit in () if self._reach is None else self.attempt("the tags", self._others) or ():
            table_of = partial(Snapshot(self._storage, commit).columns, _OF_SHARDS)
            found = self.attempt(f"the segments table of commit {commit.number}", table_of)
            if found is not None and self._reach is not None:
                yield found.filter(stored_in(found, self._reach.shards))

    def _late(self) -> pa.Table:
        """Rows of the late table, as of an episode without a name."""
        import pyarrow as pa

        found = tablefiles.load(self._storage, "late", self.head.files("late"), _OF_SHARDS[1:])
        return found.append_column("episode_id", pa.array(["a late field"] * found.num_rows, pa.string()))

    def _others(self) -> list[Commit]:
        """The other commits whose tables are needed."""
        serving = {manifest or number for number, manifest in checkpoint_places(self._storage, self.head)}
        older = {number for number in serving if number < (self.head.let_go or 0)}
        return [*retained(self._storage, self.head, rounds=())[1:], *commits.read_all(self._storage, older, self.head)]

    def _shards_of(self, table: pa.Table) -> Iterator[NamedShard]:
        for shard, named in named_shards(table).items():
            if shard in self._shards:
                continue
            self._shards.update([shard, *(ref.path for ref in named.files)])
            base = split_key(shard)[0]
            if base is None or self._roots.allows(base):
                yield named
            else:
                url = self._roots.url_of(base) or base
                self.report.not_allowed[url] = self.report.not_allowed.get(url, 0) + 1

    def at_results(self, call: JobCall) -> None:
        """Add the results of all batches to the report."""
        report, unreadable = self.report, list[Finding]()
        problems: dict[Finding, None] = {}  # one that several batches met counts once
        for receipt in call.read(call.results):
            one = CheckedShards.of(receipt)
            report.shards += one.shards
            report.bytes += one.bytes
            problems |= dict.fromkeys(Finding(*problem) for problem in one.problems)
            unreadable += [Finding(*problem) for problem in one.unreadable]
        report.findings += [*problems, *sorted(unreadable, key=lambda found: found.object)]

    # -- leftovers -----------------------------------------------------------------------------------------------------

    def at_leftovers(self) -> None:
        """Note objects that no commit names, and commits that objects show to be missing."""
        find = partial(leftovers, self._storage, self._history, self._shards, self._evidence)
        for key, what in self.attempt("what no commit names", find) or ():
            self.report.notes.append(Finding(key, what))
        head = self._history.head or self.head
        for number, problem in self._evidence.problems(self._storage, head, self._known):
            self._find(layout.commit_key(number), problem)

    def judged(self) -> Iterator[Judged]:
        """The newest whole checkpoints of each run, down to the first without a finding against it."""
        problems = {one.object: one.problem for one in reversed(self.report.findings)}
        left = set(self.head.runs)
        for number, manifest in sorted(checkpoint_places(self._storage, self.head), key=lambda place: -place[0]):
            try:
                ck = self._checkpoint(number, manifest)
            except ArchiveError:  # its commit has a finding
                continue
            if ck.run not in left or not ck.whole:
                continue
            problem = _against(ck, problems)
            if problem is None:
                left.discard(ck.run)
            yield Judged(ck.run, ck.name, ck.number, problem)


def _against(ck: Checkpoint, problems: dict[str, str]) -> str | None:
    """The first problem of an object that a checkpoint needs."""
    own, serving = ck.commit, ck.served_by
    files = [*serving.files("segments"), *serving.files("branches"), *([own.live] if own.live else [])]
    keys = [layout.commit_key(ck.number), *(one.key for one in ck.record.ranks), *ck.record.borrowed]
    for key in [*keys, *(one.path for one in files)]:
        if key in problems:
            return f"{key}: {problems[key]}"
    try:
        rows = ck.snapshot.take(ascending(ck.located.stream), ["shard", "chunks"])
    except ArchiveError as e:
        return str(e)
    needed = {key for name in rows.column_names for key in distinct(rows[name])}
    return next((f"{key}: {problems[key]}" for key in sorted(needed & problems.keys())), None)


def spliced(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Episodes with a segment that goes on from one which its session has never seen, because another branch wrote it;
    and what is wrong with each. Origins are recorded when a session is opened."""
    known = snapshot.branches
    if not known:
        return
    table = snapshot.columns(chains.DETAIL)
    before = chains.predecessors(table)
    for row in np.sort(known.spliced(ByWriter(table), before)).tolist():
        (mine, other) = snapshot.take(np.array([row, before[row]]), chains.DETAIL).to_pylist()
        names = [chains.address(r["session"], r["rank"], r["sequence"]) for r in (mine, other)]
        origin = known.origins.get(mine["session"])
        where = "began by itself" if origin is None else f"resumed from commit {origin.commit}"
        problem = (
            f"episode {mine['episode_id']!r} is spliced: segment {names[0]!r} goes on from {names[1]!r}, which is "
        )
        yield mine["episode_id"], f"{problem}of a branch that its session, which {where}, does not have"
