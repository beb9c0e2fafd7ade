"""Adapters: what of an ALF replay buffer a writer has not seen, and the columns and state beside it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from archive.adapters import Saved, declare, digests
from archive.adapters.alf.tensors import DISC_0, FIRST, HEADLESS, INDEX, LAST, RETURNS, SUMS, Tensors, path_by_key
from archive.arrays import Ints
from archive.fields import unflatten
from archive.torch import ring
from archive.write import Buffer

PRIORITY, RETURN = "priority", "episodic_return"
MARKED = 4  # newest steps of a row that tell whether the row is still the one that was saved
Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Track:
    """What is known of a live buffer since its last save or restore, for the next save."""

    offset: Ints  # of each row: position in the archive less ALF's own, which starts anew when the buffer is cleared
    at: Ints  # position in the archive of each row's next step
    marks: Table  # (E, MARKED) checksums of the newest steps, the newest first; -1 where there is none
    rewritten: Table  # (n, 3) env row, position in the archive, step type: in the buffer other than in the archive
    closed: list[int] = field(
        default_factory=list
    )  # rows whose open episode was closed in the buffer, not yet in the archive


_tracks: weakref.WeakKeyDictionary[Any, Track] = weakref.WeakKeyDictionary()


def remember(rb: Any, track: Track) -> None:
    _tracks[rb] = track


def no_rewrites() -> Table:
    return np.zeros((0, 3), np.int64)


def append(w: Buffer, tensors: Tensors, rb: Any = None, about: dict[str, Any] | None = None) -> Saved:
    """Append what `w` has not seen; the columns and the state. `about`: what of the object is not in its tensors."""
    _declare(w, tensors)
    track = None if rb is None else _tracks.get(rb)
    if track is not None and track.closed:
        _close(w, track)
    offset = _offsets(w, tensors, track)
    pos = tensors.pos.cpu().numpy() + offset
    columns = ring.append(
        w,
        unflatten(dict(tensors.fields)),
        pos=pos,
        size=tensors.size,
        columns=_columns(tensors),
        begin=offset,
        **_ends(tensors),
    )
    rewritten = _still_live(track, tensors, offset)
    if rb is not None:
        remember(rb, Track(offset, pos, marks(tensors), rewritten))
    return Saved(columns, state=_state(tensors, offset, rewritten, about or {}))


def _declare(w: Buffer, tensors: Tensors) -> None:
    reward = path_by_key(tensors.fields, "reward")
    with w.exclusive(bounded=False) as writer:
        declare(writer, env_id=[path for path in tensors.fields if path[-1] == "env_id"], reward=reward)


def _close(w: Buffer, track: Track) -> None:
    """Episodes that the restore closed in the buffer end in the archive too, if nothing went on with them."""
    rows = [env for env in track.closed if w.next_position(env) == track.at[env]]
    if rows:
        w.close_episodes(rows, truncated=True, reason="closed on restore")


def _offsets(w: Buffer, tensors: Tensors, track: Track | None) -> Ints:
    """A row that was cleared starts again from position 0; in the archive it goes on, at a multiple of its length, so
    that slots stay where they are."""
    seen = np.array([w.next_position(env) for env in range(tensors.num_envs)], np.int64)
    offset = np.zeros(tensors.num_envs, np.int64) if track is None else track.offset
    cleared = seen > tensors.pos.cpu().numpy() + offset
    if track is not None:
        cleared |= (seen == track.at) & _differs(tensors, track, offset)
    length = max(1, tensors.max_length)
    fresh: Ints = np.where(cleared, -(-seen // length) * length, offset)
    return fresh


def _differs(tensors: Tensors, track: Track, offset: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows in which a marked step that should be there is another one."""
    position = torch.from_numpy(track.at - offset)[:, None] - 1 - torch.arange(MARKED)
    pos, size = tensors.pos.cpu()[:, None], tensors.size.cpu()[:, None]
    there = ((position >= pos - size) & (position < pos)).numpy() & (track.marks >= 0)
    now = _checksums(tensors, position.clamp(min=0), there)
    out: np.ndarray[Any, np.dtype[np.bool_]] = (there & (now != track.marks)).any(1)
    return out


