"""Looking after an archive: verifying what commits promise, and going on after a damaged newest commit.
Deletes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from archive.base import ArchiveError, CorruptCommitError, NotFoundError, UsageError, layout
from archive.checkpoint import Checkpoint, StagedFile
from archive.maintain import splices
from archive.manifest import (
    METADATA,
    Commit,
    ShardIndex,
    Snapshot,
    StoredFile,
    about,
    chunkindex,
    commits,
    sessions,
    tablefiles,
)
from archive.read import fetching
from archive.shard import checksum
from archive.store import Roots, Storage, split_key


class Opened(Protocol):
    """An archive as it is open, as of a commit."""

    @property
    def storage(self) -> Storage: ...

    @property
    def head(self) -> Commit: ...

    @property
    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True)
class Finding:
    """Something that is not as a commit says."""

    object: str
    problem: str
    episodes: tuple[str, ...] = ()  # some of those that lie there


@dataclass
class Report:
    """What was looked at, and what was found wrong."""

    deep: bool
    commits: int = 0
    manifests: int = 0
    shards: int = 0
    states: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    not_allowed: dict[str, int] = field(default_factory=dict)  # URL of another archive -> its shards, not looked at

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, and nothing was left out."""
        return not self.findings and not self.not_allowed


def verify(archive: Opened, *, deep: bool = False, progress: Callable[[Report], None] | None = None) -> Report:
    """Check all commits, their tables, what their checkpoints staged, that no episode goes on from a branch that a
    resume left behind, and every shard of the newest: that its first bytes are there or, if `deep`, that every byte is
    as it was written.

    Shards of other archives are looked at where `allow_bases` permits it; those that it does not are no findings, but
    counted, and the report is not sound then.
    """
    report = Report(deep)
    tell = progress or (lambda _: None)
    seen: set[str] = set()
    resumes = splices.Resumes()
    for commit in _commits(archive, report):
        _check_files(archive, commit, seen, report)
        _check_staged(archive, commit, resumes, report)
        tell(report)
    _check_chains(archive, resumes, report)
    for key in _attempt(report, "sessions", lambda: sessions.claim_keys(archive.storage)) or ():
        _attempt(report, key, partial(sessions.read_claim, archive.storage, key))
    for index, episodes in _shards(archive, report):
        _check_shard(_roots(archive), index, episodes, report)
        tell(report)
    return report


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


def _check_files(archive: Opened, commit: Commit, seen: set[str], report: Report) -> None:
    """The manifest files that a commit names, each once."""
    for ref in commit.all_files:
        if ref.path not in seen:
            seen.add(ref.path)
            report.manifests += 1
            _attempt(report, ref.path, partial(tablefiles.fetch, _roots(archive), [ref]))


def _check_chains(archive: Opened, resumes: splices.Resumes, report: Report) -> None:
    """No episode may be put together from branches that exclude each other."""
    table = "the segments table"
    for splice in _attempt(report, table, lambda: list(splices.find(archive.snapshot, resumes))) or ():
        report.findings.append(Finding(table, str(splice), (splice.episode_id,)))


def _check_staged(archive: Opened, commit: Commit, resumes: splices.Resumes, report: Report) -> None:
    """What the ranks staged for the checkpoint of a commit."""
    for staged in () if commit.checkpoint is None else commit.checkpoint.ranks:
        file = StagedFile(archive.storage, staged.key, staged.nonce)
        report.states += 1
        index = _attempt(report, staged.key, partial(getattr, file, "index"))
        if index is not None:
            resumes.add(Checkpoint(archive.storage, commit), index)
            if report.deep:
                _attempt(report, staged.key, file.check)


def _shards(archive: Opened, report: Report) -> Iterator[tuple[ShardIndex, tuple[str, ...]]]:
    """Every shard that the segments table names, with some of its episodes."""
    names = ("episode_id", "shard", "chunks", "chunks_bytes", "chunks_crc32c")
    table = _attempt(report, "the segments table", lambda: archive.snapshot.columns(names))
    if table is None:
        return
    episodes: dict[str, list[str]] = {}
    for shard, name in zip(table["shard"].to_pylist(), table["episode_id"].to_pylist(), strict=True):
        if shard is not None:
            episodes.setdefault(shard, []).append(name)
    files = tablefiles.chunk_files(table)
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


@dataclass(frozen=True)
class Repaired:
    """What `repair` did."""

    commit: int
    kept_as: str


def damaged_commit(storage: Storage) -> int:
    """Number of the newest commit, if it is damaged; UsageError if there is nothing to repair."""
    try:
        newest = commits.newest(storage)
    except CorruptCommitError:
        folder = [n for n in storage.list("commits") if n.endswith("/")][-1].rstrip("/")
        return int(
            [n for n in storage.list(layout.commit_folder(folder)) if n.endswith(".json")][-1].removesuffix(".json")
        )
    if newest.number == 0:
        raise NotFoundError(f"there are no commits at {storage.url}; nothing to repair")
    raise UsageError(f"the newest commit at {storage.url}, {newest.number}, is sound; nothing to repair")


def repair(storage: Storage) -> Repaired:
    """Put a commit without changes in the place of a damaged newest one,
    so that the archive opens as of the one before.

    What only the damaged commit made visible is no longer; nothing is deleted, and the damaged bytes are kept beside.
    Nobody must be writing. For any other damage, `verify` says what is affected.
    """
    number = damaged_commit(storage)
    key = layout.commit_key(number)
    parent = commits.read(storage, number - 1)
    kept_as = f"damaged/commit-{number:09d}-{secrets.token_hex(4)}.json"
    found = about.find(storage)
    if found is None:
        raise NotFoundError(f"there is no {layout.ARCHIVE_KEY} at {storage.url}: put it back from a copy first")
    data = storage.get_head(key, commits.MAX_OBJECT_BYTES + 1)
    if len(data) > commits.MAX_OBJECT_BYTES:
        raise UsageError(
            f"{storage.full_url(key)} is larger than any commit, so it is not kept beside: move it away yourself; "
            f"without it the archive opens as of commit {number - 1}"
        )
    storage.create(kept_as, data)
    made = commits.completed(parent.after("repair", damaged=kept_as), parent, found[0].id, f"repair/{kept_as}")
    storage.put(key, commits.dumps(made))
    return Repaired(number, kept_as)
