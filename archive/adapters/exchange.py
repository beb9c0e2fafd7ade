"""The steps that one system saved, into a live buffer of another: ALF, TorchRL, RLinf.

```python
share = resharding.plan(ck, world_size=1).share(0)  # of a checkpoint that ALF's adapter made
print(exchange.restore(torchrl_buffer, share))
torchrl.save(torchrl_buffer, w, step=ck.step).result()  # from now on it is TorchRL's
```

| from | to | |
|---|---|---|
| ALF, TorchRL, RLinf | TorchRL | one item a transition: observation, action, next, traj_ids; its tree's leaves |
| ALF, TorchRL, RLinf | RLinf | one trajectory [T, 1, ...] an episode: curr_obs, next_obs, actions, rewards, dones |
| TorchRL, RLinf | ALF | T + 1 steps, FIRST to LAST, dealt to the env rows; leaves of its trees |

The same system's own adapter restores more, and exactly. docs/adapters/exchange.md has more.
"""

from __future__ import annotations

from archive.base import package

package("torch", "archive.adapters.exchange", "'trajectory-archive[torch]'")

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from archive.adapters import Report, alf, check_room, share_buffer, share_of, system
from archive.arrays import Steps, run_heads, since_head
from archive.base import CapacityError, FieldError, UsageError
from archive.checkpoint import MAIN_BUFFER
from archive.fields import Array, Path, dtypes, flatten, leaves, lookup, unflatten

__all__ = [
    "restore",
]

MID = 1  # ALF's kind of a step that is neither FIRST nor LAST
ENDS = ("reward", "done", "terminated", "truncated")  # no observation, though TorchRL has them with it
Leaves = dict[Path, Array]  # (T, ...) each; () is the path of an array without a name


@dataclass(frozen=True)
class Transitions:
    """Consecutive transitions of one episode: in `observation`, `action` was taken, `reward` and `following` came of
    it. All systems have these, each in its own form."""

    observation: Leaves
    following: Leaves
    action: Leaves
    reward: Array  # (T, ...)
    terminated: Array  # (T,) bool
    truncated: Array  # (T,) bool
    closed: bool  # the last one is truncated here, and was not
    priority: Array | None = None  # (T,)
    model_weights_uuid: str | None = None
    update_count: int | None = None

    @property
    def length(self) -> int:
        return len(self.reward)

    @property
    def ended(self) -> Array:
        """(T,) bool: the transitions that end an episode, one way or the other."""
        return self.terminated | self.truncated


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
    found = list(_transitions_of(part))
    notes = load(target, found)
    counts = {"closed": sum(one.closed for one in found), "without_a_transition": max(0, len(part) - len(found))}
    return Report(len(found), sum(one.length for one in found), counts, notes)


def _kind(target: Any) -> tuple[Callable[[Any, list[Transitions]], tuple[str, ...]], int]:
    """The function that replaces its content, and how much it holds."""
    if hasattr(target, "add_trajectories"):
        return _into_rlinf, int(target.size)
    if hasattr(target, "extend") and hasattr(target, "storage"):
        return _into_torchrl, len(target)
    if hasattr(target, "_current_pos") and hasattr(target, "_current_size"):
        return _into_alf, int(target._current_size.sum())
    raise UsageError(f"{type(target).__name__} is no buffer of TorchRL, RLinf or ALF")


def _transitions_of(part: Any) -> Iterator[Transitions]:
    """The transitions of a share's buffer, episode by episode; one of a single ALF step has none."""
    priority, at = part.columns.get("priority"), 0
    for episode, steps in part.stream():
        column = None if priority is None else np.asarray(priority[at : at + episode.length])
        at += episode.length
        for found in _reader_of(steps)(leaves(steps), column):
            yield replace(found, model_weights_uuid=episode.model_weights_uuid, update_count=episode.update_count)


def _reader_of(steps: Mapping[str, Any]) -> Callable[[Leaves, Any], Iterator[Transitions]]:
    """The reader of the system whose fields these are."""
    if any(path[-1] == "step_type" for path, _ in flatten(steps)):
        return _of_alf
    if lookup(steps, ("next", "reward")) is not None:
        return _of_torchrl
    if "curr_obs" in steps and "actions" in steps:
        return _of_rlinf
    raise UsageError(f"these are steps of neither ALF, TorchRL nor RLinf; their fields: {', '.join(sorted(steps))}")


