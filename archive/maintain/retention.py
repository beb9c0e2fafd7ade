"""The request of a forgetting, and the checkpoints that stay, each with its reasons: the policy, and protection from
any policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from archive.base import MissingObjectError, NotFoundError, UsageError
from archive.checkpoint import Keep, candidates, read_clock
from archive.log import Commit, RunEntry, read_of, tablefiles
from archive.maintain.plans import CheckpointFate
from archive.maintain.tags import Tags
from archive.store import Storage

UNREFERENCED, SUPERSEDED = "unreferenced", "superseded"
EVERY, OTHER_RUN = "all checkpoints stay", "of another run"
_FACTS = ("commit", "run", "session", "name", "step", "whole", "created_at", "manifest")  # of a checkpoint's fate
_REMEDY = (
    "say which checkpoints stay, by keep=archive.Keep(last=5, every=100, within='7d', best=('return', 3)), or which "
    "episodes go, by episodes='unreferenced', episodes='superseded', where=... or ids=[...]"
)

Row = Mapping[str, Any]
Reasons = dict[int, list[str]]  # commit -> why it stays


@dataclass(frozen=True)
class ForgetRequest:
    """A request: the retention of checkpoints (None: all stay), and the episodes that may go.

    episodes: "unreferenced", "superseded" or None; where and ids narrow it, or select by themselves where it is None.
    run: nothing of other runs may go.  anyhow: a policy that retains no checkpoint leaves what is protected.
    redact: nothing of these episodes may be left.
    """

    keep: Keep | None = None
    episodes: str | None = None
    where: Any = None
    ids: tuple[str, ...] | None = None
    run: str | None = None
    anyhow: bool = False
    redact: bool = False

    @property
    def lets_episodes_go(self) -> bool:
        """True if any episode may go."""
        return any(given is not None for given in (self.episodes, self.where, self.ids))

    def __str__(self) -> str:
        given = {"keep": self.keep, "episodes": self.episodes, "where": self.where, "run": self.run}
        parts = [f"{name}={value}" for name, value in given.items() if value is not None]
        ids = [] if self.ids is None else [f"{len(self.ids)} ids"]
        return ", ".join([*parts, *ids, *(["redact"] if self.redact else [])])


def asked(keep: Any, episodes: Any, where: Any, ids: Any, run: Any, *, redact: bool) -> ForgetRequest:
    """The request that these arguments make; UsageError if they are empty or contradict each other."""
    if redact and (ids is None or any(given is not None for given in (episodes, where, run))):
        raise UsageError(
            "redact=True removes all that there is of some episodes: give their ids=[...], and keep= at most, not "
            "episodes=, where= or run="
        )
    if keep is not None and not isinstance(keep, Keep):
        raise UsageError(f"keep={keep!r}: {_REMEDY}")
    if keep == Keep():
        raise UsageError(f"keep=Keep() retains nothing: {_REMEDY}")
    if episodes not in (None, UNREFERENCED, SUPERSEDED):
        raise UsageError(f"episodes={episodes!r}: give {UNREFERENCED!r}, {SUPERSEDED!r} or None; {_REMEDY}")
    found = ForgetRequest(keep, episodes, where, None if ids is None else _names(ids), run, redact=redact)
    if keep is None and not found.lets_episodes_go:
        raise UsageError(f"forget() needs keep=, episodes=, where= or ids=: {_REMEDY}")
    return found


def _names(ids: Any) -> tuple[str, ...]:
    names = (ids,) if isinstance(ids, str) else tuple(ids)
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"ids={ids!r:.200}: give the ids of one or several episodes")
    return tuple(dict.fromkeys(names))


# -- the policy --------------------------------------------------------------------------------------------------------


def fates(storage: Storage, head: Commit, asked: ForgetRequest) -> list[CheckpointFate]:
    """The fate of each checkpoint, oldest first.

    UsageError for a policy that retains none: it would leave only what is protected. NotFoundError for a run that
    is not there.
    """
    rows = tablefiles.load(storage, "checkpoints", head.files("checkpoints"), (*_FACTS, "metrics")).to_pylist()
    reasons: Reasons = {row["commit"]: [EVERY] if asked.keep is None else [] for row in rows}
    if asked.run is not None and asked.run not in head.runs:
        raise NotFoundError(
            f"there is no run {asked.run!r} at {storage.url}; its runs: {', '.join(head.runs) or 'none'}"
        )
    if asked.keep is not None:
        clock = read_clock(storage, asked.keep)
        for run in dict.fromkeys(row["run"] for row in rows):  # each run by itself: one cannot push out another's
            mine = [row for row in rows if row["run"] == run]
            wanted = {row["commit"]: [OTHER_RUN] for row in mine}
            if asked.run in (None, run):
                wanted = asked.keep.reasons(candidates(mine, clock), clock.now)
            for commit, why in wanted.items():
                reasons[commit] += why
        _check_wants(rows, asked, reasons)
    for commit, reason in (*_newest(rows, head), *_resumed(storage, rows, head), *_tagged(storage, rows, head)):
        reasons[commit].append(reason)
    every = [{**row, "reasons": tuple(dict.fromkeys(reasons[row["commit"]]))} for row in rows]
    return [CheckpointFate(**{name: one[name] for name in (*_FACTS, "reasons")}) for one in every]


def _check_wants(rows: list[Row], asked: ForgetRequest, reasons: Reasons) -> None:
    meant = [row for row in rows if asked.run in (None, row["run"])]
    if meant and not asked.anyhow and not any(reasons[row["commit"]] for row in meant):
        whole = any(row["whole"] for row in meant)
        remedy = "add last=1, or see by arc.checkpoints.table which steps and metrics they have"
        raise UsageError(
            f"{asked.keep} retains none of the {len(meant)} checkpoints, so that all would go but what is protected: "
            + (remedy if whole else "none of them is whole, so forget episodes alone, without keep=")
        )


# -- protection --------------------------------------------------------------------------------------------------------


def _newest(rows: list[Row], head: Commit) -> Iterator[tuple[int, str]]:
    """The newest whole checkpoint of each run, the newest with its buffers, and newer partial ones."""
    newest = Counter[str]()
    for run, entry in head.runs.items():
        for name, mark in entry.marks.items():
            words = "newest whole of its run" if name == "latest" else "newest of its run with buffers"
            named = (run, mark.session, mark.name)  # a compaction publishes it again, under a number that has no row
            for row in rows:
                if row["whole"] and (row["run"], row["session"], row["name"]) == named:
                    newest[run] = max(row["commit"], newest[run])
                    yield row["commit"], words
    for row in rows:
        if not row["whole"] and row["commit"] > newest[row["run"]]:
            yield row["commit"], "newer than the newest whole of its run"


def _resumed(storage: Storage, rows: list[Row], head: Commit) -> Iterator[tuple[int, str]]:
    """The checkpoint that each run's newest session went on from, as long as that has no whole one with buffers of its
    own."""
    for run, entry in head.runs.items():
        origin = entry.resumed_from
        if origin is None or has_own(entry):
            continue
        at = {origin.commit, *_published(storage, rows, head, origin.commit)}
        for row in rows:
            if row["commit"] in at:
                yield row["commit"], f"the newest session of run {run!r} went on from it"


def has_own(entry: RunEntry) -> bool:
    """True if a run's newest session has a whole checkpoint with its buffers."""
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
    """The checkpoints that tags name: one, or all that there were as of a commit."""
    for tag in Tags(storage, head).values():
        for row in rows:
            is_named = (row["run"], row["name"]) == (tag.run, tag.checkpoint)
            if is_named if tag.checkpoint is not None else row["commit"] <= tag.commit:
                yield row["commit"], f"tag {tag.name!r}"
