"""Nests of values and the fields they are stored as. Nests, dtypes and schemas come in; named arrays go out,
and back. No I/O."""

from __future__ import annotations

from archive.fields import derived, dtypes, nests, schema, trees
from archive.fields.arrowcolumns import json_texts, lists_column, own_dtype, plain, rows_column
from archive.fields.axis import Axis, Cuts, Extent, Fetched, Layout, Located, Slices, empty_rows
from archive.fields.derived import Bools, Derivation, Rows, parse, put
from archive.fields.dtypes import to_numpy
from archive.fields.jsoncolumns import Objects, are_nested, typed
from archive.fields.kinds import axis_of, normalise
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
from archive.fields.rows import StepAxis
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
    "Axis",
    "Bools",
    "Cuts",
    "Derivation",
    "Extent",
    "Fetched",
    "FieldSpec",
    "Fields",
    "Kinds",
    "Layout",
    "Located",
    "Objects",
    "Path",
    "Ragged",
    "Rows",
    "Schema",
    "ShardSchema",
    "Slices",
    "StepAxis",
    "are_nested",
    "axis_of",
    "derived",
    "dtypes",
    "empty_rows",
    "flatten",
    "is_tensor",
    "json_texts",
    "leaves",
    "lists_column",
    "loads",
    "lookup",
    "mapped",
    "nests",
    "normalise",
    "own_dtype",
    "parse",
    "plain",
    "put",
    "rows_column",
    "schema",
    "shard_schema",
    "to_numpy",
    "to_path",
    "to_tensors",
    "trees",
    "typed",
    "unflatten",
    "unflatten_all",
]