def _below(steps: Leaves, folder: Path) -> Leaves:
    """The arrays in a folder by their paths in it; () for one that has its name."""
    n = len(folder)
    return {path[n:]: leaf for path, leaf in steps.items() if path[:n] == folder and isinstance(leaf, np.ndarray)}


def _each(fields: Leaves, which: Any) -> Leaves:
    return {path: leaf[which] for path, leaf in fields.items()}


def _flag(values: Any, length: int) -> Array:
    """(T,) bool; a fresh array."""
    if values is None:
        return np.zeros(length, bool)
    flags: Array = np.logical_or.reduce(np.asarray(values).reshape(length, -1) != 0, axis=1)
    return flags


def _listed(paths: Any) -> str:
    return ", ".join(map("/".join, paths))


# -- ALF ---------------------------------------------------------------------------------------------------------------


def _of_alf(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """ALF's step has the reward that led to it, so n steps are n - 1 transitions."""
    root = min((path for path in steps if path[-1] == "step_type"), key=len)[:-1]
    seen, done = _below(steps, (*root, "observation")), _below(steps, ("action",))
    kinds, reward = steps[*root, "step_type"], steps.get((*root, "reward"))
    if reward is None or not seen or not done:
        raise FieldError(f"ALF's steps need reward, observation and action; there are: {_listed(steps)}")
    if len(kinds) < 2:
        return
    last = kinds[1:] == alf.LAST
    terminated = last & (steps.get((*root, "discount"), np.ones(len(kinds)))[1:] == 0)
    truncated, closed = last & ~terminated, not bool(last[-1])
    truncated[-1] |= closed
    now, later = slice(None, -1), slice(1, None)
    before = _each(seen, now), _each(seen, later), _each(done, now)
    yield Transitions(*before, reward[1:], terminated, truncated, closed, None if priority is None else priority[:-1])


def _into_alf(rb: Any, found: list[Transitions]) -> tuple[str, ...]:
    """ALF's own adapter writes the buffer; refused if it has no room, or fields of another kind."""
    target = alf.target_of(rb)
    episodes = [part for one in found for part in _split(one)]
    made = alf.rebuild(_dealt(episodes, target), target, "close")
    unknown = _unknown(episodes[0], target) if episodes else []
    if unknown:
        note = f"nothing is known of {_listed(unknown)}: 0 everywhere"
        made = replace(made, report=replace(made.report, notes=(*made.report.notes, note)))
    alf.write(rb, made)
    return made.report.notes


def _split(one: Transitions) -> Iterator[Transitions]:
    """Runs up to an end: RLinf's trajectories go on over it."""
    stops = (np.flatnonzero(one.ended) + 1).tolist()
    for start, stop in pairwise([0, *stops]):
        some = slice(start, stop)
        rows = ("reward", "terminated", "truncated", *(["priority"] if one.priority is not None else []))
        cut: dict[str, Any] = {name: getattr(one, name)[some] for name in rows}
        cut |= {name: _each(getattr(one, name), some) for name in ("observation", "following", "action")}
        yield replace(one, **cut)


def _dealt(episodes: list[Transitions], target: alf.Target) -> Any:
    """The part of a share that ALF's adapter needs: episodes dealt to env rows in order, balanced by steps. Nothing is
    known but these, and nothing was dropped."""
    length = np.array([one.length + 1 for one in episodes], np.int64)
    before = np.cumsum(length) - length
    env = before * target.num_envs // max(1, int(length.sum()))
    position = since_head(before, run_heads(env))
    longest = int((position + length).max(initial=0))
    if longest > target.max_length:
        raise CapacityError(
            f"a row would have {longest} steps, the buffer takes {target.max_length}; plan with capacity= for fewer"
        )
    no = np.zeros(len(env), bool)
    columns = {}
    if episodes and all(one.priority is not None for one in episodes):
        rows = [np.r_[np.asarray(one.priority, np.float32), np.float32(0)] for one in episodes]
        columns[alf.PRIORITY] = np.concatenate(rows)  # the last step of an episode begins no transition
    kinds = target.kinds or {}

    def stream() -> Iterator[tuple[None, dict[str, Any]]]:
        for one in episodes:
            steps = _alf_steps(one, kinds)
            yield None, unflatten({path: _of_kind(steps.get(path), one, *kinds[path]) for path in kinds})

    return SimpleNamespace(
        name=MAIN_BUFFER,
        state=None,
        source_states={},
        rules=SimpleNamespace(unfinished="close"),
        plan=SimpleNamespace(dropped_of=lambda buffer: {}),
        dropped=Steps(*[np.zeros(0, np.int64)] * 3),
        layout=SimpleNamespace(env_id=env, position=position, length=length, open=no, headless=no),
        next_positions=dict(zip(env.tolist(), (position + length).tolist(), strict=True)),
        columns=columns,
        stream=stream,
    )


def _alf_steps(one: Transitions, kinds: Any) -> Leaves:
    """Steps as ALF has them: the reward with the step that it led to."""
    root = (alf.path_by_key(kinds, "step_type") or ("step_type",))[:-1]
    n, reward = one.length, one.reward
    kind = np.full(n + 1, MID)
    kind[0], kind[-1] = alf.FIRST, alf.LAST
    steps: Leaves = {
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


def _unknown(one: Transitions, target: alf.Target) -> list[Path]:
    """Fields of the buffer that no transition tells of; FieldError for one of these that the buffer has not."""
    kinds = target.kinds or {}
    steps = _alf_steps(one, kinds)
    if missing := sorted(p for p in steps if p not in kinds and (p[0] == "action" or "observation" in p)):
        raise FieldError(f"the buffer has no field {'/'.join(missing[0])!r}; it has: {_listed(kinds)}")
    return sorted(kinds.keys() - steps.keys())


def _of_kind(array: Array | None, one: Transitions, dtype: Any, shape: tuple[int, ...]) -> Array:
    """An array in the buffer's shape; in its dtype where that is a matter of form."""
    wanted = dtypes.from_torch(torch.zeros(0, dtype=dtype), where="the buffer").dtype
    if array is None:
        return np.zeros((one.length + 1, *shape), wanted)
    if array.size == (one.length + 1) * int(np.prod(shape, dtype=np.int64)):
        array = array.reshape(one.length + 1, *shape)
    form = array.dtype.kind in "fiu" and np.dtype(wanted).kind in "fiu" and array.ndim == 1
    return array.astype(wanted) if form else array


# -- TorchRL -----------------------------------------------------------------------------------------------------------


def _of_torchrl(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """A field in the root and below "next" is an observation."""
    after = _below(steps, ("next",))
    seen = [path for path in after if path in steps and path[-1] not in ENDS]
    done = _below(steps, ("action",))
    if not seen or not done:
        raise FieldError(f"TorchRL's steps need an observation and an action; there are: {_listed(steps)}")
    reward = after[("reward",)]
    flags = {name: _flag(after.get((name,)), len(reward)) for name in ("done", "terminated", "truncated")}
    terminated = flags["terminated"] if ("terminated",) in after else flags["done"] & ~flags["truncated"]
    truncated = flags["truncated"] | (flags["done"] & ~terminated)
    closed = bool(len(reward)) and not bool((terminated | truncated)[-1])
    if closed:
        truncated[-1] = True
    inside = all(path[0] == "observation" for path in seen)  # as ALF calls it, too: no part of the names in it
    names = {path: path[1:] if inside else path for path in seen}
    now, later = ({name: found[path] for path, name in names.items()} for found in (steps, after))
    yield Transitions(now, later, done, reward, terminated, truncated, closed, priority)


def _into_torchrl(rb: Any, found: list[Transitions]) -> tuple[str, ...]:
    room, steps = int(rb.storage.max_size), sum(one.length for one in found)
    if steps > room:
        raise UsageError(
            f"the share has {steps} transitions, the buffer takes {room}; plan with capacity={room}, which drops the "
            "oldest"
        )
    items = [_tensordict(one, number) for number, one in enumerate(found)]
    _check_kinds(rb, items)
    rb.empty()
    for item, one in zip(items, found, strict=True):
        index = rb.extend(item)
        if one.priority is not None and hasattr(rb.sampler, "_sum_tree"):
            rb.update_priority(index, _before_alpha(rb.sampler, one.priority))
    return ()


def _check_kinds(rb: Any, items: list[Any]) -> None:
    """FieldError for items of several kinds, or of another than a storage that has been filled; a list takes any."""
    held: Any = getattr(rb.storage, "_storage", None)
    if isinstance(held, list):
        return
    known = _kinds_of(held, held.batch_dims) if hasattr(held, "batch_dims") else None
    for item in items:
        found = _kinds_of(item, 1)
        known = found if known is None else known
        own = ("index", "_weight", getattr(rb, "priority_key", "td_error"))  # TorchRL adds these itself
        if odd := [p for p in known.keys() | found.keys() if known.get(p) != found.get(p) and p[0] not in own]:
            raise FieldError(
                f"field {'/'.join(min(odd))!r} is {found.get(min(odd), 'nothing')} in the share, "
                f"{known.get(min(odd), 'nothing')} in the buffer or an earlier episode; restore into a new buffer"
            )


def _kinds_of(tensordict: Any, batch_dims: int) -> dict[Path, str]:
    """Dtype and shape of an item's leaves."""
    items = tensordict.items(include_nested=True, leaves_only=True)
    return {
        (key if isinstance(key, tuple) else (key,)): f"{leaf.dtype} {list(leaf.shape[batch_dims:])}"
        for key, leaf in items
    }


def _tensordict(one: Transitions, number: int) -> Any:
    flags = {"done": one.ended, "terminated": one.terminated, "truncated": one.truncated}
    reward = dtypes.to_torch(one.reward)
    after = {name: torch.from_numpy(mask.copy())[:, None] for name, mask in flags.items()}
    nest = {
        "observation": _nest_of(one.observation),
        "action": _nest_of(one.action),
        "next": {
            "observation": _nest_of(one.following),
            "reward": reward[:, None] if reward.ndim == 1 else reward,
            **after,
        },
        "collector": {"traj_ids": torch.full((one.length,), number)},
    }
    return system("tensordict", "tensordict").TensorDict.from_dict(nest, batch_size=[one.length])


def _nest_of(found: Leaves) -> Any:
    """A tensor where there is but one array without a name, else a nest."""
    tensors = {path: dtypes.to_torch(leaf) for path, leaf in found.items()}
    return tensors[()] if () in tensors else unflatten(tensors)


def _before_alpha(sampler: Any, leaves: Any) -> torch.Tensor:
    """The priorities that the sampler makes these leaves of."""
    values = torch.from_numpy(np.asarray(leaves, np.float64))
    alpha, eps = float(sampler._alpha), float(sampler._eps)
    raw: torch.Tensor = values ** (1 / alpha) - eps if alpha else torch.zeros_like(values)
    return raw.clamp(min=0).to(torch.float32)


# -- RLinf -------------------------------------------------------------------------------------------------------------


def _of_rlinf(steps: Leaves, priority: Any) -> Iterator[Transitions]:
    """A trajectory's envs one after the other."""
    rewards = steps[("rewards",)]
    length, envs = rewards.shape[:2]
    now, after = _below(steps, ("curr_obs",)), _below(steps, ("next_obs",))
    for env in range(envs):
        own: Any = (slice(None), env)
        given = [steps.get((name,)) for name in ("terminations", "truncations")]
        terminated, truncated = (_flag(None if v is None else v[len(v) - length :, env], length) for v in given)
        closed = not bool(terminated[-1] | truncated[-1])
        truncated[-1] |= closed
        action: Leaves = {(): steps[("actions",)][own]}
        yield Transitions(_each(now, own), _each(after, own), action, rewards[own], terminated, truncated, closed)


def _into_rlinf(buffer: Any, found: list[Transitions]) -> tuple[str, ...]:
    make = system("rlinf.data.embodied_io_struct", "rlinf==0.3.0").Trajectory
    trajectories = [make(**_trajectory(one)) for one in found]
    if buffer.size:
        buffer.clear()
    buffer.add_trajectories(trajectories)
    return ()


def _trajectory(one: Transitions) -> dict[str, Any]:
    if len(one.action) != 1:
        raise UsageError(f"RLinf has one tensor of actions; these episodes have {_listed(one.action)}")
    ends = {"terminations": one.terminated, "truncations": one.truncated, "dones": one.ended}
    known = one.model_weights_uuid is not None and one.update_count is not None
    return {
        "max_episode_length": one.length,
        "model_weights_id": f"{one.model_weights_uuid}_{one.update_count}" if known else "",
        "actions": _one_env(next(iter(one.action.values()))),
        "rewards": _one_env(one.reward.reshape(one.length, -1)),
        "curr_obs": _by_name(one.observation),
        "next_obs": _by_name(one.following),
        **{name: torch.from_numpy(mask.copy())[:, None, None] for name, mask in ends.items()},
    }


def _by_name(found: Leaves) -> dict[str, torch.Tensor]:
    """RLinf's observations are tensors by name, without nesting."""
    return {".".join(path) or "states": _one_env(leaf) for path, leaf in found.items()}


def _one_env(array: Any) -> torch.Tensor:
    """[T, ...] as [T, 1, ...]."""
    tensor: torch.Tensor = dtypes.to_torch(array)
    return tensor[:, None]
