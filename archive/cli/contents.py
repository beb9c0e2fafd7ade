"""`archive info`, `ls`, `log`, `ledger`: what an archive holds, where it lies, and how it came to be; and what
became of its prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from archive.base import ARCHIVE_KEY, NotFoundError, size
from archive.cli import output
from archive.cli.options import Target, limit, on_archive, where
from archive.cli.selecting import meeting, named_checkpoint

if TYPE_CHECKING:
    from archive import Archive, Commit
    from archive.ledger import LedgerView

RUN = ("run", "newest_checkpoint", "commit", "checkpoints", "episodes", "steps", "newest_session", "forked_from")
ARCHIVE = ("archive", "commit", "committed_at", "runs", "url")
SHARD = ("shard", "steps", "segments", "session", "rank", "commit", "url")
LOGGED = ("commit", "committed_at", "kind", "run", "session", "rank", "segments", "about")
TAKEN = ("what", "size", "objects")  # bytes by what they are there for
STANDING = ("ledger", "drawn", "started", "sealed", "trained", "dropped", "to_reissue", "to_train")  # counts
LOG_BATCH = 100


@click.command()
@on_archive()
def info(target: Target) -> None:
    """What an archive holds, in a few lines."""
    arc = target.open()
    about = {"url": arc.url, "id": arc.id, "layout": arc.layout} | _head(arc.head) | _episodes(arc)
    about["shards"] = len(arc.shards)
    taken = arc.usage.to_json()
    sessions = {name: entry.session for name, entry in arc.head.runs.items()}
    runs = arc.runs.about

    def show() -> None:
        counts = about["update_counts"]
        output.facts(about | {"update_counts": f"{counts['least']} to {counts['greatest']}" if counts else None})
        if runs:
            output.table([run | {"newest_session": sessions.get(run["run"])} for run in runs], RUN)
        output.table([{"what": name, "size": size(one["bytes"])} | one for name, one in taken.items()], TAKEN)

    target.answer(about | {"runs": sessions, "run_table": runs, "usage": taken}, show)


def _head(head: Commit) -> dict[str, Any]:
    if not head.number:
        return {"commit": 0, "committed_at": None, "format": None}
    return {"commit": head.number, "committed_at": head.created_at, "format": head.format["write"]}


def _episodes(arc: Archive) -> dict[str, Any]:
    import pyarrow.compute as pc

    table = arc.episodes.columns(("length", "complete", "update_count_min", "update_count_max", "buffer"))
    low, high = pc.min(table["update_count_min"]).as_py(), pc.max(table["update_count_max"]).as_py()
    return {
        "episodes": table.num_rows,
        "incomplete": table.num_rows - (pc.sum(table["complete"]).as_py() or 0),
        "steps": pc.sum(table["length"]).as_py() or 0,
        "update_counts": None if low is None else {"least": low, "greatest": high},
        "buffers": sorted(pc.unique(table["buffer"]).to_pylist()),
    }


@click.command()
@where("Only shards with episodes that meet it, as in 'return > 10'.")
@on_archive()
def ls(target: Target, where: str | None) -> None:
    """The shards, with URLs that zarr.open_group takes; of a folder that is no archive, the archives in it."""
    try:
        arc = target.open()
    except NotFoundError:
        found = _archives_below(target)
        if not found or target.commit is not None:
            raise
        target.table(found, ARCHIVE)
        return
    wanted = None if where is None else _shards_of(arc, where)
    rows = [
        {"shard": i, "url": arc.shard_url(key)} | counts
        for i, (key, counts) in enumerate(_shard_counts(arc).items())
        if wanted is None or key in wanted
    ]
    target.table(rows, SHARD)


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
        shard, length = row.pop("shard"), row.pop("length")
        if shard is not None:
            counts = out.setdefault(shard, {"steps": 0, "segments": 0, **row})
            counts["steps"] += length
            counts["segments"] += 1
    return out


@click.command()
@limit("How many; 0 for all.")
@where("Only those that meet it, as in \"kind = 'checkpoint'\".")
@on_archive()
def log(target: Target, limit: int, where: str | None) -> None:
    """The commits, newest first."""
    commits = target.open().commits
    rows = (_logged(commits[i]) for i in range(len(commits) - 1, -1, -1))
    target.table(list(islice(_meeting(rows, where), limit or None)), LOGGED)


def _meeting(rows: Iterator[dict[str, Any]], where: str | None) -> Iterator[dict[str, Any]]:
    """Those that meet the condition, as they come: a table at a time, as commits are read one by one."""
    import pyarrow as pa

    numbers = dict.fromkeys(("commit", "rank", "segments"), pa.int64())
    kinds = numbers | {"committed_at": pa.timestamp("us", "UTC")}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in LOGGED])
    while where is not None and (some := list(islice(rows, LOG_BATCH))):
        yield from meeting(where, pa.Table.from_pylist(some, schema=schema)).to_pylist()
    yield from rows


def _logged(commit: Commit) -> dict[str, Any]:
    return {
        "commit": commit.number, "committed_at": commit.created_at, "kind": commit.kind, "run": commit.run,
        "session": commit.session, "rank": commit.rank, "segments": commit.added.get("segments", 0),
        "about": commit.message or (commit.checkpoint and commit.checkpoint.name),
    }  # fmt: skip


@click.command()
@click.option("--name", metavar="NAME", help="Only this ledger.")
@click.option(
    "--run", default="main", show_default=True, metavar="NAME", help="As the newest session of this run sees it."
)
@click.option("--checkpoint", metavar="NAME", help="As of this checkpoint of the run; 'latest' for the newest.")
@click.option(
    "--to-reissue", is_flag=True, help="List what is to be done again: key (as JSON) and sibling, one a line."
)
@on_archive()
def ledger(target: Target, name: str | None, run: str, checkpoint: str | None, to_reissue: bool) -> None:
    """What became of prompts: how many keys are drawn, started, sealed, trained, dropped."""
    views = _ledgers(target.open(), name, run, checkpoint)
    if not to_reissue:
        target.table([_standing(view) for view in views], STANDING)
        return
    rows = [{"ledger": view.name, **one._asdict()} for view in views for one in view.to_reissue()]
    target.answer(rows, lambda: output.say("\n".join(f"{json.dumps(row['key'])} {row['sibling']}" for row in rows)))


def _ledgers(arc: Archive, name: str | None, run: str, checkpoint: str | None) -> list[LedgerView]:
    if name is not None and name not in arc.ledgers:
        known = ", ".join(map(repr, arc.ledgers)) or "none"
        raise NotFoundError(f"there is no ledger {name!r} at {arc.url}; there is: {known}")
    saved = None if checkpoint is None else named_checkpoint(arc, checkpoint, run)
    names = arc.ledgers if name is None else [name]
    return [arc.ledger(one, run) if saved is None else saved.ledger(one) for one in names]


def _standing(view: LedgerView) -> dict[str, Any]:
    todo = {"to_reissue": len(view.to_reissue()), "to_train": len(view.to_train())}
    return {"ledger": view.name, **view.counts, **todo}
