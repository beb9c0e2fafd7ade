"""Nests of values and the fields they are stored as. Nests, dtypes and schemas come in; named arrays go out,
and back. No I/O."""

from __future__ import annotations

from archive.fields import derived, dtypes, nests, schema
from archive.fields.derived import Bools, Derivation, Rows, parse, put
from archive.fields.dtypes import to_numpy
from archive.fields.jsoncolumns import Objects, are_nested, typed
from archive.fields.nests import (
    Array,
    Fields,
    Ragged,
    flatten,
    is_tensor,
    leaves,
    lookup,
    mapped,
    to_tensors,
    unflatten,
    unflatten_all,
)
from archive.fields.schema import (
    LENGTHS,
    NODES,
    PLACES,
    FieldSpec,
    Kinds,
    Path,
    Schema,
    ShardSchema,
    loads,
    shard_schema,
    to_path,
)

__all__ = [
    "LENGTHS",
    "NODES",
    "PLACES",
    "Array",
    "Bools",
    "Derivation",
    "FieldSpec",
    "Fields",
    "Kinds",
    "Objects",
    "Path",
    "Ragged",
    "Rows",
    "Schema",
    "ShardSchema",
    "are_nested",
    "derived",
    "dtypes",
    "flatten",
    "is_tensor",
    "leaves",
    "loads",
    "lookup",
    "mapped",
    "nests",
    "parse",
    "put",
    "schema",
    "shard_schema",
    "to_numpy",
    "to_path",
    "to_tensors",
    "typed",
    "unflatten",
    "unflatten_all",
]
