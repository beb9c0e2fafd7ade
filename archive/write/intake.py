"""Pure, no I/O: the input of a writer's call, checked and put into blocks. A refused call leaves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Steps
from archive.base import FieldError, UsageError, check_text, escape_path, jsontree
from archive.fields import (
    NODES,
    Array,
    Axis,
    Fields,
    FieldSpec,
    Kinds,
    Path,
    Ragged,
    Schema,
    ShardSchema,
    axis_of,
    nests,
    normalise,
    shard_schema,
    to_path,
)
from archive.write.blocks import Block
from archive.write.streams import AppendedRows

_MAX_UPDATE = np.iinfo(np.int64).max
REWARDS = (("reward",), ("rewards",), ("next", "reward"))


class StepWeights(NamedTuple):
    """The weights that made some steps: one value, or one a step."""

    uuid: Array | str | None = None
    update_count: Ints | int | None = None


class TakenSteps(NamedTuple):
    """The fields of some steps, in stored form. whole: some field does not have one row a step, so that the steps must
    belong to one episode."""

    fields: Fields
    schema: ShardSchema
    whole: bool


class StepIntake:
    """The intake of one buffer's steps. Steps that are like the last ones are not examined again, where arrays are
    stored as they are given, one row a step."""

    def __init__(self, kinds: Kinds) -> None:
        """kinds: of which kind fields were; empty lists are of that kind."""
        self._kinds = kinds
        self._declared: Schema | None = None
        self._last: TakenSteps | None = None
        self._like: dict[str, Any] = {}  # nest of the last steps: name, dtype and row of each array

    def take(self, nest: Any, declared: Schema) -> TakenSteps:
        """The fields of some steps, with matching numbers of rows."""
        data: dict[str, Any] = {}
        if self._last is not None and self._declared is declared and _matches(nest, self._like, data):
            lengths = set(map(len, data.values()))
            if len(lengths) == 1:
                return self._last._replace(fields=self._last.fields._replace(length=lengths.pop(), data=data))
        fields = _of_known_kind(normalise(nest, declared), self._kinds.known)
        found = TakenSteps(
            fields, shard_schema(fields.specs, declared), any(axis.whole for axis in axes(fields).values())
        )
        like = None if fields.vague else _like(nest, fields, ())
        self._like, self._declared = like or {}, declared
        self._last = found._replace(fields=fields._replace(data={})) if like else None
        return found


def _matches(nest: Any, like: dict[str, Any], out: dict[str, Any]) -> bool:
    """True if a nest has arrays of the same kinds at the same places; they are put into `out` by their names."""
    if type(nest) is not dict or nest.keys() != like.keys():
        return False
    for key, leaf in nest.items():
        kind = like[key]
        if type(kind) is dict:
            if not _matches(leaf, kind, out):
                return False
        elif type(leaf) is np.ndarray and leaf.dtype == kind[1] and leaf.ndim and leaf.shape[1:] == kind[2]:
            out[kind[0]] = leaf
        else:
            return False
    return True


def _like(nest: Any, fields: Fields, path: Path) -> dict[str, Any] | None:
    """A nest with (name, dtype, shape of a row) for each array; None if one was converted."""
    if type(nest) is not dict or not nest:
        return None
    out: dict[str, Any] = {}
    for key, leaf in nest.items():
        if isinstance(leaf, dict):
            out[key] = _like(leaf, fields, (*path, key))
        else:
            name = escape_path((*path, key))
            spec = fields.specs.get(name)
            as_given = type(leaf) is np.ndarray and fields.data.get(name) is leaf and not leaf.dtype.hasobject
            plain = as_given and spec is not None and spec.axis == "step" and not spec.next_of
            out[key] = (name, leaf.dtype, leaf.shape[1:]) if plain else None
    return None if None in out.values() else out


def _of_known_kind(fields: Fields, known: Mapping[str, FieldSpec]) -> Fields:
    told = [n for n in fields.vague if n in known and _fits(fields, n, known[n])]
    if not told:
        return fields
    specs, data = dict(fields.specs), dict(fields.data)
    for name in told:
        given = data[name]
        specs[name] = known[name]
        data[name] = axis_of(known[name]).nothing(len(given.lengths) if isinstance(given, Ragged) else len(given))
    return Fields(fields.length, specs, data, fields.vague - set(told))


def _fits(fields: Fields, name: str, known: FieldSpec) -> bool:
    """True if an array without rows, or steps without values, may be of that kind."""
    return known.axis not in NODES and axis_of(known).takes_none_of(fields.data[name])


def axes(fields: Fields) -> dict[str, Axis[Any]]:
    """The fields that have data, each on its axis."""
    return {name: axis_of(fields.specs[name]) for name in fields.data}


def check_rows(fields: Fields, *, last: bool) -> None:
    """Check that fields have the number of rows of their axis. last: the episode's last step is among them."""
    for name, axis in axes(fields).items():
        axis.check(fields.data[name], fields.length, last=last)


