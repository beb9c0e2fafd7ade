"""Tool: `archive sample`: draw a batch of transitions as training would, and say what that took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from archive.base import MissingPackageError
from archive.cli import output
from archive.cli.options import Target, of_run, on_archive
from archive.cli.ranks import checkpoints_of

if TYPE_CHECKING:
    from archive import Archive, Episodes
    from archive.adapters.rlinf.buffer import Where
    from archive.store import IOStats


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
@click.option("--where", "condition", metavar="CONDITION", help="Only episodes that meet it, as in 'return > 10'.")
@click.option("--seed", default=1234, show_default=True)
@click.option("--replace", is_flag=True, help="Draw more than there are, if need be.")
@click.option(
    "--missing", default="error", metavar="skip|VALUE", help="Leave out fields that some lack, or fill them in."
)
@on_archive()
def sample(
    target: Target, num_chunks: int, cache_size: int, sample_window_size: int, name: str | None, run: str | None, buffer: str,
    condition: str | None, seed: int, replace: bool, missing: str,
) -> None:  # fmt: skip
    """Load trajectories and draw a batch of transitions once. A URL ending in rank_3 means rank 3 of the archive above."""
    where, drawn_from = _buffers()
    place = where(target.url)
    arc = target.open(url=place.root)
    source, episodes = _episodes(arc, place, name, run, buffer)
    episodes = episodes if condition is None else episodes.filter(where=condition)
    held = drawn_from(seed=seed, sample_window_size=sample_window_size, missing=_filling(missing))
    loading = _measured(arc, lambda: held.load_episodes(episodes, in_memory=cache_size))
    batch: dict[str, Any] = {}
    drawing = _measured(arc, lambda: batch.update(held.sample(num_chunks, replace=replace)))
    fields = [
        {"field": path, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for path, value in _leaves(batch)
    ]
    drawn = max((field["shape"][0] for field in fields), default=0)  # less than asked for, where there is less
    about = {"source": source, **held.get_stats(), "num_chunks": drawn, "load": loading, "sample": drawing}
    _show(target, about, fields)


def _filling(text: str) -> Any:
    """A number to fill in, or one of the words that the buffer knows."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _buffers() -> tuple[Any, Any]:
    try:
        from archive.adapters.rlinf.buffer import TrajectoryReplayBuffer, where
    except ImportError as e:
        raise MissingPackageError(f"sampling needs torch ({e}): pip install 'trajectory-archive[torch]'") from e
    return where, TrajectoryReplayBuffer


def _episodes(arc: Archive, place: Where, name: str | None, run: str | None, buffer: str) -> tuple[str, Episodes]:
    """What to draw from, in words, and the episodes."""
    from archive.adapters.rlinf.buffer import held_by

    checkpoints = checkpoints_of(arc, run)
    found = checkpoints[name] if name else checkpoints.newest(replay=True)
    if found is None:
        return "all episodes", arc.episodes.filter(buffer=buffer, rank=place.rank, run=run)
    if place.rank is None:
        return f"checkpoint {found.name}", found.episodes.filter(buffer=buffer)
    ids = held_by(found, buffer, place.rank)
    return f"checkpoint {found.name}, rank {place.rank}", found.episodes.filter(episode_id=ids)


def _measured(arc: Archive, work: Any) -> dict[str, Any]:
    before, started = arc.io_stats(), time.perf_counter()
    work()
    used: IOStats = arc.io_stats() - before
    return {"seconds": time.perf_counter() - started, "requests": used.requests, "bytes": used.bytes_in}


def _leaves(nest: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nest.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}/")
        else:
            yield path + key, value


def _show(target: Target, about: dict[str, Any], fields: list[dict[str, Any]]) -> None:
    if target.as_json:
        output.as_json(about | {"fields": fields})
        return
    spent = {
        key: "{seconds:.3f} s, {requests} requests, {bytes} bytes".format(**about[key]) for key in ("load", "sample")
    }
    output.facts(about | spent)
    output.table(([f["field"], str(f["shape"]), f["dtype"]] for f in fields), ("field", "shape", "dtype"))
