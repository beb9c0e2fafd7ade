"""`archive export --html`: an episode, a checkpoint or a plan as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.base import NotFoundError, UsageError
from archive.cli.selecting import checkpoints_of, named_checkpoint
from archive.store import file_exists, local_path, write_file

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episode, Episodes

BEST = "best"  # the episode of the greatest return, where none has this id
EPISODES = "episodes"  # all that meet the conditions, where no episode has this id
WHOLE = "archive"  # the archive itself, or a run of it, likewise


def page_of(
    arc: Archive, what: str, *, run: str | None, where: str | None, weights: tuple[str, ...], world_size: int | None,
    allow_missing: bool, **how: Any,
) -> tuple[str, str]:  # fmt: skip
    """Title and text of the page of an episode's id or a checkpoint's name ("latest"), with a world size of its plan.

    how: options of an episode's page, as of Episode.to_html; a UsageError for another one's. NotFoundError if there is
    nothing of that name.
    """
    if world_size:
        _refuse(how, "plan")
        return _plan(arc, what, run, world_size, filter=where, allow_missing=allow_missing)
    if run is not None:
        arc.runs[run]  # a run that is not there is an error of its own
    found = arc.episodes.filter(where=where, model_weights_uuid=weights or None, run=run)
    if len(named := found.filter(episode_id=what)):
        return f"episode {what}", named[0].to_html(**how)
    if what == BEST and (best := _best(found)) is not None:
        return f"episode {best.id}", best.to_html(**how)
    if what == EPISODES:
        _refuse(how, "list of episodes")
        return f"{len(found)} episodes", found.to_html()
    if where is not None or weights:
        raise NotFoundError(
            f"no episode {what!r} at {arc.url} meets --where and --weights; `archive episodes` lists those that do"
        )
    if what == WHOLE:
        _refuse(how, "whole archive")
        return (what, arc.to_html()) if run is None else (f"run {run}", arc.runs.to_html(run))
    checkpoint = _checkpoint(arc, what, run, "episode or checkpoint")
    _refuse(how, "checkpoint")
    return f"checkpoint {checkpoint.name}", checkpoint.to_html()


def _plan(arc: Archive, name: str, run: str | None, world_size: int, **how: Any) -> tuple[str, str]:
    import resharding

    checkpoint = _checkpoint(arc, name, run, "checkpoint")
    plan = resharding.plan(checkpoint, world_size, tails="ignore", **how)  # whoever looks commits nothing
    return f"plan of {checkpoint.name} for {world_size} ranks", plan.to_html()


def _refuse(how: Mapping[str, Any], kind: str) -> None:
    if how:
        option = "--" + ("field" if "fields" in how else min(how).replace("_", "-"))
        raise UsageError(f"{option} is for the page of an episode; that of a {kind} shows no steps: leave it out")


def _best(found: Episodes) -> Episode | None:
    """The one of the greatest return."""
    import pyarrow.compute as pc

    returns = found.columns(["return"])["return"]
    greatest = pc.max(returns)
    return found[pc.index(returns, greatest).as_py()] if greatest.is_valid else None


def _checkpoint(arc: Archive, name: str, run: str | None, kind: str) -> Checkpoint:
    """By name, or the newest whole one."""
    checkpoints_of(arc, run)  # a run that is not there is an error of its own
    try:
        return named_checkpoint(arc, name, run)
    except NotFoundError:
        raise NotFoundError(
            f"there is no {kind} {name!r} at {arc.url}; `archive episodes` and `archive checkpoints` list them"
        ) from None


def page_writer(file: str, storage_options: Mapping[str, Any], *, replace: bool) -> Callable[[bytes], None]:
    """What writes a page to a path, or a URL that the storage options open: whole or not at all.

    UsageError if that is no place for a page, or something is there that is not to be replaced.
    """
    path = None if "://" in file else local_path(file, "--output")
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UsageError(f"--output {file} is no file in a folder that is there: make the folder, or give another")
    place, options = (file, storage_options) if path is None else (str(path), {})
    if file_exists(place, options) and not replace:
        raise UsageError(f"{file} is there; nothing was done: give another --output, or add --yes to replace it")
    return partial(write_file, place, storage_options=options)
