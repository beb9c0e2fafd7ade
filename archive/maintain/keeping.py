"""Which checkpoints stay when an archive lets go, each with its reasons: what the policy wants, and what is
protected from any policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from archive.base import MissingObjectError, NotFoundError, UsageError, jsontree
from archive.checkpoint import Candidate, Clock, Keep, read_clock
from archive.maintain.asking import Asked
from archive.manifest import Commit, Mark, RunEntry, read_of, tablefiles
from archive.store import Storage

_COLUMNS = ("commit", "run", "session", "name", "step", "whole", "created_at", "metrics", "manifest")
EVERY, OTHER_RUN = "all checkpoints stay", "of another run"


@dataclass(frozen=True)
class CheckpointFate:
    """A checkpoint, and why it stays; without a reason it goes."""

    commit: int
    run: str
    name: str
    step: int
    created_at: datetime
    session: str
    whole: bool
    manifest: int | None
    reasons: tuple[str, ...] = ()

    @property
    def stays(self) -> bool:
        """Whether there is a reason to keep it."""
        return bool(self.reasons)


Row = Mapping[str, Any]
Reasons = dict[int, list[str]]  # commit -> why it stays


def fates(storage: Storage, head: Commit, asked: Asked) -> list[CheckpointFate]:
    """What becomes of each checkpoint, oldest first.

    UsageError for a policy that wants none of them: it would leave only what is protected. NotFoundError for a run that
    is not there.
    """
    rows = tablefiles.load(storage, "checkpoints", head.files("checkpoints"), _COLUMNS).to_pylist()
    reasons: Reasons = {row["commit"]: [] for row in rows}
    if asked.run is not None and asked.run not in head.runs:
        raise NotFoundError(
            f"there is no run {asked.run!r} at {storage.url}; its runs: {', '.join(head.runs) or 'none'}"
        )
    if asked.keep is None:
        reasons = {commit: [EVERY] for commit in reasons}
    else:
        clock = read_clock(storage) if asked.keep.ages else Clock()
        for run in dict.fromkeys(row["run"] for row in rows):
            _by_policy([row for row in rows if row["run"] == run], asked, clock, reasons)
        _check_wants(rows, asked, reasons)
    for commit, reason in (*_newest(rows, head), *_resumed(storage, rows, head), *_tagged(storage, rows, head)):
        reasons[commit].append(reason)
    return [_fate(row, tuple(dict.fromkeys(reasons[row["commit"]]))) for row in rows]


def _fate(row: Row, reasons: tuple[str, ...]) -> CheckpointFate:
    given = {name: row[name] for name in _COLUMNS if name != "metrics"}
    return CheckpointFate(**given, reasons=reasons)


def _by_policy(rows: list[Row], asked: Asked, clock: Clock, reasons: Reasons) -> None:
    """What the policy wants of one run: of each by itself, so that one cannot push out another's."""
    keep = asked.keep or Keep()
    if asked.run not in (None, rows[0]["run"]):
        found = {row["commit"]: [OTHER_RUN] for row in rows}
    else:
        found = keep.reasons([_candidate(row, clock) for row in rows if row["whole"]], clock.now)
    for commit, why in found.items():
        reasons[commit] += why


def _check_wants(rows: list[Row], asked: Asked, reasons: Reasons) -> None:
    meant = [row for row in rows if asked.run in (None, row["run"])]
    if meant and not asked.anyhow and not any(reasons[row["commit"]] for row in meant):
        whole = any(row["whole"] for row in meant)
        remedy = "add last=1, or see by arc.checkpoints.table which steps and metrics they have"
        raise UsageError(
            f"{asked.keep} wants none of the {len(meant)} checkpoints, so that all would go but what is protected: "
            + (remedy if whole else "none of them is whole, so let go of episodes alone, without keep=")
        )


def _candidate(row: Row, clock: Clock) -> Candidate:
    return Candidate(row["commit"], row["step"], jsontree.loads(row["metrics"] or "{}"), clock.made.get(row["commit"]))


# -- what is protected -------------------------------------------------------------------------------------------------


def _newest(rows: list[Row], head: Commit) -> Iterator[tuple[int, str]]:
    """The newest whole one of each run, the newest with its buffers, and partial ones that are newer."""
    newest: dict[str, int] = {}
    for run, entry in head.runs.items():
        for name, mark in entry.marks.items():
            words = "newest whole of its run" if name == "latest" else "newest of its run with buffers"
            for commit in _of_mark(rows, run, mark):
                newest[run] = max(commit, newest.get(run, 0))
                yield commit, words
    for row in rows:
        if not row["whole"] and row["commit"] > newest.get(row["run"], 0):
            yield row["commit"], "newer than the newest whole of its run"


def _of_mark(rows: list[Row], run: str, mark: Mark) -> list[int]:
    """Its row: a compaction publishes a checkpoint again, under a number that has none."""
    named = (run, mark.session, mark.name)
    return [row["commit"] for row in rows if row["whole"] and (row["run"], row["session"], row["name"]) == named]


def _resumed(storage: Storage, rows: list[Row], head: Commit) -> Iterator[tuple[int, str]]:
    """What each run's newest session went on from, as long as it has no whole one with buffers of its own."""
    for run, entry in head.runs.items():
        origin = entry.resumed_from
        if origin is None or has_own(entry):
            continue
        at = {origin.commit, *_published(storage, rows, head, origin.commit)}
        for row in rows:
            if row["commit"] in at:
                yield row["commit"], f"the newest session of run {run!r} went on from it"


def has_own(entry: RunEntry) -> bool:
    """Whether a run's newest session has a whole checkpoint with its buffers."""
    return entry.latest_replay is not None and entry.latest_replay.session == entry.session


def _published(storage: Storage, rows: list[Row], head: Commit, number: int) -> list[int]:
    """The rows of a checkpoint that a compaction published again under this number."""
    if any(row["commit"] == number for row in rows):
        return []
    try:
        found = read_of(storage, number, head)
    except MissingObjectError:  # it was of another archive
        return []
    name = None if found.checkpoint is None else found.checkpoint.name
    return [row["commit"] for row in rows if (row["session"], row["name"]) == (found.session, name)]


def _tagged(storage: Storage, rows: list[Row], head: Commit) -> Iterator[tuple[int, str]]:
    """What tags name: a checkpoint, or all that there were as of a commit."""
    for tag in read_tags(storage, head):
        for row in rows:
            same = (row["run"], row["name"]) == (tag["run"], tag["checkpoint"])
            named = row["commit"] == tag["target"] or same
            if named if tag["checkpoint"] is not None else row["commit"] <= tag["target"]:
                yield row["commit"], f"tag {tag['name']!r}"


def read_tags(storage: Storage, head: Commit) -> list[dict[str, Any]]:
    """The rows of the table of tags."""
    found: list[dict[str, Any]] = tablefiles.load(storage, "tags", head.files("tags")).to_pylist()
    return found
