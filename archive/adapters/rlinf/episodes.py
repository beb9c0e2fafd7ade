"""Trajectories [T, B, ...] taken apart into the episodes of each env. One way: RLinf cannot load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from archive.adapters.rlinf.trajectory import DONES, one_a_step, shape_of, to_steps, weights_of
from archive.base import IntegrityError

if TYPE_CHECKING:
    from archive.write import Buffer


def add_episodes(part: Buffer, tree: Mapping[str, Any], trajectory_id: int) -> list[str]:
    """Add each env's episodes, cut after each done; the last one is left without an end if it has none."""
    shape = shape_of(tree)
    if len(shape) < 2:
        return [to_steps(tree, trajectory_id).add(part)]
    steps, envs = shape[:2]
    plain = dict(tree) | {key: _one_a_step(tree[key], steps, key) for key in DONES if tree.get(key) is not None}
    return [_add(part, plain, trajectory_id, env, cut) for env in range(envs) for cut in _cuts(plain, steps, env)]


def _add(part: Buffer, tree: Mapping[str, Any], trajectory_id: int, env: int, cut: tuple[int, int, bool]) -> str:
    start, stop, last = cut
    made = to_steps(_of_env(tree, shape_of(tree)[:2], env, start, stop))
    uuid, count = weights_of(str(tree.get("model_weights_id", "")))
    terminated, truncated = (_flag(tree.get(key), stop - 1, env) for key in ("terminations", "truncations"))
    where = {"from_trajectory": trajectory_id, "env": env, "start": start}
    more = {key: tree[key] for key in ("max_episode_length", "model_weights_id") if key in tree}
    return part.add_episode(
        made.steps, schema=made.schema, metadata=where | more, last=last, model_weights_uuid=uuid, update_count=count,
        terminated=terminated, truncated=truncated,
    )  # fmt: skip


def _flag(value: torch.Tensor | None, step: int, env: int) -> bool | None:
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
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out[key] = _of_env(value, shape, env, start, stop)
        elif isinstance(value, torch.Tensor) and tuple(value.shape[:2]) == shape:
            out[key] = value[start:stop, env]
        elif isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == shape[0]:
            out[key] = value[start:stop]
        else:
            out[key] = value
    return out


def _one_a_step(value: torch.Tensor, steps: int, key: str) -> torch.Tensor:
    """A done field without its extra rows: the first of each of as many epochs."""
    found = one_a_step(value, steps, leading=True) if len(value) > steps else value
    if found is None:
        raise IntegrityError(
            f"{key} has {len(value) - steps} rows more than there are steps ({steps}), which do not make as many "
            "epochs; import without split=True"
        )
    return found
