"""Joining what the ranks staged into one commit: all of them or nothing. Any rank may do it; it is done once.

Rank 0 looks at once and often; the others first look whether it has been committed, and step in after a pause in
proportion to their rank. Whether all have staged is asked by name, never by a listing. No rank is declared missing by
a clock: the wait ends with an error that names those that have not staged, and may be taken up again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import CheckpointError, MissingObjectError, Patience, RanksMissingError, layout
from archive.checkpoint.staged import StagedFile
from archive.manifest import Body, Commit, CommitLog, Place, claims, commits, tablefiles, tables
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_POLL_S = 0.02
MAX_POLL_S = 1.0
MAX_CONCURRENT = 16
PARTIAL_STEP_IN_S, MAX_PARTIAL_STEPS = 0.5, 6  # the same where the process ends, and there is little time
STEP_IN_S = 1.0  # what each higher rank waits longer before it completes a checkpoint itself


@dataclass(frozen=True)
class Joint:
    """One checkpoint to be committed: by whom it is staged, under which name."""

    place: Place
    name: str
    ordinal: int

    @property
    def transaction(self) -> str:
        return f"{self.place.session}/checkpoint/{self.name}"


def join(
    log: CommitLog, joint: Joint, *, timeout_s: float, given_up: Callable[[], bool] = lambda: False,
    ending: Callable[[float], bool] = lambda grace_s: False,
    absent: Callable[[Sequence[int], float], None] = lambda ranks, waited_s: None,
) -> Commit:  # fmt: skip
    """The commit of this checkpoint, once all ranks have staged it. `given_up` ends the wait early.

    `ending(grace_s)` says that the process ends, and that its time for waiting was over so long ago: what is there by
    then is committed as partial.  `absent` is told, after seconds and then now and then, which ranks have not staged.
    """
    began, patience = time.monotonic(), Patience()
    stop = began + timeout_s
    step_in = began + STEP_IN_S * joint.place.rank
    last_grace_s = PARTIAL_STEP_IN_S * min(joint.place.rank, MAX_PARTIAL_STEPS)
    staged: dict[int, StagedFile] = {}
    poll = FIRST_POLL_S
    while True:
        if found := _committed(log, joint):
            return found
        if time.monotonic() >= step_in and all_staged(log.storage, joint, staged):
            return commit(log, joint, staged)
        if ending(last_grace_s):
            return commit_present(log, joint, staged)
        if time.monotonic() > stop or given_up():
            if not all_staged(log.storage, joint, staged, look_at_all=True):
                raise _missing(joint, staged, time.monotonic() - began)
            return commit(log, joint, staged)
        if patience.due():
            absent(_absent(log.storage, joint), patience.waited_s)
        time.sleep(min(poll, max(0.0, stop - time.monotonic()) + 0.001))
        poll = min(2 * poll, MAX_POLL_S)


def commit_present(log: CommitLog, joint: Joint, staged: dict[int, StagedFile] | None = None) -> Commit:
    """Commit with the ranks that have staged by now, as partial if that is not all; another rank's such commit serves
    as well, if this rank is in it."""
    staged = {} if staged is None else staged
    whole = all_staged(log.storage, joint, staged, look_at_all=True)
    if not whole:
        log.catch_up()
        for rank in range(joint.place.rank):
            made = log.find(f"{joint.transaction}/partial-{rank}")
            if made and joint.place.rank in [part["rank"] for part in made.body["checkpoint"]["ranks"]]:
                return made
    return commit(log, joint, staged, partial=not whole)


def _absent(storage: Storage, joint: Joint) -> list[int]:
    """Who has not staged, by one listing: good enough to tell people, not to decide by."""
    place = joint.place
    keys = [layout.state_key(place.session, joint.name, rank) for rank in range(place.world_size)]
    folder = keys[0].rpartition("/")[0]
    names = set(storage.list(folder))
    return [rank for rank, key in enumerate(keys) if key.rpartition("/")[2] not in names]


def _committed(log: CommitLog, joint: Joint) -> Commit | None:
    if joint.place.world_size == 1:
        return None
    commits.fence(log.catch_up(), joint.place.run, joint.place.session)
    return log.find(joint.transaction)


def all_staged(storage: Storage, joint: Joint, staged: dict[int, StagedFile], *, look_at_all: bool = False) -> bool:
    """Look for those that are not in `staged` yet; whether all ranks are now.

    The first that is absent ends the look, unless all are to be looked at: so waiting costs a request a look.
    """

    def look(rank: int) -> tuple[int, StagedFile | None]:
        file = StagedFile(storage, layout.state_key(joint.place.session, joint.name, rank))
        try:
            return rank, file if file.index else None
        except MissingObjectError:
            return rank, None

    absent = [r for r in range(joint.place.world_size) if r not in staged]
    if absent and not look_at_all and look(absent[0])[1] is None:
        return False
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        staged.update({rank: file for rank, file in pool.map(look, absent) if file is not None})
    return len(staged) == joint.place.world_size


def _missing(joint: Joint, staged: Mapping[int, StagedFile], waited_s: float) -> RanksMissingError:
    absent = [r for r in range(joint.place.world_size) if r not in staged]
    return RanksMissingError(
        f"checkpoint {joint.name!r} of session {joint.place.session!r} is not whole after {waited_s:.0f} s: rank "
        f"{', '.join(map(str, absent))} of {joint.place.world_size} has not staged; nothing was committed and nothing is "
        "lost. See to these ranks, or call result() again to wait longer"
    )


def commit(log: CommitLog, joint: Joint, staged: Mapping[int, StagedFile], *, partial: bool = False) -> Commit:
    """Commit what these ranks staged."""
    parts = [staged[r] for r in sorted(staged)]
    _check_agree(joint, parts)
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        rows = dict(
            zip(sorted(staged), pool.map(lambda f: tuple(f.tables("segments", "chunks", "live")), parts), strict=True)
        )
    transaction = joint.transaction + (f"/partial-{joint.place.rank}" if partial else "")
    joint = replace(joint, ordinal=min(f.index["ordinal"] for f in parts))  # ranks may have counted apart

    def build(parent: Commit, attempt: int) -> Body:
        commits.fence(parent, joint.place.run, joint.place.session)
        _check_order(parent, joint, partial=partial)
        return _body(log.storage, joint, parts, rows, parent, fold=attempt == 0, partial=partial)

    return log.append(transaction, build)


def _check_agree(joint: Joint, parts: Sequence[StagedFile]) -> None:
    """All ranks must mean the same checkpoint."""
    for key in ("step", "world_size", "run", "replay_saved"):
        values = {f.index["rank"]: f.index[key] for f in parts}
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"the ranks do not agree on the {key} of checkpoint {joint.name!r}: {values}; nothing was committed"
            )
    went_on = {f.index["rank"]: number for f in parts if (number := f.index.get("resumed_from")) is not None}
    if len(set(went_on.values())) > 1:
        raise CheckpointError(
            f"the ranks went on from different checkpoints (rank: commit): {went_on}, so checkpoint {joint.name!r} would "
            "lose what others had, or have it twice; nothing was committed: load the same checkpoint on all ranks"
        )


def _check_order(parent: Commit, joint: Joint, *, partial: bool) -> None:
    """Whichever rank was late: of each rank, what it staged must come after what it staged for the latest one.

    Then the least ordinal of the ranks grows too, also where a rank counted calls that others did not make.
    """
    latest = parent.runs[joint.place.run].get("latest") or {}
    if latest.get("session") != joint.place.session:
        return
    same = partial and latest["name"] == joint.name
    if same or latest["ordinal"] >= joint.ordinal:
        raise CheckpointError(
            f"checkpoint {joint.name!r} was not committed: {latest['name']!r}, which is "
            f"{'whole' if same else 'newer'}, is commit {latest['commit']} already; go on with the next checkpoint"
        )


def _body(
    storage: Storage, joint: Joint, parts: Sequence[StagedFile], rows: Mapping[int, Any], parent: Commit, *,
    fold: bool, partial: bool,
) -> Body:  # fmt: skip
    place = joint.place
    segments, chunks, sequences = fresh_rows(parent, place, {r: (s, c) for r, (s, c, _) in rows.items()})
    known_at = min((f.index["known_at"] for f in parts if f.index["known_at"] >= 0), default=0)
    claims.check(storage, parent, segments, place.session, known_at)
    chunk_file = tablefiles.write(storage, place.session, "chunks", chunks) if chunks.num_rows else None
    body, _ = tablefiles.add_rows(storage, place.session, "segments", parent, stamped(segments, chunk_file), fold=fold)
    replay = all(f.index["replay_saved"] for f in parts)
    live = (
        tablefiles.write(storage, place.session, "live", tables.concat("live", [t for _, _, t in rows.values()]))
        if replay
        else None
    )
    about = _about(joint, parts, parent, sequences, partial=partial)
    table, _ = tablefiles.add_rows(storage, place.session, "checkpoints", parent, _row(about, place), fold=fold)
    runs = parent.runs
    runs[place.run] = _run_entry(runs[place.run], about, place, sequences, parent.number + 1, partial=partial)
    return {
        **commits.carried(parent), **body, **table, "runs": runs, "kind": "checkpoint", "run": place.run,
        "session": place.session, "chunks": chunk_file, "live": live, "checkpoint": about,
        "added": {"segments": segments.num_rows},
    }  # fmt: skip


def fresh_rows(parent: Commit, place: Place, rows: Mapping[int, tuple[Any, Any]]) -> tuple[Any, Any, dict[str, int]]:
    """Rows not committed before, by each rank's sequence, and up to where each rank is committed with them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sequences = dict(parent.runs[place.run].get("sequences", {}))
    segments, chunks = [], []
    for rank, (mine, places) in rows.items():
        done = sequences.get(str(rank), 0)
        new = mine.filter(pc.greater_equal(mine["sequence"], done)) if done else mine
        if new.num_rows:
            sequences[str(rank)] = int(pc.max(new["sequence"]).as_py()) + 1
        segments.append(new)
        shards = pc.unique(new["shard"].cast(pa.string()).drop_null())
        chunks.append(places.filter(pc.is_in(places["shard"].cast(pa.string()), value_set=shards)))
    return tables.concat("segments", segments), tables.concat("chunks", chunks), sequences


