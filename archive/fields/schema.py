"""Pure, no I/O: what fields mean (`Schema`, declared by the user) and what they are (`FieldSpec`,
found in the data)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from archive.base import (
    CorruptManifestError,
    Count,
    FieldError,
    MisshapenError,
    Record,
    cached_property,
    escape_path,
    plainjson,
    show,
)

Path = tuple[str, ...]
AXES = ("step", "offset", "ragged", "free")
NODES = ("dict", "none")  # an empty dict and None: kept in the tree, without data
LENGTHS = "%lengths"  # companion array of a ragged field; "%l" is no escape, so no field's name ends so
_MOST_AXES = 32
_MOST_IN_A_ROW = 1 << 48  # items: what no machine holds
PLACES = "%places"  # companion array of a field declared in next_of


def to_path(name: str | Iterable[str]) -> Path:
    """A field's keys: a tuple as it is, a string split at its slashes."""
    return tuple(name.split("/")) if isinstance(name, str) else tuple(name)


@dataclass(frozen=True)
class FieldSpec:
    """One field as stored: its keys, kind of axis, logical dtype and shape of one row."""

    path: Path
    axis: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    extra: int = 0  # rows beyond the steps of a complete episode (axis "offset")
    scalar: bool = False  # a 0-d value of axis "free", stored as one row
    next_of: str = ""  # name of the field whose next row this one repeats

    @property
    def name(self) -> str:
        return escape_path(self.path)

    @property
    def per_step(self) -> bool:
        """Whether row i of the segment is step i, so that no extents are needed."""
        return self.axis == "step" and not self.next_of

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"path": list(self.path), "axis": self.axis}
        if self.axis not in NODES:
            out |= {"dtype": self.dtype, "shape": list(self.shape)}
        optional = {"extra": self.extra, "scalar": self.scalar, "next_of": self.next_of}
        return out | {k: v for k, v in optional.items() if v}


@dataclass(frozen=True)
class Schema:
    """What fields mean, declared once by the user. Names are `"obs/image"` or tuples of keys.

    env_id, episode_id: fields that hold an env row's or a trajectory's id; renumbered on redistribution.
    next_of: `{"next/obs": "obs"}`: next/obs[t] is obs[t+1]; rows that follow this are not stored twice. A field that is
    followed cannot follow another.
    axes: kind of axis 0 per field: "step" (default), "offset" or "offset:2" (that many rows more than steps),
    "ragged" (default of lists of one array, list or tuple a step, whether or not they are of equal length; "step" makes
    one array of them), "free" (belongs to the episode, kept whole).
    json: fields whose steps are any JSON values.  unit: "step" says that steps are independent of each other.
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
        """Declared axis of a field and its extra rows; None where nothing is declared."""
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
class ShardSchema:
    """The fields of one shard and what they mean; its JSON lies in the shard and in the segments table."""

    fields: tuple[FieldSpec, ...]
    env_id: tuple[str, ...] = ()
    episode_id: tuple[str, ...] = ()
    unit: str = "episode"

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {f.name: f for f in self.fields})

    by_name: dict[str, FieldSpec] = field(init=False, compare=False, repr=False, default_factory=dict)

    def dumps(self) -> str:
        body = {
            "fields": [f.as_json() for f in self.fields],
            "env_id": list(self.env_id),
            "episode_id": list(self.episode_id),
            "unit": self.unit,
        }
        return json.dumps(body, separators=(",", ":"), sort_keys=True)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    def describe(self) -> dict[str, str]:
        """Field path -> `dtype[shape] axis`, for people."""
        return {
            show(f.path): f"{f.dtype}{list(f.shape)} {f.axis}" if f.axis not in NODES else f.axis for f in self.fields
        }


@dataclass(frozen=True, slots=True)
class _StoredField(Record):
    """A field, as a schema's JSON has it."""

    path: tuple[str, ...]
    axis: str
    dtype: str = ""
    shape: tuple[Count, ...] = ()
    extra: Count = 0
    scalar: bool = False
    next_of: str = ""

    def __post_init__(self) -> None:
        if not self.path or len(self.shape) > _MOST_AXES or prod(max(1, n) for n in self.shape) > _MOST_IN_A_ROW:
            raise MisshapenError(f"field {show(self.path)!r} has no path, or a row of impossible shape")

    def spec(self) -> FieldSpec:
        return FieldSpec(self.path, self.axis, self.dtype, self.shape, self.extra, self.scalar, self.next_of)


@dataclass(frozen=True, slots=True)
class _StoredSchema(Record):
    """A schema's JSON."""

    fields: tuple[_StoredField, ...]
    env_id: tuple[str, ...]
    episode_id: tuple[str, ...]
    unit: str


@lru_cache(maxsize=256)  # an archive has few, and each of its rows names one
def loads(text: str) -> ShardSchema:
    """The schema of a shard from its JSON; what is not one is an error."""
    what = "a shard's schema"
    body = plainjson.parse_object(text, what=what, error=CorruptManifestError)
    found = _StoredSchema.from_json(body, what=what, error=CorruptManifestError, remedy="run `archive verify`")
    return ShardSchema(tuple(one.spec() for one in found.fields), found.env_id, found.episode_id, found.unit)


def described(texts: Iterable[str]) -> dict[str, str]:
    """Field -> dtype, shape and kind of axis, of several schemas."""
    return {k: v for text in texts for k, v in loads(text).describe().items()}


def shard_schema(specs: Mapping[str, FieldSpec], declared: Schema) -> ShardSchema:
    """What is kept in the shard of the fields found and the roles declared."""
    names = {spec.path: name for name, spec in specs.items()}
    return ShardSchema(
        tuple(specs[name] for name in sorted(specs)),
        tuple(sorted(names[p] for p in declared.env_id if p in names)),
        tuple(sorted(names[p] for p in declared.episode_id if p in names)),
        declared.unit,
    )