def marks(tensors: Tensors) -> Table:
    """Checksums of the newest steps of each row."""
    position = tensors.pos.cpu()[:, None] - 1 - torch.arange(MARKED)
    there = (position >= (tensors.pos - tensors.size).cpu()[:, None]).numpy()
    return _checksums(tensors, position.clamp(min=0), there)


def _checksums(tensors: Tensors, position: torch.Tensor, there: np.ndarray[Any, Any]) -> Table:
    rows, which = np.nonzero(there)
    slots = position[rows, which] % max(1, tensors.max_length)
    at = torch.from_numpy(rows)
    sums = np.zeros(len(rows), np.uint64)
    for number, (path, leaf) in enumerate(sorted(tensors.fields.items())):
        if path[-1] != "step_type":  # ALF's own loading rewrites it
            steps = leaf[at.to(leaf.device), slots.to(leaf.device)]
            sums += digests.of_tensor(steps, None) * digests.salt(number, path)
    out = np.full(there.shape, -1, np.int64)
    out[rows, which] = sums >> np.uint64(1)
    return out


def _ends(tensors: Tensors) -> dict[str, Any]:
    step_type, discount = tensors.by_key("step_type"), tensors.by_key("discount")
    assert step_type is not None  # Tensors has looked
    ends = {"first": step_type == FIRST, "last": step_type == LAST}
    if discount is not None and discount.shape == step_type.shape:
        ends |= {"terminated": ends["last"] & (discount == 0), "truncated": ends["last"] & (discount != 0)}
    return ends


def _columns(tensors: Tensors) -> dict[str, torch.Tensor]:
    columns = {PRIORITY: tensors.leaves, RETURN: tensors.named.get(RETURNS)}
    return {name: column for name, column in columns.items() if column is not None}


def _still_live(track: Track | None, tensors: Tensors, offset: Ints) -> Table:
    if track is None or not len(track.rewritten):
        return no_rewrites()
    env, position, _ = track.rewritten.T
    stop = (tensors.pos.cpu().numpy() + offset)[env]
    kept = (offset[env] == track.offset[env]) & (position >= stop - tensors.size.cpu().numpy()[env]) & (position < stop)
    rewritten: Table = track.rewritten[kept]
    return rewritten


def _state(tensors: Tensors, offset: Ints, rewritten: Table, about: dict[str, Any]) -> dict[str, Any]:
    named = tensors.named
    second = tensors.oldest(INDEX, 1)
    heads = {
        "head_value": tensors.oldest(INDEX),
        "head_begin": None if second is None else _head_begin(tensors, second),
        "head_disc_0": tensors.oldest(DISC_0),
        "headless_indexed_pos": named.get(HEADLESS),
    }
    return {
        "system": "alf", "num_envs": tensors.num_envs, "max_length": tensors.max_length, "offset": offset,
        "current_pos": tensors.pos.cpu().numpy().copy(), "rewritten": rewritten, "single": _single(tensors),
        "prioritized": SUMS in named,
        "episodic": INDEX in named, "returns": RETURNS in named, **about,
        **{name: None if value is None else value.cpu().numpy().copy() for name, value in heads.items()},
    }  # fmt: skip


def _single(tensors: Tensors) -> Table | None:
    """(env row, slot) of episodes of one step that is no FIRST any more: closed, they are told from the end of the
    episode before by the index alone."""
    index, step_type = tensors.named.get(INDEX), tensors.by_key("step_type")
    if index is None or step_type is None or not tensors.max_length:
        return None
    last, slots = tensors.pos[:, None] - 1, torch.arange(tensors.max_length, device=tensors.pos.device)
    age = (last - slots) % tensors.max_length
    found = (age < tensors.size[:, None]) & (step_type == LAST) & (index == last - age)
    single: Table = torch.nonzero(found).cpu().numpy()
    return single


def _head_begin(tensors: Tensors, second: torch.Tensor) -> torch.Tensor:
    """Where the episode at each row's start began: its second step knows, where the first one may hold its end."""
    step_type, oldest = tensors.by_key("step_type"), tensors.oldest(INDEX)
    assert step_type is not None
    assert oldest is not None
    at = ((tensors.pos - tensors.size + 1) % tensors.max_length)[:, None]
    same = (step_type.gather(1, at)[:, 0] != FIRST) & (tensors.size > 1)
    return torch.where(same, second, oldest)
