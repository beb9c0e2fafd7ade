"""Pure, no I/O: what the fields of one buffer have been so far, to notice those that come in another kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from archive.base import logger, show
from archive.fields.schema import NODES, FieldSpec, ShardSchema

MANY = 8  # schemas: one or a few come of a field added later, or of two tasks


class Kinds:
    """The schemas of a buffer's steps. Each has shards of its own,
    so one that changes all the time is told of, once."""

    def __init__(self, buffer: str) -> None:
        self._buffer = buffer
        self._schemas: dict[str, ShardSchema] = {}
        self._vague: dict[str, frozenset[str]] = {}  # digest -> fields whose dtype is a guess
        self._told: set[str] = set()
        self.known: dict[str, FieldSpec] = {}  # field -> what it was last

    def is_only(self, schema: ShardSchema) -> bool:
        """Whether no steps have come in another schema."""
        return not self._schemas or self._schemas.keys() == {schema.digest}

    def add(self, schema: ShardSchema, vague: frozenset[str]) -> None:
        """These steps are kept."""
        if schema.digest in self._schemas:
            return
        self._schemas[schema.digest], self._vague[schema.digest] = schema, vague
        for name, spec in schema.by_name.items():
            if name in vague or spec.axis in NODES:
                continue
            before = self.known.get(name)
            if before is not None and _kind(before) != _kind(spec) and name not in self._told:
                self._told.add(name)
                logger.warning(
                    _CHANGED, show(spec.path), self._buffer, describe(spec), describe(before), _remedy(before, spec)
                )
            self.known[name] = spec
        if len(self._schemas) == MANY and not self._told:
            logger.warning(_MANY, self._buffer, MANY, ", ".join(sorted(_comers_and_goers(self._schemas))))

    def difference(self, digest: str, schema: ShardSchema) -> str:
        """How a schema differs from an earlier one, for people."""
        before = self._schemas.get(digest)
        if before is None:
            return ""
        names = sorted(before.by_name.keys() | schema.by_name.keys())
        pairs = [(name, before.by_name.get(name), schema.by_name.get(name)) for name in names]
        return "; ".join(f"{_shown(a, b)}: {describe(b)}, earlier {describe(a)}" for _, a, b in pairs if a != b)

    def only_guesses_differ(self, digest: str, schema: ShardSchema) -> bool:
        """Whether a schema is an earlier one but for the dtype of fields that had no values then."""
        before, vague = self._schemas.get(digest), self._vague.get(digest, frozenset())
        if before is None or before.by_name.keys() != schema.by_name.keys():
            return False
        odd = [name for name, spec in schema.by_name.items() if spec != before.by_name[name]]
        return set(odd) <= vague and all(schema.by_name[n].axis == before.by_name[n].axis == "ragged" for n in odd)


_CHANGED = (
    "field %r of buffer %r comes as %s, after %s: steps of each kind go to shards of their own, which are many and "
    "small if it changes often. %s. (Told once a field.)"
)
_MANY = (
    "the fields of buffer %r have come in %d combinations, and steps of each go to shards of their own, which are many "
    "and small if that goes on: give all steps the same fields, or put what only some have into metadata=. These come "
    "and go: %s"
)


def _kind(spec: FieldSpec) -> FieldSpec:
    return replace(spec, next_of="")


def describe(spec: FieldSpec | None) -> str:
    """A field's dtype, shape of a row and axis, for people."""
    if spec is None:
        return "absent"
    return spec.axis if spec.axis in NODES else f"{spec.dtype}{list(spec.shape)} {spec.axis}"


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
