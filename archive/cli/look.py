"""Tool: `archive info`, `ls`, `log`: what an archive holds, where it lies, and how it came to be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from archive.base import ARCHIVE_KEY, NotFoundError
from archive.cli import output
from archive.cli.options import Target, meeting, on_archive

if TYPE_CHECKING:
    from archive import Archive, Commit

LOGGED = ("commit", "committed_at", "kind", "run", "session", "rank", "segments", "about")
LOG_BATCH = 100
RUN = (
    "run", "newest_checkpoint", "commit", "checkpoints", "episodes", "steps", "newest_session", "forked_from",
)  # fmt: skip


@click.command()
@on_archive()
def info(target: Target) -> None:
    """What an archive holds, in a few lines."""
    arc = target.open()
    about = {"url": arc.url, "id": arc.id, "layout": arc.layout} | _head(arc.head) | _episodes(arc)
    about["shards"] = len(arc.shards)
    about["runs"] = {name: entry.get("session") for name, entry in arc.head.runs.items()}
    about["run_table"] = arc.runs.about
    if target.as_json:
        output.as_json(about)
        return
    runs, counts = about.pop("runs"), about["update_counts"]
    about["update_counts"] = f"{counts['least']} to {counts['greatest']}" if counts else None
    told = [run | {"newest_session": runs.get(run["run"])} for run in about.pop("run_table")]
    output.facts(about)
    if told:
        output.table(([run[name] for name in RUN] for run in told), RUN)


def _head(head: Commit) -> dict[str, Any]:
    if not head.number:
        return {"commit": 0, "committed_at": None, "format": None}
    return {"commit": head.number, "committed_at": head.created_at, "format": head.body["format"]["write"]}


def _episodes(arc: Archive) -> dict[str, Any]:
    import pyarrow.compute as pc

    names = ("length", "complete", "update_count_min", "update_count_max", "buffer")
    table = arc.episodes.table.select(names)
    low, high = pc.min(table["update_count_min"]).as_py(), pc.max(table["update_count_max"]).as_py()
    return {
        "episodes": table.num_rows,
        "incomplete": table.num_rows - (pc.sum(table["complete"]).as_py() or 0),
        "steps": pc.sum(table["length"]).as_py() or 0,
        "update_counts": None if low is None else {"least": low, "greatest": high},
        "buffers": sorted(pc.unique(table["buffer"]).to_pylist()),
    }


@click.command()
@click.option("--where", metavar="CONDITION", help="Only shards with episodes that meet it, as in 'return > 10'.")
@on_archive()
def ls(target: Target, where: str | None) -> None:
    """The shards, with URLs that zarr.open_group takes; of a folder that is no archive, the archives in it."""
    try:
        arc = target.open()
    except NotFoundError:
        found = _archives_below(target)
        if not found or target.commit is not None:
            raise
        _show(target, found, ("archive", "commit", "committed_at", "runs", "url"))
        return
    wanted = None if where is None else _shards_of(arc, where)
    rows = [
        {"shard": i, "url": arc.shard_url(key)} | counts
        for i, (key, counts) in enumerate(_shard_counts(arc).items())
        if wanted is None or key in wanted
    ]
    _show(target, rows, ("shard", "steps", "segments", "session", "rank", "commit", "url"))


def _show(target: Target, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if target.as_json:
        output.as_json(rows)
    else:
        output.table(([row[c] for c in columns] for row in rows), columns)


def _archives_below(target: Target) -> list[dict[str, Any]]:
    """The archives directly in the folder."""
    from archive.store import Storage

    storage = Storage.connect(target.url, target.storage_options, deadline_s=target.deadline_s)
    out = []
    for name in storage.list(""):
        if name.endswith("/") and storage.exists(f"{name}{ARCHIVE_KEY}"):
            arc = target.open(url=storage.full_url(name.rstrip("/")))
            head = {"commit": arc.head.number, "committed_at": arc.head.created_at if arc.head.number else None}
            out.append({"archive": name.rstrip("/"), **head, "runs": list(arc.head.runs), "url": arc.url})
    return out


def _shards_of(arc: Archive, where: str) -> set[str]:
    """The shards that hold steps of the episodes that meet a condition."""
    import numpy as np

    found = arc.episodes.filter(where=where)
    rows = [arc.index.chains.of(int(number)) for number in found.numbers]
    table = arc.snapshot.take(np.concatenate([np.zeros(0, np.int64), *rows]), ["shard"])
    return {name for name in table["shard"].cast("string").to_pylist() if name is not None}


def _shard_counts(arc: Archive) -> dict[str, dict[str, Any]]:
    """Shard -> what the segments table says of it, in the order in which they were written."""
    table = arc.snapshot.columns(("shard", "length", "session", "rank", "commit"))
    out: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        if row["shard"] is not None:
            new = {"steps": 0, "segments": 0, "session": row["session"], "rank": row["rank"], "commit": row["commit"]}
            counts = out.setdefault(row["shard"], new)
            counts["steps"] += row["length"]
            counts["segments"] += 1
    return out


@click.command()
@click.option("--limit", "-n", type=click.IntRange(0), default=20, show_default=True, help="How many; 0 for all.")
@click.option("--where", metavar="CONDITION", help="Only those that meet it, as in \"kind = 'checkpoint'\".")
@on_archive()
def log(target: Target, limit: int, where: str | None) -> None:
    """The commits, newest first."""
    commits = target.open().commits
    numbers = range(len(commits) - 1, -1, -1)
    rows = (_logged(commits[i]) for i in numbers)
    _show(target, list(islice(_meeting(rows, where), limit or None)), LOGGED)


def _meeting(rows: Iterator[dict[str, Any]], where: str | None) -> Iterator[dict[str, Any]]:
    """Those that meet the condition, as they come: a table at a time, as commits are read one by one."""
    import pyarrow as pa

    while where is not None and (some := list(islice(rows, LOG_BATCH))):
        table = pa.table({name: [row[name] for row in some] for name in LOGGED}, schema=_log_schema())
        yield from meeting(where, table).to_pylist()
    yield from rows


def _log_schema() -> Any:
    import pyarrow as pa

    kinds = {
        "commit": pa.int64(),
        "rank": pa.int64(),
        "segments": pa.int64(),
        "committed_at": pa.timestamp("us", "UTC"),
    }
    return pa.schema([(name, kinds.get(name, pa.string())) for name in LOGGED])


def _logged(commit: Commit) -> dict[str, Any]:
    body = commit.body
    return {
        "commit": commit.number, "committed_at": commit.created_at, "kind": commit.kind, "run": commit.run,
        "session": commit.session, "rank": body.get("rank"), "segments": body.get("added", {}).get("segments", 0),
        "about": body.get("message") or body.get("checkpoint", {}).get("name"),
    }  # fmt: skip
