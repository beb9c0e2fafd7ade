"""Pure, no I/O: what the buffer is given, as an episode of the archive and as rows in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from archive.adapters import _rlinf_trajectory as trajectories
from archive.buffers import flatten
from archive.buffers.flatten import Flat
from archive.errors import FieldError
from archive.schema import Schema

SCHEMA: Schema = trajectories.SCHEMA
_UUID_NAMES = ("model_weights_uuid",)
_COUNT_NAMES = ("model_update_count", "update_count")


@dataclass(frozen=True)
class Taken:
    """One trajectory as it was given."""

    tree: dict[str, Any]
    flat: Flat
    info: dict[str, Any]
    model_weights_uuid: str | None
    update_count: int | None

    def made_by(self, uuid: str | None, count: int | None) -> Taken:
        """The same, with what the caller says of the weights."""
        return replace(
            self,
            model_weights_uuid=self.model_weights_uuid if uuid is None else str(uuid),
            update_count=self.update_count if count is None else int(count),
        )

    def episode(self, trajectory_id: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """(steps, what else `Buffer.add_episode` takes)."""
        made = trajectories.to_steps(self.tree, trajectory_id)
        metadata = made.metadata | {"model_weights_uuid": self.model_weights_uuid}
        metadata |= {"model_update_count": self.update_count}
        about = {
            "metadata": metadata, "schema": made.schema, "model_weights_uuid": self.model_weights_uuid,
            "update_count": self.update_count,
        }  # fmt: skip
        return made.steps, about


def take(trajectory: Any) -> Taken | None:
    """A trajectory's parts; None for one without any steps."""
    tree = trajectories.tree_of(trajectory)
    shape = trajectories.shape_of(tree)
    if shape == (0,):
        return None
    if len(shape) < 2:
        raise FieldError(f"a trajectory's tensors are [T, B, ...]; the first of these has shape {list(shape)}")
    steps, envs = int(shape[0]), int(shape[1])
    if not steps * envs:
        return None
    uuid, count = trajectories.weights_of(tree.get("model_weights_id") or "")
    info = {key: tree.get(key) for key in trajectories.SCALARS} | {"shape": shape}
    return Taken(tree, flatten.flatten(tree, steps, envs), info, _text(tree, uuid), _number(tree, count))


def _text(tree: dict[str, Any], found: str | None) -> str | None:
    given = next((tree[name] for name in _UUID_NAMES if tree.get(name) is not None), found)
    return None if given is None else str(given)


def _number(tree: dict[str, Any], found: int | None) -> int | None:
    given = next((tree[name] for name in _COUNT_NAMES if tree.get(name) is not None), found)
    return None if given is None else int(given)