def has_steps(fields: Fields) -> bool:
    """True if there is a field of steps at all, even an empty one."""
    return any(axis.of_steps for axis in axes(fields).values())


def weights(uuid: Any, update_count: Any, default: StepWeights, fields: Fields) -> StepWeights:
    """The weights of these steps: given for all, per step or by a field's name; else those set before."""
    return StepWeights(
        default.uuid if uuid is None else _uuids(uuid, fields),
        default.update_count if update_count is None else _updates(update_count, fields),
    )


def _uuids(value: Any, fields: Fields) -> Array | str:
    if isinstance(value, str):
        named = _field(value, fields)
        return check_text(value, "model_weights_uuid") if named is None else _uuids(named, fields)
    if not isinstance(value, (list, tuple, np.ndarray)):
        return check_text(str(value), "model_weights_uuid")  # a uuid.UUID, say
    values = value.reshape(-1).tolist() if isinstance(value, np.ndarray) else value
    out = np.empty(len(values), object)
    out[:] = [None if v is None else check_text(str(v), "model_weights_uuid") for v in values]
    return _per_step(out, "model_weights_uuid", fields)


def _updates(value: Any, fields: Fields) -> Ints | int:
    if isinstance(value, str):
        named = _field(value, fields)
        if named is None:
            raise FieldError(f"update_count={value!r} names no field of these steps")
        value = named
    array = np.asarray(nests.as_array(value, "update_count"))
    if array.size == 0 and array.ndim and fields.length == 0:
        return np.zeros(0, np.int64)
    if (
        array.dtype.kind not in "iu"
        or int(array.max(initial=0)) > _MAX_UPDATE
        or int(array.min(initial=0)) < -_MAX_UPDATE
    ):
        raise FieldError(f"update_count must be an integer of 64 bits (or one a step), not {value!r}")
    return int(array) if array.ndim == 0 else _per_step(array.astype(np.int64), "update_count", fields)


def update_count(value: Any) -> int:
    """The update count for all later steps."""
    array = np.asarray(nests.as_array(value, "update_count"))
    if array.size != 1 or array.dtype.kind not in "iu" or abs(int(array.reshape(-1)[0])) > _MAX_UPDATE:
        raise FieldError(f"update_count must be an integer of 64 bits, not {value!r}")
    return int(array.reshape(-1)[0])


def _field(name: str, fields: Fields) -> Array | None:
    path = to_path(name)
    for key, spec in fields.specs.items():
        if spec.path == path and spec.axis not in NODES:
            value = fields.data[key]
            return value if isinstance(value, np.ndarray) else None
    return None


def _per_step(array: Array, what: str, fields: Fields) -> Array:
    array = array.reshape(-1)  # (T, 1) is one a step as well
    if len(array) != fields.length:
        raise FieldError(f"{what} has {len(array)} values for {fields.length} steps; give one value, or one a step")
    return array


class StepsPart(NamedTuple):
    """A part of the steps that are appended together: their nest, and what else is known of each."""

    steps: Any
    of: Steps
    model_weights_uuid: Any
    update_count: Any


def env_ids(value: Any, length: int) -> Ints:
    """Env row of each appended row: one for all, one a row, or None for rows 0 to length."""
    if value is None:
        return np.arange(length)
    array = np.asarray(
        nests.as_array(value if np.isscalar(value) or hasattr(value, "__array__") else list(value), "env_ids")
    )
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"env_ids must be integers, not {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"env id {int(array.max())} is above the greatest int64")
    if array.size and int(array.min()) < 0:
        raise UsageError(f"env id {int(array.min())} is negative; env rows count from 0")
    if array.ndim == 0:
        return np.full(length, int(array), np.int64)
    if len(array) != length:
        raise UsageError(f"{len(array)} env_ids for {length} rows; give one for all, or one a row")
    return array.astype(np.int64)


