"""Verifying that what commits promise is there, as it was written. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from archive.base import ArchiveError, layout
from archive.checkpoint import checkpoint_at
from archive.journal import Tails, tails
from archive.maintain import agreement, leftovers, missing
from archive.maintain.objects import retained, retained_reach
from archive.maintain.report import Finding, Report, judged
from archive.manifest import (
    METADATA,
    Commit,
    EpisodeIndex,
    Reach,
    RunEntry,
    ShardIndex,
    Snapshot,
    StoredFile,
    checkpoint_places,
    chunkindex,
    commits,
    sessions,
    tablefiles,
)
from archive.read import fetching
from archive.saved import Part
from archive.shard import checksum
from archive.store import Roots, Storage, split_key
from archive.tables import CHUNK_FILE, among, of_segments

if TYPE_CHECKING:
    import pyarrow as pa

_OF_SHARDS = ("episode_id", "shard", *CHUNK_FILE)


class Opened(Protocol):
    """An archive as it is open, as of a commit."""

    @property
    def storage(self) -> Storage: ...

    @property
    def head(self) -> Commit: ...

    @property
    def snapshot(self) -> Snapshot: ...


def verify(archive: Opened, *, deep: bool = False, progress: Callable[[Report], None] | None = None) -> Report:
    """Check all commits, their tables, what their checkpoints staged, that the live steps of each checkpoint are in
    its tables, that no episode goes on from a branch that a resume left behind, and every shard of the newest: that
    its first bytes are there or, if `deep`, that every byte is as it was written and every step can be read. Where
    something was let go of, the tables, checkpoints and shards are those that the newest commit and the tagged ones
    lead to: what else there was need not be there.

    So are what the newest sessions of runs have journaled beyond their checkpoints: where it is damaged, what lies
    beyond cannot be recovered. That breaks no promise of a commit, so it is a warning and no finding.

    What no commit names is noted: a writer that died leaves it, and so does a commit that was removed. Where an object
    says that its writer had seen a commit which is not there, or is another one, that is a finding.

    Shards of other archives are looked at where `allow_bases` permits it; those that it does not are no findings, but
    counted, and the report is not sound then.
    """
    report = Report(deep)
    tell = progress or (lambda _: None)
    seen: set[str] = set()
    reach = _reach(archive, report)
    named, evidence, known = leftovers.Named(), missing.Evidence(), dict[int, Commit]()
    for commit in _commits(archive, report):
        named.add(commit)
        known[commit.number] = commit
        _check_files(archive, commit, seen, report, reach)
        _check_staged(archive, commit, report, reach, evidence)
        tell(report)
    _check_checkpoints(archive, report)
    _check_chains(archive, report)
    _check_sealed(archive, report)
    for key in _attempt(report, "sessions", lambda: sessions.claim_keys(archive.storage)) or ():
        claim = _attempt(report, key, partial(sessions.read_claim, archive.storage, key))
        evidence.add(key, None if claim is None else claim.seen)
    _check_tails(archive, report)
    looked_at: set[str] = set()
    for table in _tables_of_shards(archive, report, reach):
        for index, episodes in _shards(archive, table, looked_at, report):
            _check_shard(_roots(archive), index, episodes, report)
            tell(report)
    if deep:
        _check_contents(archive, report)
    _check_left(archive, named, looked_at, evidence, known, report)
    if report.findings:
        find = partial(judged, archive.storage, archive.head, archive.snapshot, report)
        report.checkpoints += _attempt(report, "the checkpoints table", lambda: list(find())) or ()
    return report


def _check_contents(archive: Opened, report: Report) -> None:
    """Steps must come out of shards as tables say that they lie there."""
    known = {one.object for one in report.findings}
    find = partial(agreement.unreadable, archive.snapshot, _roots(archive), known)
    for one in _attempt(report, "the segments table", lambda: list(find())) or ():
        report.findings.append(Finding(one.shard, one.why, (one.episode_id,)))


def _check_checkpoints(archive: Opened, report: Report) -> None:
    """The live steps of each checkpoint must be in the tables that it is read with."""
    places = _attempt(report, "the checkpoints table", lambda: checkpoint_places(archive.storage, archive.head)) or ()
    for number, manifest in sorted(places, key=lambda place: place[0]):
        _attempt(report, layout.commit_key(number), partial(_locate, archive, number, manifest))


def _locate(archive: Opened, number: int, manifest: int | None) -> None:
    checkpoint_at(archive.storage, archive.head, number, manifest, archive.snapshot.later).groups  # noqa: B018


def _check_left(
    archive: Opened, named: leftovers.Named, shards: set[str], evidence: missing.Evidence, known: dict[int, Commit],
    report: Report,
) -> None:  # fmt: skip
    """What no commit names and, by what all objects say, commits that were there."""
    find = partial(leftovers.find, archive.storage, named, shards, evidence)
    for one in _attempt(report, "what no commit names", find) or ():
        report.notes.append(Finding(one.key, one.what))
    for number, problem in evidence.problems(archive.storage, named.head or archive.head, known):
        report.findings.append(Finding(layout.commit_key(number), problem))


def _reach(archive: Opened, report: Report) -> Reach | None:
    """What must be there; None: all that was ever committed."""
    if archive.head.let_go is None:
        return None
    found: Reach | None = _attempt(report, "the tables", lambda: retained_reach(archive.storage, archive.head))
    return found


def _roots(archive: Opened) -> Roots:
    return Roots(archive.storage, archive.head.base_urls)


def _commits(archive: Opened, report: Report) -> Iterator[Commit]:
    """All commits that can be read, oldest first; each must follow the one before."""
    before: Commit | None = None
    for number in range(1, archive.head.number + 1):
        key = layout.commit_key(number)
        try:
            commit = commits.read(archive.storage, number)
        except ArchiveError as e:
            report.findings.append(Finding(key, str(e)))
            before = None
            continue
        if before is not None and commit.parent != before.digest:
            report.findings.append(Finding(key, f"its parent's checksum is not that of commit {before.number}"))
        report.commits += 1
        before = commit
        yield commit


def _attempt(report: Report, name: str, check: Callable[[], Any]) -> Any:
    """What the check gives; None, and a finding, if it fails."""
    try:
        return check()
    except ArchiveError as e:
        report.findings.append(Finding(name, str(e)))
        return None


def _check_files(archive: Opened, commit: Commit, seen: set[str], report: Report, reach: Reach | None) -> None:
    """The manifest files that a commit names, each once."""
    led_to = commit.tables
    if commit.run_files is not None and (reach is None or commit.run_files.path in reach.manifests):
        led_to = _attempt(report, f"the runs of commit {commit.number}", lambda: commit.tables_led_to) or led_to
    for kind, ref in led_to:
        if ref.path not in seen and (reach is None or ref.path in reach.manifests):
            seen.add(ref.path)
            report.manifests += 1
            data = _attempt(report, ref.path, partial(tablefiles.fetch, _roots(archive), [ref]))
            if data is not None:
                _attempt(report, ref.path, partial(agreement.check_file, _roots(archive), kind, ref, data))


def _check_chains(archive: Opened, report: Report) -> None:
    """No episode may be put together from branches that exclude each other, or go on from another one or itself."""
    table = "the segments table"
    if _attempt(report, table, lambda: EpisodeIndex(archive.snapshot).chains) is None:
        return
    for splice in _attempt(report, table, lambda: list(agreement.find(archive.snapshot))) or ():
        report.findings.append(Finding(table, str(splice), (splice.episode_id,)))


def _check_sealed(archive: Opened, report: Report) -> None:
    """No rollout of a prompt may be sealed with an episode that is not there."""
    table = "the ledger table"
    for name, key, episode in _attempt(report, table, lambda: list(_without_episode(archive))) or ():
        problem = f"key {key} of ledger {name!r} is sealed with episode {episode!r}, of which there is no row"
        report.findings.append(Finding(table, problem, (episode,)))


def _without_episode(archive: Opened) -> Iterator[tuple[str, str, str]]:
    files = archive.head.files("ledger")
    ledger = tablefiles.load(archive.storage, "ledger", files, ["ledger", "key", "episode_id"])
    if ledger.num_rows:
        import pyarrow as pa

        segments = archive.snapshot.columns(["episode_id"])
        unknown = ledger["episode_id"].is_valid().to_numpy() & ~of_segments("ledger", ledger, segments)
        for row in ledger.filter(pa.array(unknown)).to_pylist():
            yield row["ledger"], row["key"], row["episode_id"]


def _check_staged(
    archive: Opened, commit: Commit, report: Report, reach: Reach | None, evidence: missing.Evidence
) -> None:
    """What the ranks staged for the checkpoint of a commit."""
    for staged in () if commit.checkpoint is None else commit.checkpoint.ranks:
        if reach is not None and staged.key not in reach.states:
            continue
        file = Part(archive.storage, staged.key, staged.nonce)
        report.states += 1
        index = _attempt(report, staged.key, partial(getattr, file, "index"))
        if index is not None:
            evidence.add(staged.key, index.seen)
            if report.deep:
                _attempt(report, staged.key, file.check)


def _check_tails(archive: Opened, report: Report) -> None:
    """What the newest session of each run has journaled since its newest checkpoint."""
    runs: dict[str, RunEntry] | None = _attempt(report, "the runs", lambda: {**archive.head.runs})
    for run, entry in (runs or {}).items():
        if not entry.journal:
            continue
        found: Tails | None = _attempt(report, f"the journal of run {run!r}", partial(_tails, archive, run))
        for one in () if found is None else found.ranks:
            report.journaled += one.objects
            if one.ended == tails.DAMAGED:
                key = layout.journal_key(entry.session, one.rank, one.next)
                lost = _count_from(archive.storage, key)
                problem = f"{one.why}; if the job dies now, this and what comes after it, {lost} objects, are lost"
                report.warnings.append(Finding(key, problem))


def _tails(archive: Opened, run: str) -> Tails:
    return tails.of_run(archive.storage, archive.head, run)


def _count_from(storage: Storage, key: str) -> int:
    """How many objects of a journal are there from this one on."""
    folder, _, name = key.rpartition("/")
    return sum(other >= name for other in storage.list(folder))


def _tables_of_shards(archive: Opened, report: Report, reach: Reach | None) -> Iterator[pa.Table]:
    """Rows that name the shards to be looked at: of the newest commit and, where something was let go of, those of
    tagged commits and of checkpoints that earlier tables serve, as far as they are needed."""
    table = _attempt(report, "the segments table", lambda: archive.snapshot.columns(_OF_SHARDS))
    if table is not None:
        yield table
    late = _attempt(report, "the late table", lambda: _late(archive))
    if late is not None:
        yield late
    for commit in () if reach is None else _attempt(report, "the tags", lambda: _others(archive)) or ():
        table_of = partial(Snapshot(archive.storage, commit).columns, _OF_SHARDS)
        found = _attempt(report, f"the segments table of commit {commit.number}", table_of)
        if found is not None and reach is not None:
            yield found.filter(among(found["shard"], reach.shards))


def _late(archive: Opened) -> pa.Table:
    """Rows of the late table, as if of an episode without a name."""
    import pyarrow as pa

    found = tablefiles.load(archive.storage, "late", archive.head.files("late"), _OF_SHARDS[1:])
    return found.append_column("episode_id", pa.array(["a late field"] * found.num_rows, pa.string()))


def _others(archive: Opened) -> list[Commit]:
    """The commits beside the newest whose tables are needed."""
    storage, head = archive.storage, archive.head
    serving = {manifest or number for number, manifest in checkpoint_places(storage, head)}
    older = [commits.read_of(storage, number, head) for number in sorted(serving) if number < (head.let_go or 0)]
    return [*retained(storage, head)[1:], *older]


def _shards(
    archive: Opened, table: pa.Table, looked_at: set[str], report: Report
) -> Iterator[tuple[ShardIndex, tuple[str, ...]]]:
    """Every shard that rows name, but for those looked at, with some of its episodes."""
    episodes: dict[str, list[str]] = {}
    for shard, name in zip(table["shard"].to_pylist(), table["episode_id"].to_pylist(), strict=True):
        if shard is not None and shard not in looked_at:
            episodes.setdefault(shard, []).append(name)
    files = tablefiles.chunk_files(table)
    looked_at.update(episodes, files)
    roots = _roots(archive)
    for shard in list(episodes):
        base = split_key(shard)[0]
        if base is not None and not roots.allows(base):
            url = roots.url_of(base) or base
            report.not_allowed[url] = report.not_allowed.get(url, 0) + 1
            del episodes[shard]
    for path, ref in files.items():
        if not roots.allows(split_key(path)[0]):
            continue
        for index in _attempt(report, path, partial(_indexes, roots, ref)) or ():
            if index.shard in episodes:
                yield index, tuple(dict.fromkeys(episodes.pop(index.shard)))[:3]
    report.findings += [Finding(s, "no chunk table has it", tuple(ids[:3])) for s, ids in episodes.items()]


def _indexes(roots: Roots, ref: StoredFile) -> list[ShardIndex]:
    return [index for _, found in fetching.indexes(roots, [ref]) for index in found.values()]


def _check_shard(roots: Roots, index: ShardIndex, episodes: tuple[str, ...], report: Report) -> None:
    """All members of a shard, or its metadata; each against the chunk table."""
    report.shards += 1
    reads = index.plan(index.everything() if report.deep else {})
    try:
        blocks = roots.get_ranges(reads.requests)
    except ArchiveError as e:
        report.findings.append(Finding(index.shard, str(e), episodes))
        return
    report.bytes += reads.fetched_bytes
    for piece in reads.pieces:
        data = memoryview(blocks[piece.request])[piece.start : piece.start + piece.size]
        sound = chunkindex.stored_checksum(data, piece) == piece.crc32c
        if piece.array != METADATA:
            sound = sound and checksum(data[:-4]) == piece.crc32c
        if not sound:
            report.findings.append(Finding(index.shard, f"{piece.member!r} does not match its checksum", episodes))
