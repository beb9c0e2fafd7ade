"""Pure, no I/O: what the buffer is given, as an episode of the archive and as rows in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from archive.adapters.rlinf import NUMBER, Steps
from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.buffer import flatten
from archive.adapters.rlinf.buffer.flatten import Flat
from archive.base import FieldError, UsageError
from archive.fields import dtypes, mapped, unflatten

ADDED = "added"  # metadata of what is journaled: how many trajectories the buffer had been given with this one
_UUID_NAMES = ("model_weights_uuid",)
_COUNT_NAMES = ("model_update_count", "update_count")
_WANTED = "give RLinf's Trajectory, or an object or a dict with the same fields"


class Weights(NamedTuple):
    """What made a trajectory, as far as that is known."""

    uuid: str | None = None
    update_count: int | None = None

    def or_else(self, other: Weights) -> Weights:
        """These; what is not known of them from `other`."""
        uuid = other.uuid if self.uuid is None else str(self.uuid)
        return Weights(uuid, other.update_count if self.update_count is None else int(self.update_count))


@dataclass(frozen=True)
class Taken:
    """One trajectory as it was given."""

    made: Steps
    flat: Flat
    weights: Weights

    def made_by(self, weights: Weights) -> Taken:
        """The same, with what is known of the weights besides."""
        return replace(self, weights=weights.or_else(self.weights))

    def counted(self, added: int) -> Taken:
        """The same; its episode says how many trajectories had been added with it."""
        return replace(self, made=replace(self.made, metadata={**self.made.metadata, ADDED: added}))

    def as_episode(self, trajectory_id: int) -> Steps:
        """What the archive is to have of it, under that id and with what is known of the weights."""
        uuid, count = self.weights
        weights = {"model_weights_uuid": uuid, "model_update_count": count}
        metadata = {NUMBER: trajectory_id} | self.made.metadata | weights
        return replace(self.made, metadata=metadata, model_weights_uuid=uuid, update_count=count)


def take_all(given: Iterable[Any] | None, weights: Weights) -> list[Taken]:
    """The trajectories that have steps; an error if one of them cannot be kept."""
    if given is not None and (isinstance(given, Mapping) or not isinstance(given, Iterable)):
        raise UsageError(f"a list of trajectories is expected, not a {type(given).__name__}")
    return [t.made_by(weights) for t in map(take, given or ()) if t is not None]


def take(trajectory: Any) -> Taken | None:
    """A trajectory's parts; None for one without any steps."""
    tree = mapped(_tree(trajectory), lambda leaf: dtypes.to_torch(leaf) if type(leaf) is np.ndarray else leaf)
    shape = trajectories.shape_of(tree)
    if shape == (0,):
        return None
    if len(shape) < 2:
        raise FieldError(f"a trajectory's tensors are [T, B, ...]; the first of these has shape {list(shape)}")
    steps, envs = int(shape[0]), int(shape[1])
    if not steps * envs:
        return None
    return Taken(trajectories.to_steps(tree), flatten.flatten(tree, steps, envs), _weights(trajectory, tree))


def transitions(trajectory: Any) -> dict[str, Any]:
    """A trajectory's fields [T, B, ...] as rows of transitions [T * B, ...]; {} for one without any steps."""
    taken = take(trajectory)
    return {} if taken is None else unflatten(taken.flat.rows)


def _tree(trajectory: Any) -> dict[str, Any]:
    try:
        tree = trajectories.tree_of(trajectory)
    except TypeError:
        tree = {}
    if not tree.keys() & {*trajectories.FIELDS}:
        raise UsageError(f"a {type(trajectory).__name__} is no trajectory: {_WANTED}")
    if isinstance(tree.get("model_weights_id", ""), str):
        return tree
    return tree | {"model_weights_id": str(tree["model_weights_id"] or "")}


def _weights(trajectory: Any, tree: Mapping[str, Any]) -> Weights:
    """What it says of them in fields or attributes, else in its model_weights_id."""

    def said(names: Iterable[str]) -> Any:
        found = (tree.get(name, getattr(trajectory, name, None)) for name in names)
        return next((value for value in found if value is not None), None)

    named = Weights(*trajectories.weights_of(tree.get("model_weights_id", "")))
    return Weights(said(_UUID_NAMES), said(_COUNT_NAMES)).or_else(named)
