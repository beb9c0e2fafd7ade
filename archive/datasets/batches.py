"""What the fields of a dataset's items are, and reading many parts of episodes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, fresh, spans
from archive.datasets.items import Collation
from archive.fields import Derivation, FieldSpec, Path, put, schema
from archive.read import Bounds, Empty, Episodes, Gather, Selection, sizes


def collation_of(
    schemas: Sequence[schema.ShardSchema], selection: Selection, derive: Sequence[Derivation], *, varying: bool
) -> Collation:
    """What collation has to know of the fields. In items of varying length, all of one row a step are ragged."""
    specs = [spec for one in schemas for spec in selection.specs(one).values()]
    axes = ("step", "offset", "ragged") if varying else ("ragged",)
    ragged = {s.path for s in specs if s.axis in axes and s.dtype != "json"}
    opaque = frozenset(s.path for s in specs if s.dtype == "json")
    return Collation(frozenset(ragged | ({d.name for d in derive} if varying else set())), opaque, varying)


def row_bytes(schemas: Sequence[schema.ShardSchema], selection: Selection, derive: Sequence[Derivation]) -> int:
    """Bytes of one step of the fields that are read, of one row a step, at most."""
    wanted = _wanted(selection, derive)
    return max((sizes.step_bytes(s for w in wanted for s in w.specs(one).values()) for one in schemas), default=0)


def _wanted(selection: Selection, derive: Sequence[Derivation]) -> list[Selection]:
    """What is read: the fields chosen, and each set of fields that something is derived from."""
    return [selection, *(Selection(fields) for fields in dict.fromkeys(d.fields for d in derive if d.fields))]


class Batches:
    """Reads steps of many episodes into one array a field, end to end, and keeps the chunks that it read."""

    def __init__(
        self,
        episodes: Episodes,
        selection: Selection,
        derive: Sequence[Derivation],
        bounds: Bounds | None,
        cache_bytes: int,
    ) -> None:
        self._derive = derive
        self._bounds = bounds
        self._own = Gather(episodes, selection.names, missing=selection.missing, cache_bytes=cache_bytes)
        self._of = {d.fields: self._own.also(d.fields) for d in derive if d.fields}

    def read(self, numbers: Ints, starts: Ints, stops: Ints, empty: Empty = fresh) -> dict[str, Any]:
        """Steps [starts, stops) of episodes, end to end, in memory that `empty` makes."""
        out = _rows(self._own, numbers, starts, stops, empty)
        for derivation in self._derive:
            assert self._bounds is not None
            lo, hi = self._bounds.reach(derivation, numbers, starts, stops)
            values = _rows(self._of[derivation.fields], numbers, lo, hi) if derivation.fields else {}
            out = put(out, derivation, derivation.of(values, self._bounds.rows(numbers, starts, stops, lo, hi)))
        return out


def alike(schemas: Sequence[schema.ShardSchema], selection: Selection, derive: Sequence[Derivation]) -> bool:
    """Whether all fields that are read are numbers of one shape, one row a step, the same in all these episodes."""
    return all(_same_fields([one.specs(s) for s in schemas]) for one in _wanted(selection, derive))


def _rows(gather: Gather, numbers: Ints, starts: Ints, stops: Ints, empty: Empty = fresh) -> dict[str, Any]:
    counts = stops - starts
    return gather.rows(np.repeat(numbers, counts), spans(starts, counts), empty=empty)


def _same_fields(found: Sequence[dict[Path, FieldSpec]]) -> bool:
    kinds = {(path, s.axis, s.dtype, s.shape) for specs in found for path, s in specs.items()}
    return bool(found and found[0]) and len(kinds) == len(found[0]) and all(map(_plain, found[0].values()))


def _plain(spec: FieldSpec) -> bool:
    return spec.axis == "step" and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"
