"""RLinf's Trajectory as the steps of one episode, and back to the bit; the numbers of trajectories, as
episodes and their attributes have them. Shared by the adapter and the buffer.

A trajectory is a nest of tensors [T, B, ...]: T steps of B envs at once. It becomes an episode of T steps,
B an inner axis.

| of the trajectory | where it is kept |
|---|---|
| tensors of T rows | fields, one row a step; `next_obs/x` only where it is not the next row of `curr_obs/x` |
| tensors of another number of rows (the done fields with extra leading ones), numbers | fields on the axis "free" |
| arrays that are no tensors, texts, lists, dicts with other keys than strings | a state tree below the field `REST` |
| None, empty dicts | themselves |
| max_episode_length, model_weights_id, number, T, B, shape | metadata |
| `uuid_count` in model_weights_id | model_weights_uuid and update_count |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from archive.adapters import Item, share_buffer
from archive.arrays import ascending
from archive.base import IntegrityError, StateError, UsageError, jsontree
from archive.fields import Path, Schema, dtypes, flatten, trees, unflatten

if TYPE_CHECKING:
    from archive.read import Episodes
    from archive.write import Buffer

FIELDS = (
    *("actions", "intervene_flags", "rewards", "terminations", "truncations", "dones", "prev_logprobs", "prev_values"),
    *("versions", "forward_inputs", "curr_obs", "next_obs"),
)
DONES = ("terminations", "truncations", "dones")
SCALARS = {"max_episode_length": int, "model_weights_id": str}
SYSTEM = "rlinf"
NUMBER = "trajectory_id"  # metadata; and an attribute, where it is no longer that of the metadata
MAX_SEED = 2**32 - 1  # RLinf gives it to numpy as well
REST = "%rest"
SCHEMA = Schema(axes=dict.fromkeys(DONES, "free"))
_SKELETON = "skeleton"
_WEIGHTS = re.compile(r"(?P<uuid>.+)_(?P<count>\d{1,18})")
_DTYPES = {
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", *dtypes.ML_NAMES),
}


class Weights(NamedTuple):
    """The weights that made a trajectory, as far as they are known."""

    uuid: str | None = None
    update_count: int | None = None

    def or_else(self, other: Weights) -> Weights:
        """These; what is not known of them from `other`."""
        uuid = other.uuid if self.uuid is None else str(self.uuid)
        return Weights(uuid, other.update_count if self.update_count is None else int(self.update_count))


@dataclass(frozen=True)
class Steps:
    """A trajectory as `Buffer.add_episode` takes it."""

    steps: dict[str, Any]
    metadata: dict[str, Any]
    schema: Schema
    weights: Weights

    def add(self, buffer: Buffer, **ends: Any) -> str:
        """Add it to a buffer of a writer; its episode's id. ends: how the episode ends, as `add_episode` takes it."""
        uuid, count = self.weights
        about = {"schema": self.schema, "metadata": self.metadata, **ends}
        return buffer.add_episode(self.steps, model_weights_uuid=uuid, update_count=count, **about)


def to_steps(trajectory: Any, trajectory_id: int | None = None, *, schema: Schema | None = None) -> Steps:
    """The steps of a Trajectory, or of a dict or any object with its fields; what is None stays None.

    trajectory_id: its number in the buffer.  schema: what the fields mean besides, as the writer's schema says.
    """
    tree = tree_of(trajectory)
    scalars = {key: tree.pop(key) for key, kind in SCALARS.items() if type(tree.get(key)) is kind}
    shape, every, base = shape_of(tree), dict(leaves(tree)), schema or Schema()
    fields = {path: leaf for path, leaf in every.items() if path[0] != REST and _is_field(leaf)}
    steps = unflatten(fields)
    axes = {path: "free" for path, leaf in fields.items() if not _has_rows(leaf, shape[0])}
    next_of = {}  # next_obs repeats the next rows of curr_obs
    for path, leaf in fields.items() if shape[0] > 1 else ():
        current = ("curr_obs", *path[1:])
        if path[0] == "next_obs" and len(path) > 1 and path not in axes and _alike(leaf, fields.get(current)):
            next_of[path] = current
    if rest := [(path, leaf) for path, leaf in every.items() if path not in fields]:
        steps[REST] = _rest(rest)
        axes |= {(REST, key): "free" for key in steps[REST]}
    kept = {path: axis for path, axis in base.axes.items() if path[0] not in FIELDS}
    made = dataclasses.replace(base, next_of={**next_of, **base.next_of}, axes={**kept, **axes})
    metadata: dict[str, Any] = {} if trajectory_id is None else {NUMBER: int(trajectory_id)}
    metadata |= {"T": shape[0], "B": shape[1] if len(shape) > 1 else 1, "shape": list(shape)}
    metadata |= {"max_episode_length": 0, "model_weights_id": ""} | scalars
    metadata["absent"] = [key for key in SCALARS if key not in scalars or key in tree]
    return Steps(steps, metadata, made, weights_of(scalars.get("model_weights_id", "")))