def mask(value: Any, length: int, what: str, *, run_at: int | None = None) -> Any:
    """A mask of the rows. One True stands for all rows, or, in a range of steps of one env, for the row at `run_at`."""
    array = np.asarray(nests.as_array(value if not isinstance(value, tuple) else list(value), what)).astype(bool)
    if array.ndim == 0 and run_at is not None:
        out = np.zeros(length, bool)
        out[run_at:][:1] = bool(array)
        return out
    if array.ndim == 0:
        return np.full(length, bool(array))
    if array.reshape(-1).shape != (length,):
        raise UsageError(f"{what} has shape {array.shape} for {length} rows; give one value a row")
    return array.reshape(-1)


def texts(value: Any, length: int, what: str) -> Array:
    """A string or None for each row; one string stands for all rows."""
    values = [value] * length if isinstance(value, str) else list(value)
    if len(values) != length:
        raise UsageError(f"{what} has {len(values)} values for {length} rows; give one a row")
    out = np.empty(length, object)
    out[:] = [None if v is None else check_text(v if isinstance(v, str) else str(v), what) for v in values]
    return out


def rows(
    length: int,
    given_envs: Any,
    first: Any,
    last: Any,
    episode_ids: Any,
    terminated: Any,
    truncated: Any,
    positions: Any,
) -> AppendedRows:
    """The appended rows with their arguments. For a range of steps of one env (one id), a single True is the first or
    last row."""
    by_runs = isinstance(given_envs, Steps)
    run = given_envs is not None and not by_runs and np.ndim(given_envs) == 0
    at = -1 if run else None
    masks = {
        "first": None if first is None else mask(first, length, "first", run_at=0 if run else None),
        "last": None if last is None else mask(last, length, "last", run_at=at),
        "terminated": None if terminated is None else mask(terminated, length, "terminated", run_at=at),
        "truncated": None if truncated is None else mask(truncated, length, "truncated", run_at=at),
    }
    if last is None and (terminated is not None or truncated is not None):
        ended = [mask for mask in (masks["terminated"], masks["truncated"]) if mask is not None]
        masks["last"] = np.logical_or.reduce(ended)
    return AppendedRows(
        given_envs if by_runs else env_ids(given_envs, length),
        **masks,
        episode_ids=None if episode_ids is None else texts(episode_ids, length, "episode_ids"),
        positions=None if positions is None else np.broadcast_to(whole_numbers(positions, "positions"), length),
    )


def whole_numbers(value: Any, what: str) -> Ints:
    """Offsets as they were given; UsageError for a mask, a float or other values."""
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"{what} must be integers, not {array.dtype}")
    return array.astype(np.int64)


def check_single(fields: Fields, rows: AppendedRows) -> None:
    """Check that steps with fields of a whole episode are a range of one episode."""
    several = len(rows.envs) > 1
    inner = (rows.first is not None and rows.first[1:].any()) or (rows.last is not None and rows.last[:-1].any())
    if several or inner or fields.length == 0:
        raise FieldError(
            "steps with a field on an 'offset' or 'free' axis must be a run of one or more steps of one episode; "
            "append the env rows and episodes one by one, or use add_episode"
        )
    check_rows(fields, last=rows.last is not None and bool(rows.last[-1]))


def owned(block: Block) -> Block:
    """The block with its arrays copied, so that the caller may change its own."""
    data = {
        name: Ragged(v.values.copy(), v.lengths.copy()) if isinstance(v, Ragged) else np.array(v, copy=True, order="C")
        for name, v in block.data.items()
    }
    return replace(block, data=data)


def reward_field(schema: Schema, shard: ShardSchema) -> str | None:
    """Name of the field that is summed into an episode's return."""
    wanted = REWARDS if schema.reward is None else (schema.reward,)
    names = {f.path: f.name for f in shard.fields if f.per_step and f.dtype not in ("str", "json")}
    return next((names[p] for p in wanted if p in names), None)


def own_metadata(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """A copy of the metadata, as it will be read back."""
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise UsageError(f"metadata must be a dict, not {type(metadata).__name__}")
    copied: dict[str, Any] = jsontree.loads(jsontree.dumps(metadata, where="metadata"))
    return copied


def position_range(given: Any, limit: int) -> tuple[int, int]:
    """The (start, stop) of a range of offsets, within `limit`."""
    if isinstance(given, (range, slice)) and given.step in (None, 1):
        given = (given.start or 0, limit if given.stop is None else given.stop)
    if not isinstance(given, tuple) or len(given) != 2 or not 0 <= int(given[0]) <= int(given[1]) <= limit:
        raise UsageError(
            f"positions={given!r}: give (start, stop) within 0 to {limit}, half-open, or a list of positions"
        )
    return int(given[0]), int(given[1])
