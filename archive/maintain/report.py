"""What `verify` says: what was looked at, what was found, and which checkpoints that leaves to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from archive.base import ArchiveError, layout
from archive.checkpoint import Checkpoint, checkpoint_at
from archive.manifest import Commit, Snapshot, checkpoint_places
from archive.store import Storage


@dataclass(frozen=True)
class Finding:
    """Something that is not as a commit says."""

    object: str
    problem: str
    episodes: tuple[str, ...] = ()  # some of those that lie there


@dataclass(frozen=True)
class Judged:
    """A whole checkpoint of a run, and why it cannot be resumed; None: nothing that was looked at is against it."""

    run: str
    name: str
    commit: int
    problem: str | None


@dataclass
class Report:
    """What was looked at, and what was found wrong."""

    deep: bool
    commits: int = 0
    manifests: int = 0
    shards: int = 0
    states: int = 0
    bytes: int = 0
    journaled: int = 0  # objects of journals beyond the newest checkpoints
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)  # what no commit promises, and is lost as it stands
    notes: list[Finding] = field(default_factory=list)  # what no commit names, and would have been
    checkpoints: list[Judged] = field(default_factory=list)  # where something is wrong: of each run the newest, down to
    # the first that is sound
    not_allowed: dict[str, int] = field(default_factory=dict)  # URL of another archive -> its shards, not looked at

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, and nothing was left out."""
        return not self.findings and not self.not_allowed


def judged(storage: Storage, head: Commit, snapshot: Snapshot, report: Report) -> Iterator[Judged]:
    """Of each run its newest whole checkpoints, down to the first that nothing found is against."""
    problems = {one.object: one.problem for one in reversed(report.findings)}
    left = set(head.runs)
    for number, manifest in sorted(checkpoint_places(storage, head), key=lambda place: -place[0]):
        try:
            ck = checkpoint_at(storage, head, number, manifest, snapshot.later)
        except ArchiveError:  # of its commit there is a finding
            continue
        if ck.run not in left or not ck.whole:
            continue
        problem = _against(ck, problems)
        if problem is None:
            left.discard(ck.run)
        yield Judged(ck.run, ck.name, ck.number, problem)


def _against(ck: Checkpoint, problems: dict[str, str]) -> str | None:
    """What is wrong with something that a checkpoint needs."""
    own, serving = ck.commit, ck.served_by
    files = [*serving.files("segments"), *serving.files("branches"), *([own.live] if own.live else [])]
    keys = [layout.commit_key(ck.number), *(one.key for one in ck.record.ranks), *ck.record.borrowed]
    for key in [*keys, *(one.path for one in files)]:
        if key in problems:
            return f"{key}: {problems[key]}"
    try:
        rows = ck.snapshot.take(np.unique(ck.located.stream), ["shard", "chunks"])
    except ArchiveError as e:
        return str(e)
    needed = {key for name in rows.column_names for key in rows[name].unique().to_pylist()}
    return next((f"{key}: {problems[key]}" for key in sorted(needed & problems.keys())), None)