def stamped(segments: pa.Table, chunk_file: tablefiles.FileRef | None) -> pa.Table:
    """Segment rows with where their chunk table lies, and when they were collected."""
    from datetime import UTC, datetime

    if segments.num_rows == 0:
        return segments
    segments = tables.set_column(segments, "created_at", datetime.now(UTC))
    for name, key in (("chunks", "path"), ("chunks_bytes", "bytes"), ("chunks_crc32c", "crc32c")):
        segments = tables.set_column(segments, name, chunk_file[key] if chunk_file else None)
    return segments


def _about(
    joint: Joint, parts: Sequence[StagedFile], parent: Commit, sequences: Mapping[str, int], *, partial: bool
) -> dict[str, Any]:
    """What the commit says of the checkpoint itself; the rest is in the staged objects."""
    first = parts[0].index
    place = joint.place
    present = [f.index["rank"] for f in parts]
    missing = [r for r in range(place.world_size) if r not in present]
    return {
        "name": joint.name, "step": first["step"], "ordinal": joint.ordinal, "world_size": place.world_size,
        "whole": not missing and not partial, "replay_saved": all(f.index["replay_saved"] for f in parts),
        "missing": [{"rank": r, "last_whole": _last_whole(parent, place.run)} for r in missing],
        "sequences": dict(sequences) | {str(f.index["rank"]): f.index["sequence"] for f in parts if "sequence" in f.index},
        "ranks": [{"rank": f.index["rank"], "key": f.key, "nonce": f.index["nonce"]} for f in parts],
        "buffers": _totals(parts), "discarded": _discarded(parts), "metrics": first["metrics"], "lineage": first["lineage"],
    }  # fmt: skip


