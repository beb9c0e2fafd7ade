"""Save and restore of ALF's replay buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from archive.adapters import Saved, appended, as_given, check_room, checkpoint, exact_share, several, share_buffer
from archive.adapters.alf import saving
from archive.adapters.alf.restoring import Rebuilt, rebuild
from archive.adapters.alf.target import DEFAULT_RETURN, target_of, tensors_of
from archive.adapters.alf.tensors import MAXIMA, SUMS
from archive.checkpoint import Pending

if TYPE_CHECKING:
    from archive import Writer

_SETTINGS = ("num_earliest_frames_ignored", "recent_data_steps", "recent_data_ratio", "gamma")


def save(buffers: Any, writer: Writer, *, step: int, **options: Any) -> Pending:
    """Checkpoint a replay buffer, or several as {name: buffer}: what the writer has not seen, and what changes.

    options: those of `Writer.checkpoint`, such as progress, metrics, name, save_replay and wait.
    Everything is copied before this returns; the rest happens in the background,
    and its errors come with the next call.
    """
    skipped = options.get("save_replay", True) is False
    saved = {} if skipped else {name: _saved(rb, writer, name) for name, rb in several(buffers).items()}
    return checkpoint(writer, step, saved, **options)


def restore(
    buffers: Any, source: Any, *, rank: int | None = None, existing: str = "error", unfinished: str = "close"
) -> Any:
    """Put a share of a checkpoint into a replay buffer, or into several; the report, or {name: report}.

    source: a share, or a checkpoint of the same world, with rank=.
    existing: "replace" for what ALF's first `train_iter()` has left there.  unfinished: see above.
    Nothing is changed if anything does not fit.
    """
    share = exact_share(source, rank)
    objects = several(buffers)
    for name, rb in objects.items():
        check_room(existing, int(tensors_of(rb).size.sum()), f"the ALF buffer {name!r}")
    made = {name: rebuild(share_buffer(share, name), target_of(rb), unfinished) for name, rb in objects.items()}
    for name, rb in objects.items():
        write(rb, made[name])
    return as_given(buffers, {name: one.report for name, one in made.items()})


def _saved(rb: Any, writer: Writer, name: str) -> Saved:
    with _locked(rb):
        about = {key: getattr(rb, f"_{key}", None) for key in _SETTINGS}
        if getattr(rb, "_prioritized_sampling", False):
            about["mini_batch_length"] = int(rb._mini_batch_length)
        about["default_return"] = float(getattr(rb, "_default_return", DEFAULT_RETURN))
        return appended(writer, name, lambda part: saving.append(part, tensors_of(rb), rb, about))


@torch.no_grad()
def write(rb: Any, made: Rebuilt) -> None:
    """Put what was made for a buffer into it."""
    with _locked(rb):
        for name, tensor in tensors_of(rb).named.items():
            found = made.named.get(name)
            tensor.zero_() if found is None else tensor.copy_(found)
        if SUMS in made.named and MAXIMA in made.named:
            rb._sum_tree._nnz = made.nnz
            rb._mini_batch_length = made.mini_batch_length
        saving.remember(rb, made.track)


def _locked(rb: Any) -> AbstractContextManager[Any]:
    lock = getattr(rb, "_lock", None)
    return nullcontext() if lock is None else lock
