"""Adapters: transitions as the steps of ALF's rings, for its own adapter to fill a buffer with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from archive.adapters.alf import FIRST, LAST, PRIORITY, Rebuilt, Target, path_by_key, rebuild
from archive.adapters.exchange.read import Transitions
from archive.arrays import Steps, run_heads, since_head
from archive.base import CapacityError, FieldError, cached_property
from archive.checkpoint import MAIN_BUFFER
from archive.fields import Array, Path, dtypes, unflatten

MID = 1


def rebuilt(found: list[Transitions], target: Target) -> Rebuilt:
    """The buffer that holds these; refused if it has no room for them, or fields of another kind."""
    episodes = [part for one in found for part in _split(one)]
    made = rebuild(_Dealt(episodes, target), target, "close")
    unknown = _unknown(episodes[0], target) if episodes else []
    note = f"nothing is known of {', '.join('/'.join(path) for path in unknown)}: 0 everywhere"
    return replace(made, report=replace(made.report, notes=(*made.report.notes, note))) if unknown else made


def _split(one: Transitions) -> Iterator[Transitions]:
    """Runs up to an end: RLinf's trajectories go on over it."""
    stops = (np.flatnonzero(one.terminated | one.truncated) + 1).tolist()
    for start, stop in pairwise([0, *stops]):
        yield one.part(slice(start, stop))


@dataclass(frozen=True)
class _Dealt:
    """What ALF's adapter needs of a share's buffer: episodes dealt to env rows in order, balanced by steps."""

    episodes: list[Transitions]
    target: Target

    state = None  # nothing is known but the episodes, and nothing was dropped
    source_states: ClassVar[dict[int, Any]] = {}
    rules = SimpleNamespace(unfinished="close")
    name = MAIN_BUFFER
    plan = SimpleNamespace(dropped_of=lambda buffer: {})
    dropped = Steps(*[np.zeros(0, np.int64)] * 3)

    @cached_property
    def layout(self) -> Any:
        length = np.array([one.length + 1 for one in self.episodes], np.int64)
        before = np.cumsum(length) - length
        env = before * self.target.num_envs // max(1, int(length.sum()))
        position = since_head(before, run_heads(env))
        longest = int((position + length).max(initial=0))
        if longest > self.target.max_length:
            raise CapacityError(
                f"a row would have {longest} steps, the buffer takes {self.target.max_length}; plan with capacity= for "
                "fewer"
            )
        no = np.zeros(len(env), bool)
        return SimpleNamespace(env_id=env, position=position, length=length, open=no, headless=no)

    @cached_property
    def next_positions(self) -> dict[int, int]:
        where = self.layout
        return {int(e): int(p + n) for e, p, n in zip(where.env_id, where.position, where.length, strict=True)}

    @property
    def columns(self) -> dict[str, Array]:
        """Priorities where all have one; the last step of an episode begins no transition."""
        parts = [one.priority for one in self.episodes]
        if not parts or any(part is None for part in parts):
            return {}
        rows = [np.r_[np.asarray(part, np.float32), np.float32(0)] for part in parts]
        return {PRIORITY: np.concatenate(rows)}

    def stream(self) -> Iterator[tuple[None, dict[str, Any]]]:
        kinds = self.target.kinds or {}
        for one in self.episodes:
            steps = _steps(one, kinds)
            yield None, unflatten({path: _of_kind(steps.get(path), one, *kinds[path]) for path in kinds})


def _steps(one: Transitions, kinds: Any) -> dict[Path, Array]:
    """Steps as ALF has them: the reward with the step that it led to."""
    root = (path_by_key(kinds, "step_type") or ("step_type",))[:-1]
    n = one.length
    kind = np.full(n + 1, MID)
    kind[0], kind[-1] = FIRST, LAST
    reward = one.reward
    steps: dict[Path, Array] = {
        (*root, "step_type"): kind,
        (*root, "reward"): np.concatenate([np.zeros_like(reward[:1]), reward]),
        (*root, "discount"): np.r_[1.0, np.where(one.terminated, 0.0, 1.0)],
        (*root, "env_id"): np.zeros(n + 1),
    }
    for path, leaf in one.observation.items():
        steps[(*root, "observation", *path)] = np.concatenate([leaf, one.following[path][-1:]])
    for path, leaf in one.action.items():
        steps[("action", *path)] = np.concatenate([leaf, np.zeros_like(leaf[:1])])
        steps[(*root, "prev_action", *path)] = np.concatenate([np.zeros_like(leaf[:1]), leaf])
    return steps


def _unknown(one: Transitions, target: Target) -> list[Path]:
    kinds = target.kinds or {}
    if missing := sorted(path for path in _steps(one, kinds) if path not in kinds and _is_seen(path)):
        raise FieldError(f"the buffer has no field {'/'.join(missing[0])!r}; it has: {', '.join(map('/'.join, kinds))}")
    return sorted(kinds.keys() - _steps(one, kinds).keys())


def _is_seen(path: Path) -> bool:
    return path[0] == "action" or "observation" in path


def _of_kind(array: Array | None, one: Transitions, dtype: Any, shape: tuple[int, ...]) -> Array:
    """With the buffer's shape; its dtype where that is a matter of form."""
    wanted = dtypes.from_torch(torch.zeros(0, dtype=dtype), where="the buffer").dtype
    if array is None:
        return np.zeros((one.length + 1, *shape), wanted)
    if array.size == (one.length + 1) * int(np.prod(shape, dtype=np.int64)):
        array = array.reshape(one.length + 1, *shape)
    form = array.dtype.kind in "fiu" and np.dtype(wanted).kind in "fiu" and array.ndim == 1
    return array.astype(wanted) if form else array
