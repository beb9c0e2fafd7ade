"""Pure, no I/O: the meaning of fields (`Schema`, declared by the user), their form (`FieldSpec`, found in the data),
and the forms in one buffer so far (`Kinds`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from archive.base import (
    CorruptManifestError,
    Count,
    FieldError,
    Record,
    cached_property,
    escape_path,
    logger,
    records,
    show,
    stored,
)

Path = tuple[str, ...]
AXES = ("step", "offset", "ragged", "free")
NODES = ("dict", "none")  # an empty dict and None: kept in the tree, without data
LENGTHS = "%lengths"  # companion array of a ragged field; "%l" is no escape, so no field's name ends so
_MOST_AXES = 32
_MOST_IN_A_ROW = 1 << 48  # items: what no machine holds
PLACES = "%places"  # companion array of a field declared in next_of
_MANY_SCHEMAS = 8  # schemas: one or a few come of a field added later, or of two tasks
_CHANGED = (
    "field %r of buffer %r comes as %s, after %s: steps of each kind go to shards of their own, which are many and "
    "small if it changes often. %s. (Told once a field.)"
)
_MANY = (
    "the fields of buffer %r have come in %d combinations, and steps of each go to shards of their own, which are many "
    "and small if that goes on: give all steps the same fields, or put what only some have into metadata=. These come "
    "and go: %s"
)


def to_path(name: str | Iterable[str]) -> Path:
    """A field's keys: a tuple as it is, a string split at its slashes."""
    return tuple(name.split("/")) if isinstance(name, str) else tuple(name)


@dataclass(frozen=True)
class FieldSpec(Record):
    """One field as stored: its keys, kind of axis, logical dtype and shape of one row."""

    path: Path
    axis: str
    dtype: str = stored("", always=True)
    shape: tuple[Count, ...] = stored((), always=True)
    extra: Count = 0  # rows beyond the steps of a complete episode (axis "offset")
    scalar: bool = False  # a 0-d value of axis "free", stored as one row
    next_of: str = ""  # name of the field whose next row this one repeats

    @property
    def name(self) -> str:
        return escape_path(self.path)

    @property
    def per_step(self) -> bool:
        """True if row i of the segment is step i, so that no extents are needed."""
        return self.axis == "step" and not self.next_of

    @property
    def described(self) -> str:
        """Its dtype, shape of a row and axis, for people."""
        return self.axis if self.axis in NODES else f"{self.dtype}{list(self.shape)} {self.axis}"

    def to_json(self) -> dict[str, Any]:
        """The field as a schema's JSON has it; nodes have no data, and so neither dtype nor shape."""
        out = super().to_json()
        return out if self.axis not in NODES else {k: v for k, v in out.items() if k not in ("dtype", "shape")}


