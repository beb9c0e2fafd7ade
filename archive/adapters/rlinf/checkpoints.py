"""RLinf's folders imported as checkpoints, and exported from them; checkpoints merged and split as its tools do it,
into new ones of the same data."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from archive.adapters import Saved, check_option, checkpoint, part_of, share_of
from archive.adapters.rlinf import folders
from archive.adapters.rlinf.folders import Problem
from archive.adapters.rlinf.live import ON_MISSING
from archive.adapters.rlinf.trajectory import (
    DONES,
    NUMBER,
    SYSTEM,
    file_kind,
    listed_at,
    one_a_step,
    shape_of,
    to_steps,
    trajectories_of,
    weights_of,
)
from archive.base import IntegrityError, UsageError, logger
from archive.checkpoint import MAIN_BUFFER, Checkpoint, Holding
from archive.fields import mapped
from archive.store import Storage

if TYPE_CHECKING:
    from archive import Archive
    from archive.write import Buffer

_UPLOADS = 8  # files at a time, each in memory until it is there


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
    found = folders.folders(Storage.connect(source, storage_options))
    folders.check_pickle(found, allow_pickle)
    if on_missing == "error":
        folders.refuse(found)
    with ExitStack() as stack:
        session = _session("import")
        writers = [stack.enter_context(arc.writer(rank, len(found), run=run, session=session)) for rank in found]
        for writer, folder in zip(writers, found.values(), strict=True):
            for number, tree in folder.trajectories(pickled=allow_pickle):
                part = part_of(writer, buffer)
                _add_episodes(part, tree, number) if split else to_steps(tree, number).add(part)
            writer.flush()  # so that many ranks take no more memory than one
        if on_missing == "error":
            folders.refuse(found)
        at = folders.largest_update(found) if step is None else step
        given = [{buffer: Saved(state=folder.state(split=split))} for folder in found.values()]
        made = [checkpoint(w, at, saved, name=name) for w, saved in zip(writers, given, strict=True)]
        results = [pending.result() for pending in made]
    for problem in problems(results[0], buffer):
        logger.warning("not as it should be: %s", problem)
    return results[0]


def problems(ck: Checkpoint, buffer: str = MAIN_BUFFER) -> list[Problem]:
    """The problems of the files that an imported checkpoint was made from."""
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
    several = isinstance(source, Checkpoint) and rank is None and source.world_size > 1
    shares = [share_of(source, each) for each in range(source.world_size)] if several else [share_of(source, rank or 0)]
    folders.check_free(storage, "")
    prefixes = [f"rank_{share.rank}/" if several else "" for share in shares]
    return sum(
        folders.write(storage, prefix, trajectories_of(share, buffer))
        for prefix, share in zip(prefixes, shares, strict=True)
    )


def merge(ck: Checkpoint, arc: Archive, *, buffer: str = MAIN_BUFFER, name: str | None = None) -> Checkpoint:
    """A checkpoint of one rank with the trajectories of all, in the order of RLinf's tool, numbered from 0.

    That is by number, then by rank as folder names sort (rank_10 before rank_2). Nothing is copied: it refers to the
    same data.  name: default that of `ck` with "-merged".
    """
    chosen = sorted(_places(ck, buffer), key=lambda p: (p.number, f"rank_{p.rank}"))
    return _saved_as(ck, arc, buffer, chosen, name or f"{ck.name}-merged", _session("merge"))


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
    place, rank = listed_at(ck.state(rank or 0, buffer)), rank or 0
    mine = sorted((p for p in _places(ck, buffer) if p.rank == rank), key=lambda p: place(p.number))
    if not 1 <= count <= len(mine):
        raise UsageError(f"count={count}: rank {rank} has {len(mine)} trajectories; give 1 to {len(mine)}")
    return _saved_as(ck, arc, buffer, mine[:count], name or f"{ck.name}-split", _session("split"))


def _session(what: str) -> str:
    return f"{what}-{uuid.uuid4().hex[:12]}"


class _Place(NamedTuple):
    """A trajectory of a checkpoint: its place among the live episodes, rank, number and id."""

    group: int
    rank: int
    number: int
    episode_id: str


def _places(ck: Checkpoint, buffer: str) -> list[_Place]:
    """The trajectories of one buffer of all ranks, in live order."""
    heads, _ = ck.groups
    rows = ck.live.select(["rank", "buffer"]).to_pylist()
    out = []
    for group, (run, ep) in enumerate(zip(ck.located["run"][heads].tolist(), ck.episodes, strict=True)):
        if rows[run]["buffer"] != buffer:
            continue
        number = ep.attributes.get(NUMBER, ep.metadata.get(NUMBER))
        if number is None:
            raise UsageError(f"episode {ep.id!r} of buffer {buffer!r} is no numbered trajectory of RLinf")
        out.append(_Place(group, int(rows[run]["rank"]), int(number), ep.id))
    return out


def _saved_as(
    ck: Checkpoint, arc: Archive, buffer: str, chosen: Sequence[_Place], name: str, session: str
) -> Checkpoint:
    """A checkpoint of one rank that has these trajectories in this order, numbered from 0."""
    states = [ck.state(rank, buffer) for rank in sorted(ck.ranks, key=lambda rank: f"rank_{rank}")]
    seeds = [state.get("seed") for state in states if isinstance(state, dict)]
    state = {
        "system": SYSTEM,
        "seed": next((s for s in seeds if s is not None), None),
        "trajectory_format": file_kind(states),
        "counter": len(chosen),
        "ids": np.arange(len(chosen)),
    }
    saved = Saved(attributes={NUMBER: {p.episode_id: i for i, p in enumerate(chosen)}}, state=state)
    held = Holding(ck.episodes[np.array([p.group for p in chosen], np.int64)], buffer, ck.run)
    with arc.writer(resume=held, session=session) as w:
        return checkpoint(w, ck.step, {buffer: saved}, name=name, progress=ck.progress).result()


# -- trajectories taken apart into the episodes of each env: one way, as RLinf cannot load them --------------------


def _add_episodes(part: Buffer, tree: Mapping[str, Any], number: int) -> None:
    """Add each env's episodes, cut after each done; the last one is left without an end if it has none."""
    shape = shape_of(tree)
    if len(shape) < 2:
        to_steps(tree, number).add(part)
        return
    steps, envs = shape[:2]
    plain = dict(tree) | {key: _without_extra(tree[key], steps, key) for key in DONES if tree.get(key) is not None}
    for env in range(envs):
        for start, stop, last in _cuts(plain, steps, env):
            made = to_steps(_of_env(plain, (steps, envs), env, start, stop))
            about = {"from_trajectory": number, "env": env, "start": start}
            about |= {key: plain[key] for key in ("max_episode_length", "model_weights_id") if key in plain}
            weights = weights_of(str(plain.get("model_weights_id", "")))
            ends = {"last": last, "terminated": _flag(plain, "terminations", stop - 1, env)}
            ends |= {"truncated": _flag(plain, "truncations", stop - 1, env)}
            replace(made, metadata=about, weights=weights).add(part, **ends)


