"""Pure, no I/O: the one list of the kinds of axis, and a nest of steps as a user has it to fields in stored form.

A new kind is a class of its own and a line here (and its name in `archive.fields.schema.AXES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from archive.base import CorruptManifestError, FieldError, escape_path, show
from archive.fields.axis import Axis, Value
from archive.fields.nests import Fields, flatten
from archive.fields.next_of import NextOfAxis
from archive.fields.ragged import RaggedAxis
from archive.fields.rows import FreeAxis, OffsetAxis, StepAxis
from archive.fields.schema import NODES, FieldSpec, Path, Schema

KINDS: dict[str, type[Axis[Any]]] = {
    "step": StepAxis,
    "offset": OffsetAxis,
    "ragged": RaggedAxis,
    "free": FreeAxis,
}


def axis_of(spec: FieldSpec) -> Axis[Any]:
    """A field that has data on its axis; CorruptManifestError for an axis that this library does not know."""
    if spec.next_of:
        return NextOfAxis(spec)
    kind = KINDS.get(spec.axis)
    if kind is None:
        raise CorruptManifestError(
            f"field {show(spec.path)!r} is on axis {spec.axis!r}, which holds no data that this library can read; a "
            "newer one may know it"
        )
    return kind(spec)


def normalise(nest: Any, schema: Schema) -> Fields:
    """The stored form of a nest of steps; raises FieldError, naming the field, for what cannot be stored."""
    leaves = dict(flatten(nest, stop=frozenset(schema.json)))
    missing = [p for n, p in schema.next_of.items() if n in leaves and p not in leaves]
    if missing:
        raise FieldError(f"next_of names field {show(missing[0])!r}, which these steps do not have")
    specs: dict[str, FieldSpec] = {}
    data: dict[str, Value] = {}
    for path, leaf in leaves.items():
        name = escape_path(path)
        specs[name], value = _field(path, leaf, schema)
        if value is not None:
            data[name] = value
    _check_next_of(specs, schema)
    vague = {escape_path(p) for p, leaf in leaves.items() if p not in schema.json and _has_no_dtype(leaf)}
    return Fields(_steps(specs, data), specs, data, frozenset(vague))


def _has_no_dtype(leaf: Any) -> bool:
    """True for a list of empty lists, or of nothing."""
    return isinstance(leaf, list) and all(isinstance(x, (list, tuple)) and not len(x) for x in leaf)


def _field(path: Path, leaf: Any, schema: Schema) -> tuple[FieldSpec, Value | None]:
    if leaf is None:
        return FieldSpec(path, "none"), None
    if isinstance(leaf, dict) and not leaf:
        return FieldSpec(path, "dict"), None
    where = repr(show(path))
    try:
        return _on_its_axis(path, leaf, schema)
    except FieldError as e:
        raise e if where in str(e) else FieldError(f"field {where}: {e}") from e


def _on_its_axis(path: Path, leaf: Any, schema: Schema) -> tuple[FieldSpec, Value]:
    declared, extra = schema.axis_of(path)
    if path in schema.json:
        return KINDS[declared or "step"].json(path, leaf, extra)
    kind = declared or next((kind for kind, axis in KINDS.items() if axis.claims(leaf)), "step")
    spec, value = KINDS[kind].normalised(path, leaf, extra)
    follows = schema.next_of.get(path)
    return (replace(spec, next_of=escape_path(follows)) if follows else spec), value


def _check_next_of(specs: Mapping[str, FieldSpec], schema: Schema) -> None:
    """Fields that repeat each other's next rows are one row a step, both."""
    for pair in schema.next_of.items():
        if escape_path(pair[0]) not in specs or specs[escape_path(pair[0])].axis in NODES:
            continue
        for path in pair:
            spec = specs[escape_path(path)]
            if spec.axis != "step":
                raise FieldError(
                    f"field {show(path)!r} is in Schema(next_of=...) and on axis {spec.axis!r}; only fields of one row "
                    "a step repeat each other's next rows: leave it out of next_of"
                )


def _steps(specs: Mapping[str, FieldSpec], data: Mapping[str, Value]) -> int:
    """Number of steps, on which all fields that say it must agree."""
    axes = {name: axis_of(specs[name]) for name in data}
    said = {name: steps for name, axis in axes.items() if (steps := axis.steps(data[name])) is not None}
    counts = set(said.values())
    if len(counts) > 1:
        listed = ", ".join(f"{show(specs[n].path)}: {k}" for n, k in sorted(said.items()))
        raise FieldError(
            f"fields differ in their number of steps ({listed}); declare the axis of those that are not one row a "
            "step, "
            "as in Schema(axes={'obs': 'offset'}) for T+1 observations or 'free'"
        )
    if not counts:
        guesses = (axis.steps_at_a_guess(data[name]) for name, axis in axes.items())
        counts = {steps for steps in guesses if steps is not None}
    return counts.pop() if len(counts) == 1 else 0
