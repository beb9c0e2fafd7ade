"""The buffer that is to hold a share: a live one, or one like those that were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from archive.adapters.alf.tensors import INDEX, RETURNS, SUMS, Tensors
from archive.base import FieldError, UsageError
from archive.fields import Path

SYSTEM = "alf"
DEFAULT_RETURN = -1000.0  # ALF's own default of what steps have whose episode has not ended


@dataclass(frozen=True)
class Target:
    """The buffer that is to hold the share."""

    num_envs: int
    max_length: int
    episodic: bool = False  # it keeps ALF's episode indices
    returns: bool = False
    prioritized: bool = False
    default_return: float = DEFAULT_RETURN
    initial_priority: float = 1.0
    ignored_frames: int = 0  # earliest steps of each row that are never sampled
    device: Any = None
    kinds: Mapping[Path, tuple[torch.dtype, tuple[int, ...]]] | None = None  # dtype and shape of each field


def tensors_of(rb: Any) -> Tensors:
    """The tensors of a live buffer."""
    if not isinstance(rb, torch.nn.Module):
        raise UsageError(
            f"{type(rb).__name__} is no replay buffer of ALF; give algorithm._replay_buffer once it is there"
        )
    return Tensors(dict(rb.named_buffers()))


def target_of(rb: Any) -> Target:
    """What a buffer takes."""
    tensors = tensors_of(rb)
    return Target(
        tensors.num_envs,
        tensors.max_length,
        episodic=INDEX in tensors.named,
        returns=RETURNS in tensors.named,
        prioritized=SUMS in tensors.named,
        default_return=float(getattr(rb, "_default_return", DEFAULT_RETURN)),
        initial_priority=float(getattr(rb, "_initial_priority", 1.0)),
        ignored_frames=int(getattr(rb, "_num_earliest_frames_ignored", 0)),
        device=tensors.pos.device,
        kinds={path: (leaf.dtype, tuple(leaf.shape[2:])) for path, leaf in tensors.fields.items()},
    )


def target_saved(states: Sequence[Mapping[str, Any]], num_envs: int | None, max_length: int | None) -> Target:
    """A buffer like those that were saved, of a size of its own where one is given."""
    if not states:
        raise UsageError("ALF did not save this checkpoint, so what its ring keeps is not known; restore a live buffer")
    return Target(
        num_envs or max(s["num_envs"] for s in states),
        max_length or max(s["max_length"] for s in states),
        episodic=all(s["episodic"] for s in states),
        returns=all(s["returns"] for s in states),
        prioritized=all(s["prioritized"] for s in states),
        default_return=states[0].get("default_return", DEFAULT_RETURN),
        ignored_frames=int(states[0].get("num_earliest_frames_ignored") or 0),
    )


def check_kinds(fields: Mapping[Path, Any], target: Target) -> None:
    """Refuse fields of other names, dtypes or shapes than the target has."""
    if target.kinds is None:
        return
    if odd := min(fields.keys() ^ target.kinds.keys(), key="/".join, default=None):
        raise FieldError(f"field {'/'.join(odd)!r} is only in {'the share' if odd in fields else 'the buffer'}")
    for path, leaf in fields.items():
        dtype, shape = target.kinds[path]
        if not isinstance(leaf, torch.Tensor) or (leaf.dtype, tuple(leaf.shape[2:])) != (dtype, shape):
            raise FieldError(
                f"field {'/'.join(path)!r} is {leaf.dtype} {list(leaf.shape[2:])} in the share, {dtype} {list(shape)} "
                "in the buffer; make the buffer with the data spec that was saved"
            )
