"""Pure, no I/O: numpy values inside state trees, as JSON that names arrays kept beside it.

An array of a plain dtype is kept as it is; any other dtype (big-endian, strings, times, structured) as its bytes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from archive.base import CorruptStateError, Decoder, Encoder, array_from_bytes, is_shape, is_simple_dtype

Array = np.ndarray[Any, Any]

_MAX_INLINE_BYTES = 4_096
_PLAIN_DTYPES = {np.dtype(name).str for name in ("bool", "f2", "f4", "f8", "c8", "c16")} | {
    np.dtype(f"{kind}{size}").str for kind in "iu" for size in (1, 2, 4, 8)
}
_RAW_DTYPE = re.compile(r"\|V\d{1,9}")


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """JSON that `build_dtype` understands, None for a dtype that cannot be stored without pickle."""
    if dtype.subdtype is not None:
        base = describe_dtype(dtype.subdtype[0])
        return None if base is None else {"base": base, "shape": list(dtype.subdtype[1])}
    if dtype.names is None:
        is_known = dtype.isbuiltin != 2 and (is_simple_dtype(dtype.str) or _is_raw(dtype.str))
        return dtype.str if is_known else None
    fields = [[name, describe_dtype(dtype[name]), *_offset_and_title(dtype, name)] for name in dtype.names]
    is_plain = all(field[1] is not None and isinstance(field[3], str | None) for field in fields)
    if dtype.type is not np.void or not is_plain:
        return None
    return {"fields": fields, "itemsize": dtype.itemsize}


def build_dtype(description: Any) -> np.dtype[Any]:
    """The dtype that was described; ValueError, TypeError or LookupError for anything else."""
    if isinstance(description, str):
        if not is_simple_dtype(description) and not _is_raw(description):
            raise ValueError(f"no dtype {description:.40}")
        return np.dtype(description)
    if "base" in description:
        if not is_shape(description["shape"]):
            raise ValueError("no shape")
        return np.dtype((build_dtype(description["base"]), tuple(description["shape"])))
    fields = description["fields"]
    names, formats, offsets, titles = zip(*fields, strict=True) if fields else ((), (), (), ())
    if not all(isinstance(text, str | None) for text in names + titles):
        raise TypeError("a name is a string")
    spec: Any = {"names": list(names), "formats": [build_dtype(one) for one in formats], "offsets": list(offsets)}
    if any(titles):
        spec["titles"] = list(titles)
    dtype: np.dtype[Any] = np.dtype(spec | {"itemsize": description["itemsize"]})
    return dtype


class ArrayEncoder(Encoder):
    """Encodes numpy arrays, scalars and dtypes; the arrays are collected in `arrays`."""

    def __init__(self, where: str, *, copy: bool) -> None:
        super().__init__(where)
        self.copy = copy
        self.arrays: dict[str, Array] = {}
        self._numbers = 0
        self._seen: dict[int, tuple[Any, Any]] = {}  # the value too, or its id could be given to another one

    def store(self, array: Array) -> str:
        """Keeps an array of a plain dtype; returns its key."""
        key = f"a{len(self.arrays)}"
        self.arrays[key] = np.array(array, order="C") if self.copy else np.asarray(array, order="C")
        return key

    def number(self) -> int:
        """A number that this tree has not used, to tell objects of the same content apart."""
        self._numbers += 1
        return self._numbers

    def once(self, value: Any, encode: Callable[[], Any]) -> Any:
        """What `encode` returns for the first sight of this object."""
        if id(value) not in self._seen:
            self._seen[id(value)] = (value, encode())
        return self._seen[id(value)][1]

    def other(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.once(value, lambda: self._array(value))
        if isinstance(value, np.generic):
            return self._scalar(value)
        if isinstance(value, np.dtype):
            return {"$np.dtype": self._dtype(value, value)}
        return super().other(value)

    def _array(self, value: Array) -> Any:
        if type(value) not in (np.ndarray, np.memmap):
            self.refuse(value, "store np.asarray(value), and what it has besides as arrays of their own")
        dtype = self._dtype(value, value.dtype)
        plain = value if _is_plain(dtype) else np.ndarray((value.nbytes,), np.uint8, bytearray(value.tobytes()))
        return {"$array": {"key": self.store(plain), "dtype": dtype, "shape": list(value.shape)}}

    def _scalar(self, value: np.generic) -> Any:
        if type(value) is np.str_:
            return {"$np.str": self._str(str.__str__(value))}  # str(value) cuts zeros off
        if type(value) is np.bytes_:
            return {"$np.bytes": base64.b64encode(value).decode()}
        if type(value) is not value.dtype.type:
            self.refuse(value, "store a plain numpy or Python number")
        return {"$np.scalar": {"dtype": self._dtype(value, value.dtype), "data": value.tobytes().hex()}}

    def _dtype(self, value: Any, dtype: np.dtype[Any]) -> Any:
        description = describe_dtype(dtype)
        if description is None:
            self.refuse(value, f"dtype {dtype} needs pickle or an extension, store a view or a list of plain values")
        return description

    def _blob(self, value: bytes | bytearray) -> Any:
        is_mutable = isinstance(value, bytearray)
        if len(value) <= _MAX_INLINE_BYTES:
            return {"$bytearray" if is_mutable else "$bytes": base64.b64encode(value).decode()}
        data = np.frombuffer(bytes(value) if is_mutable else value, np.uint8)
        return self.once(value, lambda: {"$blob": {"key": self.store(data), "size": len(value), "mutable": is_mutable}})

    encoders: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        **Encoder.encoders,
        bytes: _blob,
        bytearray: _blob,
    }


class ArrayDecoder(Decoder):
    """Decodes what `ArrayEncoder` makes, copying out of `arrays`."""

    error = CorruptStateError

    def __init__(self, where: str, arrays: Mapping[str, Array]) -> None:
        super().__init__(where)
        self._arrays = arrays
        self._seen: dict[str, Any] = {}

    def stored(self, key: Any, dtype: np.dtype[Any], shape: Any) -> Array:
        """The array of that key, which must have that dtype and shape."""
        array = self._arrays.get(key) if isinstance(key, str) else None
        if not isinstance(array, np.ndarray):
            self.corrupt(f"array {key!r:.40} is missing")
        if not is_shape(shape) or array.dtype != dtype or list(array.shape) != shape:
            self.corrupt(f"array {key} is {array.dtype}{list(array.shape)}, not {dtype}{shape!s:.60}")
        return array

    def once(self, tag: str, payload: Any, decode: Callable[[], Any]) -> Any:
        """One object for all places that the same object was stored from."""
        seen = f"{tag} {payload!r}"
        if seen not in self._seen:
            self._seen[seen] = decode()
        return self._seen[seen]

    def _array(self, payload: Any) -> Array:
        dtype, shape = build_dtype(payload["dtype"]), payload["shape"]
        if _is_plain(payload["dtype"]):
            return self.stored(payload["key"], dtype, shape).copy(order="C")
        if not is_shape(shape) or dtype.subdtype is not None:
            self.corrupt("an array has a wrong shape or dtype")
        size = int(np.prod([dtype.itemsize, *shape], dtype=object))
        raw = np.ascontiguousarray(self.stored(payload["key"], np.dtype(np.uint8), [size]))
        return array_from_bytes(raw.tobytes(), dtype, shape)

    def _scalar(self, payload: Any) -> Any:
        dtype = build_dtype(payload["dtype"])
        if dtype.subdtype is not None:
            self.corrupt("a scalar has the dtype of an array")
        return array_from_bytes(bytes.fromhex(payload["data"]), dtype, ())[()]

    def _np_str(self, payload: Any) -> np.str_:
        text = self.decode(payload)
        if type(text) is not str:
            self.corrupt("a string is expected")
        return np.str_(text)

    def _blob(self, payload: Any) -> bytes | bytearray:
        data = self.stored(payload["key"], np.dtype(np.uint8), [payload["size"]]).tobytes()
        return bytearray(data) if payload["mutable"] else data

    decoders: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        **Decoder.decoders,
        "$array": lambda self, payload: self.once("$array", payload, lambda: self._array(payload)),
        "$blob": lambda self, payload: self.once("$blob", payload, lambda: self._blob(payload)),
        "$bytearray": lambda self, payload: bytearray(base64.b64decode(payload, validate=True)),
        "$np.scalar": _scalar,
        "$np.str": _np_str,
        "$np.bytes": lambda self, payload: np.bytes_(base64.b64decode(payload, validate=True)),
        "$np.dtype": lambda self, payload: build_dtype(payload),
    }


def _is_plain(description: Any) -> bool:
    return isinstance(description, str) and description in _PLAIN_DTYPES


def _is_raw(text: str) -> bool:
    return _RAW_DTYPE.fullmatch(text) is not None


def _offset_and_title(dtype: np.dtype[Any], name: str) -> tuple[int, Any]:
    field: Any = dtype.fields[name] if dtype.fields else ()
    return field[1], field[2] if len(field) > 2 else None
