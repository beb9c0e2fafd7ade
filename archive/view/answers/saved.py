"""Engine: the checkpoints of an archive: when, by how many ranks, what was new, from which one a session went on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import NotFoundError, jsontree
from archive.view.answers.listings import Listing
from archive.view.answers.shown import Shown, checkpoint_at
from archive.view.web import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Archive, Checkpoint

MOST = 2000  # checkpoints of a timeline: the newest
MOST_RANKS = 512
_TOLD = ("commit", "run", "session", "name", "step", "world_size", "whole", "replay_saved", "created_at")


def checkpoints(shown: Shown, query: Query) -> Reply:
    """The checkpoints of `run=` (all runs, without it), oldest first: [{commit, run, name, step, world_size, whole,
    metrics, tags, new: {episodes, steps}, resumed: {commit, run, world_size}}]; new since the one before of its run."""
    arc, run = shown.at(query), query.text("run")
    rows = arc.checkpoints.table.to_pylist()
    chosen = [row for row in rows if not run or row["run"] == run][-MOST:]
    tags = _tags(arc)
    resumed = _resumed(arc, {row["commit"]: row for row in rows})
    new = _new(shown.listing(Query({"commit": query.text("commit")})), chosen)
    seen: set[str] = set()
    out = []
    for row, added in zip(chosen, new, strict=True):
        first = row["session"] not in seen
        seen.add(row["session"])
        origin = resumed.get(row["session"]) if first else None
        about = {"metrics": jsontree.loads(row["metrics"] or "{}"), "tags": tags.get(row["commit"], [])}
        out.append({name: row[name] for name in _TOLD} | about | {"new": added, "resumed": origin})
    return json_reply(out)


def _tags(arc: Archive) -> dict[int, list[str]]:
    out: dict[int, list[str]] = {}
    for name, tag in arc.tags.items():
        out.setdefault(tag.commit, []).append(name)
    return out


def _resumed(arc: Archive, rows: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Session -> the checkpoint that it went on from, as far as that is known."""
    out = {}
    for session, origin in arc.snapshot.branches.origins.items():
        known = rows.get(origin.commit, {})
        out[session] = {"commit": origin.commit, "run": origin.run} | {
            name: known.get(name) for name in ("name", "world_size")
        }
    return out


def _new(listing: Listing, rows: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Episodes and steps that each checkpoint's run had committed since the one before."""
    commits = listing.column("commit").fill_null(0).to_numpy()
    lengths, runs = listing.column("length").to_numpy(), listing.column("run").combine_chunks()
    names, codes = runs.dictionary.to_pylist(), runs.indices.fill_null(-1).to_numpy()
    sums: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    before: dict[str, int] = {}
    out = []
    for row in rows:
        run = row["run"]
        if run not in sums:
            mine = np.flatnonzero(codes == (names.index(run) if run in names else -2))
            mine = mine[np.argsort(commits[mine], kind="stable")]
            sums[run] = commits[mine], np.append(0, np.cumsum(lengths[mine]))
        numbers, steps = sums[run]
        start, stop = np.searchsorted(numbers, [before.get(run, 0), row["commit"]], side="right").tolist()
        out.append({"episodes": stop - start, "steps": int(steps[stop] - steps[start])})
        before[run] = row["commit"]
    return out


def checkpoint(shown: Shown, query: Query) -> Reply:
    """The checkpoint `number=` in full: what it is, live steps of each rank, buffers, what was left out, progress,
    lineage, and what changed from the one before of its run."""
    ck = checkpoint_at(shown.at(query), query.number("number", 0))
    steps = ck.steps_per_rank
    return json_reply(
        {
            "about": {name: value for name, value in ck.about.items() if value not in (None, [])},
            "ranks": [{"rank": rank, "steps": steps[rank]} for rank in sorted(steps)[:MOST_RANKS]],
            "buffers": ck.buffers,
            "discarded": ck.discarded,
            "progress": ck.progress,
            "lineage": dict(ck.lineage),
            "missing": [dict(one) for one in ck.missing],
            "unconsumed": len(ck.unconsumed),
            "changed": _changed(ck, _before(shown.at(query), ck)),
        }
    )


def _before(arc: Archive, ck: Checkpoint) -> Checkpoint | None:
    """The newest one of its run before it that has its buffers."""
    older = [one for one in arc.checkpoints.of(ck.run) if one.number < ck.number and one.replay_saved]
    return older[-1] if older else None


def _changed(ck: Checkpoint, before: Checkpoint | None) -> dict[str, Any] | None:
    """What came and went between two checkpoints, in numbers; None where there are not two with buffers."""
    if before is None or not ck.replay_saved:
        return None
    (now, was) = (dict(zip(*_lengths(one), strict=True)) for one in (ck, before))
    both = now.keys() & was.keys()
    return {
        "since": {"number": before.number, "name": before.name, "step": before.step},
        "added": len(now) - len(both),
        "gone": len(was) - len(both),
        "longer": sum(now[name] > was[name] for name in both),
        "shorter": sum(now[name] < was[name] for name in both),
        "steps": {"before": sum(was.values()), "after": sum(now.values())},
        "ranks": {"before": before.world_size, "after": ck.world_size},
    }


def _lengths(ck: Checkpoint) -> tuple[list[str], list[int]]:
    found = ck.episodes.columns(["episode_id", "length"])
    return found["episode_id"].to_pylist(), found["length"].to_pylist()


def tails(shown: Shown, query: Query) -> Reply:
    """What `run=` has journaled beyond its newest checkpoint, rank by rank; null without a journal."""
    arc, run = shown.at(query), query.needed("run")
    if run not in arc.head.runs:
        raise NotFoundError(f"there is no run {run!r:.80} at {arc.url}")
    found = arc.tails(run) if arc.head.runs[run].journal else None
    return json_reply(found.to_json() if found is not None else None)
