"""Tool: `archive info`, `ls`, `log`: what an archive holds, where it lies, and how it came to be."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, on_archive

if TYPE_CHECKING:
    from archive import Archive, Commit


@click.command()
@on_archive()
def info(target: Target) -> None:
    """What an archive holds, in a few lines."""
    arc = target.open()
    about = {"url": arc.url, "id": arc.id, "layout": arc.layout} | _head(arc.head) | _episodes(arc)
    about["shards"] = len(arc.shards)
    about["runs"] = {name: entry.get("session") for name, entry in arc.head.runs.items()}
    if target.as_json:
        output.as_json(about)
        return
    runs, counts = about.pop("runs"), about["update_counts"]
    about["update_counts"] = f"{counts['least']} to {counts['greatest']}" if counts else None
    output.facts(about | {f"run {name}": f"newest session {session}" for name, session in runs.items()})


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
@on_archive()
def ls(target: Target) -> None:
    """The shards, with URLs that zarr.open_group takes."""
    arc = target.open()
    rows = [
        {"shard": i, "url": arc.shard_url(key)} | counts
        for i, (key, counts) in enumerate(_shard_counts(arc).items())
    ]  # fmt: skip
    if target.as_json:
        output.as_json(rows)
    else:
        columns = ("shard", "steps", "segments", "session", "rank", "commit", "url")
        output.table(([row[c] for c in columns] for row in rows), columns)


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
@on_archive()
def log(target: Target, limit: int) -> None:
    """The commits, newest first."""
    commits = target.open().commits
    numbers = range(len(commits) - 1, -1, -1)
    rows = [_logged(commits[i]) for i in islice(numbers, limit or None)]
    if target.as_json:
        output.as_json(rows)
    else:
        columns = ("commit", "committed_at", "kind", "run", "session", "rank", "segments", "about")
        output.table(([row[c] for c in columns] for row in rows), columns)


def _logged(commit: Commit) -> dict[str, Any]:
    body = commit.body
    return {
        "commit": commit.number, "committed_at": commit.created_at, "kind": commit.kind, "run": commit.run,
        "session": commit.session, "rank": body.get("rank"), "segments": body.get("added", {}).get("segments", 0),
        "about": body.get("message") or body.get("checkpoint", {}).get("name"),
    }  # fmt: skip
