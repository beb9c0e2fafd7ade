"""The checkpoints of an archive: when, by how many ranks, what was new, from which one a session went on; and what a
resume on N ranks, or forgetting, would do. Nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive import tables
from archive.base import NotFoundError, UsageError, jsontree
from archive.log import tablefiles
from archive.tables import CHUNK_FILE, among, distinct
from archive.view.shown import Listing, Shown, checkpoint_at
from archive.view.tables import edges_of
from archive.view.wire import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Keep
    from resharding import Plan

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
    steps, before = ck.steps_per_rank, _before(shown.at(query), ck)
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
            "changed": _changed(ck, before),
            "written": _written(shown.at(query), ck, before.number if before is not None else 0),
        }
    )


def _before(arc: Archive, ck: Checkpoint) -> Checkpoint | None:
    """The newest one of its run before it that has its buffers."""
    saved = arc.checkpoints.of(ck.run)
    rows = saved.table.select(["commit", "replay_saved"]).to_pylist()
    older = [place for place, row in enumerate(rows) if row["commit"] < ck.number and row["replay_saved"]]
    return saved[older[-1]] if older else None


def _written(arc: Archive, ck: Checkpoint, before: int) -> int:
    """Bytes of the chunks of steps that its run committed after the commit `before`, until it was there."""
    sessions = {row["session"] for row in arc.checkpoints.table.to_pylist() if row["run"] == ck.run}
    rows = arc.snapshot.columns(["commit", "session", "shard", *CHUNK_FILE])
    commits = pc.fill_null(rows["commit"], 0)
    new = pc.and_(pc.greater(commits, before), pc.less_equal(commits, ck.number))
    mine = among(rows["session"], sessions)
    taken = rows.filter(pc.and_(new, pa.array(mine)))
    shards = distinct(taken["shard"])
    files = list(tablefiles.chunk_files(taken).values())
    total = 0
    for file, data in zip(files, tablefiles.fetch(arc.storage, files), strict=True):
        chunks = tables.loads(data, "chunks", where=file.path, columns=["shard", "size"])
        found = chunks.filter(among(chunks["shard"], shards))
        total += pc.sum(found["size"]).as_py() or 0
    return total


def _changed(ck: Checkpoint, before: Checkpoint | None) -> dict[str, Any] | None:
    """The numbers of what came and went between two checkpoints; None where there are not two with buffers."""
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


def column(shown: Shown, query: Query) -> Reply:
    """The spread of the column `name=` of `buffer=` of the checkpoint `number=`: {edges, counts, ranks: [{rank, rows,
    least, mean, most}]}; of several numbers a step, over all of them. NotFoundError where no rank has it."""
    ck = checkpoint_at(shown.at(query), query.number("number", 0))
    name, buffer = query.needed("name"), query.text("buffer", "replay")
    found = {rank: _numbers(ck, name, rank, buffer) for rank in list(ck.ranks)[:MOST_RANKS]}
    known = {rank: values for rank, values in found.items() if values is not None}
    if not known:
        raise NotFoundError(f"{ck.name} has no column {name!r:.80} in buffer {buffer!r:.80}")
    every = np.concatenate(list(known.values()))
    edges = edges_of(every) if len(every) else np.zeros(0)
    counts = np.histogram(every, edges)[0].tolist() if len(edges) else []
    rows = [{"rank": rank, "rows": len(values)} | _ends(values) for rank, values in known.items()]
    return json_reply({"edges": edges.tolist(), "counts": counts, "ranks": rows})


def _numbers(ck: Checkpoint, name: str, rank: int, buffer: str) -> np.ndarray[Any, Any] | None:
    """The finite numbers of a rank's column; None of one that has none."""
    try:
        values = np.asarray(ck.column(name, rank, buffer))
    except NotFoundError:
        return None
    if values.dtype.kind not in "biuf":
        raise UsageError(f"column {name!r:.80} holds {values.dtype}, no numbers")
    flat = values.reshape(-1).astype(np.float64)
    return flat[np.isfinite(flat)]


def _ends(values: np.ndarray[Any, Any]) -> dict[str, float]:
    if not len(values):
        return {}
    return {"least": float(values.min()), "mean": float(values.mean()), "most": float(values.max())}


def tails(shown: Shown, query: Query) -> Reply:
    """The journal of `run=` beyond its newest checkpoint, rank by rank; null without a journal."""
    arc, run = shown.at(query), query.needed("run")
    if run not in arc.head.runs:
        raise NotFoundError(f"there is no run {run!r:.80} at {arc.url}")
    found = arc.tails(run) if arc.head.runs[run].journal else None
    return json_reply(found.to_json() if found is not None else None)


MOST_TARGETS = 1024
POLICIES = ("balanced", "interleaved", "by_trajectory")


def plan(shown: Shown, query: Query) -> Reply:
    """The plan to resume the checkpoint `number=` on `ranks=` by `policy=`: {about, moved: [[from, to, steps]], ranks:
    [{episodes, steps, bytes, requests}], dropped}."""
    return told_of(planned(shown, query))


def told_of(made: Plan) -> Reply:
    """A plan as the answer to that question."""
    totals = zip(made.episodes, made.steps, made.cost(), strict=True)
    rows: list[dict[str, Any]] = [{"episodes": episodes, "steps": steps, **cost} for episodes, steps, cost in totals]
    moved = [[source, target, steps] for (source, target), steps in sorted(made.moved.items())]
    return json_reply({"about": made.about, "moved": moved, "ranks": rows, "dropped": made.dropped})


def planned(shown: Shown, query: Query) -> Plan:
    """The plan of the checkpoint `number=` for `ranks=` by `policy=`; UsageError for more ranks than anybody waits for:
    MOST_TARGETS, or those that the checkpoint has."""
    import resharding

    ck = checkpoint_at(shown.at(query), query.number("number", 0))
    ranks, policy = query.number("ranks", ck.world_size), query.text("policy") or POLICIES[0]
    most = max(MOST_TARGETS, ck.world_size)
    if not 1 <= ranks <= most or policy not in POLICIES:
        raise UsageError(f"ranks={ranks}, policy={policy!r:.40}: 1 to {most} ranks by {', '.join(POLICIES)}")
    return resharding.plan(ck, ranks, policy=policy, tails="ignore")


def forgetting(shown: Shown, query: Query) -> Reply:
    """The plan of forgetting, with its reasons. It keeps the `last=`, `every=`, `best=` (METRIC[:min|max][:N])
    checkpoints and those `within=` "7d"; `unreferenced=1` drops episodes that none of them holds, `where=` those that
    meet it. `archive forget` carries it out: `command` has its options."""
    run, where = query.text("run") or None, query.text("where").strip() or None
    episodes = "unreferenced" if query.flag("unreferenced") else None
    made = shown.at(query).forget(_keep(query), episodes, where, run=run)
    return json_reply(made.to_json() | {"command": _command(query)})


def _keep(query: Query) -> Keep | None:
    """The policy that is asked for; None for none. UsageError for what is none."""
    from archive.checkpoint import keep_of

    last, every = query.number("last", 0) or None, query.number("every", 0) or None
    return keep_of(last, every, query.text("within").strip() or None, query.text("best").strip() or None)


def _command(query: Query) -> str:
    """The options of the command that carries it out."""
    import shlex

    options = ("last", "every", "within", "best")
    words = [word for name in options if (text := query.text(name).strip()) for word in (f"--keep-{name}", text)]
    words += [word for name in ("where", "run") if (text := query.text(name).strip()) for word in (f"--{name}", text)]
    return shlex.join([*words, *(["--episodes", "unreferenced"] if query.flag("unreferenced") else [])])