def _flag(tree: Mapping[str, Any], key: str, step: int, env: int) -> bool | None:
    value = tree.get(key)
    return None if value is None else bool(value[step, env].any())


def _cuts(tree: Mapping[str, Any], steps: int, env: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether the episode ends there)."""
    ends = torch.zeros(steps, dtype=torch.bool)
    for key in DONES if tree.get("dones") is None else ("dones",):
        if tree.get(key) is not None:
            ends |= tree[key][:, env].reshape(steps, -1).to(torch.bool).any(dim=1)
    start = 0
    for end in (torch.nonzero(ends).reshape(-1) + 1).tolist():
        yield start, end, True
        start = end
    if start < steps:
        yield start, steps, False


def _of_env(tree: Mapping[str, Any], shape: tuple[int, ...], env: int, start: int, stop: int) -> dict[str, Any]:
    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == shape:
            return value[start:stop, env]
        whole = not isinstance(value, torch.Tensor) or value.dim() != 1 or len(value) != shape[0]
        return value if whole else value[start:stop]

    out: dict[str, Any] = mapped(tree, own)
    return out


def _without_extra(value: torch.Tensor, steps: int, key: str) -> torch.Tensor:
    """A done field without its extra rows: the first of each of as many epochs."""
    found = one_a_step(value, steps, leading=True) if len(value) > steps else value
    if found is None:
        raise IntegrityError(
            f"{key} has {len(value) - steps} rows more than there are steps ({steps}), which do not make as many "
            "epochs; import without split=True"
        )
    return found
