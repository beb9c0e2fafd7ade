"""Save and restore of RLinf's buffers; import, export, merge and split of its folders."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.adapters import (
    UNFINISHED,
    Report,
    Saved,
    appended,
    as_given,
    check_option,
    check_room,
    checkpoint,
    exact_share,
    part_of,
    several,
    share_of,
)
from archive.adapters.rlinf import export, live, order
from archive.adapters.rlinf.episodes import add_episodes
from archive.adapters.rlinf.folder import Problem
from archive.adapters.rlinf.numbers import Trajectories, trajectories_of
from archive.adapters.rlinf.source import (
    check_pickle,
    folders,
    largest_update,
    refuse,
    state_of_folder,
)
from archive.adapters.rlinf.trajectory import to_steps
from archive.base import UsageError, logger
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.store import Storage

if TYPE_CHECKING:
    from archive import Archive, Writer
    from archive.checkpoint import Pending

__all__ = ["Problem", "export_checkpoint", "import_checkpoint", "merge", "problems", "restore", "save", "split"]

ON_MISSING = ("error", "skip")
_UPLOADS = 8  # files at a time, each in memory until it is there


def save(buffers: Any, writer: Writer, *, step: int, on_missing: str = "error", **options: Any) -> Pending:
    """Checkpoint a live TrajectoryReplayBuffer, or several by name; only trajectories not seen before are written.

    on_missing: what becomes of trajectories whose files are gone or damaged: "error", or "skip" to leave them out (in
    the state's list of lost ones).  options: those of `Writer.checkpoint`.
    """
    check_option("on_missing", on_missing, ON_MISSING)
    found = several(buffers)
    for buffer in found.values():
        live.check_buffer(buffer)
    saved = {
        name: appended(writer, name, partial(live.collect, buffer, writer.archive_id, on_missing))
        for name, buffer in found.items()
    }
    return checkpoint(writer, step, saved, **options)


def restore(
    buffers: Any, source: Any, *, rank: int | None = None, existing: str = "error", unfinished: str = "close"
) -> Any:
    """Fill live buffers from a share, or from a checkpoint of a world of the same size; a Report, by name for a dict.

    Files of a buffer with auto_save are written to its folder.  existing: "replace" empties a buffer that holds
    something.  unfinished: as of the other adapters; trajectories are whole, so nothing is left to close.
    """
    check_option("unfinished", unfinished, UNFINISHED)
    found, share = several(buffers), exact_share(source, rank)
    for name, buffer in found.items():
        live.check_buffer(buffer)
        check_room(existing, int(buffer.total_samples), f"buffer {name!r}")
    chosen = {name: trajectories_of(share, name) for name in found}
    archive_id = share.plan.checkpoint.archive_id
    return as_given(buffers, {name: _restored(buffer, chosen[name], archive_id) for name, buffer in found.items()})


def _restored(buffer: Any, found: Trajectories, archive_id: str) -> Report:
    live.empty(buffer)
    try:
        kept = live.fill(buffer, found)
    except BaseException:
        live.empty(buffer)  # rather than half of it
        raise
    live.remember(buffer, archive_id, kept)
    counts = {"lost_before": len(found.state.get("lost", ())), "not_in_cache": len(found.numbers) - len(kept)}
    return Report(len(kept), sum(one.entry["shape"][0] for one in kept), counts)


def import_checkpoint(
    source: Any,
    arc: Archive,
    *,
    step: int | None = None,
    name: str | None = None,
    run: str = "main",
    buffer: str = MAIN_BUFFER,
    allow_pickle: bool = False,
    on_missing: str = "error",
    split: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Import a folder that RLinf saved, or its `rank_*` folders as the ranks of one checkpoint.

    source: any fsspec URL.  step: default the largest update count in the file names, else 0.
    on_missing: "error" lists every file that is gone, damaged or disagrees with the index, and imports nothing; "skip"
    imports the rest (see `problems`). The oldest that an index lists may be gone either way: RLinf saves its last
    window only; they are counted.  allow_pickle: load `.pkl` files. Unsafe: a pickle is a program; nothing but
    tensors, arrays and plain values is taken from it, but trust whoever could write it.
    split: make an episode of each env's episodes; RLinf cannot read them back.
    """
    check_option("on_missing", on_missing, ON_MISSING)
    found = folders(Storage.connect(source, storage_options))
    check_pickle(found, allow_pickle)
    if on_missing == "error":
        refuse(found)
    with ExitStack() as stack:
        session = _session("import")
        writers = [stack.enter_context(arc.writer(rank, len(found), run=run, session=session)) for rank in found]
        for writer, folder in zip(writers, found.values(), strict=True):
            for number, tree in folder.trajectories(pickled=allow_pickle):
                part = part_of(writer, buffer)
                add_episodes(part, tree, number) if split else to_steps(tree, number).add(part)
            writer.flush()  # so that many ranks take no more memory than one
        if on_missing == "error":
            refuse(found)
        at = largest_update(found) if step is None else step
        given = [{buffer: Saved(state=state_of_folder(folder, split=split))} for folder in found.values()]
        made = [checkpoint(w, at, saved, name=name) for w, saved in zip(writers, given, strict=True)]
        results = [pending.result() for pending in made]
    for problem in problems(results[0], buffer):
        logger.warning("not as it should be: %s", problem)
    return results[0]


def problems(ck: Checkpoint, buffer: str = MAIN_BUFFER) -> list[Problem]:
    """What was wrong with the files that an imported checkpoint was made from, file by file."""
    states = (ck.state(rank, buffer) for rank in ck.ranks)
    return [Problem(*one) for state in states if isinstance(state, dict) for one in state.get("problems", ())]


def export_checkpoint(
    source: Any,
    target: Any,
    *,
    rank: int | None = None,
    buffer: str = MAIN_BUFFER,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write what RLinf's own `load_checkpoint` reads, trees as they were; the number of trajectories.

    source: a share, or a checkpoint: of one rank, or of several as `rank_*` folders (all but the one of `rank=`).
    target: an empty folder, any fsspec URL.  Files are of the kind (pt, pkl) that the buffer had.
    """
    storage = Storage.connect(target, storage_options, concurrency=_UPLOADS)
    several_ranks = isinstance(source, Checkpoint) and rank is None and source.world_size > 1
    if isinstance(source, Checkpoint) and not several_ranks:
        source = share_of(source, rank or 0)
    export.check_free(storage, "")
    if not several_ranks:
        return export.write(storage, "", trajectories_of(source, buffer))
    shares = [share_of(source, each) for each in range(source.world_size)]
    return sum(export.write(storage, f"rank_{share.rank}/", trajectories_of(share, buffer)) for share in shares)


def merge(ck: Checkpoint, arc: Archive, *, buffer: str = MAIN_BUFFER, name: str | None = None) -> Checkpoint:
    """A checkpoint of one rank with the trajectories of all, in the order of RLinf's tool, numbered from 0.

    That is by number, then by rank as folder names sort (rank_10 before rank_2). Nothing is copied: it refers to the
    same data.  name: default that of `ck` with "-merged".
    """
    chosen = order.merged(order.places(ck, buffer))
    return order.saved_as(ck, arc, buffer, chosen, name or f"{ck.name}-merged", _session("merge"))


def split(
    ck: Checkpoint,
    arc: Archive,
    count: int,
    *,
    rank: int | None = None,
    buffer: str = MAIN_BUFFER,
    name: str | None = None,
) -> Checkpoint:
    """A checkpoint of one rank with the first `count` trajectories of one, as RLinf's tool does it, numbered from 0.

    rank: which one, if there are several.  Nothing is copied.  name: default that of `ck` with "-split".
    """
    if rank is None and ck.world_size > 1:
        raise UsageError(f"checkpoint {ck.name!r} has {ck.world_size} ranks: give rank=, or merge() them first")
    chosen = order.first(order.places(ck, buffer), count, rank or 0, ck.state(rank or 0, buffer))
    return order.saved_as(ck, arc, buffer, chosen, name or f"{ck.name}-split", _session("split"))


def _session(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:12]}"