def from_steps(data: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The trajectory's tree, to the bit, of an episode's data (as `Episode.read` gives it) and metadata."""
    scalars = {(key,): metadata[key] for key in SCALARS if key not in metadata.get("absent", SCALARS)}
    fields = {path: _tensor(leaf) for path, leaf in flatten(data) if path[0] != REST}
    order = sorted(fields, key=lambda path: FIELDS.index(path[0]) if path[0] in FIELDS else len(FIELDS))
    rest = {tuple(path): value for path, value in (_from_rest(data[REST]) if REST in data else ())}
    return unflatten(scalars | {path: fields[path] for path in order} | rest)


def _tensor(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, dict) else dtypes.to_torch(np.asarray(leaf))


def tree_of(trajectory: Any) -> dict[str, Any]:
    """The fields of a trajectory as a dict of its own."""
    if isinstance(trajectory, Mapping):
        return dict(trajectory)
    if dataclasses.is_dataclass(trajectory):
        return {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    return dict(vars(trajectory))


def shape_of(tree: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape that RLinf's index gives: that of prev_logprobs, else of rewards (else of what there is)."""
    for key in ("prev_logprobs", "rewards", "actions", *FIELDS):
        value = tree.get(key)
        if isinstance(value, torch.Tensor) and value.dim():
            return tuple(value.shape)
    return (0,)


def weights_of(model_weights_id: str) -> Weights:
    """The weights of a model_weights_id: `uuid_count` as documented, or a uuid alone."""
    found = _WEIGHTS.fullmatch(model_weights_id)
    return Weights(found["uuid"], int(found["count"])) if found else Weights(model_weights_id or None)


def index_entry(metadata: Mapping[str, Any], trajectory_id: int) -> dict[str, Any]:
    """The entry of RLinf's trajectory index, shape a tuple as it is in a live buffer."""
    shape = tuple(metadata["shape"])
    return {
        "num_samples": int(np.prod(shape[:2])),
        "trajectory_id": trajectory_id,
        "max_episode_length": metadata["max_episode_length"],
        "shape": shape,
        "model_weights_id": metadata["model_weights_id"],
    }


def leaves(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(keys, leaf) of a trajectory's tree; a dict with other keys than text is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and all(isinstance(k, str) for k in value):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _is_field(leaf: Any) -> bool:
    if leaf is None or (type(leaf) is dict and not leaf):
        return True
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        return False
    return str(leaf.dtype).removeprefix("torch.") in _DTYPES


def _rest(rest: list[Any]) -> dict[str, Any]:
    try:
        skeleton, arrays = trees.flatten(rest, where="trajectory", copy=False)
    except StateError:
        for path, leaf in rest:  # which says the field
            trees.flatten(leaf, where="/".join(map(str, path)), copy=False)
        raise
    return {_SKELETON: np.array([json.dumps(skeleton)], object), **arrays}


def _from_rest(fields: Mapping[str, Any]) -> list[Any]:
    try:
        skeleton = json.loads(fields[_SKELETON][0])
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise IntegrityError(
            f"what is no tensor of a trajectory cannot be read ({e}): read the field {REST!r} with it, or verify the "
            "archive"
        ) from e
    arrays = {key: value for key, value in fields.items() if key != _SKELETON}
    return list(trees.unflatten(skeleton, arrays, where="trajectory"))


def _has_rows(leaf: Any, length: int) -> bool:
    """True unless it is a tensor of another number of rows than steps."""
    return not isinstance(leaf, torch.Tensor) or (leaf.dim() > 0 and len(leaf) == length)


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.dtype == other.dtype and one.shape == other.shape


def one_a_step(value: torch.Tensor, steps: int, *, leading: bool) -> torch.Tensor | None:
    """The rows of a field that belong to the steps, where each epoch has an extra one;
    None if those are no whole epochs.

    leading: the extra row is the first of its epoch (done flags), else the last (values of the state after it).
    """
    extra = len(value) - steps
    if not extra:
        return value
    if steps % extra:
        return None
    epochs = value.reshape(extra, steps // extra + 1, *value.shape[1:])
    kept = epochs[:, 1:] if leading else epochs[:, :-1]
    return kept.reshape(steps, *value.shape[1:])


# -- numbers of trajectories ------------------------------------------------------------------------------------


def metadata_of(episodes: Episodes) -> list[dict[str, Any]]:
    """The metadata of each; no data is read."""
    return [jsontree.loads(text) if text else {} for text in episodes.table["metadata"].to_pylist()]


def ids_of(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> list[int | None]:
    """The trajectory ids that episodes were given, at first or later; None for those that were not."""
    names = episodes.table["episode_id"].to_pylist() if renumbered else [None] * len(episodes)
    found = [
        (renumbered or {}).get(name, about.get(NUMBER))
        for name, about in zip(names, metadata_of(episodes), strict=True)
    ]
    return [i if isinstance(i, int) else None for i in found]


def distinct_ids(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> dict[str, int]:
    """Episode -> trajectory id. Where several have the same, because each rank counted by itself, all are numbered
    anew: by the ids they had, then by rank; every rank comes to the same numbers."""
    names, given = episodes.table["episode_id"].to_pylist(), ids_of(episodes, renumbered)
    known = [i for i in given if i is not None]
    if len(set(known)) == len(given):
        return dict(zip(names, known, strict=True))
    order = sorted(range(len(names)), key=lambda i: (given[i] is None, given[i] or 0))
    return {names[i]: number for number, i in enumerate(order)}


def next_id(states: Iterable[Mapping[str, Any]], taken: Iterable[int | None]) -> int:
    """An id that nothing has, nor anything behind it."""
    return max((*(int(s.get("counter", 0)) for s in states), *(i + 1 for i in taken if i is not None)), default=0)


def listed_at(state: Any) -> Callable[[int], tuple[int, int]]:
    """A key that sorts numbers as RLinf's list has them: as the state lists them, others after that, ascending."""
    ids = state.get("ids", ()) if isinstance(state, Mapping) else ()
    place = {int(number): i for i, number in enumerate(ids)}
    return lambda number: (place.get(number, len(place)), number)


def file_kind(states: Iterable[Any]) -> str:
    """The kind of files that the buffers of these states had: "pkl" or "pt"."""
    pickled = any(isinstance(s, Mapping) and s.get("trajectory_format") == "pkl" for s in states)
    return "pkl" if pickled else "pt"


class Mark:
    """The entry of a live buffer's index that stands for a trajectory: another object where its number was given anew.
    original: the number that its episode's metadata says."""

    def __init__(self, entry: Any, original: int | None) -> None:
        self.entry, self.original = entry, original

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and other.entry is self.entry

    __hash__ = None  # type: ignore[assignment]


def renumbered(known: Mapping[int, Item]) -> dict[str, dict[str, int]]:
    """The attribute that says under which numbers trajectories are known now, where their episodes say others."""
    found = {item.episode_id: number for number, item in known.items() if item.mark.original != number}
    return {NUMBER: found} if found else {}


class Numbered(NamedTuple):
    """One trajectory of a share."""

    number: int
    entry: dict[str, Any]  # of RLinf's index
    episode_id: str
    original: int | None  # the number in the episode's metadata
    tree: dict[str, Any]


@dataclass(frozen=True)
class Trajectories:
    """One buffer of a share, as RLinf's buffer is to have it."""

    part: Any  # the share's buffer
    numbers: list[int]
    state: Mapping[str, Any]  # of the rank, where it goes on as it was; empty where trajectories moved
    seed: int

    def __iter__(self) -> Iterator[Numbered]:
        """In order, read ahead in bounded memory."""
        for number, (ep, data) in zip(self.numbers, self.part.stream(), strict=True):
            metadata = _checked(ep)
            if ep.length != metadata["T"]:
                raise UsageError(
                    f"of trajectory {ep.id!r} the plan keeps {ep.length} of {metadata['T']} steps; RLinf's are whole: "
                    "plan with max_episodes= instead of max_length="
                )
            entry, tree = index_entry(metadata, number), from_steps(data, metadata)
            yield Numbered(number, entry, ep.id, metadata.get(NUMBER), tree)

    @property
    def file_kind(self) -> str:
        """The kind of files that the buffers had that it comes from."""
        return file_kind((self.state, *self.part.source_states.values()))


def trajectories_of(share: Any, name: str, states: Mapping[int, Any] | None = None) -> Trajectories:
    """The trajectories of one buffer of a share; an error if they are not RLinf's. Reads no data.

    Their numbers are their own where all come from one source rank, else 0, 1, ... in order.
    states: by source rank, where they are not those that were saved.
    """
    part = share_buffer(share, name)
    state = part.state if share.plan.is_identity else None
    if state is not None and (not isinstance(state, Mapping) or state.get("system") != SYSTEM):
        raise UsageError(f"rank {share.rank} of buffer {name!r} was not saved from a replay buffer of RLinf")
    if states is not None and share.plan.is_identity:
        state = states.get(share.rank)
    given = part.attributes.get(NUMBER, {})
    numbers: list[Any] = [given.get(ep.id, _checked(ep).get(NUMBER)) for ep in part.episodes]
    one_source = len(ascending(part.layout.source_rank)) <= 1
    if not one_source or None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(numbers)))
    found = dict(state or {})
    seed = share.seed & MAX_SEED if found.get("seed") is None else found["seed"]
    return Trajectories(part, [int(n) for n in numbers], found, seed)


def _checked(episode: Any) -> dict[str, Any]:
    """The metadata of an episode that is a trajectory."""
    metadata: dict[str, Any] = episode.metadata
    if "T" not in metadata or "shape" not in metadata:
        raise UsageError(
            f"episode {episode.id!r} is no trajectory [T, B, ...] of RLinf (imported with split=True, or another "
            "system's)"
        )
    return metadata