@dataclass(frozen=True)
class Schema:
    """The meaning of fields, declared once by the user. Names are `"obs/image"` or tuples of keys.

    env_id, episode_id: fields that hold an env row's or a trajectory's id; renumbered on redistribution.
    next_of: `{"next/obs": "obs"}`: next/obs[t] is obs[t+1]; rows that follow this are not stored twice. A field that is
    followed cannot follow another.
    axes: kind of axis 0 per field: "step" (default), "offset" or "offset:2" (that many rows more than steps),
    "ragged" (default of lists of one array, list or tuple a step, whether or not they are of equal length; "step" makes
    one array of them), "free" (belongs to the episode, kept whole).
    json: fields whose steps are any JSON values.  unit: "step" means that steps are independent of each other.
    """

    env_id: tuple[Path, ...] = ()
    episode_id: tuple[Path, ...] = ()
    next_of: Mapping[Path, Path] = field(default_factory=dict)
    axes: Mapping[Path, str] = field(default_factory=dict)
    json: tuple[Path, ...] = ()
    unit: str = "episode"
    reward: Path | None = None  # the field summed into "return"; default "reward", "rewards" or "next/reward"

    def __init__(
        self,
        env_id: Iterable[Any] = (),
        episode_id: Iterable[Any] = (),
        next_of: Mapping[Any, Any] | None = None,
        axes: Mapping[Any, str] | None = None,
        json: Iterable[Any] = (),
        unit: str = "episode",
        reward: Any = None,
    ) -> None:
        if unit not in ("episode", "step"):
            raise FieldError(f"Schema(unit={unit!r}): unit is 'episode' or 'step'")
        follows = {to_path(k): to_path(v) for k, v in (next_of or {}).items()}
        if chained := [(k, v) for k, v in follows.items() if v in follows]:
            name, followed = map(show, chained[0])
            raise FieldError(
                f"next_of[{name!r}] = {followed!r}, which is in next_of itself, so its rows are not all stored: a "
                f"field that is followed is stored whole; leave {name!r} out of next_of"
            )
        values = {
            "env_id": tuple(map(to_path, [env_id] if isinstance(env_id, str) else env_id)),
            "episode_id": tuple(map(to_path, [episode_id] if isinstance(episode_id, str) else episode_id)),
            "next_of": follows,
            "axes": {to_path(k): _checked_axis(k, v) for k, v in (axes or {}).items()},
            "json": tuple(map(to_path, [json] if isinstance(json, str) else json)),
            "unit": unit,
            "reward": None if reward is None else to_path(reward),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def axis_of(self, path: Path) -> tuple[str | None, int]:
        """Declared axis of a field and its extra rows; None if it is not declared."""
        text = self.axes.get(path)
        if text is None:
            return None, 0
        kind, _, extra = text.partition(":")
        return kind, int(extra or 1) if kind == "offset" else 0


def _checked_axis(name: Any, axis: str) -> str:
    kind, _, extra = str(axis).partition(":")
    if kind not in AXES or (extra and (kind != "offset" or not extra.isdigit())):
        raise FieldError(f"axes[{name!r}] = {axis!r}: an axis is one of {', '.join(AXES)} or 'offset:N'")
    return str(axis)


@dataclass(frozen=True)
class ShardSchema(Record):
    """The fields of one shard and their roles; its JSON is in the shard and in the segments table."""

    fields: tuple[FieldSpec, ...]
    env_id: tuple[str, ...] = stored((), required=True)
    episode_id: tuple[str, ...] = stored((), required=True)
    unit: str = stored("episode", required=True)

    @cached_property
    def by_name(self) -> dict[str, FieldSpec]:
        return {f.name: f for f in self.fields}

    def dumps(self) -> str:
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]


@lru_cache(maxsize=256)  # an archive has few, and each of its rows names one
def loads(text: str) -> ShardSchema:
    """The schema of a shard from its JSON; an error if it is none."""
    what, remedy = "a shard's schema", "run `archive verify`"
    body = records.parse_object(text, what=what, error=CorruptManifestError)
    found = ShardSchema.from_json(body, what=what, error=CorruptManifestError, remedy=remedy)
    for one in found.fields:
        if not one.path or len(one.shape) > _MOST_AXES or prod(max(1, n) for n in one.shape) > _MOST_IN_A_ROW:
            raise CorruptManifestError(
                f"{what} is not what it should be (field {show(one.path)!r} has no path, or a row of impossible "
                f"shape): it is damaged; {remedy}"
            )
    return found


def described(texts: Iterable[str]) -> dict[str, str]:
    """The dtype, shape and kind of axis of each field of several schemas, for people."""
    return {show(f.path): f.described for text in texts for f in loads(text).fields}


def shard_schema(specs: Mapping[str, FieldSpec], declared: Schema) -> ShardSchema:
    """The schema that is kept in a shard, of the fields found and the roles declared."""
    names = {spec.path: name for name, spec in specs.items()}
    return ShardSchema(
        tuple(specs[name] for name in sorted(specs)),
        tuple(sorted(names[p] for p in declared.env_id if p in names)),
        tuple(sorted(names[p] for p in declared.episode_id if p in names)),
        declared.unit,
    )


