"""Pure, no I/O: strict JSON for values that users hand in (metadata, progress, configuration).

Written by the rules of `treecodec`, and one more tag:

    {"$array": {...}}     a small numpy array: dtype, shape, data (base64, C order)
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from archive.base.errors import IntegrityError
from archive.base.treecodec import Decoder, Encoder, array_from_bytes, is_shape, is_simple_dtype

if TYPE_CHECKING:
    import numpy as np

MAX_ARRAY_BYTES = 65_536


def dumps(value: Any, *, where: str) -> str:
    """`value` as compact, deterministic, ASCII-only strict JSON.

    Subclasses of str, int, float, list, dict and tuple, and numpy scalars, become the plain Python value. Anything
    that is not listed here and in `treecodec` raises StateError that names its place below `where`.
    """
    return json.dumps(JsonEncoder(where).encode(value), separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes, *, where: str = "JSON value") -> Any:
    """The value that `dumps` was given; IntegrityError for any other text."""
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not strict JSON ({error}): the text is damaged, rewrite it") from error
    return JsonDecoder(where).decode_root(parsed)


class JsonEncoder(Encoder):
    """Encodes what `dumps` takes."""

    def other(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")  # without numpy in the process no value can come from it
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value)
        if numpy is not None and isinstance(value, numpy.generic):
            value = self._plain_scalar(value)
            if type(value) is bool:
                return value
        for kind, encoder in self.encoders.items():
            if isinstance(value, kind):
                return encoder(self, value)
        self.refuse(value)

    def _plain_scalar(self, value: Any) -> Any:
        if value.dtype.kind not in "biufcSU" or value.dtype.char in "gG":
            self.refuse(value, "store a Python number or string")
        return value.item()

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
