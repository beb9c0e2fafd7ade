"""Looking at an archive: `info`, `ls`, `episodes`, `show`, `sample`, `log`, `ledger`, and `view` in a browser."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from archive.base import NotFoundError, UsageError, jsontree, layout, size
from archive.cli import options as opt
from archive.cli import output
from archive.cli.commands import LOOK, command
from archive.cli.options import Target
from archive.cli.output import Output, Part, listed

if TYPE_CHECKING:
    from archive import Archive, Commit, Episode, Episodes

RUN = ("run", "newest_checkpoint", "commit", "checkpoints", "episodes", "steps", "newest_session", "forked_from")
ARCHIVE = ("archive", "commit", "committed_at", "runs", "url")
SHARD = ("shard", "steps", "segments", "session", "rank", "commit", "url")
LOGGED = ("commit", "committed_at", "kind", "run", "session", "rank", "segments", "about")
TAKEN = ("what", "size", "objects")  # bytes by what they are there for
STANDING = ("ledger", "drawn", "started", "sealed", "trained", "dropped", "to_reissue", "to_train")  # counts
LOG_BATCH = 100


@command(LOOK)
def info(target: Target) -> Output:
    """Show what an archive holds."""
    arc = target.open()
    head, runs, taken = arc.head, arc.runs.about, arc.usage.to_json()
    about = {
        "url": arc.url,
        "id": arc.id,
        "layout": arc.layout,
        "commit": head.number,
        "committed_at": head.created_at if head.number else None,
        "format": head.format["write"] if head.number else None,
        **_counted(arc),
        "shards": len(arc.shards),
    }
    sessions = {name: entry.session for name, entry in head.runs.items()}
    counts = about["update_counts"]
    parts: list[Part] = [about | {"update_counts": f"{counts['least']} to {counts['greatest']}" if counts else None}]
    if runs:
        parts.append(([run | {"newest_session": sessions.get(run["run"])} for run in runs], RUN))
    parts.append(([{"what": name, "size": size(one["bytes"])} | one for name, one in taken.items()], TAKEN))
    return Output(about | {"runs": sessions, "run_table": runs, "usage": taken}, parts)


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


@command(LOOK, opt.where("Only shards with episodes that meet it, as in 'return > 10'."))
def ls(target: Target, where: str | None) -> Output:
    """List the shards, with URLs that zarr.open_group takes.

    If the folder is no archive, list the archives in it.
    """
    try:
        arc = target.open()
    except NotFoundError:
        found = _archives_below(target)
        if not found or target.commit is not None:
            raise
        return listed(found, ARCHIVE)
    rows = _shards(arc, None if where is None else arc.episodes.filter(where=where))
    return listed([row | {"url": arc.shard_url(row.pop("name"))} for row in rows], SHARD)


def _archives_below(target: Target) -> list[dict[str, Any]]:
    """The archives directly in the folder."""
    storage, out = target.connect(), []
    for name in storage.list(""):
        if name.endswith("/") and storage.exists(f"{name}{layout.ARCHIVE_KEY}"):
            arc = target.open(url=storage.full_url(name.rstrip("/")))
            head = {"commit": arc.head.number, "committed_at": arc.head.created_at if arc.head.number else None}
            out.append({"archive": name.rstrip("/"), **head, "runs": list(arc.head.runs), "url": arc.url})
    return out


def _shards(arc: Archive, found: Episodes | None) -> list[dict[str, Any]]:
    """A row for each shard by the segments table, in the order of writing; only those with steps of these episodes."""
    import numpy as np

    names = ("shard", "length", "session", "rank", "commit")
    rows: dict[str, dict[str, Any]] = {}
    for row in arc.snapshot.columns(names).to_pylist():
        name, length = row.pop("shard"), row.pop("length")
        if name is not None:
            shard = rows.setdefault(name, {"shard": len(rows), "steps": 0, "segments": 0, **row, "name": name})
            shard["steps"] += length
            shard["segments"] += 1
    if found is None:
        return list(rows.values())
    segments = np.concatenate([np.zeros(0, np.int64), *(arc.index.chains.of(int(one)) for one in found.numbers)])
    wanted = {*arc.snapshot.take(segments, ["shard"])["shard"].cast("string").to_pylist()}
    return [row for name, row in rows.items() if name in wanted]


# -- episodes ----------------------------------------------------------------------------------------------------------

SHOWN = ("episode_id", "length", "return", "complete", "weights", "updates", "env_id", "rank")
SHOWN_LAST = ("buffer", "commit", "metadata")
ABOUT = ("id", "length", "complete", "terminated", "truncated", "reason", "model_weights_uuids", "update_counts")
ABOUT_LAST = ("env_id", "rank", "run", "session", "buffer", "created_at", "commit", "metadata", "labels")


def _update_range(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    """A number, or START:STOP, half-open; either side may be left out."""
    start, colon, stop = (text or "").partition(":")
    try:
        return (int(start) if start else None, int(stop) if stop else None) if colon else int(text) if text else None
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor START:STOP", ctx, param) from None


@command(
    LOOK,
    opt.option("--weights UUID...", "Only episodes made by these weights."),
    opt.option("--updates N|START:STOP", "Only of these update counts, without STOP.", callback=_update_range),
    opt.where("Only those that meet it, as in \"return > 10 and metadata.task = 'push'\"."),
    opt.option("--run NAME...", "Only of this run."),
    opt.option("--buffer NAME...", "Only in this buffer."),
    opt.option("--complete/--incomplete", "Only episodes with, or without, both first and last step.", default=None),
    opt.limit("How many to show, the newest"),
)
def episodes(
    target: Target,
    weights: tuple[str, ...],
    updates: Any,
    run: tuple[str, ...],
    buffer: tuple[str, ...],
    limit: int,
    **how: Any,
) -> Output:
    """Find episodes. Reads no data."""
    arc = target.open()
    runs = [arc.runs[name].name for name in run]  # an error of its own, if there is none of that name
    found = arc.episodes.filter(
        model_weights_uuid=weights or None, update_count=updates, buffer=buffer or None, run=runs or None, **how
    )
    some = found[-limit:] if limit else found
    table = some.columns(some.episode_index.names)
    rows = table.to_pylist()
    whole = [row | {"metadata": jsontree.loads(row["metadata"]) if row["metadata"] else {}} for row in rows]
    labels = [name for name in table.column_names if name.startswith("label.")]
    shown = [*SHOWN, *(["run"] if len(arc.runs) > 1 else []), *SHOWN_LAST, *labels]
    more = f", the newest {len(rows)} shown; --limit 0 shows all" if len(rows) < len(found) else ""
    total = f"{len(found)} episode{'' if len(found) == 1 else 's'}{more}"
    return Output({"found": len(found), "episodes": whole}, [(map(_in_short, whole), shown), total, *found.notes])


def _in_short(row: dict[str, Any]) -> dict[str, Any]:
    updates, weights = _between(row["update_count_min"], row["update_count_max"]), row["model_weights_uuids"] or None
    return row | {"weights": weights, "updates": updates, "metadata": row["metadata"] or None}


def _between(low: int | None, high: int | None) -> str | None:
    return None if low is None else str(low) if low == high else f"{low} to {high}"


@command(
    LOOK,
    opt.argument("episode_id"),
    opt.option("--read -r names FIELD...", "Print this field's values."),
    opt.option("--start N", "First step to print.", type=int, default=0),
    opt.option("--stop N", "Step before which to end.", type=int),
)
def show(target: Target, episode_id: str, names: tuple[str, ...], start: int, stop: int | None) -> Output:
    """Show one episode: its metadata, fields and values.

    Values are printed of fields that --read names.
    """
    episode = target.open().episodes[episode_id]
    values = episode.read(list(names), start, stop) if names else {}
    about = {name: getattr(episode, name) for name in ABOUT} | {"return": episode.total_reward}
    about |= {name: getattr(episode, name) for name in ABOUT_LAST}
    document = about | {"fields": episode.fields} | ({"values": values} if names else {})
    return Output(document, _parts_of(episode, about, values, start))


def _parts_of(episode: Episode, about: Mapping[str, Any], values: dict[str, Any], start: int) -> Iterator[Part]:
    """Facts, fields and values of an episode: numbers as NumPy prints them, the rest step by step."""
    from archive.view import frames, notebook, texts

    counts = episode.update_counts
    known = {**about, "update_counts": counts and _between(counts[0], counts[1] - 1)}
    yield {name: value for name, value in known.items() if value not in (None, {}, [])}
    columns = ("field", "dtype", "shape", "axis")
    rows = [(name, *notebook.kind(text)) for name, text in episode.fields.items()]
    yield [dict(zip(columns, row, strict=True)) for row in rows], columns
    for path, leaf in frames.leaves(values):
        yield f"\n{output.cell(path, limit=None)}"
        said = texts.as_texts(leaf)
        if said is None or (not said.written and not isinstance(leaf, list)):
            yield str(leaf)
            continue
        for step, text in enumerate(said.steps, max(start, 0)):
            for i, line in enumerate(text.split("\n")):
                yield f"{f'[{step}]' if i == 0 else '':<6} {output.cell(line, limit=None)}".rstrip()


@command(
    LOOK,
    opt.option("--num-chunks N", "Transitions to draw.", default=4),
    opt.option("--cache-size N", "Newest trajectories to hold.", default=5, type=click.IntRange(0)),
    opt.option(
        "--sample-window-size N",
        "Draw from that many of the newest trajectories; 0 for all.",
        default=0,
        type=click.IntRange(0),
    ),
    opt.option("--checkpoint name NAME", "Default: the newest whole one; if there is none, all episodes."),
    opt.IN_RUN,
    opt.option("--buffer NAME", "The buffer to draw from.", default="replay"),
    opt.where(),
    opt.option("--seed N", "Seed of the draw.", type=int, default=1234),
    opt.option("--replace", "Draw the same transition again, if fewer are there."),
    opt.option("--missing skip|VALUE", "Leave out fields that some lack, or fill them.", default="error"),
)
def sample(
    target: Target, num_chunks: int, cache_size: int, replace: bool, missing: str, name: str | None, run: str | None,
    buffer: str, where: str | None, **how: Any,
) -> Output:  # fmt: skip
    """Draw one batch of transitions, and show what that cost.

    A URL that ends in rank_3 means rank 3 of the archive above it.
    """
    from archive.adapters import rlinf
    from archive.view import frames

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
    cost = "{seconds:.3f} s, {requests} requests, {bytes} bytes"
    shown = about | {"load": cost.format(**load), "sample": cost.format(**draw)}
    rows = [field | {"shape": str(field["shape"])} for field in fields]
    return Output(about | {"fields": fields}, [shown, (rows, ("field", "shape", "dtype"))])


def _filling(text: str) -> Any:
    """A number to fill in, or one of the words that the buffer knows."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _drawn_from(arc: Archive, rank: int | None, name: str | None, run: str | None, buffer: str) -> tuple[str, Episodes]:
    """The source of a batch in words, and its episodes."""
    from archive.adapters.rlinf import held_by

    checkpoints = opt.checkpoints_of(arc, run)
    found = checkpoints[name] if name else checkpoints.newest(replay=True)
    if found is None:
        return "all episodes", arc.episodes.filter(buffer=buffer, rank=rank, run=run)
    if rank is None:
        return f"checkpoint {found.name}", found.episodes.filter(buffer=buffer)
    return f"checkpoint {found.name}, rank {rank}", found.episodes.filter(episode_id=held_by(found, buffer, rank))


