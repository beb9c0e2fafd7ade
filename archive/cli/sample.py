"""`archive sample`: draw a batch of transitions as training would, and say what that took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from archive.cli import output
from archive.cli.options import Target, of_run, on_archive, where
from archive.cli.selecting import checkpoints_of

if TYPE_CHECKING:
    from archive import Archive, Episodes


@click.command()
@click.option("--num-chunks", default=4, show_default=True, type=click.IntRange(1), help="Transitions to draw.")
@click.option("--cache-size", default=5, show_default=True, type=click.IntRange(0), help="Newest trajectories to hold.")
@click.option(
    "--sample-window-size", default=0, show_default=True, type=click.IntRange(0),
    help="Draw from that many of the newest trajectories; 0 for all.",
)  # fmt: skip
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

    place = rlinf.where(target.url)
    arc = target.open(url=place.root)
    source, episodes = _episodes(arc, place.rank, name, run, buffer)
    episodes = episodes if where is None else episodes.filter(where=where)
    held = rlinf.TrajectoryReplayBuffer(missing=_filling(missing), **how)
    _, load = _measured(arc, lambda: held.load_episodes(episodes, in_memory=cache_size))
    batch, draw = _measured(arc, lambda: held.sample(num_chunks, replace=replace))
    fields = [
        {"field": path, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for path, value in _leaves(batch)
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


def _episodes(arc: Archive, rank: int | None, name: str | None, run: str | None, buffer: str) -> tuple[str, Episodes]:
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


def _leaves(nest: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nest.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}/")
        else:
            yield path + key, value
