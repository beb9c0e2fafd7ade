"""Pure, no I/O: state trees as a JSON skeleton and arrays, and back; never pickle.

A tree is made of dicts, lists, tuples, strings, bytes, numbers, None, numpy arrays, scalars and dtypes, torch tensors,
sizes, dtypes and devices, TensorDicts, and the random generators of Python, numpy and torch. The skeleton follows the
rules of `base.jsontree`, with more tags here, in `torchstate` and in `randomstate`. Arrays are kept beside it, by
name: one of a plain dtype as it is, one of any other (big-endian, strings, times, structured) as its bytes.
"""

from __future__ import annotations

import base64
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from archive.base import CorruptStateError, UpgradeError, jsontree
from archive.fields import randomstate, torchstate

Array = np.ndarray[Any, Any]

_FORMAT = 1
_PLAIN = (int, float, str, list, tuple, dict)
_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple, bytes)}
_MAX_INLINE_BYTES = 4_096
_PLAIN_DTYPES = {np.dtype(name).str for name in ("bool", "f2", "f4", "f8", "c8", "c16")} | {
    np.dtype(f"{kind}{size}").str for kind in "iu" for size in (1, 2, 4, 8)
}
_RAW_DTYPE = re.compile(r"\|V\d{1,9}")


def flatten(tree: Any, *, where: str = "state", copy: bool = True) -> tuple[dict[str, Any], dict[str, Array]]:
    """A JSON-able skeleton of `tree`, and its arrays by key ("a0", "a1", ...), of dtypes that zarr has.

    With `copy` the arrays are a snapshot: later changes of the source don't reach them. An object that is in the tree
    in several places is stored once. What cannot be stored raises StateError that names its place.
    """
    encoder = StateEncoder(where, copy=copy)
    skeleton = {"format": _FORMAT, "tree": encoder.encode(tree)}
    return skeleton, encoder.arrays


def unflatten(skeleton: Any, arrays: Mapping[str, Array], *, where: str = "state") -> Any:
    """The tree that was flattened, types and bits included, sharing no memory with `arrays`.

    Tensors and TensorDicts come back on the CPU. Anything that `flatten` does not write is a CorruptStateError; a
    library or device that the values need and that is not here is a UsageError.
    """
    if type(skeleton) is not dict or set(skeleton) != {"format", "tree"} or type(skeleton["format"]) is not int:
        raise CorruptStateError(f"{where}: the skeleton of a state is expected: it is damaged, read another checkpoint")
    if skeleton["format"] != _FORMAT:
        raise UpgradeError(f"{where}: its format is {skeleton['format']}, known is {_FORMAT}: upgrade this library")
    return StateDecoder(where, arrays).decode_root(skeleton["tree"])


class StateEncoder(jsontree.Encoder):
    """An encoder of state values; the arrays are collected in `arrays`."""

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
        """The result of `encode` for the first sight of this object."""
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
        for encode in (torchstate.encode, randomstate.encode):
            encoded = encode(self, value)
            if encoded is not NotImplemented:
                return encoded
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

    def remedy(self, value: Any) -> str:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"namedtuple {type(value).__name__}: turn it into a dict, value._asdict()"
        if hasattr(value, "state_dict") and not isinstance(value, type):
            return "store value.state_dict()"
        if isinstance(value, int | float | str | list | tuple | dict):
            return f"store a plain {next(kind for kind in type(value).__mro__ if kind in _PLAIN).__name__}"
        return super().remedy(value)

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        return {"$ordereddict": self.pairs(value)}

    def _default(self, value: defaultdict[Any, Any]) -> Any:
        name = getattr(value.default_factory, "__name__", None) if value.default_factory else None
        if value.default_factory is not None and _FACTORIES.get(str(name)) is not value.default_factory:
            self.refuse(value, f"its factory is none of {', '.join(_FACTORIES)}, store dict(value)")
        return {"$defaultdict": [name, self.pairs(value)]}

    encoders: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        **jsontree.Encoder.encoders,
        bytes: _blob,
        bytearray: _blob,
        OrderedDict: _ordered,
        defaultdict: _default,
    }


