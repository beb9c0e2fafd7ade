"""What an archive holds, where it is stored, how it came to be, and what became of its prompts: `archive info`, `ls`,
`log`, `ledger`; episodes, one of them, and a random batch: `episodes`, `show`, `sample`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from archive.base import NotFoundError, layout, size
from archive.cli import output
from archive.cli.options import Target, checkpoints_of, limit, meeting, named_checkpoint, of_run, on_archive, where

if TYPE_CHECKING:
    from archive import Archive, Commit, Episode, Episodes
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
    about = {"url": arc.url, "id": arc.id, "layout": arc.layout} | _head(arc.head) | _counted(arc)
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


def _counted(arc: Archive) -> dict[str, Any]:
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
        counts | {"shard": i, "url": arc.shard_url(counts["shard"])}
        for i, counts in enumerate(_shard_counts(arc))
        if wanted is None or counts["shard"] in wanted
    ]
    target.table(rows, SHARD)


def _archives_below(target: Target) -> list[dict[str, Any]]:
    """The archives directly in the folder."""
    from archive.store import Storage

    storage = Storage.connect(target.url, target.storage_options, deadline_s=target.deadline_s)
    out = []
    for name in storage.list(""):
        if name.endswith("/") and storage.exists(f"{name}{layout.ARCHIVE_KEY}"):
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


def _shard_counts(arc: Archive) -> list[dict[str, Any]]:
    """The shards, in the order in which they were written, and what the segments table says of each."""
    table = arc.snapshot.columns(("shard", "length", "session", "rank", "commit"))
    out: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        length = row.pop("length")
        if row["shard"] is not None:
            counts = out.setdefault(row["shard"], {"steps": 0, "segments": 0, **row})
            counts["steps"] += length
            counts["segments"] += 1
    return list(out.values())


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
    """The rows that meet the condition, as they come: a table at a time, as commits are read one by one."""
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
        todo = [{"to_reissue": len(view.to_reissue()), "to_train": len(view.to_train())} for view in views]
        target.table([{"ledger": v.name, **v.counts, **more} for v, more in zip(views, todo, strict=True)], STANDING)
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


SHOWN = (
    "episode_id", "length", "return", "complete", "weights", "updates", "env_id", "rank", "run", "buffer", "commit",
    "metadata",
)  # fmt: skip
ABOUT = (
    "id", "length", "complete", "terminated", "truncated", "reason", "model_weights_uuids", "update_counts",
    "total_reward", "env_id", "rank", "run", "session", "buffer", "created_at", "commit", "metadata", "labels",
)  # fmt: skip


def _update_range(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """A number, or START:STOP, half-open; either side may be left out."""
    start, colon, stop = (text or "").partition(":")
    try:
        return (int(start) if start else None, int(stop) if stop else None) if colon else int(text) if text else None
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor START:STOP", ctx, param) from None


@click.command()
@click.option("--weights", multiple=True, metavar="UUID", help="Made by these. May be repeated.")
@click.option("--updates", callback=_update_range, metavar="N|START:STOP", help="Of these update counts, without STOP.")
@where("As in \"return > 10 and metadata.task = 'push'\".")
@click.option("--run", multiple=True, metavar="NAME", help="Of these runs. May be repeated.")
@click.option("--buffer", multiple=True, metavar="NAME", help="In these buffers. May be repeated.")
@click.option("--complete/--incomplete", default=None, help="With, or without, both beginning and end.")
@limit("How many, of the newest; 0 for all.")
@on_archive()
def episodes(
    target: Target, weights: tuple[str, ...], updates: Any, run: tuple[str, ...], buffer: tuple[str, ...], limit: int,
    **how: Any,
) -> None:  # fmt: skip
    """Find episodes. Reads no data."""
    from archive.base import jsontree

    arc = target.open()
    runs = [arc.runs[name].name for name in run]  # an error of its own, if there is none of that name
    found = arc.episodes.filter(
        model_weights_uuid=weights or None, update_count=updates, buffer=buffer or None, run=runs or None, **how
    )
    some = found[-limit:] if limit else found
    table = some.columns(some.episode_index.names)
    rows = table.to_pylist()
    whole = [row | {"metadata": jsontree.loads(row["metadata"]) if row["metadata"] else {}} for row in rows]

    def show() -> None:
        said = [name for name in table.column_names if name.startswith("label.")]
        shown = [*(name for name in SHOWN if name != "run" or len(arc.runs) > 1), *said]
        output.table(map(_in_short, whole), shown)
        more = f", the newest {len(rows)} shown; --limit 0 shows all" if len(rows) < len(found) else ""
        output.say(f"{len(found)} episode{'' if len(found) == 1 else 's'}{more}")
        for note in found.notes:
            output.say(note)

    target.answer({"found": len(found), "episodes": whole}, show)


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    updates, weights = _between(row["update_count_min"], row["update_count_max"]), row["model_weights_uuids"] or None
    return row | {"weights": weights, "updates": updates, "metadata": row["metadata"] or None}


def _between(low: int | None, high: int | None) -> str | None:
    return None if low is None else str(low) if low == high else f"{low} to {high}"


@click.command()
@on_archive()
@click.argument("episode_id")
@click.option(
    "--read", "-r", "names", multiple=True, metavar="FIELD", help="Print this field's values. May be repeated."
)
@click.option("--start", default=0, show_default=True, help="First step to print.")
@click.option("--stop", type=int, help="Step before which to end.")
def show(target: Target, episode_id: str, names: tuple[str, ...], start: int, stop: int | None) -> None:
    """One episode: what is known of it, its fields, and their values."""
    episode = target.open().episodes[episode_id]
    values = episode.read(list(names), start, stop) if names else {}
    about = {name.replace("total_reward", "return"): getattr(episode, name) for name in ABOUT}

    def show() -> None:
        counts = episode.update_counts
        known = about | {"update_counts": counts and _between(counts[0], counts[1] - 1)}
        output.facts({name: value for name, value in known.items() if value not in (None, {}, [])})
        _print_fields(episode)
        _print_values(values, start)

    target.answer(about | {"fields": episode.fields} | ({"values": values} if names else {}), show)


def _print_fields(episode: Episode) -> None:
    from archive.views import summaries

    columns = ("field", "dtype", "shape", "axis")
    rows = [(name, *summaries.kind(text)) for name, text in episode.fields.items()]
    output.table([dict(zip(columns, row, strict=True)) for row in rows], columns)


def _print_values(values: dict[str, Any], start: int) -> None:
    """Numbers as NumPy prints them; text, JSON and what varies in length step by step."""
    from archive.views import frames, texts

    for path, leaf in frames.leaves(values):
        output.say(f"\n{output.cell(path, limit=None)}")
        said = texts.as_texts(leaf)
        if said is None or (not said.written and not isinstance(leaf, list)):
            output.say(str(leaf))
            continue
        for step, text in enumerate(said.steps, max(start, 0)):
            for i, line in enumerate(text.split("\n")):
                output.say(f"{f'[{step}]' if i == 0 else '':<6} {output.cell(line, limit=None)}".rstrip())


@click.command()
@click.option("--num-chunks", default=4, show_default=True, type=click.IntRange(1), help="Transitions to draw.")
@click.option("--cache-size", default=5, show_default=True, type=click.IntRange(0), help="Newest trajectories to hold.")
@click.option(
    "--sample-window-size",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Draw from that many of the newest trajectories; 0 for all.",
)
@click.option("--checkpoint", "name", metavar="NAME", help="Default: the newest whole one; without any, all episodes.")
@of_run
@click.option("--buffer", default="replay", show_default=True, metavar="NAME")
@where()
@click.option("--seed", default=1234, show_default=True)
@click.option("--replace", is_flag=True, help="Draw more than there are, if need be.")
@click.option(
    "--missing", default="error", metavar="skip|VALUE", help="Leave out fields that some lack, or fill them in."
)
@on_archive()
def sample(
    target: Target, num_chunks: int, cache_size: int, replace: bool, missing: str, name: str | None, run: str | None,
    buffer: str, where: str | None, **how: Any,
) -> None:  # fmt: skip
    """Load trajectories and draw a batch of transitions once.
    A URL ending in rank_3 means rank 3 of the archive above."""
    from archive.adapters.rlinf import buffer as rlinf
    from archive.views import frames

    place = rlinf.where(target.url)
    arc = target.open(url=place.root)
    source, episodes = _drawn_from(arc, place.rank, name, run, buffer)
    episodes = episodes if where is None else episodes.filter(where=where)
    held = rlinf.TrajectoryReplayBuffer(missing=_filling(missing), **how)
    _, load = _measured(arc, lambda: held.load_episodes(episodes, in_memory=cache_size))
    batch, draw = _measured(arc, lambda: held.sample(num_chunks, replace=replace))
    fields = [
        {"field": path, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for path, value in frames.leaves(batch)
    ]
    drawn = max((field["shape"][0] for field in fields), default=0)  # less than asked for, where there is less
    about = {"source": source, **held.get_stats(), "num_chunks": drawn, "load": load, "sample": draw}

    def show() -> None:
        cost = "{seconds:.3f} s, {requests} requests, {bytes} bytes"
        output.facts(about | {"load": cost.format(**load), "sample": cost.format(**draw)})
        output.table([field | {"shape": str(field["shape"])} for field in fields], ("field", "shape", "dtype"))

    target.answer(about | {"fields": fields}, show)


def _filling(text: str) -> Any:
    """A number to fill in, or one of the words that the buffer knows."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _drawn_from(arc: Archive, rank: int | None, name: str | None, run: str | None, buffer: str) -> tuple[str, Episodes]:
    """What to draw from, in words, and the episodes."""
    from archive.adapters.rlinf.buffer import held_by

    checkpoints = checkpoints_of(arc, run)
    found = checkpoints[name] if name else checkpoints.newest(replay=True)
    if found is None:
        return "all episodes", arc.episodes.filter(buffer=buffer, rank=rank, run=run)
    if rank is None:
        return f"checkpoint {found.name}", found.episodes.filter(buffer=buffer)
    return f"checkpoint {found.name}, rank {rank}", found.episodes.filter(episode_id=held_by(found, buffer, rank))


def _measured(arc: Archive, work: Any) -> tuple[Any, dict[str, Any]]:
    """What the work gives, and what it took."""
    before, started = arc.io_stats(), time.perf_counter()
    made = work()
    used = arc.io_stats() - before
    return made, {"seconds": time.perf_counter() - started, "requests": used.requests, "bytes": used.bytes_in}
