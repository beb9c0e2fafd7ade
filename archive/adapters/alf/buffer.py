"""A live replay buffer of ALF, row by row a ring: saved, followed and restored."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from archive.adapters import LiveBuffer, Report, Saved, Tracked, as_given, declare, live, several
from archive.adapters.alf.restored import Rebuilt, rebuild, target_of
from archive.adapters.alf.tensors import (
    DEFAULT_RETURN,
    DISC_0,
    FIRST,
    HEADLESS,
    INDEX,
    LAST,
    MARKED,
    MAXIMA,
    PRIORITY,
    RETURN,
    RETURNS,
    SUMS,
    SYSTEM,
    Table,
    Tensors,
    Track,
    checksums,
    marks,
    no_rewrites,
    path_by_key,
    tensors_of,
)
from archive.arrays import Ints, spans
from archive.checkpoint import Pending
from archive.fields import unflatten
from archive.torch import ring
from archive.write import Buffer

if TYPE_CHECKING:
    from archive import Writer
    from resharding import Share, ShareBuffer

_SETTINGS = ("num_earliest_frames_ignored", "recent_data_steps", "recent_data_ratio", "gamma")
_known: Tracked[Track] = Tracked()


class AlfBuffer(LiveBuffer):
    """A replay buffer of ALF. Each of its rows is a stream."""

    system = SYSTEM

    def __init__(self, rb: Any, name: str, *, unfinished: str = "close") -> None:
        super().__init__(name)
        self.rb = rb
        self.unfinished = unfinished
        self.tensors = tensors_of(rb)

    @property
    def what(self) -> str:
        return f"the ALF buffer {self.name!r}"

    def still(self) -> AbstractContextManager[Any]:
        lock = getattr(self.rb, "_lock", None)
        return nullcontext() if lock is None else lock

    @property
    def held(self) -> int:
        return int(self.tensors.size.sum())

    def append(self, part: Buffer) -> Saved:
        rb = self.rb
        about = {key: getattr(rb, f"_{key}", None) for key in _SETTINGS}
        if getattr(rb, "_prioritized_sampling", False):
            about["mini_batch_length"] = int(rb._mini_batch_length)
        about["default_return"] = float(getattr(rb, "_default_return", DEFAULT_RETURN))
        saved, track = append(part, self.tensors, _known.of(rb, part), about)
        _known.keep(rb, part, track)
        return saved

    def prepared(self, share: Share, part: ShareBuffer, states: Mapping[int, Any]) -> tuple[ShareBuffer, Rebuilt]:
        return part, rebuild(part, target_of(self.rb), self.unfinished, states)

    def put(self, ready: tuple[ShareBuffer, Rebuilt]) -> Report:
        part, made = ready
        write(self.rb, made)
        _known.restored(self.rb, part, made.track)
        return made.report


def save(buffers: Any, writer: Writer, *, step: int, **options: Any) -> Pending:
    """Checkpoint a replay buffer, or several as {name: buffer}: what the writer has not seen, and what changes.

    options: those of `Writer.checkpoint`, such as progress, metrics, name, save_replay and wait.
    Everything is copied before this returns; the rest happens in the background,
    and its errors come with the next call.
    """
    return live.save(_buffers(buffers), writer, step, **options)


def follow(buffers: Any, writer: Writer) -> None:
    """Have the journal of a writer (`journal_s=`) keep a replay buffer, or several as {name: buffer}, between saves.

    At each tick it takes in the steps that are new, those that were overwritten, priorities, returns and positions.
    After a crash the checkpoint that is recovered is restored as any other. Call it after `restore`, with the writer
    that resumes. The buffer gets a lock where it has none: ALF's own methods take it.
    """
    for rb in several(buffers).values():
        if getattr(rb, "_lock", None) is None:
            rb._lock = threading.RLock()
    live.follow(lambda: _buffers(buffers), writer)


def restore(
    buffers: Any, source: Any, *, rank: int | None = None, existing: str = "error", unfinished: str = "close"
) -> Any:
    """Put a share of a checkpoint into a replay buffer, or into several; the report, or {name: report}.

    source: a share, or a checkpoint of the same world, with rank=.
    existing: "replace" for what ALF's first `train_iter()` has left there.  unfinished: see above.
    Nothing is changed if anything does not fit.
    """
    return as_given(buffers, live.restore(_buffers(buffers, unfinished), source, rank, existing))


def _buffers(buffers: Any, unfinished: str = "close") -> dict[str, AlfBuffer]:
    return {name: AlfBuffer(rb, name, unfinished=unfinished) for name, rb in several(buffers).items()}


@torch.no_grad()
def write(rb: Any, made: Rebuilt) -> None:
    """Put what was made for a buffer into it; what any archive had of it counts no more."""
    with AlfBuffer(rb, "").still():
        for name, tensor in tensors_of(rb).named.items():
            found = made.named.get(name)
            tensor.zero_() if found is None else tensor.copy_(found)
        if SUMS in made.named and MAXIMA in made.named:
            rb._sum_tree._nnz = made.nnz
            rb._mini_batch_length = made.mini_batch_length
        _known.forget(rb)


# -- saving ------------------------------------------------------------------------------------------------------------


def append(
    w: Buffer, tensors: Tensors, track: Track | None = None, about: Mapping[str, Any] | None = None
) -> tuple[Saved, Track]:
    """Append what `w` has not seen: the columns and the state, and what is known of the buffer then.

    track: what was known.  about: what of the object is not in its tensors.
    """
    with w.exclusive(bounded=False) as inner:
        env_id = [path for path in tensors.fields if path[-1] == "env_id"]
        declare(inner, env_id=env_id, reward=path_by_key(tensors.fields, "reward"))
    if track is not None and track.closed:
        _close(w, track)
    offset = _offsets(w, tensors, track)
    pos = tensors.pos.cpu().numpy() + offset
    steps = unflatten(dict(tensors.fields))
    ring.append(w, steps, pos=pos, size=tensors.size, begin=offset, **_ends(tensors))
    rewritten = _still_live(track, tensors, offset)
    state = _state(tensors, offset, rewritten, about or {})
    return Saved(_columns(tensors), state=state), Track(offset, pos, marks(tensors), rewritten)


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
    now = checksums(tensors, position.clamp(min=0), there)
    out: np.ndarray[Any, np.dtype[np.bool_]] = (there & (now != track.marks)).any(1)
    return out


def _ends(tensors: Tensors) -> dict[str, Any]:
    step_type, discount = tensors.by_key("step_type"), tensors.by_key("discount")
    assert step_type is not None  # Tensors has looked
    ends = {"first": step_type == FIRST, "last": step_type == LAST}
    if discount is not None and discount.shape == step_type.shape:
        ends |= {"terminated": ends["last"] & (discount == 0), "truncated": ends["last"] & (discount != 0)}
    return ends


def _columns(tensors: Tensors) -> dict[str, Any]:
    """The values of the live steps, row by row."""
    size = tensors.size.cpu().numpy()
    row, position = np.repeat(np.arange(len(size)), size), spans(tensors.pos.cpu().numpy() - size, size)
    at = [torch.from_numpy(index).to(tensors.pos.device) for index in (row, position % max(1, tensors.max_length))]
    columns = {PRIORITY: tensors.leaves, RETURN: tensors.named.get(RETURNS)}
    return {name: column[tuple(at)].detach().cpu().numpy() for name, column in columns.items() if column is not None}


def _still_live(track: Track | None, tensors: Tensors, offset: Ints) -> Table:
    if track is None or not len(track.rewritten):
        return no_rewrites()
    env, position, _ = track.rewritten.T
    stop = (tensors.pos.cpu().numpy() + offset)[env]
    kept = (offset[env] == track.offset[env]) & (position >= stop - tensors.size.cpu().numpy()[env]) & (position < stop)
    rewritten: Table = track.rewritten[kept]
    return rewritten


def _state(tensors: Tensors, offset: Ints, rewritten: Table, about: Mapping[str, Any]) -> dict[str, Any]:
    named = tensors.named
    second = tensors.oldest(INDEX, 1)
    heads = {
        "head_value": tensors.oldest(INDEX),
        "head_begin": None if second is None else _head_begin(tensors, second),
        "head_disc_0": tensors.oldest(DISC_0),
        "headless_indexed_pos": named.get(HEADLESS),
    }
    return {
        "system": SYSTEM,
        "num_envs": tensors.num_envs,
        "max_length": tensors.max_length,
        "offset": offset,
        "current_pos": tensors.pos.cpu().numpy().copy(),
        "rewritten": rewritten,
        "single": _single(tensors),
        "prioritized": SUMS in named,
        "episodic": INDEX in named,
        "returns": RETURNS in named,
        **about,
        **{name: None if value is None else value.cpu().numpy().copy() for name, value in heads.items()},
    }


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
    """The beginning of the episode at each row's start: its second step knows it, as the first one may hold its end."""
    step_type, oldest = tensors.by_key("step_type"), tensors.oldest(INDEX)
    assert step_type is not None
    assert oldest is not None
    at = ((tensors.pos - tensors.size + 1) % tensors.max_length)[:, None]
    same = (step_type.gather(1, at)[:, 0] != FIRST) & (tensors.size > 1)
    return torch.where(same, second, oldest)
