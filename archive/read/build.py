"""Pure, no I/O: nests of episodes out of rows that were fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from archive.base import jsontree
from archive.fields import Array, Path, Ragged, dtypes, unflatten_all
from archive.fields.axes import axis_of
from archive.read.plan import FieldRead, Group
from archive.read.selection import Selection


def nests(groups: Sequence[Group], selection: Selection) -> list[dict[str, Any]]:
    """The nested dict of each episode of a request; arrays may share memory with those of a few neighbours."""
    out: list[dict[str, Any]] = [{} for _ in range(sum(len(group.episodes) for group in groups))]
    for group in groups:
        columns = {path: _column(path, group, selection) for path in group.paths}
        columns |= {_path(name): [selection.filled(name, n) for n in group.steps.tolist()] for name in group.absent}
        made = unflatten_all(list(columns), list(columns.values()), len(group.episodes))
        for number, nest in zip(group.episodes.tolist(), made, strict=True):
            out[number] = nest
    return out


def stored(groups: Sequence[Group], selection: Selection) -> list[dict[str, Array | Ragged]]:
    """The fields of each episode of a request in their stored form, by name."""
    out: list[dict[str, Array | Ragged]] = [{} for _ in range(sum(len(group.episodes) for group in groups))]
    for group in groups:
        for field in group.fields.values():
            values = axis_of(field.spec).build(field.complete(), field.episodes, lambda rows: rows)
            for number, value in zip(group.episodes.tolist(), values, strict=True):
                out[number][field.spec.name] = value
    return out


def nothing(groups: Sequence[Group], selection: Selection) -> list[Any]:
    """Put all rows of a request into their place; there is no nest of them."""
    for group in groups:
        for field in group.fields.values():
            field.complete()
    return []


def _column(path: Path, group: Group, selection: Selection) -> list[Any]:
    """What stands at a path of the nest, of each episode."""
    if path in group.fields:
        return _values(group.fields[path], selection)
    return [{} if group.nodes[path] == "dict" else None for _ in group.episodes]


def _values(field: FieldRead, selection: Selection) -> list[Any]:
    """A field of each episode, as it was given when it was written."""
    spec, fetched = field.spec, field.complete()
    convert = partial(dtypes.from_stored, logical=spec.dtype)
    values = axis_of(spec).build(fetched, field.episodes, convert)
    if spec.axis == "ragged":
        return values if selection.ragged == "flat" else [value.split() for value in values]
    if spec.dtype == "json":
        return [[jsontree.loads(text) for text in value] for value in values]
    return [value[-1:].reshape(spec.shape) for value in values] if spec.scalar else values


def _path(name: str | Path) -> Path:
    return tuple(name.split("/")) if isinstance(name, str) else tuple(name)