def _measured(arc: Archive, work: Any) -> tuple[Any, dict[str, Any]]:
    """The result of the work, and what it cost."""
    before, started = arc.io_stats(), time.perf_counter()
    made = work()
    used = arc.io_stats() - before
    return made, {"seconds": time.perf_counter() - started, "requests": used.requests, "bytes": used.bytes_in}


# -- history -----------------------------------------------------------------------------------------------------------


@command(LOOK, opt.limit("How many"), opt.where("Only those that meet it, as in \"kind = 'checkpoint'\"."))
def log(target: Target, limit: int, where: str | None) -> Output:
    """List the commits, newest first."""
    commits = target.open().commits
    rows = (_logged(commits[i]) for i in range(len(commits) - 1, -1, -1))
    return listed(list(islice(_meeting(rows, where), limit or None)), LOGGED)


def _meeting(rows: Iterator[dict[str, Any]], where: str | None) -> Iterator[dict[str, Any]]:
    """The rows that meet the condition, as they come: a table at a time, as commits are read one by one."""
    import pyarrow as pa

    numbers = dict.fromkeys(("commit", "rank", "segments"), pa.int64())
    kinds = numbers | {"committed_at": pa.timestamp("us", "UTC")}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in LOGGED])
    while where is not None and (some := list(islice(rows, LOG_BATCH))):
        yield from opt.meeting(where, pa.Table.from_pylist(some, schema=schema)).to_pylist()
    yield from rows