class StateDecoder(jsontree.Decoder):
    """A decoder of the output of `StateEncoder`, copying out of `arrays`."""

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
        if not jsontree.is_shape(shape) or array.dtype != dtype or list(array.shape) != shape:
            self.corrupt(f"array {key} is {array.dtype}{list(array.shape)}, not {dtype}{shape!s:.60}")
        return array

    def _tagged(self, tag: str, payload: Any) -> Any:
        """One object for all places that the same object was stored from."""
        if tag not in self.shared:
            return super()._tagged(tag, payload)
        seen = f"{tag} {payload!r}"
        if seen not in self._seen:
            self._seen[seen] = super()._tagged(tag, payload)
        return self._seen[seen]

    def _array(self, payload: Any) -> Array:
        dtype, shape = build_dtype(payload["dtype"]), payload["shape"]
        if _is_plain(payload["dtype"]):
            return self.stored(payload["key"], dtype, shape).copy(order="C")
        if not jsontree.is_shape(shape) or dtype.subdtype is not None:
            self.corrupt("an array has a wrong shape or dtype")
        size = int(np.prod([dtype.itemsize, *shape], dtype=object))
        raw = np.ascontiguousarray(self.stored(payload["key"], np.dtype(np.uint8), [size]))
        return jsontree.array_from_bytes(raw.tobytes(), dtype, shape)

    def _scalar(self, payload: Any) -> Any:
        dtype = build_dtype(payload["dtype"])
        if dtype.subdtype is not None:
            self.corrupt("a scalar has the dtype of an array")
        return jsontree.array_from_bytes(bytes.fromhex(payload["data"]), dtype, ())[()]

    def _np_str(self, payload: Any) -> np.str_:
        text = self.decode(payload)
        if type(text) is not str:
            self.corrupt("a string is expected")
        return np.str_(text)

    def _blob(self, payload: Any) -> bytes | bytearray:
        data = self.stored(payload["key"], np.dtype(np.uint8), [payload["size"]]).tobytes()
        return bytearray(data) if payload["mutable"] else data

    def _default(self, payload: Any) -> defaultdict[Any, Any]:
        name, pairs = payload
        factory = _FACTORIES[name] if name is not None else None
        return defaultdict(factory, self.pairs(pairs))

    decoders: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        **jsontree.Decoder.decoders,
        "$array": _array,
        "$blob": _blob,
        "$bytearray": lambda self, payload: bytearray(base64.b64decode(payload, validate=True)),
        "$np.scalar": _scalar,
        "$np.str": _np_str,
        "$np.bytes": lambda self, payload: np.bytes_(base64.b64decode(payload, validate=True)),
        "$np.dtype": lambda self, payload: build_dtype(payload),
        "$ordereddict": lambda self, payload: OrderedDict(self.pairs(payload)),
        "$defaultdict": _default,
        **torchstate.DECODERS,
        **randomstate.DECODERS,
    }
    shared = frozenset({"$array", "$blob", "$tensor", "$torch.generator", *randomstate.DECODERS})


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """JSON that `build_dtype` understands, None for a dtype that cannot be stored without pickle."""
    if dtype.subdtype is not None:
        base = describe_dtype(dtype.subdtype[0])
        return None if base is None else {"base": base, "shape": list(dtype.subdtype[1])}
    if dtype.names is None:
        is_known = dtype.isbuiltin != 2 and (jsontree.is_simple_dtype(dtype.str) or _is_raw(dtype.str))
        return dtype.str if is_known else None
    fields = [[name, describe_dtype(dtype[name]), *_offset_and_title(dtype, name)] for name in dtype.names]
    is_plain = all(field[1] is not None and isinstance(field[3], str | None) for field in fields)
    if dtype.type is not np.void or not is_plain:
        return None
    return {"fields": fields, "itemsize": dtype.itemsize}


def build_dtype(description: Any) -> np.dtype[Any]:
    """The dtype that was described; ValueError, TypeError or LookupError for anything else."""
    if isinstance(description, str):
        if not jsontree.is_simple_dtype(description) and not _is_raw(description):
            raise ValueError(f"no dtype {description:.40}")
        return np.dtype(description)
    if "base" in description:
        if not jsontree.is_shape(description["shape"]):
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


def _is_plain(description: Any) -> bool:
    return isinstance(description, str) and description in _PLAIN_DTYPES


def _is_raw(text: str) -> bool:
    return _RAW_DTYPE.fullmatch(text) is not None


def _offset_and_title(dtype: np.dtype[Any], name: str) -> tuple[int, Any]:
    field: Any = dtype.fields[name] if dtype.fields else ()
    return field[1], field[2] if len(field) > 2 else None