# -- changes of kind ---------------------------------------------------------------------------------------------------


class Kinds:
    """The schemas of a buffer's steps. Each has shards of its own, so a schema that changes all the time is logged,
    once. Values are replaced, and never changed, so that a refused call can be undone."""

    def __init__(self, buffer: str) -> None:
        self._buffer = buffer
        self._schemas: dict[str, ShardSchema] = {}
        self._vague: dict[str, frozenset[str]] = {}  # digest -> fields whose dtype is a guess
        self._told: set[str] = set()
        self.known: dict[str, FieldSpec] = {}  # field -> its last spec

    def is_only(self, schema: ShardSchema) -> bool:
        """True if no steps have come in another schema."""
        return not self._schemas or self._schemas.keys() == {schema.digest}

    def add(self, schema: ShardSchema, vague: frozenset[str]) -> None:
        """Add the schema of steps that are kept."""
        if schema.digest in self._schemas:
            return
        self._schemas, self._vague = self._schemas | {schema.digest: schema}, self._vague | {schema.digest: vague}
        for name, spec in schema.by_name.items():
            if name in vague or spec.axis in NODES:
                continue
            before = self.known.get(name)
            if before is not None and _kind(before) != _kind(spec) and name not in self._told:
                self._told.add(name)
                logger.warning(
                    _CHANGED, show(spec.path), self._buffer, spec.described, before.described, _remedy(before, spec)
                )
            self.known = self.known | {name: spec}
        if len(self._schemas) == _MANY_SCHEMAS and not self._told:
            logger.warning(_MANY, self._buffer, _MANY_SCHEMAS, ", ".join(sorted(_comers_and_goers(self._schemas))))

    def difference(self, digest: str, schema: ShardSchema) -> str:
        """The differences of a schema from an earlier one, for people."""
        before = self._schemas.get(digest)
        if before is None:
            return ""
        names = sorted(before.by_name.keys() | schema.by_name.keys())
        pairs = [(name, before.by_name.get(name), schema.by_name.get(name)) for name in names]
        return "; ".join(f"{_shown(a, b)}: {_described(b)}, earlier {_described(a)}" for _, a, b in pairs if a != b)

    def only_guesses_differ(self, digest: str, schema: ShardSchema) -> bool:
        """True if a schema is an earlier one but for the dtype of fields that had no values then."""
        before, vague = self._schemas.get(digest), self._vague.get(digest, frozenset())
        if before is None or before.by_name.keys() != schema.by_name.keys():
            return False
        odd = [name for name, spec in schema.by_name.items() if spec != before.by_name[name]]
        return set(odd) <= vague and all(schema.by_name[n].axis == before.by_name[n].axis == "ragged" for n in odd)


def _kind(spec: FieldSpec) -> FieldSpec:
    return replace(spec, next_of="")


def _described(spec: FieldSpec | None) -> str:
    return "absent" if spec is None else spec.described


def _shown(*specs: FieldSpec | None) -> str:
    return next(repr(show(s.path)) for s in specs if s is not None)


def _remedy(before: FieldSpec, spec: FieldSpec) -> str:
    name = repr(show(spec.path))
    if before.axis != spec.axis:
        return (
            f"Declare what it is, with Schema(axes={{{name}: 'ragged'}}) or 'step', or give it the same way each time"
        )
    if before.shape != spec.shape:
        return f"If its rows differ in length, declare Schema(axes={{{name}: 'ragged'}}); else give all steps one shape"
    if before.dtype[1:2] == spec.dtype[1:2] == "U":
        return "Give strings as a list of str, or as an array of objects: numpy's own have the width of the longest"
    return "Give arrays of one dtype (lists of numbers have that of what is in them)"


def _comers_and_goers(schemas: Mapping[str, ShardSchema]) -> set[str]:
    names = [{show(f.path) for f in schema.fields} for schema in schemas.values()]
    every: set[str] = set().union(*names)
    return {name for name in every if not all(name in of for of in names)}
