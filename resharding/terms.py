"""The identity of a plan's arguments: a digest that is the same for equal arguments in any process, and no other's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from archive.base import UsageError

_WHOLE_REPR = (date, datetime, time, timedelta, Decimal, UUID)  # their repr abbreviates nothing
_OWN_BYTES = "biufcmMSUV"  # kinds of NumPy arrays whose bytes are their values


def digest_of(world_size: int, options: Mapping[str, Any]) -> str:
    """16 hex digits of the arguments of a plan; UsageError for one of a type that cannot be told from another."""
    told = [world_size, {name: _identity(value, name) for name, value in options.items()}]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _identity(value: Any, name: str) -> Any:
    """A value as JSON. Text that is made for people (`str`) leaves out the middle of what is long."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(value, np.ndarray | np.generic):
        return {"numpy": _of_array(np.asarray(value), name)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list | tuple | range):
        return [_identity(one, name) for one in value]
    if isinstance(value, Set):
        return {"set": sorted((_identity(one, name) for one in value), key=json.dumps)}
    if isinstance(value, Mapping):
        pairs = [[_identity(key, name), _identity(one, name)] for key, one in value.items()]
        return {"mapping": sorted(pairs, key=json.dumps)}
    if isinstance(value, pc.Expression):
        return {"expression": _digest(memoryview(value.__reduce__()[1][0]))}  # its own serialized form
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return {"arrow": [str(value.type), _identity(value.to_pylist(), name)]}
    if isinstance(value, pa.Scalar):
        return {"arrow": [str(value.type), _identity(value.as_py(), name)]}
    if type(value) in _WHOLE_REPR:
        return {type(value).__name__: repr(value)}
    raise UsageError(
        f"{name}= has a {type(value).__module__}.{type(value).__qualname__}, by which ranks cannot tell that they mean "
        "the same plan: give text, numbers, lists, dicts, NumPy arrays, or Arrow arrays and expressions; or plan on "
        "each rank, with resharding.plan"
    )


def _of_array(array: np.ndarray[Any, Any], name: str) -> list[Any]:
    if array.dtype.kind not in _OWN_BYTES or array.dtype.hasobject:
        return [str(array.dtype), list(array.shape), _identity(array.tolist(), name)]
    return [str(np.lib.format.dtype_to_descr(array.dtype)), list(array.shape), _digest(array.tobytes())]


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
