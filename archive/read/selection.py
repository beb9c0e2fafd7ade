"""Pure, no I/O: which fields somebody wants, and what stands in for those that an episode does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archive.base import FieldError, show
from archive.fields import NODES, Array, FieldSpec, Path, ShardSchema, dtypes


@dataclass
class Selection:
    """Which fields to read, and what to do about those that an episode does not have.

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
        """The fields of a shard that are wanted, by path."""
        if self.names is None:
            return {f.path: f for f in schema.fields}
        out: dict[Path, FieldSpec] = {}
        for name in self.names:
            found = {f.path: f for f in schema.fields if _matches(name, f.path)}
            self._known |= dict.fromkeys([name], next(iter(found.values()))) if found else {}
            out |= found
        return out

    def absent(self, schemas: Iterable[ShardSchema]) -> list[str | Path]:
        """Names asked for that no field of an episode answers; an error if that is what was asked for."""
        have = list(dict.fromkeys(f.path for schema in schemas for f in schema.fields)) if self.names else []
        names = [n for n in self.names or () if not any(_matches(n, p) for p in have)]
        if names and self.is_error:
            raise FieldError(
                f"an episode has no field {names[0]!r} (it has: {', '.join(sorted(map(show, have))) or 'none'}); pass "
                "missing='skip' to leave it out, or missing=VALUE to fill it in"
            )
        return [] if isinstance(self.missing, str) and self.missing == "skip" else names

    @property
    def is_error(self) -> bool:
        """Whether a field that an episode lacks is an error."""
        return isinstance(self.missing, str) and self.missing == "error"

    @property
    def leaves_out(self) -> bool:
        """Whether an episode goes without a field that some of its steps lack."""
        return (isinstance(self.missing, str) and self.missing == "skip") or (self.is_error and self.names is None)

    def filled(self, name: str | Path, steps: int) -> Array:
        """The stand-in for an absent field: of the shape and dtype that other episodes of this read have."""
        return self.filled_as(self._known.get(name), name, steps)

    def filled_as(self, spec: FieldSpec | None, name: str | Path, steps: int) -> Array:
        """The stand-in for steps of a field, of the shape and dtype that it has elsewhere."""
        try:
            if spec is None or spec.axis in NODES or spec.dtype in ("str", "json"):
                return np.full(steps, self.missing)
            dtype = dtypes.to_numpy(spec.dtype)
            given = np.asarray(self.missing)
            if dtype.kind in "iub" and (given.dtype.kind not in "iub" or (given.astype(dtype) != given).any()):
                raise ValueError(f"{dtype} cannot hold it")  # numpy would cut it to what it can
            return np.full((steps, *spec.shape), self.missing, dtype)
        except (TypeError, ValueError, OverflowError) as e:
            raise FieldError(
                f"missing={self.missing!r} cannot stand in for field {name!r}: {e}; give another value"
            ) from e


def _matches(name: str | Path, path: Path) -> bool:
    if isinstance(name, str):
        joined = "/".join(path)
        return joined == name or joined.startswith(name + "/")
    return path[: len(name)] == tuple(name)
