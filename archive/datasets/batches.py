"""On top of the archive: what the fields of a dataset's items are, and reading many parts of episodes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, spans
from archive.datasets.items import Kinds
from archive.fields import Derivation, FieldSpec, Path, dtypes, put, schema
from archive.read import Bounds, Episodes, Gather, Selection


def schemas_of(episodes: Episodes) -> list[schema.ShardSchema]:
    """The distinct schemas of all segments of some episodes; no data is read."""
    rows = episodes._index.chains.rows_of(episodes.numbers)
    texts = episodes.reader.snapshot.take(rows, ["schema"])["schema"].unique().to_pylist()
    return [schema.loads(text) for text in texts]


def kinds_of(
    schemas: Sequence[schema.ShardSchema], selection: Selection, derive: Sequence[Derivation], *, varying: bool
) -> Kinds:
    """What collation has to know of the fields. In items of varying length, all of one row a step are ragged."""
    specs = [spec for one in schemas for spec in selection.specs(one).values()]
    axes = ("step", "offset", "ragged") if varying else ("ragged",)
    ragged = {s.path for s in specs if s.axis in axes and s.dtype != "json"}
    opaque = frozenset(s.path for s in specs if s.dtype == "json")
    return Kinds(frozenset(ragged | ({d.name for d in derive} if varying else set())), opaque, varying)


def row_bytes(schemas: Sequence[schema.ShardSchema], selection: Selection, derive: Sequence[Derivation]) -> int:
    """Bytes of one step of the fields that are read, at most."""
    wanted = [selection, *(Selection(fields) for fields in dict.fromkeys(d.fields for d in derive if d.fields))]
    return max((sum(_step_bytes(s) for w in wanted for s in w.specs(one).values()) for one in schemas), default=0)


def _step_bytes(spec: FieldSpec) -> int:
    return dtypes.to_numpy(spec.dtype).itemsize * math.prod(spec.shape) if _plain(spec) else 0


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
        sets = list(dict.fromkeys(d.fields for d in derive if d.fields))
        self._derive, self._bounds = derive, bounds
        self._own = Gather(episodes, selection.names, missing=selection.missing, cache_bytes=cache_bytes)
        self._of = {fields: self._own.also(fields) for fields in sets}

    def read(self, numbers: Ints, starts: Ints, stops: Ints) -> dict[str, Any]:
        """Steps [starts, stops) of episodes, end to end."""
        out = _rows(self._own, numbers, starts, stops)
        for derivation in self._derive:
            assert self._bounds is not None
            lo, hi = self._bounds.reach(derivation, numbers, starts, stops)
            values = _rows(self._of[derivation.fields], numbers, lo, hi) if derivation.fields else {}
            out = put(out, derivation, derivation.of(values, self._bounds.rows(numbers, starts, stops, lo, hi)))
        return out


def batches_of(
    episodes: Episodes,
    schemas: Sequence[schema.ShardSchema],
    selection: Selection,
    derive: Sequence[Derivation],
    bounds: Bounds | None,
    cache_bytes: int,
) -> Batches | None:
    """None where some field is anything but numbers of one shape, one row a step, the same in all these episodes."""
    wanted = [selection, *(Selection(d.fields) for d in derive if d.fields)]
    if all(_alike([one.specs(s) for s in schemas]) for one in wanted):
        return Batches(episodes, selection, derive, bounds, cache_bytes)
    return None


def _rows(gather: Gather, numbers: Ints, starts: Ints, stops: Ints) -> dict[str, Any]:
    counts = stops - starts
    return gather.rows(np.repeat(numbers, counts), spans(starts, counts))


def _alike(found: Sequence[dict[Path, FieldSpec]]) -> bool:
    kinds = {(path, s.axis, s.dtype, s.shape) for specs in found for path, s in specs.items()}
    return bool(found and found[0]) and len(kinds) == len(found[0]) and all(map(_plain, found[0].values()))


def _plain(spec: FieldSpec) -> bool:
    return spec.axis == "step" and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"
