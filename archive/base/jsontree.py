"""Pure, no I/O: trees of Python values as strict JSON, and back: metadata, progress and configuration of users.

Plain values stay plain JSON. What JSON has no word for becomes an object with one key, its tag:

    {"$float": "nan"}     nan, inf, -inf (or 16 hex digits, for another nan)
    {"$int": "-ff"}       an integer of more than 1024 bits, hexadecimal
    {"$str": hex}         a string with lone surrogates, UTF-8 with the surrogates passed
    {"$bytes": base64}    bytes
    {"$complex": [r, i]}  a complex number
    {"$tuple": [...]}     a tuple
    {"$dict": [[k, v]]}   a dict with keys that are not all plain strings
    {"$array": {...}}     a small numpy array: dtype, shape, data (base64, C order)

A key of the user's that begins with "$" gets one more "$". `fields.trees` has more tags, and keeps arrays beside.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from archive.base.errors import ArchiveError, IntegrityError, StateError
from archive.base.values import ReadOnlyDict, ReadOnlyList

if TYPE_CHECKING:
    import numpy as np

MAX_ARRAY_BYTES = 65_536
MAX_DEPTH = 50
_MAX_ITEMS_WITHOUT_BYTES = 65_536
_PLAIN_INT_BITS = 1024  # Python itself refuses to print or parse integers of some thousand digits
_SIMPLE_DTYPE = re.compile(r"[<>|](?:[biufcSU]\d{1,9}|[Mm]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)")
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_REMEDIES = {
    "set": "store a sorted list",
    "frozenset": "store a sorted list",
    "bytearray": "store bytes(value)",
    "deque": "store a list",
    "Tensor": "store value.item() or value.tolist(), or keep it in the state or in a field",
    "datetime": "store value.isoformat()",
    "date": "store value.isoformat()",
    "function": "store its name",
}


def dumps(value: Any, *, where: str) -> str:
    """`value` as compact, deterministic, ASCII-only strict JSON.

    Subclasses of str, int, float, list, dict and tuple, and numpy scalars, become the plain Python value. Anything
    that is not listed above raises StateError that names its place below `where`.
    """
    return json.dumps(JsonEncoder(where).encode(value), separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes, *, where: str = "JSON value") -> Any:
    """The value that `dumps` was given; IntegrityError for any other text."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not strict JSON ({error}): the text is damaged, rewrite it") from error
    return JsonDecoder(where).decode_root(parsed)


def format_path(where: str, steps: Iterable[Any]) -> str:
    """A place inside a value as Python would write it: `metadata.goal[2]`."""
    return where + "".join(
        f".{step}" if isinstance(step, str) and step.isidentifier() else f"[{step!r:.60}]" for step in steps
    )


def is_simple_dtype(text: Any) -> bool:
    """True if `text` is the `dtype.str` of a numpy dtype without fields, objects or raw bytes."""
    return isinstance(text, str) and _SIMPLE_DTYPE.fullmatch(text) is not None


def is_shape(value: Any) -> bool:
    """True if `value` is a list of array lengths."""
    return type(value) is list and len(value) <= 32 and all(type(n) is int and 0 <= n < 2**62 for n in value)