def _last_whole(parent: Commit, run: str) -> int | None:
    latest = parent.runs[run].get("latest")
    return latest["commit"] if latest else None


def _totals(parts: Sequence[StagedFile]) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, buffer in part.index["buffers"].items():
            total = out.setdefault(name, {"steps": 0, "episodes": 0, "columns": []})
            total["steps"] += buffer["steps"]
            total["episodes"] += buffer["episodes"]
            total["columns"] = sorted({*total["columns"], *part.index["columns"].get(name, {})})
    return out


def _discarded(parts: Sequence[StagedFile]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for part in parts:
        for buffer in part.index["buffers"].values():
            for reason, counts in buffer["discarded"].items():
                total = out.setdefault(reason, {"episodes": 0, "steps": 0})
                for key in total:
                    total[key] += counts[key]
    return out


def _row(about: Mapping[str, Any], place: Place) -> pa.Table:
    from datetime import UTC, datetime

    from archive.base import jsontree

    return tables.from_columns(
        "checkpoints",
        {
            "commit": np.zeros(1, np.int64), "run": place.run, "session": place.session, "name": [about["name"]],
            "step": [about["step"]], "world_size": place.world_size, "whole": [about["whole"]],
            "replay_saved": [about["replay_saved"]], "metrics": [jsontree.dumps(about["metrics"], where="metrics")],
            "created_at": [datetime.now(UTC)],
        },
    )  # fmt: skip


def _run_entry(
    entry: dict[str, Any],
    about: Mapping[str, Any],
    place: Place,
    sequences: dict[str, int],
    number: int,
    *,
    partial: bool,
) -> dict[str, Any]:
    out = {**entry, "sequences": sequences}
    if not partial and about["whole"]:
        mark = {"name": about["name"], "step": about["step"], "ordinal": about["ordinal"], "session": place.session}
        out["latest"] = {**mark, "commit": number}
        if about["replay_saved"]:
            out["latest_replay"] = {**mark, "commit": number}
    return out