def _logged(commit: Commit) -> dict[str, Any]:
    about = commit.message or (commit.checkpoint and commit.checkpoint.name)
    found = {name: getattr(commit, name) for name in ("kind", "run", "session", "rank")}
    numbers = {"commit": commit.number, "committed_at": commit.created_at}
    return {**numbers, **found, "segments": commit.added.get("segments", 0), "about": about}


@command(
    LOOK,
    opt.option("--name NAME", "Only this ledger."),
    opt.of_run("As the newest session of this run sees it.", default="main"),
    opt.option("--checkpoint NAME", "As of this checkpoint of the run; 'latest' for the newest."),
    opt.option("--to-reissue", "List the prompts to do again: key (as JSON) and sibling, one a line."),
)
def ledger(target: Target, name: str | None, run: str, checkpoint: str | None, to_reissue: bool) -> Output:
    """Count prompts by state: drawn, started, sealed, trained."""
    arc = target.open()
    if name is not None and name not in arc.ledgers:
        known = ", ".join(map(repr, arc.ledgers)) or "none"
        raise NotFoundError(f"there is no ledger {name!r} at {arc.url}; there is: {known}")
    saved = None if checkpoint is None else opt.named_checkpoint(arc, checkpoint, run)
    names = arc.ledgers if name is None else [name]
    views = [arc.ledger(one, run) if saved is None else saved.ledger(one) for one in names]
    if to_reissue:
        again = [{"ledger": view.name, **one._asdict()} for view in views for one in view.to_reissue()]
        return Output(again, "\n".join(f"{json.dumps(row['key'])} {row['sibling']}" for row in again))
    todo = [{"to_reissue": len(view.to_reissue()), "to_train": len(view.to_train())} for view in views]
    return listed([{"ledger": v.name, **v.counts, **more} for v, more in zip(views, todo, strict=True)], STANDING)


