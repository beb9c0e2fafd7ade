"""What one system saved, into a live buffer of another: ALF, TorchRL, RLinf; see EXCHANGE.md for what carries over.

```python
share = resharding.plan(ck, world_size=1).share(0)  # of a checkpoint that ALF's adapter made
print(exchange.restore(torchrl_buffer, share))
torchrl.save(torchrl_buffer, w, step=ck.step).result()  # from now on it is TorchRL's
```

| from | to | |
|---|---|---|
| ALF, TorchRL, RLinf | TorchRL | one item a transition: observation, action, next, collector/traj_ids; leaves of its tree |
| ALF, TorchRL, RLinf | RLinf | one trajectory [T, 1, ...] an episode: curr_obs, next_obs, actions, rewards, dones |

The same system's own adapter restores more, and exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from archive import dtypes
from archive.adapters._exchange_read import Transitions, nest_of, transitions_of
from archive.adapters.common import Report, check_room, share_buffer, share_of, system
from archive.checkpoints import MAIN_BUFFER
from archive.errors import UsageError
from archive.schema import Path

__all__ = ["restore"]


def restore(
    target: Any, source: Any, *, rank: int | None = None, buffer: str = MAIN_BUFFER, existing: str = "error"
) -> Report:
    """Add what a share, or a rank of a checkpoint, has to a buffer of another system; what there was of it.

    target: a TorchRL ReplayBuffer of tensordicts, or RLinf's TrajectoryReplayBuffer.
    existing: "error" if the buffer holds anything, "replace" to empty it first.
    """
    load, held, clear = _kind(target)
    check_room(existing, held, f"the {type(target).__name__}")
    part = share_buffer(share_of(source, rank), buffer)
    found = list(transitions_of(part))
    if held:
        clear()
    load(target, found)
    steps = sum(one.length for one in found)
    counts = {
        "closed": sum(one.closed for one in found),
        "without_a_transition": len(part) - len(found) if len(found) <= len(part) else 0,
    }
    return Report(len(found), steps, counts)


def _kind(target: Any) -> tuple[Any, int, Any]:
    """How to fill it, how much it holds, and how to empty it."""
    if hasattr(target, "add_trajectories"):
        return _into_rlinf, int(target.size), target.clear
    if hasattr(target, "extend") and hasattr(target, "storage"):
        return _into_torchrl, len(target), target.empty
    raise UsageError(
        f"{type(target).__name__} is neither a buffer of TorchRL nor of RLinf; ALF's has an adapter of its own"
    )


# -- TorchRL -----------------------------------------------------------------------------------------------------------


def _into_torchrl(rb: Any, found: list[Transitions]) -> None:
    _check_capacity(rb, sum(one.length for one in found))
    for number, one in enumerate(found):
        index = rb.extend(_tensordict(one, number))
        if one.priority is not None and hasattr(rb.sampler, "_sum_tree"):
            rb.update_priority(index, _before_alpha(rb.sampler, one.priority))


def _check_capacity(rb: Any, steps: int) -> None:
    room = int(rb.storage.max_size)
    if steps > room:
        raise UsageError(
            f"the share has {steps} transitions, the buffer takes {room}; plan with capacity={room}, which drops the oldest"
        )


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


def _into_rlinf(buffer: Any, found: list[Transitions]) -> None:
    make = _trajectory_class()
    buffer.add_trajectories([make(**fields) for fields in map(_trajectory, found)])


def _trajectory_class() -> Any:
    return system("rlinf.data.embodied_io_struct", "rlinf==0.3.0").Trajectory


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
