"""Pure, no I/O: the selection of fields, and stand-ins for those that an episode lacks; windows of episodes' steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archive.arrays import Ints, group_of, offsets_of
from archive.base import FieldError, UsageError, show
from archive.fields import NODES, Array, FieldSpec, Path, ShardSchema, dtypes


@dataclass
class Selection:
    """The fields to read, and the treatment of those that an episode lacks.

    missing: "error", "skip", or a value to fill in.  ragged: "list" (one array a step) or "flat" (values, lengths).
    """

    names: Sequence[str | Path] | None = None
    missing: Any = "error"
    ragged: str = "list"
    _known: dict[str | Path, FieldSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ragged not in ("list", "flat"):
            raise FieldError(f"ragged={self.ragged!r}: give 'list' or 'flat'")
        if isinstance(self.names, str):
            self.names = [self.names]

    def specs(self, schema: ShardSchema) -> dict[Path, FieldSpec]:
        """The selected fields of a shard, by path."""
        if self.names is None:
            return {f.path: f for f in schema.fields}
        found: dict[str | Path, dict[Path, FieldSpec]] = {_key(name): {} for name in self.names}
        for spec in schema.fields:
            for name in found.keys() & _answers_to(spec.path):
                found[name][spec.path] = spec
        self._known |= {name: next(iter(fields.values())) for name, fields in found.items() if fields}
        return {path: spec for fields in found.values() for path, spec in fields.items()}

    def absent(self, schemas: Iterable[ShardSchema]) -> list[str | Path]:
        """Requested names that no field of an episode has; an error if `missing` is "error"."""
        have = list(dict.fromkeys(f.path for schema in schemas for f in schema.fields)) if self.names else []
        answered = {name for path in have for name in _answers_to(path)}
        names = [name for name in self.names or () if _key(name) not in answered]
        if names and self.is_error:
            raise FieldError(
                f"an episode has no field {names[0]!r} (it has: {', '.join(sorted(map(show, have))) or 'none'}); pass "
                "missing='skip' to leave it out, or missing=VALUE to fill it in"
            )
        return [] if self.is_skip else names

    @property
    def is_error(self) -> bool:
        """True if a field that an episode lacks is an error."""
        return isinstance(self.missing, str) and self.missing == "error"

    @property
    def is_skip(self) -> bool:
        """True if a field that an episode lacks is left out, even one that was asked for."""
        return isinstance(self.missing, str) and self.missing == "skip"

    @property
    def leaves_out(self) -> bool:
        """True if a field that some steps of an episode lack is left out."""
        return self.is_skip or (self.is_error and self.names is None)

    def filled(self, name: str | Path, steps: int) -> Array:
        """The stand-in for an absent field, of the shape and dtype that other episodes of this read have."""
        return self.filled_as(self._known.get(name), name, steps)

    def filled_as(self, spec: FieldSpec | None, name: str | Path, steps: int) -> Array:
        """The stand-in for steps of a field, of the shape and dtype that it has elsewhere."""
        try:
            if spec is None or spec.axis in NODES or spec.dtype in ("str", "json"):
                return np.full(steps, self.missing)
            dtype = dtypes.to_numpy(spec.dtype)
            given = np.asarray(self.missing)
            if dtype.kind in "iub" and (given.dtype.kind not in "iub" or (given.astype(dtype) != given).any()):
                raise ValueError(f"{dtype} cannot hold it")  # numpy would truncate it
            return np.full((steps, *spec.shape), self.missing, dtype)
        except (TypeError, ValueError, OverflowError) as e:
            raise FieldError(
                f"missing={self.missing!r} cannot stand in for field {name!r}: {e}; give another value"
            ) from e


class Windows:
    """Windows of `length` steps, one every `stride` steps of each episode, none across an episode's end. Without `pad`
    all are full; with it they begin up to the last step, and the last ones are shorter."""

    def __init__(self, lengths: Ints, length: int, stride: int = 1, pad: bool = False) -> None:
        """lengths: the number of steps of each episode."""
        if length < 1 or stride < 1:
            raise UsageError(f"length={length} and stride={stride} must both be at least 1")
        self.length = length
        self.stride = stride
        self._lengths = lengths
        full = lengths if pad else lengths - length + 1
        self.offsets = offsets_of(np.maximum(-(-full // stride), 0))  # the first window of each episode

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def places(self, windows: Ints) -> tuple[Ints, Ints, Ints]:
        """The number of the episode of some windows, the first step of each, and the step after its last."""
        numbers = group_of(self.offsets, windows)
        starts = (windows - self.offsets[numbers]) * self.stride
        return numbers, starts, np.minimum(starts + self.length, self._lengths[numbers])


def path_of(name: str | Path) -> Path:
    """The keys of a field that was asked for by name."""
    return tuple(name.split("/")) if isinstance(name, str) else tuple(name)


def _key(name: str | Path) -> str | Path:
    return name if isinstance(name, str) else tuple(name)


def _answers_to(path: Path) -> set[str | Path]:
    """The names of a field in requests: its own and those of all above it, as texts and as tuples of keys."""
    parts = "/".join(path).split("/")
    texts = ("/".join(parts[:n]) for n in range(1, len(parts) + 1))
    return {*texts, *(path[:n] for n in range(len(path) + 1))}