# -- in a browser ------------------------------------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"


@command(
    LOOK,
    opt.option("--port N", "Default: one that is free.", type=click.IntRange(0, 65535)),
    opt.option(
        "--host ADDRESS",
        "Where to listen. Another address lets people with the token URL in from other machines, unencrypted.",
        default=LOOPBACK,
    ),
    opt.option("--read-only", "Nobody may label here."),
    opt.option("--labels file FILE", "JSON of the labels that one may set, and their keys."),
    opt.option("--by NAME", "Your name beside the labels that you set. Default: your login."),
    opt.option("--tokenizer NAME", "Shows token ids as text: of the package tokenizers or transformers."),
    opt.option("--at PLACE", "The page to open first, as the viewer copies it: '#/episode?id=...'."),
    opt.option("--no-browser", "Only print the URL."),
)
def view(
    target: Target,
    port: int | None,
    host: str,
    read_only: bool,
    file: str | None,
    by: str | None,
    at: str | None,
    tokenizer: str | None,
    no_browser: bool,
) -> None:
    """Browse and label episodes in a web browser.

    Prints a URL and serves it until Ctrl-C. Only people with the token URL get in, and only from this machine.
    """
    from archive.view import Settings, alone, serve

    who = by or os.environ.get("USER") or os.environ.get("USERNAME")
    arc, settings = target.open(), Settings(read_only, _labels(file), who, tokenizer)
    with _Ending() as ending, serve(arc, host=host, port=port or 0, settings=settings) as viewer:
        place = f"#{at.removeprefix('#')}" if at else ""
        url = viewer.url + place
        Output({"url": url}, f"{url}\nshows {target.url} until Ctrl-C").show(as_json=target.as_json)
        sys.stdout.flush()
        if not alone(host):
            output.say("warning: other machines can come in, with this URL; nothing is encrypted on the way", err=True)
        if not no_browser and _desktop():
            webbrowser.open(viewer.url_once() + place)
        viewer.wait(ending.waiting)


class _Ending:
    """Ctrl-C and SIGTERM end what is within, and are no error. While it only waits, they are noted and raise nothing:
    Python drops an interrupt that comes within a callback of its weakref module."""

    def __init__(self) -> None:
        self.asked = False
        self._waits = False

    def waiting(self) -> bool:
        """True once it was asked to end; from the first call on, nothing is raised."""
        self._waits = True
        return self.asked

    def _end(self, *_: object) -> None:
        self.asked = True
        if not self._waits:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number, before in self._before.items():
            signal.signal(number, before)
        return kind is KeyboardInterrupt


def _labels(file: str | None) -> tuple[dict[str, Any], ...]:
    if file is None:
        return ()
    from archive.view import labels_of

    try:
        return labels_of(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"--labels {file} cannot be read as JSON: {e}") from e


def _desktop() -> bool:
    """True if somebody sits before this machine, rather than at the end of a line."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
