"""Restores what one system saved into a buffer of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from archive.adapters import Report, alf, check_room, share_buffer, share_of, system
from archive.adapters.exchange.alf import rebuilt
from archive.adapters.exchange.read import Transitions, nest_of, transitions_of
from archive.base import FieldError, UsageError
from archive.checkpoint import MAIN_BUFFER
from archive.fields import Path, dtypes

__all__ = ["restore"]


def restore(
    target: Any, source: Any, *, rank: int | None = None, buffer: str = MAIN_BUFFER, existing: str = "error"
) -> Report:
    """Fill a buffer with what a share, or a rank of a checkpoint of another system, has; what there was of it.

    target: a TorchRL ReplayBuffer of tensordicts, RLinf's TrajectoryReplayBuffer, or ALF's ReplayBuffer.
    existing: "error" if the buffer holds anything, "replace" to empty it first.
    Nothing is changed if anything does not fit.
    """
    load, held = _kind(target)
    check_room(existing, held, f"the {type(target).__name__}")
    part = share_buffer(share_of(source, rank), buffer)
    found = list(transitions_of(part))
    notes = load(target, found)
    counts = {
        "closed": sum(one.closed for one in found),
        "without_a_transition": max(0, len(part) - len(found)),
    }
    return Report(len(found), sum(one.length for one in found), counts, notes)


def _kind(target: Any) -> tuple[Any, int]:
    """What replaces its content, and how much it holds."""
    if hasattr(target, "add_trajectories"):
        return _into_rlinf, int(target.size)
    if hasattr(target, "extend") and hasattr(target, "storage"):
        return _into_torchrl, len(target)
    if hasattr(target, "_current_pos") and hasattr(target, "_current_size"):
        return _into_alf, int(target._current_size.sum())
    raise UsageError(f"{type(target).__name__} is no buffer of TorchRL, RLinf or ALF")


# -- ALF ---------------------------------------------------------------------------------------------------------------


def _into_alf(rb: Any, found: list[Transitions]) -> tuple[str, ...]:
    made = rebuilt(found, alf.target_of(rb))
    alf.write(rb, made)
    return made.report.notes


# -- TorchRL -----------------------------------------------------------------------------------------------------------


def _into_torchrl(rb: Any, found: list[Transitions]) -> tuple[str, ...]:
    _check_capacity(rb, sum(one.length for one in found))
    items = [_tensordict(one, number) for number, one in enumerate(found)]
    _check_kinds(rb, items)
    rb.empty()
    for item, one in zip(items, found, strict=True):
        index = rb.extend(item)
        if one.priority is not None and hasattr(rb.sampler, "_sum_tree"):
            rb.update_priority(index, _before_alpha(rb.sampler, one.priority))
    return ()


def _check_capacity(rb: Any, steps: int) -> None:
    room = int(rb.storage.max_size)
    if steps > room:
        raise UsageError(
            f"the share has {steps} transitions, the buffer takes {room}; plan with capacity={room}, which drops the "
            "oldest"
        )


def _check_kinds(rb: Any, items: list[Any]) -> None:
    """All items are of one kind, and of that of a storage that has been filled before; a list takes any."""
    held: Any = getattr(rb.storage, "_storage", None)
    if isinstance(held, list):
        return
    known = _leaves(held, held.batch_dims) if hasattr(held, "batch_dims") else None
    for item in items:
        found = _leaves(item, 1)
        known = found if known is None else known
        own = ("index", "_weight", getattr(rb, "priority_key", "td_error"))  # TorchRL adds these itself
        if odd := [p for p in known.keys() | found.keys() if known.get(p) != found.get(p) and p[0] not in own]:
            raise FieldError(
                f"field {'/'.join(min(odd))!r} is {found.get(min(odd), 'nothing')} in the share, "
                f"{known.get(min(odd), 'nothing')} in the buffer or an earlier episode; restore into a new buffer"
            )


def _leaves(tensordict: Any, batch_dims: int) -> dict[Path, str]:
    """Dtype and shape of an item's leaves."""
    leaves = tensordict.items(include_nested=True, leaves_only=True)
    return {
        (key if isinstance(key, tuple) else (key,)): f"{leaf.dtype} {list(leaf.shape[batch_dims:])}"
        for key, leaf in leaves
    }


def _tensordict(one: Transitions, number: int) -> Any:
    tensordict = system("tensordict", "tensordict").TensorDict
    flags = {name: torch.from_numpy(getattr(one, name).copy())[:, None] for name in ("terminated", "truncated")}
    after = {"reward": _column(one.reward), "done": flags["terminated"] | flags["truncated"], **flags}
    nest = {
        "observation": nest_of(one.observation, dtypes.to_torch),
        "action": nest_of(one.action, dtypes.to_torch),
        "next": {"observation": nest_of(one.following, dtypes.to_torch), **after},
        "collector": {"traj_ids": torch.full((one.length,), number)},
    }
    return tensordict.from_dict(nest, batch_size=[one.length])


def _column(array: Any) -> torch.Tensor:
    tensor: torch.Tensor = dtypes.to_torch(array)
    return tensor[:, None] if tensor.ndim == 1 else tensor


def _before_alpha(sampler: Any, leaves: Any) -> torch.Tensor:
    """What the sampler makes these leaves of."""
    values = torch.from_numpy(np.asarray(leaves, np.float64))
    alpha, eps = float(sampler._alpha), float(sampler._eps)
    raw: torch.Tensor = values ** (1 / alpha) - eps if alpha else torch.zeros_like(values)
    return raw.clamp(min=0).to(torch.float32)


# -- RLinf -------------------------------------------------------------------------------------------------------------


def _into_rlinf(buffer: Any, found: list[Transitions]) -> tuple[str, ...]:
    make = system("rlinf.data.embodied_io_struct", "rlinf==0.3.0").Trajectory
    trajectories = [make(**_trajectory(one)) for one in found]
    if buffer.size:
        buffer.clear()
    buffer.add_trajectories(trajectories)
    return ()


def _trajectory(one: Transitions) -> dict[str, Any]:
    actions = [_one_env(leaf) for _, leaf in sorted(one.action.items())]
    if len(actions) != 1:
        raise UsageError(f"RLinf has one tensor of actions; these episodes have {', '.join(map('/'.join, one.action))}")
    ends = {"terminations": one.terminated, "truncations": one.truncated, "dones": one.terminated | one.truncated}
    known = one.model_weights_uuid is not None and one.update_count is not None
    return {
        "max_episode_length": one.length,
        "model_weights_id": f"{one.model_weights_uuid}_{one.update_count}" if known else "",
        "actions": actions[0],
        "rewards": _one_env(one.reward.reshape(one.length, -1)),
        "curr_obs": dict(_named(one.observation)),
        "next_obs": dict(_named(one.following)),
        **{name: torch.from_numpy(mask.copy())[:, None, None] for name, mask in ends.items()},
    }


def _named(leaves: dict[Path, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """RLinf's observations are tensors by name, without nesting."""
    for path, leaf in leaves.items():
        yield ".".join(path) or "states", _one_env(leaf)


def _one_env(array: Any) -> torch.Tensor:
    """[T, ...] as [T, 1, ...]."""
    tensor: torch.Tensor = dtypes.to_torch(array)
    return tensor[:, None]