def array_from_bytes(data: bytes | memoryview, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """A new array from its bytes in C order; ValueError where the sizes do not match or a character is none."""
    import numpy as np

    if math.prod(shape) * dtype.itemsize != len(data) or (
        dtype.itemsize == 0 and math.prod(shape) > _MAX_ITEMS_WITHOUT_BYTES
    ):
        raise ValueError(f"{len(data)} bytes do not make an array of shape {list(shape)} and dtype {dtype}")
    array = np.ndarray(tuple(shape), dtype, buffer=bytearray(data))
    if dtype.kind == "U" and array.size and dtype.itemsize:
        codes = np.ndarray((len(data) // 4,), dtype.byteorder + "u4", buffer=data)
        if codes.max() > sys.maxunicode:
            raise ValueError("a character is beyond Unicode")
    return array


class Encoder:
    """Turns a tree of values into JSON values, tracking where it is; types it does not know go to `other`."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.path: list[Any] = []
        self._open: set[int] = set()

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        encoder = self.encoders.get(kind)
        return encoder(self, value) if encoder is not None else self.other(value)

    def other(self, value: Any) -> Any:
        """A value of a type without an entry in `encoders`."""
        self.refuse(value)

    def refuse(self, value: Any, remedy: str | None = None) -> NoReturn:
        """Raises StateError that names the place and type of `value` and what to do."""
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        place = format_path(self.where, self.path)
        raise StateError(f"{place} is a {name}, which cannot be stored here: {remedy or self.remedy(value)}")

    def remedy(self, value: Any) -> str:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return "store value._asdict()"
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            return "store dataclasses.asdict(value)"
        if hasattr(value, "__fspath__"):
            return "store str(value)"
        default = "use dicts, lists, tuples, numbers, strings, bytes, None or small numpy arrays"
        return _REMEDIES.get(type(value).__name__, default)

    def children(self, owner: Any, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """The encoded values of (step, value) pairs inside `owner`, which must not hold itself."""
        if id(owner) in self._open:
            self.refuse(owner, "it contains itself, store a tree without cycles")
        if len(self.path) >= MAX_DEPTH:
            self.refuse(owner, f"it is nested more than {MAX_DEPTH} levels deep, flatten it")
        self._open.add(id(owner))
        encoded = []
        for step, child in pairs:
            self.path.append(step)
            encoded.append(self.encode(child))
            self.path.pop()
        self._open.remove(id(owner))
        return encoded

    def pairs(self, value: dict[Any, Any]) -> list[list[Any]]:
        """Encoded (key, value) pairs, in order."""
        items = list(value.items())
        values = self.children(value, items)
        return [[self._key(key), child] for (key, _), child in zip(items, values, strict=True)]

    def _list(self, value: list[Any]) -> list[Any]:
        return self.children(value, enumerate(list(value)))

    def _dict(self, value: dict[Any, Any]) -> Any:
        pairs = self.pairs(value)
        if all(isinstance(key, str) for key, _ in pairs):
            return {"$" + key if key.startswith("$") else key: child for key, child in pairs}
        return {"$dict": pairs}

    def _key(self, key: Any) -> Any:
        if not _is_key(key):
            self.path.append(key)
            self.refuse(key, "as a key of a dict use a string, a number, or a tuple of these")
        return self.encode(key)

    def _str(self, value: str) -> Any:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"$str": value.encode("utf-8", "surrogatepass").hex()}
        return value

    def _float(self, value: float) -> Any:
        if math.isfinite(value):
            return value
        text = float.__repr__(value)
        bits = struct.pack(">d", value)
        return {"$float": text if bits == struct.pack(">d", _SPECIAL_FLOATS[text]) else bits.hex()}

    encoders: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        str: _str,
        int: lambda self, value: value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": f"{value:x}"},
        float: _float,
        complex: lambda self, value: {"$complex": [self._float(value.real), self._float(value.imag)]},
        bytes: lambda self, value: {"$bytes": base64.b64encode(value).decode()},
        list: _list,
        tuple: lambda self, value: {"$tuple": self.children(value, enumerate(value))},
        dict: _dict,
        ReadOnlyList: _list,
        ReadOnlyDict: _dict,
    }


class Decoder:
    """Turns JSON values back, strictly: what makes no sense raises `error`, naming the place."""

    error: ClassVar[type[IntegrityError]] = IntegrityError

    def __init__(self, where: str) -> None:
        self.where = where
        self.path: list[Any] = []

    def decode_root(self, value: Any) -> Any:
        """The whole tree; `decode` is for parts of it."""
        try:
            return self.decode(value)
        except RecursionError as error:
            raise self.error(f"{self.where}: nested too deeply: it is damaged") from error

    def decode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is list:
            return self.items(value)
        if kind is dict:
            return self._object(value)
        self.corrupt(f"{kind.__name__} {value!r:.40} is no strict JSON value")

    def corrupt(self, what: str) -> NoReturn:
        place = format_path(self.where, self.path)
        raise self.error(f"{place:.300}: {what}: it is damaged or from a newer version")

    def items(self, value: Any, steps: list[str] | None = None) -> list[Any]:
        """The decoded items of a list, found at `steps` (default: their indices)."""
        if type(value) is not list:
            self.corrupt(f"a list is expected, not {type(value).__name__}")
        if len(self.path) >= 3 * MAX_DEPTH:  # a tag takes up to three levels for one of the user's
            self.corrupt("nested too deeply")
        decoded = []
        for step, child in zip(steps or range(len(value)), value, strict=True):
            self.path.append(step)
            decoded.append(self.decode(child))
            self.path.pop()
        return decoded

    def pairs(self, value: Any) -> list[tuple[Any, Any]]:
        """Decoded (key, value) pairs of a dict, keys hashable and different."""
        decoded = self.items(value)
        is_pairs = all(type(pair) is list and len(pair) == 2 and _is_key(pair[0]) for pair in decoded)
        if not is_pairs or len(dict(decoded)) != len(decoded):
            self.corrupt("a list of different keys with values is expected")
        return [(key, child) for key, child in decoded]

    def _object(self, value: dict[str, Any]) -> Any:
        tag = next(iter(value)) if len(value) == 1 else ""
        if type(tag) is str and tag.startswith("$") and not tag.startswith("$$"):
            return self._tagged(tag, value[tag])
        keys = [self._unescape(key) for key in value]
        return dict(zip(keys, self.items(list(value.values()), keys), strict=True))

    def _tagged(self, tag: str, payload: Any) -> Any:
        decoder = self.decoders.get(tag)
        if decoder is None:
            self.corrupt(f"unknown tag {tag!r:.40}")
        try:
            return decoder(self, payload)
        except ArchiveError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error) as error:
            self.corrupt(f"tag {tag!r} holds a wrong value ({error!s:.100})")

    def _unescape(self, key: Any) -> str:
        if type(key) is not str or (key.startswith("$") and not key.startswith("$$")):
            self.corrupt(f"key {key!r:.40} is no key")
        return key[1:] if key.startswith("$") else key

    def _float(self, payload: str) -> float:
        special = _SPECIAL_FLOATS.get(payload)
        value = special if special is not None else struct.unpack(">d", bytes.fromhex(payload))[0]
        if math.isfinite(value):
            self.corrupt("a finite number needs no tag")
        return float(value)

    def _complex(self, payload: Any) -> complex:
        real, imag = self.items(payload)
        if type(real) is not float or type(imag) is not float:
            self.corrupt("two floats are expected")
        return complex(real, imag)

    decoders: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        "$float": _float,
        "$complex": _complex,
        "$int": lambda self, payload: int(payload, 16),
        "$str": lambda self, payload: bytes.fromhex(payload).decode("utf-8", "surrogatepass"),
        "$bytes": lambda self, payload: base64.b64decode(payload, validate=True),
        "$tuple": lambda self, payload: tuple(self.items(payload)),
        "$dict": lambda self, payload: dict(self.pairs(payload)),
    }


def _is_key(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_key(item) for item in value)
    numpy = sys.modules.get("numpy")
    is_scalar = numpy is not None and isinstance(value, numpy.generic)
    return value is None or isinstance(value, str | int | float | complex | bytes) or is_scalar


class JsonEncoder(Encoder):
    """Encodes what `dumps` takes."""

    def other(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")  # without numpy in the process no value can come from it
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value)
        if numpy is not None and isinstance(value, numpy.generic):
            if value.dtype.kind not in "biufcSU" or value.dtype.char in "gG":
                self.refuse(value, "store a Python number or string")
            value = value.item()
            if type(value) is bool:
                return value
        for kind, encoder in self.encoders.items():
            if isinstance(value, kind):
                return encoder(self, value)
        self.refuse(value)

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        if type(value).__name__ not in ("ndarray", "memmap") or not is_simple_dtype(value.dtype.str):
            self.refuse(value, f"dtype {value.dtype} does not fit, store value.tolist() or keep it in a field")
        if value.nbytes > MAX_ARRAY_BYTES:
            self.refuse(value, f"{value.nbytes} bytes are more than {MAX_ARRAY_BYTES}, keep it in the state or a field")
        data = base64.b64encode(value.tobytes()).decode()
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}


class JsonDecoder(Decoder):
    """Decodes what `JsonEncoder` makes."""

    def _array(self, payload: Any) -> np.ndarray[Any, Any]:
        import numpy as np

        text, shape = payload["dtype"], payload["shape"]
        if not is_simple_dtype(text) or not is_shape(shape):
            self.corrupt(f"no array has dtype {text!r:.40} and shape {shape!r:.40}")
        return array_from_bytes(base64.b64decode(payload["data"], validate=True), np.dtype(text), shape)

    decoders: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {**Decoder.decoders, "$array": _array}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
